// Package kwok is the other kind of node that a devcluster can have: KWOK says
// of any number of pods that they run, each on an address of its own in
// 127.0.0.0/8, and one HTTP server answers for all of them. It is for
// benchmarks with thousands of pods; package processnode is for pods that do
// something.
//
// # What holds
//
//   - A pod without a node is bound to the one with the fewest pods, eight pods at
//     a time (package scheduler), and is Ready as soon as KWOK sees it.
//   - Pods that live have distinct addresses inside Nodes.PodCIDR. A deleted pod's
//     address goes to a later pod, often the very next one.
//   - The server answers with the address that it was reached on, or as Options.Handler
//     does, and on the addresses of Nodes.PodCIDR only: it closes other connections
//     unread, so nothing answers on this machine's other interfaces.
//   - Nothing is left running after Close, and KWOK dies with this process
//     (package proc).
//
// # What is not
//
//   - No containers: no probes, logs, restarts or grace periods. A deleted pod is
//     gone at once, and its address still answers.
//   - The server takes its port on every address of this machine, so nobody else
//     can have that port: no pod of a process node of another cluster either.
//   - Nodes are not cordoned, drained or made unready but by the caller's hand.
//
// # What breaks it
//
//   - KWOK deletes a pod that is being deleted by its name, twice within
//     milliseconds: one that is made anew by that name at once may go too.
//   - KWOK takes an address for each try to write a pod's status. One that it could
//     not write is lost, because the pod had gone, or because somebody else had
//     changed it before it was Ready and KWOK writes it again. PodCIDR must have
//     room for more pods than there are.
//   - KWOK does not know the addresses of pods from before its start, so it can be
//     started once on a cluster.
package kwok
