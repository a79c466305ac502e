// Package demand decides how many warm pods a pool keeps, from the claims of the recent past. It is pure: it does no
// I/O, starts no goroutine, and receives the time as an argument. One goroutine uses a Tracker.
//
// # Rule
//
// A claim takes a warm pod, and the pool creates another one at once. That one is warm a start time later. So a pool
// whose pods take S to start answers all claims from warm pods if it keeps as many as are claimed within S. Tracker
// counts the pods that were asked for in each stretch of that length. The target is the count of the busiest stretch of
// the last History, between the Limits.
//
//   - S is the start time that 9 of 10 of the last 32 pods did not exceed, FirstStart before one was measured, and at
//     most MaxStart.
//   - The target rises with the claim that makes a stretch the busiest one. It falls only when that stretch is older
//     than History. So it does not follow single claims down and up again.
//   - Claims that find no warm pod count like others. A claim that its caller repeats counts each time; Limits.Max bounds
//     what that can do.
//   - Pods that waiting claims lack are created in addition. When the claims have gone, Limits.Spare of such
//     pods are kept for Spare, so that a caller whose wait is shorter than the start time finds a pod when it comes
//     again.
//
// # Bounds
//
// The first burst of its size finds too few warm pods, because nothing announces it. No function of the past can do
// better there; Limits.Min is for those who know more. In the replayed hours of bursts alone, all other claims find a
// warm pod.
//
// Pods for a burst stand idle until it comes again. So bursts of 50 claims some 4 minutes apart, with sandboxes that
// live for 5 minutes, cost 1.7 to 1.9 times the pod-seconds of an oracle that creates each pod one start time before
// its claim. Where intervals have no memory, a pool that keeps fewer pods for a part of the interval misses the bursts
// of that part. Bursts that are further apart than History are all missed. The replayed hours with claims between the
// bursts cost at most 1.26 times those pod-seconds.
//
// With the mean start time as S a pool would keep fewer pods, at most 4 % of all pod-seconds less. But 1.4 % of the
// claims of the hours with steady claims and bursts would wait, instead of 0.9 %.
//
// # State
//
// A Tracker has a fixed size. A change of the leader loses it. The new leader keeps the idle pods that it finds for a
// History: see Found.
package demand
