// Package core decides what the allocator does. It does no I/O, starts no goroutine and owns no
// clock. [Core.Step] takes one event and the time, and returns effects: what the caller has to
// do. One goroutine calls everything in this package.
//
// # Rooms
//
// Each room is a package that owns one kind of state. It has its own package comment, a Check for tests, and
// imports only rooms that stand before it in this list. Core uses all of them:
//
//	core/fact       what the journal keeps, and the facts that are on their way into it
//	core/step       what goes into a step and comes out of it: observations, effects, the time
//
//	core/deadline   the next deadline of each sandbox               pure ledgers, which know nothing of
//	core/taint      the addresses that stale routes may reach       pods and sandboxes but their keys
//	core/warm       the order of warm pods, the plan of a pool
//	core/demand     how many warm pods the claims of late need
//	core/lines      the claims that wait, and idempotency keys
//	core/teams      whether the limits of a team allow a claim
//	core/fence      what the release of a sandbox waits for
//	core/member     the sessions of routers
//	core/idle       when a sandbox is released for not being used
//
//	core/pods       the pods and their lives, nodes and addresses
//	core/sandboxes  the life of every sandbox, and its object
//	core/pools      how many pods each pool makes and deletes
//	core/claims     claims and batches, and the answers to callers
//
// A room calls the rooms before it. What it cannot decide, because it concerns a later room, it lists as a notice. Core
// passes the notices on before the step ends: see heed. Only core/pods and core/sandboxes list notices:
//
//	pods.Disturbed        a pod in use has changed        to the claim or the sandbox that has it
//	pods.Failed, Warmed   an idle pod has ended, is warm  to its pool
//	pods.Unblocked        idle pods are retired           to the sandbox that may end now
//	sandboxes.Started     it runs                         to the routers, and to the callers of its claim
//	sandboxes.Routed      its route has changed           to the routers
//	sandboxes.Closed      it is about to sleep            to the routers: a closing begins
//	sandboxes.Tired       it is to sleep at its end       to the same, if it can be closed now
//	sandboxes.Turned      it is asleep, or wakes          to its pod: the CPU request
//	sandboxes.Ruled       its rules have changed          to the egress routers: a ruling begins
//	sandboxes.Rising      it is stopped, and needs a pod  to the claims
//	sandboxes.Doomed      it ends, and a claim has it     to the claims
//	sandboxes.Released    its release is durable          to the claims, and to the routers: its fence begins
//
// Core keeps the step, recovery, the fence of a release, and the routers, which keep the ledgers of sessions in step and
// send the messages. The files of Core:
//
//	core.go         Config, Core, Step, Tick, what the rooms list
//	aliases.go      the names of the rooms' types
//	events.go       what a step takes; its effects are in core/step
//	recovery.go     what a new leader learns from the journal, the objects and the pods
//	idle.go         the release of idle sandboxes, tied to streams and objects
//	sleep.go        the closing of a sandbox that is about to sleep, tied to streams; requests that wake it
//	fence.go        the fence of a release, tied to pods and streams
//	rulings.go      calls that change what a sandbox may reach, until egress routers have the rules
//	sessions.go     routers: their sessions, and the messages that they are sent
//	declared.go     routers that an operator has declared dead
//	earlier.go      routers that may serve routes of an earlier journal
//	view.go         queries, in a stable order
//	routestatus.go  whether requests reach a sandbox, and why
//	status.go       what operators see of fences, sessions and activity
//
// # Facts
//
// Core journals a promise before it makes it. A fact is a change that others rely on: a claim,
// the start of a sandbox, its release, the session of a router and its end, the intent to delete
// an idle pod. Facts wait in one queue. When the writer is free, all of them go to it together
// ([Write]). [Written] makes them true in their order. Only then are callers answered and
// routers informed. A claim can be called off until its facts are handed to the writer; its pod
// then returns to its place in the queue. After that Core awaits the outcome.
//
// A change that the next leader can observe by itself, such as the end of a pod, is no fact and
// is not journaled.
//
// # The end of a step
//
// An event changes tables. A fence, a closing or a ruling is marked when it may wait for less than before, and a pool
// when something changes on which its plan depends: its object, its pods, its claims, or the time. At the end of the
// step (endStep) what is marked goes on. Every marked pool gives warm pods to the claims that wait, and creates or
// deletes pods. The releases of a step are sent last, in one message to each router, and then the closes. No effect is
// changed after it was emitted.
//
// # Guarantees
//
//   - A sandbox whose pod has an agent is granted, and its route is sent, only when its agent is
//     configured for it, under every leader.
//   - A leader releases no sandbox because of the change of leaders, unless its agent is not
//     configured, or a claim that was granted to none of its callers would get too few: see package claims.
//   - Core deletes or recycles a released pod only after its fence. Every session that could know the route
//     has acknowledged the release, left, was proven or declared dead, or has expired; then
//     Config.ConnectWindow has passed. Sessions are durable before they receive a route, so a new
//     leader waits for those of earlier terms as well.
//   - The declaration of an operator that a router has ended counts when it is durable. It is
//     refused while the router is connected, or may only have lost its connection. The router
//     cannot join again under that name before its routes must have gone stale.
//   - No pod is handed out at an address to which a router may still send the requests of an
//     earlier sandbox, nor at one where two pods seem to be: see package pods.
//   - While routers of an earlier journal may serve routes that are on no record, no pod is
//     handed out. Pods that had an address by then are not handed out later: see earlier.go.
//   - A sandbox is released for being idle only if every session that could know its route was
//     asked, answered in time that nothing was in use within the idle timeout, and has admitted
//     nothing since: see package idle. A session that cannot be asked, or does not answer, counts as
//     use until it has expired.
//   - Core decides nothing about a pool before Recover has seen all of its pods, and repeats
//     nothing that failed without time or news in between.
//   - The ports of a live sandbox are those of its pool now. When they change, every connected
//     session receives the route again.
//   - An observation never takes a fact back: watches lag behind writes.
//   - SandboxReady and SandboxReleased come at most once for a sandbox, across leaders.
//   - The rooms keep what their package comments say.
//
// # What breaks them
//
// Events in another order than that in which the caller learned of them. Written for facts that
// are not durable. A Recover from a journal that another leader can still write to. An
// observation that is older than an answer already given; the caller drops those by resource
// version.
package core
