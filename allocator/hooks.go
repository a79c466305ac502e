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

// hooks makes one kind of call to the pods of sandboxes, those of each pool in order: postStart hooks, or
// the configuration of agents. J says what a call is about. Its methods may be called concurrently.
type hooks[J any] struct {
	call func(context.Context, J)
	of   func(J) core.Sandbox

	mu     sync.Mutex
	ctx    context.Context // of run; nil before it and after its end
	lines  map[core.PoolKey]*hookLine[J]
	cancel map[string]context.CancelFunc // of the hooks under way, by sandbox ID
	all    sync.WaitGroup
}

type hookLine[J any] struct {
	running int
	waiting []J
}

// newHooks returns hooks. of returns the sandbox that a call is about.
func newHooks[J any](call func(context.Context, J), of func(J) core.Sandbox) *hooks[J] {
	return &hooks[J]{call: call, of: of, lines: map[core.PoolKey]*hookLine[J]{}, cancel: map[string]context.CancelFunc{}}
}

// add queues the hook of a sandbox. It never blocks.
func (h *hooks[J]) add(j J) {
	pool := h.of(j).Pool
	h.mu.Lock()
	defer h.mu.Unlock()
	line := h.lines[pool]
	if line == nil {
		line = &hookLine[J]{}
		h.lines[pool] = line
	}
	line.waiting = append(line.waiting, j)
	h.advance(pool)
}

// drop cancels the hook of a released sandbox, or removes it from the queue.
func (h *hooks[J]) drop(s core.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if cancel := h.cancel[s.ID]; cancel != nil {
		cancel()
	} else if line := h.lines[s.Pool]; line != nil {
		line.waiting = slices.DeleteFunc(line.waiting, func(j J) bool { return h.of(j).ID == s.ID })
	}
}

// waiting returns the number of hooks that are queued.
func (h *hooks[J]) waiting() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, line := range h.lines {
		n += len(line.waiting)
	}
	return n
}

// run calls hooks until ctx ends, and waits for the running ones, whose contexts end with ctx.
func (h *hooks[J]) run(ctx context.Context) {
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
func (h *hooks[J]) advance(pool core.PoolKey) {
	line := h.lines[pool]
	for len(line.waiting) > 0 && line.running < maxHooksPerPool && h.ctx != nil {
		j := line.waiting[0]
		id := h.of(j).ID
		line.waiting[0] = *new(J) // it may have the values of a claim
		line.waiting = line.waiting[1:]
		line.running++
		ctx, cancel := context.WithCancel(h.ctx)
		h.cancel[id] = cancel
		h.all.Go(func() {
			h.call(ctx, j)
			cancel()
			h.mu.Lock()
			defer h.mu.Unlock()
			delete(h.cancel, id)
			line.running--
			h.advance(pool)
		})
	}
	if line.running == 0 && len(line.waiting) == 0 {
		delete(h.lines, pool)
	}
}
