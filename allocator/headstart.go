package allocator

import (
	"context"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// headStartEach is how long what nobody waits for is kept back after a call,
	// headStartMost after the first one of a burst, and headStartAgain how soon
	// that may happen again: calls that come all the time keep nothing back for
	// more than a quarter of it.
	headStartEach  = 100 * time.Millisecond
	headStartMost  = 250 * time.Millisecond
	headStartAgain = time.Second
)

// headStart lets claims and releases go before what nobody waits for: pods that are
// made anew or deleted, Sandbox objects, labels. A burst of calls makes a burst of
// those, which would compete with the calls' own answers, and with what routers are told
// and say, for the API server and for this machine. Its methods may be called
// concurrently.
type headStart struct {
	mu    sync.Mutex
	began time.Duration // boot clock; 0: never
	until time.Duration
}

// call notes that a claim, a release or a new end has come.
func (h *headStart) call() {
	now := bootclock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.began == 0 || now-h.began >= headStartAgain {
		h.began = now
	}
	h.until = max(h.until, min(now+headStartEach, h.began+headStartMost))
}

// wait returns when calls have had their head start, or ctx has ended.
func (h *headStart) wait(ctx context.Context) {
	for {
		h.mu.Lock()
		left := h.until - bootclock.Now()
		h.mu.Unlock()
		if left <= 0 || !sleep(ctx, left) {
			return
		}
	}
}

// sleep is false when ctx has ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
