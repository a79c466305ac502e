package lastactive

import (
	"sync/atomic"
	"time"
)

// Entry is one ID. Its methods end what Begin has begun, once each.
type Entry struct {
	t  *Tracker
	id string

	unread  atomic.Int64
	touched atomic.Int64 // newest touch; never: none
	due     atomic.Int64 // a touch from then on is to be reported
	every   atomic.Int64 // how much later than the last report that is
	queued  atomic.Bool
	next    *Entry // in the queue of what is to be reported
	// left: it is not, or is about not to be, in Tracker.entries.
	left atomic.Bool

	// Under Tracker.mu:
	place         int // in Tracker.all
	reported      time.Duration
	logged, moved time.Duration
	open          int
	streams       *logStream // the first one
}

// begin is false if the entry has left meanwhile.
func (e *Entry) begin() bool {
	e.unread.Add(1)
	// Who makes an entry leave for want of room says so first and looks at unread then.
	if e.left.Load() {
		e.unread.Add(-1)
		return false
	}
	e.touch()
	return true
}

// Read says that Envoy has read the answer that admitted the request, or has given the
// request up: it has ended the stream.
func (e *Entry) Read() {
	e.touch() // first: see Tracker.use
	e.unread.Add(-1)
}

// Cancel says that the request has not been admitted.
func (e *Entry) Cancel() { e.unread.Add(-1) }

func (e *Entry) touch() {
	now := e.t.clock.coarse.Load()
	for {
		before := e.touched.Load()
		// Somebody who was stopped between the load and here must not take back what
		// others have stored meanwhile.
		if before >= now || e.touched.CompareAndSwap(before, now) {
			break
		}
	}
	if now >= e.due.Load() {
		e.enqueue()
	}
}

// enqueue has the entry reported.
func (e *Entry) enqueue() {
	if e.queued.Load() || !e.queued.CompareAndSwap(false, true) {
		return
	}
	for {
		e.next = e.t.queue.Load()
		if e.t.queue.CompareAndSwap(e.next, e) {
			return
		}
	}
}

// drain returns the entries that are to be reported, linked by next. Before one may be
// queued again its next must have been read.
func (t *Tracker) drain() *Entry { return t.queue.Swap(nil) }

// reportEvery is how much later than it was reported an activity is worth another
// report.
func (t *Tracker) reportEvery(idleTimeout time.Duration, known bool) time.Duration {
	switch {
	case !known:
		return t.window / 4
	case idleTimeout <= 0:
		return time.Minute
	}
	return idleTimeout / 4
}
