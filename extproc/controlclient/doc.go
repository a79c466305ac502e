// Package controlclient is the router's side of the control stream. It keeps the router's
// session with the allocator's leader, over one stream after another, and applies what
// arrives to what the router knows of its sandboxes (package admission).
//
// # Guarantees
//
// Order:
//
//   - One goroutine applies messages, from one stream at a time, in the order in which they
//     arrive. A new stream begins only after the last message of the old one was applied.
//   - A message of a lower term than this router has seen ends its stream.
//   - Terms are compared within one journal only. A leader of another journal starts with a
//     snapshot that replaces everything. The router never returns to a journal that it has
//     left, so a deposed leader of that journal cannot restore it.
//
// Acknowledgement:
//
//   - A message is acknowledged after it took effect in the cache and after Envoy has read
//     every answer that was sent before. A missing or invalid message ends the stream before
//     any later message is acknowledged.
//
// Freshness:
//
//   - The cache is fresh until the send time of the last answered ping plus max-stale, on a
//     clock that counts suspended time.
//   - A router that an operator has declared dead serves nothing after it has learned so, and
//     its process must end. Only controlv1.IsDeclaredDead recognises that error. After any
//     other end of a stream the router tries another one.
//
// API keys:
//
//   - The keys are those of the newest complete message. They outlast the stream, as the routes do.
//   - A leader sends its keys before its first pong. If it does not, as one of an earlier version, no key is known.
//
// Activity:
//
//   - The router sends a report after every look, and a full report after a snapshot. A
//     report names the newest pong that was received before its look began, which gives the
//     leader a lower bound for the begin of the look.
//   - A Quiesce is answered after it took effect in the cache, with looks that began after
//     that, within 1.6 s. If the looks fail, the answer says so. The router does not answer a
//     Quiesce that the cache has no room for, that a newer one follows, or whose answer does
//     not fit into the queue; its sandboxes stay quiesced. Looks do not delay the reader.
//   - At most 1,000 probes run at one time. The router does not answer probes above that.
//
// End:
//
//   - Goodbye is sent only after Envoy has read every answer, and after a report of a look
//     that began later than that. If no look succeeds within 1 s, Goodbye says so. Goodbye is
//     complete when the leader ends the stream without an error, which it does after it has
//     committed Goodbye to its journal. Otherwise the router looks for another leader.
//
// Resources:
//
//   - Queues are bounded. A stream is dropped if it cannot be opened or written to, or if
//     pings on it are not answered.
//
// Egress:
//
//   - With Options.Egress the session is that of an egress router. It gets what sandboxes may reach. A message is
//     acknowledged when Egress.Barrier is drained, which delays no later message. The router reports nothing, and
//     answers no Quiesce and no Probe.
//
// # What breaks them
//
// A caller that still admits requests after it has ended the first context of Run, or a
// clock that stands still while the machine is suspended.
package controlclient
