// Package admin is the router's HTTP interface for operators and probes.
//
//	GET /admin/last-active   when each sandbox was last used; ?id= or ?prefix= filter, ?format=text
//	GET /admin/routes        the route cache; same parameters
//	GET /admin/envoy/...     clusters, config_dump, server_info, stats/prometheus of Envoy; at a loopback address only
//	GET /healthz             200 while the process works; does not depend on the allocator
//	GET /readyz              200 while routes may be served; otherwise 503 and the reason
//	GET /metrics             Prometheus
//	GET /debug/pprof/        profiles
//
// # Guarantees
//
//   - Pages.Admin shows sandbox IDs, which are credentials. It answers only at a
//     loopback address, and only requests whose Host is localhost or a loopback address, unless
//     Options.AnyHost is set.
//   - Pages.Health shows no sandbox ID. It may listen on any address.
//   - An unknown parameter is an error, so a misspelled filter never selects everything.
package admin
