// Package scheduler binds pods to nodes where no kube-scheduler runs: to the
// node with the fewest pods first, by name among equals, which on empty nodes is
// one after the other.
//
// # What holds
//
//   - A pod is bound to a node that, as far as the watch has told, is ready, not
//     cordoned and of the type asked for, matches the pod's nodeSelector, and has
//     room. Nodes and pods are two watches, as in a real scheduler: a pod may be
//     bound to a node that has only just been cordoned.
//   - No node gets more than Options.MaxPods pods, however many are bound at once.
//   - A pod without a place stays Pending and says why, and is tried again as soon
//     as something changes that may give it one.
//
// # What is not
//
// Of the rules a pod may set it knows nodeSelector; a pod that requires affinity
// is not bound. Taints, resources and priorities are not looked at. Two
// schedulers on one cluster would both want the pods of the default scheduler.
package scheduler
