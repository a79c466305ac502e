// Package reaping tests that no sandbox is released for being idle while somebody uses
// it, whatever becomes of the processes and of the connections between them, and that
// every one that nobody uses is released.
//
// # What stands there
//
// Real etcd and kube-apiserver, two allocators that elect a leader, three gateways of one
// Envoy and one router each, and pods that KWOK makes. One server of the test answers
// for all pods and is the recorder: it sees what is in progress at each, and from when
// to when. Between routers and allocators stand TCP relays of the test.
// Idle timeouts are as short as they can be: five to seven seconds. Max-stale and the lease
// last for seconds too.
//
// # What is done
//
// Hundreds of users each claim a sandbox with an idle timeout and no end, use it as a
// script says that is drawn from the seed, and leave it alone: short requests a little
// before and after the moment at which it will have been idle for long enough, through
// any of the gateways, WebSockets, SSE streams, long polls and uploads that are silent for
// longer than the timeout, some of them given up by the client, and keep-alives. Many a
// script ends with requests in the very moment in which the sandbox is released.
//
// Times of faults alternate with quiet ones:
//
//   - routers are killed and started again, stopped for up to 6 s, and again and again for
//     less than one, replaced by a successor that is started first, and cut off from all
//     allocators, in one direction or both;
//   - allocators, most often the leader, are killed, stopped for up to 8 s, and again and
//     again for less than one, and ended in order; all of them are started again;
//   - of the allocators' wall clocks one is ten minutes ahead and the other ten minutes
//     behind, and each is on the other side when it is started again.
//
// # What is judged
//
// The judges of suite reaping in package e2e/history judge the run. A run in which nothing could have gone
// wrong fails too: the test goes on until enough sandboxes were released, enough
// requests were sent near a deadline and every kind of fault has happened, or fails
// because that takes too long.
//
// # What is not done
//
// No Envoy is stopped or killed, and pods are not deleted: package soak does that. No
// router is kept away for so long that what is open at its Envoy counts no more
// (docs/design/idle.md says what is assumed).
//
// # How long
//
// In make test every fault is made once or twice, 100 sandboxes are released and 10
// requests meet the moment of a release; in make test-long these are 500 and 50, in five
// minutes of faults. What depends on the order of several faults, or on a moment that few
// requests meet, is found by make test-long.
package reaping
