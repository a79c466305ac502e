// Package chaos tests what allocators promise while they are killed and paused,
// while the API server fails them, and while others delete their pods: real etcd
// and kube-apiserver, the allocator's own program as processes, KWOK pods.
//
// # How it is put together
//
// Callers use the HTTP API of whichever replica they hit, as through a Service,
// and ask again when they got no answer. What they asked and what came back goes
// into one history, with what the test itself has done to processes and pods. At
// the end, when nothing moves any more, the world is read: the API's list, each
// sandbox that was ever answered, Sandbox objects, pods, the pool's status. That goes into
// the history too. The judges of suite chaos in package e2e/history, which know nothing
// about the scenario, judge it.
//
// # What is judged
//
//   - Nothing double: an ID is answered for one claim only, a key stands for one
//     ID, and no pod ever holds two sandboxes.
//   - Nothing lost: what was answered is live until it is released, its time is
//     over or the test has deleted its pod; in the API, as an object and as a pod.
//   - Nothing leaked: each pod is warm or holds a sandbox that is in the list or
//     on its way out, and each sandbox in the list is known to the caller who
//     claimed it. A claim without a key that was never answered lasts for as long
//     as its timeout says and no longer: whoever asked cannot ask for it again.
//   - Nothing comes back: a sandbox that was released is never seen again, and
//     its key claims no other one.
//   - Claims that wait are answered in the order in which they came.
//
// # How long
//
// In make test leaders are killed 5 times, paused twice, and fewer callers come than in
// make test-long, which kills 20 and pauses 4. A fault that hits only one kill or one wave
// of callers in ten is found by make test-long, or by several runs of make test.
//
// A history orders calls by one clock of the machine, see package e2e/history. The one wall
// clock time that counts is the end that a sandbox was given.
package chaos
