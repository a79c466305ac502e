// Package hollow adds nodes for thousands of pods without processes to a devcluster. A
// pod that is bound to such a node is Ready at once, or after Options.StartTime, on an address of its own in
// 127.0.0.0/8, and one HTTP server answers on all these addresses. It is for
// benchmarks and for tests with many pods. Package processnode is for pods that run a
// program.
//
// # Guarantees
//
//   - Package nodes binds the pods. Two requests to the API server make a pod ready:
//     its binding and its status. One makes it go.
//   - Live pods have distinct addresses inside PodCIDR. The address of a deleted pod
//     goes to the next pod.
//   - The server answers with the address of the connection, or as Options.Handler
//     does, on the addresses of PodCIDR only. It closes other connections unread, so
//     other interfaces of this machine get no answer.
//
// # Limits
//
//   - There are no containers: no probes, logs or grace periods. A deleted pod is gone
//     at once, and its address still answers.
//   - All containers of a pod that Berth recycles restart by one write of its status.
//     A kubelet writes it several times.
//   - The server takes its port on every address of this machine. No other program
//     can have that port.
//   - Nodes are cordoned, drained or made unready by the caller only.
//   - Hollow nodes do not know the addresses of pods from before their start, so they
//     can be started once per cluster.
//
// # Why not KWOK
//
// KWOK (sigs.k8s.io/kwok) does the same as a process of its own that takes one to two
// minutes to build. It assigns an address for each try to write a status, can assign
// one address twice to its first pods, and deletes pods by name.
package hollow
