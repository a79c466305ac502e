// Package lastactive knows, for each sandbox ID, when it was last in use through this
// router, and answers whether it may be in use now.
//
// # What activity is
//
// The router sees every request when it admits it, and learns from Envoy's access log
// which requests are open for longer: an entry for each of them, every flush interval,
// and one at the end. So an entry of this package has
//
//   - unread answers: requests between Begin and Read or Cancel. Envoy may have been
//     stopped in between, for however long; such a request is open.
//   - the newest touch. For a while after it, Options.Window, the request may be open
//     without the log having said so: it counts as open. If nothing was said by then it
//     was short, and its activity ended a second after the touch.
//   - the streams that the log has shown to be open. Each counts as open until its end
//     was logged, or until it is proven that its end was lost.
//
// From that Age and Quiet of an Activity follow. Quiet ignores that a stream is open
// and asks when bytes have moved through it.
//
// # Guarantees
//
//   - What was in use is never said to have been idle: the answers err on the side of
//     activity, or there is doubt. Doubt lasts for three flush intervals after
//     everything through which an entry of the log, or a touch, can have gone missing
//     or come late: the start, a log stream that ended or stood still, a process that
//     was paused (its ticks came late).
//   - What may have ended while entries were lost counts as in use until that was over:
//     the end of a request is told once. Of what was admitted less than a window before,
//     and of what the log had shown to be open and does not name any more, that is so; of
//     everything, if it was not known then what is open.
//   - Silence is never idleness. A log that says nothing keeps its streams open, and
//     counters that do not move close nothing.
//   - Whoever sets a flag that stops admissions and calls Ask then has seen every
//     request that is admitted in spite of it: a request begins here first (Begin),
//     and the flag is looked at afterwards. Either Ask comes later than Begin and sees
//     the use, or it came earlier, and then so did the flag. Ask is also the reason
//     why Read touches before it counts down, and why a look at an entry loads the
//     count before the touch.
//   - A released ID leaves at once. Forget takes the entry and its streams; a Read that
//     comes late touches an entry that nobody looks at, and a late log entry is
//     refused by Options.Gone.
//   - A touch takes no lock and allocates nothing.
//   - Bounded memory. Of an ID that was dropped for want of room it is said that it was
//     active as recently as any that was ever dropped.
//
// What breaks them: Tick called less than twice a second makes doubt without end;
// Options.Flush below what Envoy has been told, unless the log says so (OpenLog);
// Begin after the look at the flag; a Begin that neither Read nor Cancel follows keeps
// its sandbox for ever.
//
// # How
//
// The clock is passed in: one that counts suspended time. Touches store a coarse copy
// of it that Tick refreshes, so a touch that stored v can have happened until the next
// tick after v, and that is the moment that counts; ticks that came late are remembered
// for it. There is no I/O in here and no goroutine but Run's. All methods may be called
// concurrently.
package lastactive
