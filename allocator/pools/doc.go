// Package pools watches SandboxPool objects for the core and writes their status,
// conditions and finalizer.
//
// # States
//
// A pool is accepted when its template passes the [Policy], and refused otherwise. The
// core gets refused pools too: it makes no pod for them and keeps their sandboxes.
//
// # Guarantees
//
//   - No pod is made from a template that the policy refuses.
//   - A pool's finalizer stays until the core reports that its last pod is gone.
//   - Every write is conditional on the resource version that was read, so a newer
//     object is never overwritten.
//   - Ready becomes true when the pool has as many warm pods as it asks for. It stays true while the
//     spec stays as it is and a warm pod is left, so claims do not turn it.
//   - Degraded quotes the API server, the scheduler or the kubelet. A change of its reason makes one Event, and
//     so do the end of the trouble, the replacement of pods and the deletion of the pool.
//   - A status shows counts only if the core answered; it never shows a guessed zero.
//
// # What breaks them
//
// Another writer that removes the finalizer: the pool's object then goes before its pods.
package pools
