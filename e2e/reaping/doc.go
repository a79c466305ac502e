// Package reaping tests that a sandbox is not released for being idle while it is used, and
// that each sandbox that is not used is released, whatever happens to the processes and to
// the connections between them.
//
// # Set-up
//
// Real etcd and kube-apiserver run with two allocators that elect a leader, three gateways
// of one Envoy and one router each, and pods without processes. One server of the test, the
// recorder, answers for all pods, and records what is in progress at each pod from when to
// when. TCP relays of the test stand between routers and allocators. Idle timeouts are five
// to seven seconds, close to the minimum. Max-stale and the lease last for seconds too.
//
// # Load
//
// Hundreds of users each claim a sandbox with an idle timeout and no end, use it as a
// script drawn from the seed says, and then leave it alone. They send short requests a
// little before and after the deadline, through any gateway, WebSockets, SSE streams, long
// polls and uploads that are silent for longer than the timeout, and keep-alives. Some
// clients give up early. Many scripts end with requests at the moment of the release.
//
// # Faults
//
// Times of faults alternate with quiet times:
//
//   - Routers are killed and started again, paused for up to 6 s, paused repeatedly for less
//     than a second, replaced by a successor that is started first, and cut off from all
//     allocators, in one direction or both.
//   - Allocators, mostly the leader, are killed, paused for up to 8 s, paused repeatedly for
//     less than a second, and ended in order. All of them are started again.
//   - The wall clock of one allocator is ten minutes ahead, that of the other ten minutes
//     behind. Each restart swaps the sides of that allocator.
//
// # Limits
//
// No Envoy is paused or killed and no pod is deleted: package soak does that. No router is
// kept away for so long that what is open at its Envoy does not count any more
// (see docs/design/idle.md).
//
// # Judgement
//
// The judges of suite reaping in package e2e/history judge the run. A run that proves
// nothing fails too: the test goes on until enough sandboxes were released, enough requests
// were sent near a deadline and each kind of fault has happened. It fails if that takes too
// long.
//
// # Duration
//
// In make test each fault is made once or twice, 100 sandboxes are released and 10 requests
// meet the moment of a release. In make test-long these are 500 and 50, in five minutes of
// faults. A failure that depends on the order of several faults, or on a moment that few
// requests meet, is found by make test-long only.
package reaping
