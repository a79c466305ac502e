// Package scheduler binds pods to nodes on clusters without a kube-scheduler. A pod
// goes to the node with the fewest pods. Among equals the first by name gets it.
//
// # Guarantees
//
//   - A pod is bound to a node that is ready, uncordoned and of the type in
//     Options.InstanceType, matches the pod's nodeSelector, and has room, as far as
//     the watches show. Nodes and pods are two watches, as in kube-scheduler, so a
//     pod may be bound to a node that has just been cordoned.
//   - No node gets more than Options.MaxPods pods, however many workers there are.
//   - A pod without a node stays Pending with the condition PodScheduled=False and a
//     message. It is tried again when a change of a node or pod may make room.
//
// # Limits
//
// nodeSelector is the only placement rule. A pod that requires affinity is not
// bound, and its condition names the field. Taints, resources, priorities,
// preemption and topology spread constraints are ignored.
//
// # Misuse
//
// Two schedulers on one cluster would both bind the pods of the default scheduler.
package scheduler
