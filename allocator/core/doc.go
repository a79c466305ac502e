// Package core decides what the allocator does. It does no I/O, starts no goroutine and owns no
// clock. [Core.Step] takes one event and the time, and returns effects: what the caller has to
// do. One goroutine calls everything in this package.
//
// # Rooms
//
// Core keeps the step, the life of sandboxes and recovery. Pure ledgers keep what can be decided
// without the rest. A ledger is keyed by IDs, has its own package comment and model test, and imports
// nothing of Core but package fact.
//
//	core/fact       what the journal keeps, and the facts that are on their way into it
//	core/claims     the claims without an answer, whose turn it is, and the idempotency keys
//	core/teams      whether the limits of a team allow a claim
//	core/fence      what the release of a sandbox waits for
//	core/member     the sessions of routers: which may serve routes, and how far each has come
//	core/demand     how many warm pods a pool needs, from its claims of late
//	core/taint      the addresses that stale routes may still reach, and the pods that were there
//	core/idle       when a sandbox is released for not being used
//	core/warm       the warm pods of a pool, in the order in which they are handed out
//	core/deadline   the next deadline of each sandbox
//
// Within Core, what concerns one part alone is a method of that part, and no part points back to
// Core: the tables of pools, nodes and sandboxes, and the routers, which keep the
// ledgers of sessions in step and send the messages. Core decides what concerns several of them.
// View reads it.
//
// The files of Core:
//
//	core.go         Config, Core, Step, Tick
//	aliases.go      the names of package fact
//	recovery.go     what a new leader learns from the journal, the objects and the pods
//	claims.go       claims and batches, tied to pods and sandboxes
//	configure.go    the agents of pods, which are configured before a claim is granted
//	answers.go      the answers to claims, and what their teams may
//	sandboxes.go    the life of a sandbox, from running to ended
//	lifetime.go     end times and keep-alives
//	idle.go         the release of idle sandboxes, tied to streams and objects
//	fence.go        the fence of a release, tied to pods and streams
//	taint.go        tainted addresses, tied to pods
//	sessions.go     routers: their sessions, and the messages that they are sent
//	declared.go     routers that an operator has declared dead
//	earlier.go      routers that may serve routes of an earlier journal
//	pools.go        how many pods a pool makes and deletes
//	census.go       the pods of a pool by what they are counted by
//	pods.go         pods, from pending to deleted
//	retire.go       idle pods that are taken out of use for good
//	recycle.go      pods that become warm again after a sandbox
//	objects.go      the Sandbox objects
//	view.go         queries, in a stable order
//	table.go        the sandboxes: by ID, by pod, in the order of their claims, in that of their ends
//	status.go       what operators see of fences, sessions and activity
//
// # States
//
// A pod is
//
//	pending    created and not ready yet, or on a node that gets no new sandboxes
//	warm       ready, and in the queue of its pool
//	claiming   taken from the queue for a claim that is on its way into the journal
//	claimed    holds a sandbox
//	released   held a sandbox, and stays until the fence is complete
//	deleting   about to be deleted or recycled, and never handed out again in this life
//
// A sandbox is
//
//	starting   claimed; the pool's postStart hook has not answered yet
//	running    routers may send requests to it
//	releasing  its release is on its way into the journal
//	released   no new request may be admitted; its fence is under way, or its pod still exists
//	ended      its pod is gone, and no router can send a request to its address
//
// # Facts
//
// Core journals a promise before it makes it. A fact is a change that others rely on: a claim,
// the start of a sandbox, its release, the session of a router and its end, the intent to delete
// an idle pod. Facts wait in one queue. When the writer is free, all of them go to it together
// ([Write]). [Written] makes them true in their order. Only then are callers answered and
// routers informed. A claim can be withdrawn until its fact is handed to the writer; its pod
// then returns to its place in the queue. After that Core awaits the outcome.
//
// A change that the next leader can observe by itself, such as the end of a pod, is no fact and
// is not journaled.
//
// # Settling
//
// An event changes tables. A fence is marked when it may wait for less than before, and a pool when
// something changes on which its plan depends: its object, its pods, its claims, or the time. At
// the end of the step marked fences go on, and every marked pool gives warm pods to the claims
// that wait, and creates or deletes pods. The releases of a step are sent last, in one message to
// each router. No effect is changed after it was emitted.
//
// # Guarantees
//
//   - A pod has at most one sandbox in each of its lives. It leaves the queue before its claim is handed to the
//     writer, and enters the queue only from pending. A pod that is on record as used stays
//     used, whatever a late observation shows. A pod that is marked as used and is on no record
//     is never handed out.
//   - Claims of a pool and a team are served in the order in which they came. Teams take turns. A
//     claim whose pod ends before the answer keeps its place, and gets another pod under an ID that
//     was never used.
//   - A batch gets all of its sandboxes in one Write, or at least as many as it asked for, or none.
//     Until then it collects pods, one in each turn of its team. One batch of a pool does so at a
//     time, so two batches never wait for each other.
//   - A team never has more sandboxes than its limit at the time of the claim: those that are not
//     released, and those that its claims ask for. Both are counted from the tables.
//   - Every claim is answered once for each of its callers, unless the caller has gone. A
//     Release is answered once. Claims of one team with one idempotency key are one claim while
//     the sandbox lives and for Config.KeepKeys after its end, also under the next leader.
//   - A sandbox whose pod has an agent is granted, and its route is sent, only when its agent is
//     configured for it, under every leader. A claim tries the agents of 3 pods. When a container of
//     such a pod restarts, the sandbox is released.
//   - A leader releases no sandbox because of the change of leaders, unless its agent is not
//     configured, or a claim that was granted to none of its callers would get too few: see configure.go.
//   - Pods are handed out ready, from one node after the other, oldest first, and never from a
//     node that is not ready or is cordoned.
//   - Core deletes or recycles a released pod only after its fence. Every session that could know the route
//     has acknowledged the release, left, was proven or declared dead, or has expired; then
//     Config.ConnectWindow has passed. Sessions are durable before they receive a route, so a new
//     leader waits for those of earlier terms as well.
//   - The declaration of an operator that a router has ended counts when it is durable. It is
//     refused while the router is connected, or may only have lost its connection. The router
//     cannot join again under that name before its routes must have gone stale.
//   - No pod is handed out at an address to which a router may still send the requests of an
//     earlier sandbox, nor at one where two pods seem to be: see taint.go.
//   - While routers of an earlier journal may serve routes that are on no record, no pod is
//     handed out. Pods that had an address by then are not handed out later: see earlier.go.
//   - An idle pod is deleted only when that intent is durable, so the next leader never hands
//     out a pod whose deletion is on its way.
//   - A sandbox is released for being idle only if every session that could know its route was
//     asked, answered in time that nothing was in use within the idle timeout, and has admitted
//     nothing since: see package idle. A session that cannot be asked, or does not answer, counts as
//     use until it has expired.
//   - The record of a sandbox stays until it has ended and its idempotency key holds no longer.
//   - Core decides nothing about a pool before Recover has seen all of its pods, and repeats
//     nothing that failed without time or news in between.
//   - The ports of a live sandbox are those of its pool now. When they change, every connected
//     session receives the route again.
//   - An observation never takes a fact back: watches lag behind writes.
//   - SandboxReady and SandboxReleased come at most once for a sandbox, across leaders.
//
// # What breaks them
//
// Events in another order than that in which the caller learned of them. Written for facts that
// are not durable. A Recover from a journal that another leader can still write to. An
// observation that is older than an answer already given; the caller drops those by resource
// version.
package core
