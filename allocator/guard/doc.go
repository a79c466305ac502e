// Package guard stands between the core and what a leader does. It keeps, from the events and the effects alone, what
// was journaled, sent and acknowledged, and compares each effect with that before the effect is carried out. It
// does no I/O, starts no goroutine, and receives the time as an argument. One goroutine uses it.
//
// # Assertions
//
//	pod_fenced       a pod that held a sandbox is deleted or recycled only when the fence of the sandbox is complete,
//	                 any other pod is deleted only when that intent is durable
//	session_durable  a router receives routes only when its session is durable, with its max-stale and its gateway
//	claim_durable    a claim is answered, and a sandbox is configured, started, shown and routed to, only when the
//	                 fact that bound the ID to the pod is durable
//	one_binding      a sandbox ID is bound once, a pod is bound once in each of its lives, and a retired pod never
//	route_awake      a router receives the route of a sandbox only if its latest fact does not say that its processes may
//	                 be stopped, or if its agent has obeyed the order to continue them that follows from that fact
//
// # States
//
// A sandbox is
//
//	bound      its claim was handed to the writer
//	durable    its claim is in the journal
//	released   its release is in the journal; its fence is under way
//	fenced     its fence is complete
//
// A session is durable from its fact until the fact of its end. It is routed, which means that it may send requests
// to sandboxes, from its first snapshot until it ends. A session of an earlier term, or one that stands for the routers
// of an earlier journal, is routed from the beginning.
//
// # When a fence is complete
//
// The fence of a sandbox waits for each session that is routed when the release is durable, and for each one that
// is sent the route later. The wait for a session ends when
//
//   - it acknowledges a message that has the release, or a snapshot without the route;
//   - it says Goodbye, or a router of the same gateway reports it dead and its stream has ended;
//   - its end is durable: it has expired, or an operator has declared it dead.
//
// The fence is complete when the connect window has passed since the last wait has ended.
//
// # Guarantees
//
//   - Step returns no effect that violates an assertion.
//   - It never reads the core, and no value by which the core decides. It decides from facts that the journal has
//     confirmed, from messages of routers, and from effects that it has let pass.
//   - It raises no alarm as long as the core keeps its guarantees. Where the core waits for more than the fence needs,
//     the guard does not ask for it.
//   - A Violation names IDs and what is known of them. It has no other text of a claim or a caller.
//   - It keeps what is alive: sandboxes until the core drops their records, sessions until their end is durable.
//
// # What it does not see
//
// Whether a session has expired, whether a death or a declaration is true, whether an address may be used again, and
// whether the journal has what it confirms. A report of a death that was kept counts although the router was heard
// after it, until the router joins again.
//
// # What breaks them
//
// Written for facts that are not durable. An effect that is carried out although Step has not returned it, or is not
// carried out although it has. A Recover with another State than the core has got.
package guard
