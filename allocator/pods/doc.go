// Package pods turns Pod objects into the core's observations and the core's effects
// into writes to pods. It takes no decision.
//
//   - [Watcher] reports every pod of the namespace.
//   - [Writer] creates and deletes pods.
//   - [Writer.Recycle] has all containers of a pod restarted for another sandbox.
//   - [Labeler] shows on each pod what it is used for.
//   - [Build] makes a pod from a pool's template.
//
// # Guarantees
//
//   - A pod belongs to the pool in its owner reference. Labels do not decide.
//   - A pod that cannot be read in full is reported, but never as one that can be claimed.
//   - A pod of a pool with the egress mode Gateway says so in its spec, for as long as it lives. It is never observed as one
//     that can be claimed while it lacks the label by which network policies select it. A pod with a sandbox gets the
//     label back, and may reach more until then.
//   - Deletions name the pod's UID, so a later pod of the same name is safe.
//   - Every container of a pod that [Build] made serves for [ServeOn] after another
//     client deleted the pod.
//
// # What breaks them
//
// A kubelet that cuts the preStop sleep short, and a client that deletes a pod with
// grace period 0.
package pods
