// Package lastactive knows when each sandbox was last in use through this router's Envoy,
// and whether it may be in use now.
//
// A look is one read of what Envoy holds open, by address (package look). Nothing else is
// asked about requests that go on. The end of a request is not recorded: a look does not
// show it any more.
//
// # When a sandbox was last in use
//
//   - now, while Envoy may not have read an answer that admits a request to it;
//   - now, while the newest good look shows a request open at its address, in progress or
//     waiting for a connection;
//   - now, until a good look has begun after the newest answer was read;
//   - else when the first good look ended that found none of these. Later looks do not
//     change it.
//
// If only bytes count (minBytes of Begin), an open request is no use. Then a look finds a
// sandbox in use if bytes have moved over one of its connections, by the kernel's count
// (package sockets), that fill a bucket: it holds minBytes and loses minBytes a minute. A
// connection over which as much moves in every minute fills it at least once a minute, and
// one that is only pinged never.
//
// A look that fails proves nothing: what was in use remains so, and it cannot be told what
// is open (Blind) until the next one that succeeds.
//
// # Guarantees
//
//   - What was in use is never said to have been idle then.
//   - A caller that sets a flag that stops admissions, and calls Ask then, learns of every
//     request that is admitted in spite of it. A request begins here first (Begin), and the
//     flag is looked at afterwards. The looks of Ask begin after the flag was set: they see
//     the answer unread, or that it was read before them.
//   - An unread answer, or an address that is open, is use of its own sandbox only.
//   - An open address that no request of this router has gone to is reported as an address:
//     another router beside the same Envoy has sent it there.
//   - Begin and Read take no lock and do not allocate if the sandbox and its port are known.
//   - Memory grows with the sandboxes that have routes: releases (Forget) and snapshots
//     (Retain) drop the others.
//   - One sandbox cannot make looks long. Envoy lists about 512 entries of it, and twice as
//     many between two looks, for at most 64 ports.
//
// What breaks them: Begin after the look at the flag; a Begin that neither Read nor Cancel
// follows, which keeps its sandbox in use; an idle timeout shorter than Options.Window,
// because a look may not show yet what Envoy has begun a moment ago; an ID that loses its
// route in a snapshot and has it again before a Begin that goes on meanwhile has ended.
//
// # How
//
// Run looks: a second after its look before, or 100 times as long as that took, at most
// 15 s. A question has two looks of its own, more than 100 ms apart; how often it is asked
// is the caller's choice. The begin of a look is noted before Envoy is asked, and a touch
// stores the begin of the newest look; so what an entry has stored is less than the begin
// of a look exactly if its newest answer was read before that look. A look judges all
// entries.
package lastactive
