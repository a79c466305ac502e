// Package adminpages has the HTTP pages that every service of Berth serves to operators,
// probes and Prometheus.
//
//	GET /healthz, /readyz, ...  200 "ok", or 503 and the reason
//	GET /metrics                Prometheus, with exemplars for scrapes that accept them
//	GET /debug/pprof/           profiles, see [AddProfiles]
//
// # Guarantees
//
//   - A page of [New] shows no sandbox ID.
//   - [LoopbackOnly] lets no request through that came over the network, or from a web page
//     whose name resolves to a loopback address.
package adminpages
