// Package allocator is the control plane: it keeps pools of warm pods, hands
// one out per claim, takes sandboxes back, and tells every router.
//
// # How it is put together
//
// One loop owns the core and is the only goroutine that calls it. Events come
// to it through one bounded queue: observations from the watches, calls from
// the HTTP API, messages from routers, outcomes of writes. What the core wants
// done goes out as effects: messages to routers in order, writes to workers.
//
//	watches, API, routers, write outcomes --> loop(core) --> routers, writers, callers
//
// # Replicas
//
// All replicas serve; one, the holder of the Lease, acts. It runs in a numbered
// term. A replica that loses the Lease, or cannot tell any more that it holds
// it, ends its process: nothing of a term is carried over in memory. The next
// leader reads pools, pods and Sandbox objects from the API server and knows
// everything again. Until it has, it answers "not ready", never "unknown".
//
// The record of a claim is the conditional write to its pod; the record of what
// ended is the Sandbox object.
package allocator
