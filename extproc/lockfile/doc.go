// Package lockfile gives a router process its ID and a lock file, and finds out which other
// routers of the same gateway have ended.
//
// All routers of one gateway share a directory. A process holds a lock on the file <ID>.lock
// there, from before its ID is known to any other process until its end. The kernel releases
// the lock with the process, however it ends. A router that gets the lock of another one has
// proof that the other one will answer Envoy no more. The allocator then need not wait until
// the routes of that router have gone stale. The directory also has a secret, which proves to the
// allocator that both routers are of one gateway.
//
// # Guarantees
//
//   - Dead lists only routers whose processes have ended.
//   - A router that was closed with clean set to false is never listed.
//   - All routers of one directory have the same secret, also those that start at the same time.
//   - A dead router is listed until Forget, by this process or by one that starts later.
//
// # What breaks them
//
//   - A file system that other machines write to, or that has no flock(2).
//   - Envoy may read an answer of a killed router later, if Envoy was paused at that moment.
//     The pause must not exceed envoy.StallBudget, which is part of the connect window. A
//     router that ends in order and knows of unread answers closes its file as not clean.
package lockfile
