// Package taint keeps which addresses stale routes may still reach, and which pods have been at
// them. It is a pure ledger: it does no I/O and owns no clock. One goroutine uses it.
//
// The network gives the address of a pod to another pod when the first one ends, and a pod can
// move to another address. A router may still have a route to the address then, and send it the
// requests of the earlier sandbox. Sandboxes appear here by their IDs.
//
// # States
//
// An address is
//
//	free      no sandbox has a route to it
//	tainted   at least one sandbox has a route to it that is not fenced
//
// A pod is
//
//	clean     it may be handed out
//	tainted   requests of another sandbox may have reached it; it is never clean again
//	retired   tainted, and its deletion is journaled
//
// A sandbox is
//
//	routed    routers may have a route to its addresses
//	blocked   its routes are fenced, but a tainted pod that they may have reached is not retired.
//	          The next leader would take that pod for a clean one, if it forgot the sandbox
//	done      neither of these
//
// # Guarantees
//
//   - A pod that was idle at an address while that was tainted by another sandbox is tainted.
//   - A sandbox is not done while a pod exists that is tainted by its routes and not retired, even
//     if that pod has moved away meanwhile.
//   - Two pods that are at one address at the same time are both contested, unless one of them is
//     ending. One of them must have lost the address, and it cannot be seen which one.
//   - Pods are listed in the order in which they came to an address, so the same events have the
//     same effects.
//
// # What breaks them
//
// A router that gets a route of a sandbox before AddRoutes, or uses one after Fenced. A sandbox that
// gets a pod without a call of AddRoutes.
package taint
