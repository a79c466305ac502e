// Package kwok adds nodes for thousands of pods without processes to a devcluster.
// KWOK marks each pod as running, on an address of its own in 127.0.0.0/8, and one
// HTTP server answers on all these addresses. It is for benchmarks. Package
// processnode is for pods that run a program.
//
// # Guarantees
//
//   - A pod without a node is bound to the one with the fewest pods, eight pods at a
//     time (package scheduler). It is Ready as soon as KWOK sees it.
//   - Live pods have distinct addresses inside Nodes.PodCIDR. A deleted pod's address
//     goes to a later pod, often the very next one.
//   - The server answers with the address of the connection, or as Options.Handler
//     does, on the addresses of Nodes.PodCIDR only. It closes other connections
//     unread, so other interfaces of this machine get no answer.
//   - No process is left after Close, and KWOK dies with this process (package proc).
//
// # Limits
//
//   - There are no containers: no probes, logs, restarts or grace periods. A deleted
//     pod is gone at once, and its address still answers.
//   - The server takes its port on every address of this machine. No other program
//     can have that port, including pods on a process node of another cluster.
//   - Nodes are cordoned, drained or made unready by the caller only.
//
// # Misuse
//
//   - KWOK deletes a pod by its name, twice within milliseconds. A pod that is
//     created under that name at once may be deleted too.
//   - KWOK takes an address for each try to write a pod's status, and loses it if the
//     write fails. A write fails if the pod is gone, or if another client has changed
//     it before it was Ready. PodCIDR must have room for more pods than there are.
//   - KWOK does not know the addresses of pods from before its start, so it can be
//     started once per cluster.
package kwok
