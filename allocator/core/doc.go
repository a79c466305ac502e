// Package core decides what the allocator does. It does no I/O, starts no
// goroutine and owns no clock: [Core.Step] takes one event and the time, and
// returns what is to be done about it. Everything in here is called from one
// goroutine.
//
// # States
//
// A pod is
//
//	pending    made, not ready yet, or on a node that gets nothing new
//	warm       ready and in its pool's queue
//	claiming   taken from the queue for a claim that is on its way into the journal
//	claimed    holds a sandbox
//	released   held one; stands until the fence is complete
//	deleting   to be deleted; never handed out again
//
// A sandbox is starting (its pool's hook has not been answered), running,
// releasing (its release is on its way into the journal), released (no new
// request may be admitted; its fence is under way, or its pod still there) or
// ended (its pod is gone, and no router can send anything to where it was).
//
// # Facts
//
// What the core promises, it has journaled first. A change that matters to others
// is a fact: a claim, that a sandbox runs, its release, the intent to delete an
// idle pod. Facts wait in one queue. When the writer is free, all that wait go to
// it together ([Write]); [Written] makes them true, in their order, and only then
// are callers answered and routers told. Up to the moment at which a claim's fact
// is handed to the writer it can be called off, and its pod goes back to its place
// in the queue. From then on the outcome is awaited.
//
// What can be seen again by whoever comes next, that a pod is gone for example,
// is no fact and is not journaled.
//
// # Guarantees
//
//   - A pod has at most one sandbox. It leaves the queue before its claim is
//     handed to the writer, and enters it only from pending; nothing goes back
//     from claimed or released. A pod that is on record as used stays used,
//     whatever a late observation shows, and one that is marked as used and on no
//     record is never handed out.
//   - Claims of a pool are served in the order in which they came. One whose pod
//     goes before it was answered keeps its place, and gets another pod under an
//     ID that was never used.
//   - Every claim is answered, once for each of its callers, unless the caller
//     has gone; a Release once. Claims of one team with one idempotency key are
//     one claim, while its sandbox lives and for Config.KeepKeys after its end,
//     also under the next leader.
//   - Pods are handed out ready, from one node after the other, oldest first, and
//     never from a node that is not ready or is cordoned.
//   - A released pod is deleted by us only after its fence: every session that
//     could know the route has acknowledged the release, said Goodbye, is known to
//     be dead or has expired; then Config.Window has passed. Sessions are facts,
//     durable before they are told anything, so a new leader waits for those of
//     earlier terms as well.
//   - An operator's word that a router has ended counts like the proof of it, once it
//     is durable. It is refused while the router is connected, or may only have lost
//     its connection. The router is not let in again under that name before what it
//     knew must have gone stale.
//   - No pod is handed out at an address to which some router may still send an
//     earlier sandbox's requests, nor at one where two pods seem to be: see place.
//   - While routers of an earlier journal may serve what they know, which is on no record
//     any more, no pod is handed out at all, and those that had an address by then are
//     not handed out later: see earlier.go.
//   - An idle pod is deleted only once that intent is durable: the next leader
//     never hands it out while our deletion is still on its way.
//   - A sandbox is released for being idle only if every session that could know its
//     route was asked, has answered in time that nothing was in use within its idle
//     timeout, and has admitted nothing since: see idle.go. A session that cannot be
//     asked, or does not answer, counts as using it until it has expired.
//   - The record of a sandbox stays until it has ended and its idempotency key
//     holds no longer.
//   - Nothing is decided about a pool before Recover was told all of its pods,
//     and nothing that failed is repeated without time or news in between.
//   - The ports of a live sandbox are those that its pool names now: when they
//     change, every connected session is sent its route again.
//   - Observations never move a fact backwards: watches lag behind writes.
//   - SandboxReady and SandboxReleased come at most once for a sandbox, whichever
//     leaders there are.
//
// # What breaks them
//
// Events out of the order in which the shell learned them; Written for what is
// not durable; a Recover from a journal that another leader can still write to;
// an observation older than an answer already given (the shell drops those by
// resource version).
package core
