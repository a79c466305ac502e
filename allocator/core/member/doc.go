// Package member keeps the sessions of routers: which routers may serve routes, and how far each
// of them has come. It is a pure ledger: it does no I/O, starts no goroutine, and receives the
// time as an argument. One goroutine uses it.
//
// # States
//
// A session is the membership of one router process, under an ID that the router has chosen.
//
//	         Join             Recorded            End
//	unknown ------> joined -------------> durable ------> unknown, or banned until Lift
//
//	joined     its fact is on its way into the journal; the router receives nothing
//	durable    it is in the journal; the router may have routes
//	banned     an operator has declared the router dead; the ID is refused
//
// A session is connected or not, in every state: Join connects it, and Disconnect or a newer Join
// ends that. While it is not connected an operator can declare it dead. The session counts until
// that declaration is durable. A router that returns before its declaration was handed to the
// writer has it withdrawn.
//
// One session can stand for all routers of an earlier journal ([Session.Earlier]). No router
// speaks for it.
//
// # What ends a session
//
//   - Its router says Goodbye.
//   - Another router of the same gateway proves that its process has ended, and it is not connected. A
//     proof that comes while it is connected is kept until it is not, or until it is heard again.
//   - The declaration of an operator is durable.
//   - It expires: the expiry of its max-stale has passed since its last ping, so its routes are
//     stale, and that is durable.
//
// # Guarantees
//
//   - A session that has not ended is listed, whether its router is connected or not.
//   - A stream belongs to one session, and a session has one stream at most.
//   - A ping is answered only when the session is durable and every death that its router has
//     reported is durable or kept. The router forgets its proof of a death when it gets the pong, unless
//     Reports says that a report of it is kept.
//   - The last ping of a session never goes back, nor does the max-stale that its router has said.
//   - No router joins while the journal does not have its max-stale, or a longer one, and its gateway.
//   - No router joins under an ID that is banned, or under that of a session of another gateway.
//   - Sessions are listed by ID, so the same events have the same effects.
//
// # What breaks them
//
// A session that expires although its router has a pong that is newer than Session.LastPing. A
// stream number that is used twice. A handle of a session that has ended, in other calls
// than Recorded, Learned and DeathRecorded. Time that goes back.
package member
