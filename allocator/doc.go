// Package allocator is the control plane of Berth. It keeps pools of warm pods, gives one to each
// claim, takes released sandboxes back, and keeps the routers up to date.
//
// # Structure
//
// One loop owns the core and is the only goroutine that calls it. Events reach it through one
// bounded queue: observations of the watches, calls of the HTTP API, messages of routers, and
// outcomes of writes. The core returns effects: facts for the journal (one write at a time),
// messages for routers (in order), and work for the workers.
//
//	watches, API, routers, outcomes --> loop(core, guard) --> journal, routers, callers, workers
//
// Package guard compares each effect with what was journaled and acknowledged. An effect that would violate an assertion
// is not carried out, and the term ends: see violations.go.
//
// # States
//
// A replica is a follower, a leader that recovers, or a leader. A follower watches the API server
// and forwards calls. The holder of the Lease takes the journal over, which numbers its term, then
// recovers from the journal, the Sandbox objects, the pools, nodes and pods, and then acts.
//
// # Guarantees
//
//   - The record of a claim or a release is its fact in the journal. A call is answered only after
//     that fact is durable.
//   - Nothing of a term is carried over in memory. A replica ends its process when it loses the
//     Lease, is not certain to hold it, or finds a later term in the journal.
//   - Until a leader has recovered, it answers "not ready" and never "unknown".
//   - [Allocator.Run] returns within [MaxShutdown] after its context has ended.
//
// # What breaks them
//
//   - A second writer of JournalSlot objects while no leader runs.
//   - A wall clock that jumps just before the leader changes: the new leader reads from the
//     records when sandboxes end, by the wall clock. Within a term everything uses the boot clock.
package allocator
