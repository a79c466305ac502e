// Package nodes reports to the core which nodes accept new pods. Such a node is ready,
// is not cordoned and is not being deleted; the package calls it usable.
//
// # Guarantees
//
//   - [Watcher.Run] reports every change of a node's usability after it began.
//   - [Watcher.List] reads the API server's store and not a cache.
//   - The core is free to ignore an event: a wrong one only affects on which node the
//     pod of the next claim is preferred.
//
// # What breaks them
//
// A watch that loses events. The allocator's audit compares a list with the core and
// repairs the difference.
package nodes
