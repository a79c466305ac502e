package allocator

import (
	"context"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// headStartPerCall is how long background work waits after a call, maxHeadStart how long it
	// waits at most after the first call of a burst, and headStartInterval the minimum time between
	// two bursts. Constant calls therefore delay background work for at most a quarter of the time.
	headStartPerCall  = 100 * time.Millisecond
	maxHeadStart      = 250 * time.Millisecond
	headStartInterval = time.Second
)

// headStart delays background work while calls are in progress: creating and deleting pods, writing
// Sandbox objects and labels. A burst of calls causes a burst of such work, which would compete
// with the calls for the API server and the CPU. Its methods may be called concurrently.
type headStart struct {
	mu    sync.Mutex
	began time.Duration // boot clock; 0: never
	until time.Duration
}

// call records a claim, a release or a moved end.
func (h *headStart) call() {
	now := bootclock.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.began == 0 || now-h.began >= headStartInterval {
		h.began = now
	}
	h.until = max(h.until, min(now+headStartPerCall, h.began+maxHeadStart))
}

// wait returns when background work may run, or when ctx has ended.
func (h *headStart) wait(ctx context.Context) {
	for {
		h.mu.Lock()
		left := h.until - bootclock.Now()
		h.mu.Unlock()
		if left <= 0 || !wait.Sleep(ctx, left) {
			return
		}
	}
}
