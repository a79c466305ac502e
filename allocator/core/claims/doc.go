// Package claims keeps the claims that have no answer yet, the callers that wait for them, and the
// idempotency keys. It is a pure ledger: it does no I/O, starts no goroutine, and receives the time
// as an argument. One goroutine uses it. Sandboxes appear here by their IDs, callers by tokens.
//
// # States
//
// A claim is
//
//	waiting    in the line of its pool
//	bound      it has a pod, and is on its way into the journal
//	granted    its sandbox is in the journal; its callers wait until the sandbox runs
//
// An idempotency key is
//
//	free       unknown
//	claimed    it stands for a claim that is waiting or bound
//	granted    it stands for a sandbox
//	kept       its sandbox was released; it holds for some time longer
//
// # Guarantees
//
//   - A caller is in one place at most: at a claim, or at a sandbox. It is returned once, by
//     Expire, Drop or Answer, unless it was abandoned.
//   - The claims of a line are in the order in which they were added, also after Return.
//   - A key stands for one claim or one sandbox. It is free again only after Drop or DropKeys.
//
// # What breaks them
//
// A token that is used twice. A claim in another call after Drop or Grant.
package claims
