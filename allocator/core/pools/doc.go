// Package pools decides how many pods each pool makes and deletes: for what it asks for, for the claims that wait, and
// for what the demand of late suggests. It is the only owner of what is under way for that: creations, pauses after
// failures, the bound on pods that start. The pods themselves are those of package pods, and all counts are taken from
// there. It does no I/O and starts no goroutine. One goroutine uses it.
//
// # States
//
// A pool is
//
//	unseen    a pod of it was seen, or is on record, and its object was not; nothing is decided about its pods
//	known     its object exists
//	deleting  its object is being deleted or is gone; its pods and sandboxes go
//	drained   deleting, and nothing of it is left; PoolDrained was emitted
//
// The parts below this package decide without the rest:
//
//	core/demand  how many warm pods a pool needs, from its claims of late
//	core/warm    what to create and to delete for that
//
// # Guarantees
//
//   - A pool has no more pods than MaxPods, but for those that it had when that was lowered.
//   - A pool that is unseen keeps its pods. One that is paused creates and deletes no idle ones.
//   - A creation that failed is tried again under the same name, after a pause that doubles, so that a pod that was
//     created although the call failed is not created twice.
//   - Idle pods that end early, or are not ready in time, are replaced after a pause that doubles with each round: see
//     backOff. The end of a sandbox's pod is replaced at once.
//   - At most so many pods start at one time: MaxSurge, or a bound that doubles while starts stay fast.
//   - The plan of a pool depends on events only, not on how often it is asked for: Adjust without news does nothing.
//
// # What breaks them
//
// A pool with waiting claims whose lack of pods the caller does not give to Adjust.
package pools
