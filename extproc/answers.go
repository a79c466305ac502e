package extproc

import "sync"

// Answers are those that admitted a request and that Envoy may not have read yet.
//
// Envoy ends the stream of a request when it has read the answer, or when it does
// not want one any more. Until then it may still open a connection to the pod that
// the answer names, however long ago that was decided: it may have been stopped in
// between. So a router that is told of a release must not acknowledge it before the
// streams have ended on which it answered earlier. That is a matter of what Envoy
// has done: a stream that ended because this process ends proves nothing.
//
// Barriers are cumulative and take no more room than there are unread answers, however
// many releases come while Envoy stands still: of those that wait for the same answers
// only the last is kept.
//
// All methods may be called concurrently.
type Answers struct {
	mu     sync.Mutex
	unread int
	// first and last are the ends of the list of epochs, in the order of time. The last
	// one is the present. Each of the others has answers that are not read.
	first, last *Epoch
}

// Epoch is the time between two barriers.
type Epoch struct {
	earlier, later *Epoch
	open           int    // answers that began in it and are not read
	passed         func() // called when that and every earlier epoch has none
}

// NewAnswers returns Answers of which there are none.
func NewAnswers() *Answers {
	e := &Epoch{}
	return &Answers{first: e, last: e}
}

// Admit notes an answer that is about to be given, if what it says still holds, and
// returns the epoch to give to End. It is noted before that is asked, so that no
// release fits in between.
func (a *Answers) Admit(holds func() bool) (e *Epoch, ok bool) {
	e = a.begin()
	if !holds() {
		a.End(e)
		return nil, false
	}
	return e, true
}

func (a *Answers) begin() *Epoch {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unread++
	a.last.open++
	return a.last
}

// End notes that Envoy has read an answer, or does not want it any more: it has ended
// the stream.
func (a *Answers) End(e *Epoch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unread--
	if e.open--; e.open > 0 || e == a.last {
		return
	}
	// What waited for this epoch waits for those before it now, if there are any.
	e.later.earlier = e.earlier
	if e.earlier != nil {
		e.earlier.later, e.earlier.passed = e.later, e.passed
		return
	}
	a.first = e.later
	e.passed()
}

// Barrier calls passed once every answer that has begun before has been read: at
// once, or from the goroutine of the last one. A barrier that passes together with a
// later one is not called. The calls come in the order of the barriers. passed must
// not block, and must not call Answers.
func (a *Answers) Barrier(passed func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.last.open > 0:
		a.last.passed = passed
		a.last.later = &Epoch{earlier: a.last}
		a.last = a.last.later
	case a.last.earlier != nil: // nothing has begun since the last barrier, which has not passed
		a.last.earlier.passed = passed
	default:
		passed()
	}
}

// Unread is the number of answers that Envoy may not have read yet.
func (a *Answers) Unread() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unread
}
