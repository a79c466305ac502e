// Package soak tests the main promise of Berth: no request reaches a pod that does not hold
// its sandbox, whatever happens to the processes and to the connections between them.
//
// # Set-up
//
// Real etcd and kube-apiserver run with one process node, three allocators that elect a
// leader, and three gateways of one Envoy and one router each. TCP relays of the test stand
// between routers and allocators, and between allocators and API server. The pool is small,
// and the node gives the address of an ended pod to the next one at once. So addresses are
// used again as soon as the fence allows. Max-stale and the lease last for seconds, so that
// fences complete while the test runs.
//
// # Load
//
// Claimers claim a sandbox, keep it for some seconds and release it, or let its time run
// out. Users send requests through any gateway. A third of the requests go to sandboxes
// that are gone. There are plain requests, requests with bodies, slow ones, HTTP/2 to the
// pod as gRPC uses it, and WebSockets that stay open. Two sandboxes at a time are stopped and woken, and must have
// their files again. Many clients give up before the
// answer. Each pod records what reaches it before it answers, in a file that outlives it.
//
// # Faults
//
// The seed determines the order of these faults:
//
//   - Routers are killed and started again on the same socket, and paused, also for longer
//     than max-stale. A second router takes the socket over while the first one still
//     serves, or is paused and then runs on for a moment.
//   - An Envoy is paused alone, for a second at most, also while its router is killed.
//   - Leaders and other allocators are killed, and paused for longer than their lease.
//   - A router is cut off from all allocators, or an allocator from the API server, in one
//     direction or both. What was sent meanwhile arrives late, or the connection breaks.
//   - Pods that hold sandboxes are deleted, by force and plainly. Some are deleted while a
//     router is cut off.
//
// # Limits
//
// No Envoy is paused together with its router, or for longer than the stall budget
// (envoy.StallBudget), and no other program gets the address of a pod. Berth assumes both,
// see docs/design/fence.md. A router can be paused between its last look at a route and its
// answer. That falls under the same assumption if the pause exceeds the budget. It does no
// harm here: Envoy waits 5 s for the answer, which is no longer than the connect window. No
// Envoy is killed, because that only ends its clients' connections. All clocks run at one
// speed, because all processes run on one machine.
//
// # Judgement
//
// The history is judged by package e2e/history, and again by "go run ./e2e/judge FILE". A
// run that proves nothing fails too: enough addresses must be used again, enough requests
// be sent for a sandbox that is gone while another one lives at its address, and each kind
// of fault must happen.
//
// # Egress
//
// A second test has sandboxes with rules of their own come and go at few addresses, behind an
// egress gateway whose router is killed once. They send requests and tunnels to a host that
// their rules allow, to the one that they allowed before, and to those of others. They go on
// after their end, while the next sandbox has their address. The origin records what arrives.
// Nothing may arrive that began after the call was answered that forbids it, or while no router
// ran, and no connection to the origin may serve two sandboxes. The judge is in outgoing_test.go.
//
// # Duration
//
// In make test faults are made for 45 s, which is one round of them, and in make test-long for
// ten minutes. A failure that needs two rare faults at once is found by make test-long or
// make soak only.
package soak
