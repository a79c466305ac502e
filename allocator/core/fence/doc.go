// Package fence keeps what the releases of sandboxes wait for. It is a pure ledger: it does no
// I/O, starts no goroutine, and receives the time as an argument. One goroutine uses it.
//
// A router may send requests for a sandbox to its address until the router has acknowledged the
// release. The pod must not be deleted, and the address must not be used again, before that. A
// fence is this wait for one sandbox. Sandboxes and routers appear here by their IDs.
//
// # States
//
//	waiting    at least one router may still have the route
//	cleared    no router has the route; requests that were admitted before may still connect
//	complete   the connect window has passed since the fence was cleared
//
// # What ends the wait for a router
//
//   - It acknowledges the message that carried the release, or a later one. Acknowledgements
//     are cumulative, as in TCP.
//   - It acknowledges a snapshot that was sent after the release. A snapshot replaces all routes.
//   - It is removed: it left, was proven or declared dead, or its session expired.
//
// A router that disconnects is still waited for. It may serve the route until its session
// expires.
//
// # Guarantees
//
//   - A fence is cleared only when the wait for each router that it began with, or that Await
//     added, has ended.
//   - A fence is complete only when the connect window has passed since then.
//   - Fences are listed in the order in which they began, so the same events have the same
//     effects.
//
// # What breaks them
//
// Sequences of one router that do not grow between two snapshots. An acknowledgement that the
// router sent before the release took effect in its route cache. Time that goes back.
package fence
