// Package lastactive knows when each sandbox was last in use through this router's Envoy,
// and whether it may be in use now.
//
// A look is one read of what Envoy holds open, by address (package look). The package has
// no other source about requests that continue. It does not record the end of a request:
// the next look no longer shows the request.
//
// # When a sandbox was last in use
//
//   - Now, while Envoy may not have read an answer that admits a request to it.
//   - Now, while the newest good look shows a request open at its address, either in
//     progress or waiting for a connection.
//   - Now, until a good look has begun after the newest answer was read.
//   - Otherwise at the end of the first good look that found none of these. Later looks do
//     not change that time, except for the first one that begins a connect window after the
//     newest answer was read: Envoy may have opened the connection after the look before, and
//     the request may have ended since.
//
// If only bytes count (minBytes of Expect), an open request alone is not use. A look then
// finds a sandbox in use if enough bytes have moved over one of its connections, by the
// kernel's count (package sockets), to fill a leaky bucket. The bucket holds minBytes and
// loses minBytes per minute. A connection that moves minBytes in every minute fills it at
// least once a minute. A connection that only carries pings never fills it.
//
// A failed look proves nothing. A sandbox that was in use stays in use, and LookError says
// why the tracker cannot tell what is open, until the next look succeeds.
//
// # Guarantees
//
//   - A sandbox that was in use at some time is never reported as idle at that time.
//   - A caller that first sets a flag that stops admissions, and then calls Ask, learns of
//     every request that was admitted before the flag took effect. A request calls Begin
//     first and checks the flag afterwards. The looks of Ask begin after the flag was set.
//     They see the answer unread, or see that it was read before they began.
//   - An unread answer, or an open address, counts as use of its own sandbox only.
//   - Requests that another router of the same gateway has admitted count, because each
//     sandbox with a route has an entry (Expect). Requests at other addresses do not count.
//   - Only Expect creates an entry. Releases (Forget) and snapshots (Retain) drop entries. So
//     memory grows with the sandboxes that have routes.
//   - Begin and Read take no lock and do not allocate if Envoy lists the port.
//   - One sandbox cannot make looks slow. Envoy lists at most 64 ports of it, and at most about
//     1,000 new entries between two looks, which a look reads in 10 ms.
//   - Many sandboxes together cannot either. Envoy lists about 40,000 entries, and at most 4 more
//     for each sandbox above 5,000. Above half of that each sandbox has a fair share of ports.
//
// # Limits of one sandbox
//
// Begin refuses a request above Options.Rate or Options.MaxOpen, before it counts as use.
//
//   - A request that goes on costs one token. Cancel gives it back, so a request that is tried several times costs one.
//   - The bucket is a part of the entry. It is full again at most when the entry is made anew.
//   - What is open is what the newest good look shows, so the bound is not exact. Until the next look as many more are
//     admitted as Options.Rate allows, and what has ended still counts. While looks fail, the bound has no effect.
//   - Both count the requests through this router's Envoy only.
//
// # What breaks them
//
//   - A caller that checks the flag before it calls Begin, or that serves a route before Expect or after Forget. In the
//     router only package extproc/admission calls these.
//   - A Begin without a Read or Cancel. Its sandbox stays in use.
//   - An idle timeout shorter than Options.ConnectWindow. A look may not yet show a request
//     that Envoy is about to open.
//   - An ID that loses its route in a snapshot and gets it back while a Begin of the first
//     route is still running.
//
// # How
//
// Run looks in a loop. The pause after a look is one second, or 100 times the duration of
// the newest good look if that is longer, but at most 15 s. Ask takes two looks of its own,
// more than 100 ms apart. The caller bounds how often Ask is called.
//
// The tracker stores the begin of a look before it asks Envoy. Entry.Read stores the begin
// of the newest look in the entry. So the stored time is less than the begin of a look if
// and only if the newest answer was read before that look began. A look evaluates all
// entries.
package lastactive
