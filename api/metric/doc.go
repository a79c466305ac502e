// Package metric is the table of the metrics that Berth's programs serve at /metrics. Collectors, the reference page,
// dashboards and rules are made from it, so a metric has one name and one meaning everywhere.
//
// # Guarantees
//
//   - A [Registry] takes the metrics of its program in this table, and no others.
//   - No label has an unbounded number of values: none is the ID of a sandbox.
package metric
