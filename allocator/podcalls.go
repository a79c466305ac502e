package allocator

import (
	"context"
	"slices"
	"sync"

	"github.com/berth-sandbox/berth/allocator/core"
)

// maxCallsPerPool is the number of concurrent calls to the pods of one pool. A call runs untrusted
// code and may use its whole timeout, so the calls of one pool must not delay those of another.
const maxCallsPerPool = 256

// podCalls makes one kind of call to the pods of sandboxes, those of each pool in order: postStart hooks, or
// the configuration of agents. J says what a call is about. Its methods may be called concurrently.
type podCalls[J any] struct {
	call func(context.Context, J)
	of   func(J) core.Sandbox

	mu     sync.Mutex
	ctx    context.Context // of run; nil before it and after its end
	lines  map[core.PoolKey]*callLine[J]
	cancel map[string]*underWay // of the newest call under way, by sandbox ID
	all    sync.WaitGroup
}

// underWay is a call that runs.
type underWay struct{ cancel context.CancelFunc }

type callLine[J any] struct {
	running int
	waiting []J
}

// newPodCalls returns podCalls. of returns the sandbox that a call is about.
func newPodCalls[J any](call func(context.Context, J), of func(J) core.Sandbox) *podCalls[J] {
	return &podCalls[J]{call: call, of: of, lines: map[core.PoolKey]*callLine[J]{}, cancel: map[string]*underWay{}}
}

// add queues the call for a sandbox. It never blocks.
func (c *podCalls[J]) add(j J) {
	pool := c.of(j).Pool
	c.mu.Lock()
	defer c.mu.Unlock()
	line := c.lines[pool]
	if line == nil {
		line = &callLine[J]{}
		c.lines[pool] = line
	}
	line.waiting = append(line.waiting, j)
	c.advance(pool)
}

// drop cancels the newest call for a sandbox, or removes it from the queue.
func (c *podCalls[J]) drop(s core.Sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if call := c.cancel[s.ID]; call != nil {
		call.cancel()
	} else if line := c.lines[s.Pool]; line != nil {
		line.waiting = slices.DeleteFunc(line.waiting, func(j J) bool { return c.of(j).ID == s.ID })
	}
}

// waiting returns the number of calls that are queued.
func (c *podCalls[J]) waiting() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, line := range c.lines {
		n += len(line.waiting)
	}
	return n
}

// run makes calls until ctx ends, and waits for the running ones, whose contexts end with ctx.
func (c *podCalls[J]) run(ctx context.Context) {
	c.mu.Lock()
	c.ctx = ctx
	for pool := range c.lines {
		c.advance(pool)
	}
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	c.ctx = nil // starts no further call
	c.mu.Unlock()
	c.all.Wait()
}

// advance starts as many queued calls of a pool as allowed.
func (c *podCalls[J]) advance(pool core.PoolKey) {
	line := c.lines[pool]
	for len(line.waiting) > 0 && line.running < maxCallsPerPool && c.ctx != nil {
		j := line.waiting[0]
		id := c.of(j).ID
		line.waiting[0] = *new(J) // it may have the values of a claim
		line.waiting = line.waiting[1:]
		line.running++
		ctx, cancel := context.WithCancel(c.ctx)
		call := &underWay{cancel}
		c.cancel[id] = call
		c.all.Go(func() {
			c.call(ctx, j)
			cancel()
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.cancel[id] == call { // else the next call for the sandbox has begun
				delete(c.cancel, id)
			}
			line.running--
			c.advance(pool)
		})
	}
	if line.running == 0 && len(line.waiting) == 0 {
		delete(c.lines, pool)
	}
}
