// Package sandboxobjects writes the core's committed states into Sandbox objects, in the
// background, and reads them back for a new leader.
//
// # States
//
// An object exists from the claim of its sandbox until [Writer.Forget] deletes it, some
// time after the sandbox ended. A finalizer keeps it while the sandbox is live, and after
// that while its idempotency key is valid.
//
// # Guarantees
//
//   - An older revision never overwrites a newer one, also across leaders: every write is
//     conditional on the resource version that was read.
//   - Only committed states are written. If several states of a sandbox wait, only the
//     latest is written, so the backlog is bounded by the number of sandboxes.
//   - The core hears of each write, and only then lets the journal drop the record.
//   - An object of a live sandbox that cannot be read is reported as such by
//     [Watcher.List]; it is never taken for a sandbox that does not exist.
//
// # What breaks them
//
// A client that removes the finalizer and deletes the object, and edits of the fields
// that the allocator writes.
package sandboxobjects
