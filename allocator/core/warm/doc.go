// Package warm keeps the warm pods of a pool in the order in which they are handed out. It is a
// pure ledger: it does no I/O and owns no clock. One goroutine uses it.
//
// Pods are handed out from one node after the other, the oldest pod of each node first, so that
// a burst of claims is spread over the nodes.
//
// # Guarantees
//
//   - Next returns a pod that was put and not removed, unless the queue is empty.
//   - When Passed follows each Next, every node that has warm pods has its turn before a node
//     has its second one.
//   - Of one node the oldest pod comes first; pods of the same age come by name.
//   - Put, Next and Remove cost the same however many pods there are, if the pod that is put is
//     not older than those on its node.
//
// # What breaks them
//
// A pod that is put twice, or removed when it is not there. Both panic.
package warm
