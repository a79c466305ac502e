// Package controlserver is the allocator's side of the control stream. It turns the messages
// of routers into events for the core, and the core's effects into messages.
//
// # States
//
// A server follows until Lead, and leads after that until its process ends. While it follows
// it answers each stream with NotLeader and the leader's address. A stream begins with Join,
// and ends with a Goodbye, an error, or because the server cuts it off.
//
// # Guarantees
//
//   - Each stream has one bounded queue that keeps the core's order for its router.
//   - A router that is too slow for its queue is cut off, and gets a snapshot when it joins
//     again. It never blocks another router.
//   - A pong, a snapshot or the answer to a question is sent only while the lease is certainly held.
//   - Each ingress router gets all API keys after its snapshot and before its first pong, and again all of them
//     after each change. So a router that serves routes has the keys that were valid at its join, or
//     newer ones.
//   - An egress router gets what sandboxes may reach, and the hash of their token for the gateway. It gets no key, and
//     nothing else that opens a sandbox.
//   - What egress routers say of the use of a sandbox is asked for on demand. Nothing of it is kept, and it is no event.
//   - Each joined stream submits exactly one core.SessionJoined and one core.SessionLeft.
//   - A report of deaths is submitted as a whole or not at all.
//
// # What breaks them
//
// A Leader whose Valid returns true after its lease has expired: routers would then serve
// routes that another leader has released.
package controlserver
