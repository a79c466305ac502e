package freeze

import "time"

// timer is a timer that stands still while the sandbox is asleep.
type timer struct {
	*time.Timer
	at   time.Time     // when it fires, if nothing comes between
	left time.Duration // while the sandbox is asleep
}

// AfterFunc calls fn in a goroutine of its own when the sandbox was awake for d, unless stop is called before. Call
// stop also afterwards.
func (f *Freezer) AfterFunc(d time.Duration, fn func()) (stop func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := &timer{at: time.Now().Add(d), left: d}
	t.Timer = time.AfterFunc(d, fn)
	f.timers[t] = struct{}{}
	select {
	case <-f.awake:
	default:
		t.halt()
	}
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		t.Stop()
		delete(f.timers, t)
	}
}

// halt stops a timer that has not fired.
func (t *timer) halt() {
	if t.left = 0; t.Stop() {
		t.left = max(time.Until(t.at), 1)
	}
}

// close begins a sleep, unless one has begun.
func (f *Freezer) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.awake:
	default:
		return
	}
	f.awake = make(chan struct{})
	for t := range f.timers {
		t.halt()
	}
}

// open ends a sleep.
func (f *Freezer) open() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for t := range f.timers {
		if t.left > 0 {
			t.at = time.Now().Add(t.left)
			t.Reset(t.left)
		}
	}
	close(f.awake)
}
