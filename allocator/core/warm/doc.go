// Package warm decides about the warm pods of a pool: in which order they are handed out ([Queue]),
// and which pods the pool creates and deletes ([PlanFor]). It does no I/O and owns no clock. One
// goroutine uses a Queue; PlanFor is a pure function.
//
// Pods are handed out from one node after the other, the oldest pod of each node first, so that
// a burst of claims is spread over the nodes.
//
// # Guarantees of a Queue
//
//   - Next returns a pod that was put and not removed, unless the queue is empty.
//   - When Passed follows each Next, every node that has warm pods has its turn before a node
//     has its second one.
//   - Of one node the oldest pod comes first; pods of the same age come by name.
//   - Put, Next and Remove cost the same however many pods there are, if the pod that is put is
//     not older than those on its node.
//
// # Guarantees of a Plan
//
//   - It creates no pod beyond MaxPods, MaxSurge and Window, and none while Refused, Paused or Retrying.
//   - It deletes no current warm pod that is wanted, unless Refused. It deletes an outdated warm
//     pod only when another warm pod replaces it, within MaxUnavailable, or when MaxPods leaves no room
//     for a replacement.
//   - It deletes nothing while Paused, unless Refused.
//   - When it has been carried out and nothing else happens, the next plan is empty.
//
// # What breaks them
//
// A pod that is put twice, or removed when it is not there. Both panic. Counts that do not add up.
package warm
