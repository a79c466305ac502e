package admission

import "sync"

// Answers counts the admitting answers that Envoy may not have read yet.
//
// Envoy resets the ext_proc stream of a request when it has read the answer, or when it no
// longer wants one. Until then it may still open a connection to the pod that the answer
// names, however long ago the answer was sent, because Envoy may have been paused in
// between. So a router must not acknowledge a release before the streams of all earlier
// answers have ended. Only an end by Envoy counts: a stream that ends because this process
// shuts down proves nothing.
//
// Answers are counted per epoch, the time between two barriers. Memory is bounded by the
// number of unread answers, however many releases arrive while Envoy is paused: of the
// barriers that wait for the same answers only the newest is kept.
//
// All methods may be called concurrently.
type Answers struct {
	mu     sync.Mutex
	unread int
	// first and last are the ends of the list of epochs, oldest first. The last one is the
	// current epoch. Every other epoch has unread answers.
	first, last *Epoch
}

// Epoch is the time between two barriers.
type Epoch struct {
	earlier, later *Epoch
	unread         int    // answers admitted in this epoch and not read
	drained        func() // called when this and every earlier epoch has no unread answers
}

// NewAnswers returns Answers of which none is unread.
func NewAnswers() *Answers {
	e := &Epoch{}
	return &Answers{first: e, last: e}
}

// Begin counts an answer that may be sent, and returns the epoch to pass to Done.
func (a *Answers) Begin() *Epoch {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unread++
	a.last.unread++
	return a.last
}

// Done records that Envoy has read the answer or no longer wants one, or that no answer is sent. It may call the
// function of a Barrier.
func (a *Answers) Done(e *Epoch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unread--
	if e.unread--; e.unread > 0 || e == a.last {
		return
	}
	// Remove the epoch. Its barrier now waits for the epochs before it, if there are any.
	e.later.earlier = e.earlier
	if e.earlier != nil {
		e.earlier.later, e.earlier.drained = e.later, e.drained
		return
	}
	a.first = e.later
	e.drained()
}

// Barrier calls drained once Envoy has read every answer that was admitted before: either at
// once, or from the last call of Done. Calls come in the order of the barriers. If several
// barriers are drained at the same time, only the function of the newest is called. drained
// must not block and must not call Answers.
func (a *Answers) Barrier(drained func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.last.unread > 0:
		a.last.drained = drained
		a.last.later = &Epoch{earlier: a.last}
		a.last = a.last.later
	case a.last.earlier != nil: // no answer since the last barrier, which still waits
		a.last.earlier.drained = drained
	default:
		drained()
	}
}

// Unread is the number of answers that Envoy may not have read yet.
func (a *Answers) Unread() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unread
}
