// Package allocator is the control plane: it keeps pools of warm pods, hands
// one out per claim, takes sandboxes back, and tells every router.
//
// # How it is put together
//
// One loop owns the core and is the only goroutine that calls it. Events come
// to it through one bounded queue: observations from the watches, calls from
// the HTTP API, messages from routers, outcomes of writes. What the core wants
// done goes out as effects: facts to the journal, one write of them at a time,
// messages to routers in order, everything else to workers.
//
//	watches, API, routers, outcomes --> loop(core) --> journal, routers, callers, workers
//
// # Replicas
//
// All replicas watch and answer; one, the holder of the Lease, acts. Its term
// begins when it has taken the journal over, and is numbered by it. A replica
// that loses the Lease, or cannot tell any more that it holds it, or finds that
// somebody else has written to the journal, ends its process: nothing of a term is
// carried over in memory. The next leader reads the journal, Sandbox objects,
// pools, nodes and pods from the API server's store and knows everything again.
// Until it has, it answers "not ready", never "unknown".
//
// The record of a claim or a release is its fact in the journal. Sandbox objects
// are made from the journal and outlive it.
package allocator
