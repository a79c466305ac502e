// Package lines keeps the claims that have no answer yet, the callers that wait for them, and the
// idempotency keys. It is a pure ledger: it does no I/O, starts no goroutine, and receives the time
// as an argument. One goroutine uses it. Sandboxes appear here by their IDs, callers by tokens. What
// a claim gets is its grant: one sandbox, or those of a batch.
//
// # States
//
// A claim is
//
//	waiting    in the line of its pool, in the queue of its team
//	bound      it has its pods, and is on its way into the journal
//	granted    its sandboxes are in the journal; its callers wait until they run
//
// An idempotency key is
//
//	free       unknown
//	claimed    it stands for a claim that is waiting or bound
//	granted    it stands for a grant
//	kept       all sandboxes of the grant were released; it holds for some time longer
//
// # Guarantees
//
//   - A caller is in one place at most: at a claim, or at a grant. It is returned once, by
//     Expire, Drop or Answer, unless it was abandoned.
//   - The claims of a team are in the order in which they were added, also after Return.
//   - A team with waiting claims has its turn after at most one pod for each other team that waits
//     in the line, unless the owner lets no claim of it take a pod, or returns claims of others.
//   - A team that comes into an empty queue has the last turn, so leaving a line wins nothing.
//   - A key stands for one claim or one grant. It is free again only after Drop or DropKeys.
//
// # What breaks them
//
// A token that is used twice. A claim in another call after Drop or Grant.
package lines
