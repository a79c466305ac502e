package allocator

import (
	"context"
	"slices"
	"sync"

	"github.com/berth-sandbox/berth/allocator/core"
)

// maxHooksPerPool is the number of concurrent postStart hooks of one pool. A hook runs untrusted
// code and may use its whole timeout, so the hooks of one pool must not delay those of another.
const maxHooksPerPool = 256

// hooks calls the postStart hooks of sandboxes, those of each pool in order. Its methods may be
// called concurrently.
type hooks struct {
	call func(context.Context, core.Sandbox)

	mu     sync.Mutex
	ctx    context.Context // of run; nil before it and after its end
	lines  map[core.PoolKey]*hookLine
	cancel map[string]context.CancelFunc // of the hooks under way, by sandbox ID
	all    sync.WaitGroup
}

type hookLine struct {
	running int
	waiting []core.Sandbox
}

func newHooks(call func(context.Context, core.Sandbox)) *hooks {
	return &hooks{call: call, lines: map[core.PoolKey]*hookLine{}, cancel: map[string]context.CancelFunc{}}
}

// add queues the hook of a sandbox. It never blocks.
func (h *hooks) add(s core.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	line := h.lines[s.Pool]
	if line == nil {
		line = &hookLine{}
		h.lines[s.Pool] = line
	}
	line.waiting = append(line.waiting, s)
	h.advance(s.Pool)
}

// drop cancels the hook of a released sandbox, or removes it from the queue.
func (h *hooks) drop(s core.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if cancel := h.cancel[s.ID]; cancel != nil {
		cancel()
	} else if line := h.lines[s.Pool]; line != nil {
		line.waiting = slices.DeleteFunc(line.waiting, func(w core.Sandbox) bool { return w.ID == s.ID })
	}
}

// waiting returns the number of hooks that are queued.
func (h *hooks) waiting() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, line := range h.lines {
		n += len(line.waiting)
	}
	return n
}

// run calls hooks until ctx ends, and waits for the running ones, whose contexts end with ctx.
func (h *hooks) run(ctx context.Context) {
	h.mu.Lock()
	h.ctx = ctx
	for pool := range h.lines {
		h.advance(pool)
	}
	h.mu.Unlock()
	<-ctx.Done()
	h.mu.Lock()
	h.ctx = nil // starts no further hook
	h.mu.Unlock()
	h.all.Wait()
}

// advance starts as many queued hooks of a pool as allowed.
func (h *hooks) advance(pool core.PoolKey) {
	line := h.lines[pool]
	for len(line.waiting) > 0 && line.running < maxHooksPerPool && h.ctx != nil {
		s := line.waiting[0]
		line.waiting = line.waiting[1:]
		line.running++
		ctx, cancel := context.WithCancel(h.ctx)
		h.cancel[s.ID] = cancel
		h.all.Go(func() {
			h.call(ctx, s)
			cancel()
			h.mu.Lock()
			defer h.mu.Unlock()
			delete(h.cancel, s.ID)
			line.running--
			h.advance(pool)
		})
	}
	if line.running == 0 && len(line.waiting) == 0 {
		delete(h.lines, pool)
	}
}
