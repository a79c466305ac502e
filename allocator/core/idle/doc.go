// Package idle decides when a sandbox is released for not being used. It is a pure ledger: it does
// no I/O, starts no goroutine, and receives the time as an argument. One goroutine uses it.
// Sandboxes and routers appear here by their IDs.
//
// Reports of routers, calls and earlier answers give a lower bound of the last use of a sandbox.
// The bound only says when to ask. When the idle timeout has passed since the bound, the caller
// asks every router about all sandboxes that are due, in one round at a time. A router that was
// asked admits no request for these sandboxes until it learns the outcome, takes two looks at
// what its Envoy holds open, and answers.
//
// # States
//
// A sandbox is
//
//	not due    in use, or used within its idle timeout, or not to be asked about yet
//	probed     one router asks its pod whether it is busy, because its pool has a busy probe
//	asked      in the round that is under way
//	decided    released by a verdict; it stays so until it is removed
//
// A router is
//
//	away        known, and not connected; it may serve the routes that it has
//	blind       connected; it has not reported yet, cannot tell what its Envoy holds open, needs
//	            too long for a look, or has not reported since a question that it did not answer
//	askable     connected, and its last report or answer was good
//
// A router that ends may leave requests open at its Envoy: a leftover. It lasts until another
// router of the same gateway has reported a look that began after the end, or until the given time.
//
// # Guarantees
//
//   - A verdict names a sandbox as idle only if every connected router has answered the round in
//     time, each of them could tell what is open, and no use within the idle timeout is known.
//   - No question is asked about a sandbox while a router that may know its route is not askable,
//     or while a leftover may include it.
//   - A router that joins or leaves ends the round without a verdict.
//   - The end of a leftover counts as use of all sandboxes that it may include.
//   - Every sandbox of a round is named by exactly one verdict, unless it was removed.
//   - The idle timeout is never shorter than the connect window, because a look may miss a
//     request that was admitted less than that ago. It is at least one minute if only bytes
//     count, because routers count bytes per minute.
//   - Sandboxes and routers are listed in a stable order, so the same events have the same effects.
//
// # What breaks them
//
// A router that receives the route of a sandbox before Add, or after a verdict that names it as
// idle. A question that is not sent to every connected router. Time that goes back.
package idle
