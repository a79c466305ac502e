// Package poststart calls a pool's postStart hook in a pod that has become a sandbox.
//
// # Guarantees
//
//   - A hook is called only while this process holds the lease: another leader may have
//     released the sandbox and reused the pod's address.
//   - A request is written to a pod at most once. Only attempts that sent nothing are
//     repeated.
//   - [Caller.Call] returns within the hook's timeout, whatever the pod sends or does not
//     send. It reads at most 8 KiB of the answer and follows no redirect.
//
// # What breaks them
//
// A dial function that ignores its context.
package poststart
