// Package pods keeps the pods: in which state each of them is, whether it may be handed out, and when it is
// deleted or begins another life. It is the only owner of that. It knows sandboxes by their IDs, and pools by what
// they ask of their pods. It does no I/O and starts no goroutine. One goroutine uses it.
//
// # States
//
//	pending    created and not ready yet, or withheld for another reason
//	warm       ready, and in the queue of its pool
//	claiming   taken for a claim whose facts are not durable
//	bound      a sandbox has it, whose claim is not granted yet
//	claimed    a sandbox has it
//	released   it had a sandbox, whose fence is not complete
//	recycling  it is about to begin its next life, in which it is another [Pod]
//	going      it is about to be deleted
//
//	pending <--> warm --> claiming --> bound --> claimed --> released --> recycling --> the next life, pending
//	   ^                     |                                  |             |
//	   +---------------------+ Return                           +-> going <---+
//
// A pod can go from every state to going: pending and warm ones are retired, and any pod can be deleted by others.
// A pod in pending or warm is idle.
//
// # Why a pod is not handed out
//
// An idle pod is warm if and only if [Pod.Withheld] is empty: one that is marked as used, or that has no owner, is retired
// or an orphan, and so it is not idle. Withheld is computed from the latest observation of the
// pod and its node, from its address, and from what may have reached it:
//
//	Unready      it is not ready, or has no address
//	Ending       it is being deleted, or has ended
//	NodeBad      its node is not ready, is cordoned, or was not seen
//	Contested    another pod was seen at its address
//	Tainted      it was idle at an address while stale routes led there: see package taint
//	Quarantined  it had an address while routers of an earlier journal may have served routes
//	NotProven    its life began with a restart that is not proven yet
//	Open         its pool is behind an egress gateway, and the pod was made before that
//
// A tainted pod keeps its address until all fences there are complete, because the next pod at the address would be
// tainted too, unless another pod was seen there: then both are retired. A quarantined one keeps it until the earlier journal's session ends. Both are then retired.
//
// # Lives
//
// The pod of a released sandbox can become warm again, if its pool asks for that. A pod then has several lives, one
// after the other. Each has a key of its own, so nothing outside of this package knows of recycling: a life has at
// most one sandbox, its retirement is final, and a late message about it says nothing about the next one.
//
//   - A life ends by RecyclePod, which follows the complete fence of its sandbox. So no router has a route to its
//     address, and no request is on its way there. The observation of the next life ends it.
//   - The next life begins pending, at the same address. It is ready only when the kubelet's status proves that every
//     container was restarted after the life before: see package pods of the allocator. This package trusts
//     Pod.Recycling for that. A life is retired if its pod cannot be cleaned, or if it is not proven within
//     ProofWithin. A life that does not end within that time after RecyclePod is deleted.
//   - A restart needs no fact of its own. A leader that ends in between leaves either the life before, whose fence the
//     next leader begins again, or a next life that is not proven. The next leader has not seen the fence complete:
//     until it has, the address is tainted, and a next life there is tainted too and is deleted. A late RecyclePod of
//     a deposed leader does no harm: the fence that it followed stays complete.
//   - A client that changes what marks the life of a pod in use ends its sandbox: the release, its fence and the taint
//     follow as for a pod that is gone.
//
// # Guarantees
//
//   - A pod has at most one sandbox in each of its lives. It enters the queue only from pending.
//   - A pod that is on record as used stays used, whatever a late observation shows. One that is marked as used and is
//     on no record is an orphan. It is never handed out, and is deleted by [Table.RetireOrphans].
//   - An idle pod is deleted only when that intent is durable, so the next leader never hands out a pod whose deletion
//     is on its way. The intent is final. It is kept until the pod is gone.
//   - The pod of a sandbox is deleted or recycled only by [Table.Finish], which the caller calls when its fence is
//     complete, or by [Table.RetireOrphans].
//   - A pod is counted once, by its pool and its [Class].
//   - The same calls have the same effects.
//
// What the package cannot decide it lists, and the caller takes it from [step.Notices] before the step ends: a pod in
// use that was observed or is gone, an idle pod that has failed or became warm, a sandbox that may end.
//
// # What breaks them
//
// Finish before the fence of the pod's sandbox is complete. A sandbox whose record names another pod than Seen was
// told. Time that goes back.
package pods
