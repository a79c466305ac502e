// Package soak tests what Berth exists for: that no request ever reaches a pod that
// does not hold its sandbox, whatever becomes of the processes and of the connections
// between them.
//
// # What stands there
//
// Real etcd and kube-apiserver, one process node, three allocators that elect a
// leader, three gateways of one Envoy and one router each. Between routers and
// allocators, and between allocators and API server, stand TCP relays of the test. The
// pool is small, and the node gives an address to the next pod as soon as nothing runs
// there any more, so addresses come back as fast as the fence allows. Max-stale and the
// lease last for seconds, so that fences end while the test lasts.
//
// # What is done
//
// Claimers claim, keep their sandbox for some seconds, and release it; some let its
// time run out. Users send requests through any gateway, to sandboxes that live and, a
// third of them, to some that are gone: plain ones, with bodies, slow ones, over HTTP/2
// to the pod as gRPC has it, and WebSockets that stay. Many give up before the answer.
// Every pod writes down what reaches it, in a file that outlives it, before it answers.
//
// Meanwhile, in an order that SEED repeats:
//
//   - routers are killed and started again on the same socket; stopped, for longer than
//     max-stale too; replaced by a second one on the same socket while the first still
//     serves, or stands still and then goes on for a moment;
//   - an Envoy is stopped alone, for a second at most, also while its router is killed;
//   - leaders and other allocators are killed, and stopped past their lease;
//   - a router is cut off from all allocators, an allocator from the API server, in one
//     direction or both. What was sent meanwhile is not lost but late, as TCP has it, or
//     the connection breaks in the end;
//   - pods that hold sandboxes are deleted, by force and plainly; some of them just when
//     a router cannot be told.
//
// # What is not done
//
// An Envoy is not stopped together with its router, nor for longer than the stall
// budget (envoy.StallBudget), and no other program gets the address of a pod: that
// neither happens is assumed, and stated in docs/design/fence.md. A router that is stopped
// in the moment between its last look at a route and its answer is done, and is part of
// the same assumption where it lasts longer than the budget; it does no harm here because
// Envoy stops waiting for its answer after 5 s, which is no longer than the window. No Envoy
// is killed: its clients' connections would end and nothing else. Clocks run at one speed,
// because all is on one machine.
//
// # What is judged
//
// Everything goes into a history, which package e2e/history describes and judges. It is a
// file: "go run ./e2e/judge FILE" judges it again. A run in which nothing could
// have gone wrong fails too: so many addresses must have been used again, so many requests
// been sent for a sandbox that was gone while another one lived at its address, and every
// kind of fault must have happened.
//
// # How long
//
// In make test faults are made for a minute, once or twice each, and in make test-long for
// ten minutes. What takes two faults of a rare kind at the same time is found by make
// test-long, or by make soak.
package soak
