// Command monitoring writes the Grafana dashboards and the Prometheus rules of the chart, from the table of metrics
// (package metric). It is a module of its own, so that nothing it needs enters the programs:
//
//	cd tools/monitoring && go run . ../../charts/berth/files
//
// "make generate" does that. A renamed metric does not compile here. The tests parse each query, and allow only metrics
// and labels of the table.
package main
