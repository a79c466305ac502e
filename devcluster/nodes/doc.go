// Package nodes has what the two kinds of nodes of a devcluster share: the Node
// object, the addresses of pods, and a scheduler. Package processnode has nodes that
// run pods as processes, package hollow nodes for thousands of pods without processes.
//
// # Guarantees of the scheduler
//
//   - A pod goes to the node with the fewest pods. Among equals the first by name
//     gets it.
//   - A pod is bound to a node that is uncordoned and of the scheduler's kind, and
//     matches the pod's nodeSelector, as far as the watches show. Nodes and pods
//     are two watches, as in kube-scheduler, so a pod may be bound to a node that has
//     just been cordoned.
//   - A pod without a node stays Pending with the condition PodScheduled=False and a
//     message. It is tried again when a node changes.
//
// # Limits
//
// nodeSelector is the only placement rule. A pod with an affinity is not bound, and
// its condition names the field. Taints, resources, priorities, preemption and
// topology spread constraints are ignored.
//
// # Why not kube-scheduler
//
// The module k8s.io/kubernetes is pinned for the API server and contains
// kube-scheduler. It would add about a minute to the first build, and one process to
// each of the many clusters that a test run starts. The tests on a kind cluster run
// with the real kube-scheduler.
//
// # Misuse
//
// Two schedulers on one cluster would both bind the pods of the default scheduler.
package nodes
