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
// All methods may be called concurrently.
type Answers struct {
	mu sync.Mutex
	// epochs follow each other in time; the last one is the present.
	epochs []*Epoch
}

// Epoch is the time between two barriers.
type Epoch struct {
	open   int      // answers that began in it and are not read
	passed []func() // called when that and every earlier epoch has none
}

// NewAnswers returns Answers of which there are none.
func NewAnswers() *Answers { return &Answers{epochs: []*Epoch{{}}} }

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
	e := a.epochs[len(a.epochs)-1]
	e.open++
	return e
}

// End notes that Envoy has read an answer, or does not want it any more: it has ended
// the stream.
func (a *Answers) End(e *Epoch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e.open--
	a.advance()
}

// Barrier calls passed once every answer that has begun before has been read: at
// once, or from the goroutine of the last one. The calls come in the order of the
// barriers. passed must not block, and must not call Answers.
func (a *Answers) Barrier(passed func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch last := len(a.epochs) - 1; {
	case a.epochs[last].open > 0:
		a.epochs[last].passed = append(a.epochs[last].passed, passed)
		a.epochs = append(a.epochs, &Epoch{})
	case last > 0: // nothing has begun since the last barrier, which has not passed
		a.epochs[last-1].passed = append(a.epochs[last-1].passed, passed)
	default:
		passed()
	}
}

// Unread is the number of answers that Envoy may not have read yet.
func (a *Answers) Unread() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.epochs {
		n += e.open
	}
	return n
}

// advance lets the barriers pass that may, and drops the epochs before them.
func (a *Answers) advance() {
	for len(a.epochs) > 1 && a.epochs[0].open == 0 {
		for _, passed := range a.epochs[0].passed {
			passed()
		}
		a.epochs = a.epochs[1:]
	}
}
