// Package devcluster runs a real kube-apiserver and etcd on loopback, and
// process nodes that run pods as local processes, for tests and the demo. Package
// kwok adds the other kind of node: pods by the thousands that are no processes.
//
// # What holds
//
//   - Nothing outlives the process that started a cluster, however that process
//     ends: no server, no pod, no temporary directory (package proc).
//   - Clusters run side by side on one machine: each has a block of addresses
//     of its own in 127.64.0.0/10, from which it takes its servers and its pods,
//     so no two of them ever want the same port.
//   - A program in the cache is complete, and built once however many processes
//     want it at the same time.
//   - Every wait ends: when its component dies, when the context ends, or at a
//     limit; and the error holds the end of the component's log.
//
// # What there is not
//
// No controller manager: nothing collects garbage by owner references, makes
// endpoints or service accounts, or finishes the deletion of a namespace. No
// kube-scheduler; with process nodes a small one binds pods to them (package
// scheduler).
//
// Programs come from the machine when it has them (KUBEBUILDER_ASSETS,
// ENVOY_BIN, PATH); else they are built or downloaded into the cache
// (BERTH_CACHE) the first time. Linux only.
package devcluster
