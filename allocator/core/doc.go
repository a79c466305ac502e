// Package core decides what the allocator does. It does no I/O, starts no
// goroutine and owns no clock: [Core.Step] takes one event and the time, and
// returns what is to be done about it. Everything in here is called from one
// goroutine.
//
// # States
//
// A pod is
//
//	pending    made, not ready yet
//	warm       ready and in its pool's queue, oldest first
//	binding    taken from the queue for a claim whose write is under way
//	claimed    holds a sandbox
//	released   held one; stands until the fence is complete
//	deleting   to be deleted; never handed out again
//
// A sandbox is running, releasing (the write is under way), released (no new
// request may be admitted; its fence is under way) or ended (its pod is gone).
//
// # Guarantees
//
//   - A pod has at most one sandbox. It leaves the queue before the write that
//     binds it, and enters it only from pending; nothing goes back from claimed
//     or released. A pod that is on record as used stays used, whatever a late
//     observation shows.
//   - A fact is acted on only once it is durable: a claim is answered and
//     pushed to routers after BindDone, a release after ReleaseDone or after
//     something that cannot be undone was observed (the pod is gone, has a
//     deletion timestamp, has finished, or bears the mark of a release).
//   - A released pod is deleted by us only after its fence: every session that
//     could know the route has acknowledged the release, said Goodbye or
//     expired; then Config.Window has passed. After a change of leader, what an
//     earlier term's routers know is not known here, so sandboxes older than
//     the term also wait until every router of that term must have gone stale.
//   - A released sandbox is recorded before its pod is deleted, so "gone" is
//     never forgotten in between. The record stays until the fence is complete.
//   - An idle pod is deleted only if it has not changed since it was seen: a
//     claim that a deposed leader wrote late is adopted, not deleted with it.
//   - A Claim is answered once, unless it was abandoned; a Release once.
//   - Nothing is decided about a pool before Recover was told all of its pods,
//     and nothing that failed is repeated without time or news in between.
//   - The ports of a live sandbox are those that its pool names now: when they
//     change, every connected session is sent its route again.
//   - Observations never move a fact backwards: watches lag behind writes.
//
// # What breaks them
//
// Events out of the order in which the shell learned them; two Cores acting in
// the same term (the conditional writes then still keep a pod from having two
// owners, but not a fence from being cut short); an observation older than an
// answer already given (the shell drops those by resource version).
package core
