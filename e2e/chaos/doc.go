// Package chaos tests the promises of allocators while allocators are killed and paused,
// the API server fails them, and others delete their pods. Real etcd and kube-apiserver run
// with the allocator's program as processes and pods without processes.
//
// # How it is put together
//
// Callers use the HTTP API of any replica, as through a Service, and ask again when they get
// no answer. What they ask and are answered goes into one history, with what the test does
// to processes and pods. At the end, when nothing moves any more, the history gets the API's
// list, each sandbox that was ever answered, the Sandbox objects, the pods and the pool's
// status. The judges of suite chaos in package e2e/history, which do not know the scenario,
// judge the history.
//
// # What is judged
//
//   - Nothing is double: an ID is answered for one claim only, a key stands for one ID, and
//     no pod ever holds two sandboxes.
//   - Nothing is lost: an answered sandbox is live until it is released, its time is over or
//     the test has deleted its pod: in the API, as an object and as a pod.
//   - Nothing leaks: each pod is warm, or holds a sandbox that is in the list or ending, and
//     each sandbox in the list is known to the caller that claimed it. A claim without a key
//     that was never answered lasts no longer than its timeout, because its caller cannot
//     ask for it again.
//   - Nothing comes back: a released sandbox is never seen again, and its key claims no
//     other one.
//   - Claims that wait are answered in the order of their arrival.
//
// A history orders calls by one clock of the machine. The one wall clock time that counts is
// the end of a sandbox.
//
// # Duration
//
// Four tests have a Berth each. In one, leaders are killed, paused and fail to write, one scenario
// after another. In the second, pods are deleted and claims wait. In the third, the allocator sees pods 2 s late
// while pools are filled, emptied, scaled and rolled out. Each scenario has a pool of its own, and one judgement
// is about all pools of a Berth. The fourth kills leaders while teams claim up to their limits and in batches. It
// has no history, because the API's list is all that it judges.
//
// In make test leaders are killed 11 times and paused once, and fewer callers come. In
// make test-long leaders are killed 73 times and paused 4 times, a pool is filled with 5,000 pods, and
// 2,000 callers claim from one that changes all the time. A failure that one kill or
// one wave of callers in ten meets is found by make test-long, or by several runs of
// make test.
package chaos
