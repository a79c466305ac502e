// Package envoy writes the configuration of the Envoy in front of the sandboxes. It is one
// static bootstrap. Nothing in it changes while Envoy runs, because every request asks the
// router where to go. bootstrap.yaml is its template.
//
// # Guarantees
//
//   - Only the router sets the destination, in dynamic metadata. No header, listener filter
//     or default selects an upstream. A guard behind ext_proc refuses every request without a
//     valid destination and sandbox ID, because Envoy does not treat a cleanly closed ext_proc
//     stream as an error.
//   - Everything fails closed.
//   - Envoy retries an upstream request only while it has sent no part of it (never on
//     "reset"), and only within ConnectWindow. After that time an admitted request opens no
//     connection. The fence before a pod is deleted waits for the same time.
//   - Connections to pods are pooled per sandbox ID, not only per address.
//   - Headers by which Envoy, the router and proxies communicate are removed from client
//     requests before any filter reads them. No client counts as internal.
//   - A sandbox cannot answer in Berth's name or instruct a proxy in front: such headers are
//     removed from its answers. Its cookies are valid on its own host only.
//   - A request waits for a router that restarts. Envoy repeats its question until the router
//     has begun to answer.
//
// # What breaks them
//
// An Envoy whose bootstrap was edited, and a joint pause of router and Envoy, between the
// router's decision and Envoy's connection attempt, that is longer than StallBudget.
package envoy
