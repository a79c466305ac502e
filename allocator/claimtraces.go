package allocator

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/internal/tracing"
)

// maxTracedSteps bounds the sandboxes whose steps are kept.
const maxTracedSteps = 10_000

// claimTraces notes when the steps of claims happen, while a traced claim is under way. Which claim a step belongs to is
// known only at its end, so the steps of all sandboxes that are claimed meanwhile are kept until then. While no traced
// claim is under way a step costs one atomic read. The zero value is off.
type claimTraces struct {
	tracer   *tracing.Tracer
	underWay atomic.Int64

	mu    sync.Mutex
	steps map[string]*claimSteps // by sandbox ID
	batch *tracing.Span          // of the write to the journal that is under way
}

// claimSteps are the times of the steps of one sandbox. batch is the write that made it durable.
type claimSteps struct {
	written, durable, sent, configuring, configured time.Time
	batch                                           tracing.Link
}

// begin notes that a claim is under way if it is traced. The caller ends it with the sandboxes of the claim.
func (c *claimTraces) begin(ctx context.Context) (end func(sandboxes ...core.Sandbox)) {
	span, began := tracing.From(ctx), time.Now()
	if span == nil {
		return func(...core.Sandbox) {}
	}
	c.underWay.Add(1)
	return func(sandboxes ...core.Sandbox) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for i := range sandboxes {
			s := c.steps[sandboxes[i].ID]
			if s == nil {
				continue // it was claimed before, under the same key
			}
			span.Part("wait for a pod and take it", began, s.written)
			span.Part("write to the journal", s.written, s.durable, s.batch)
			span.Part("push the route", s.durable, s.sent)
			span.Part("configure the agent", s.configuring, s.configured)
		}
		if c.underWay.Add(-1) == 0 {
			clear(c.steps)
		}
	}
}

// note has f note a step of a sandbox.
func (c *claimTraces) note(id string, f func(*claimSteps)) {
	if c.underWay.Load() == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.steps[id]
	if s == nil {
		if len(c.steps) == maxTracedSteps {
			return
		}
		if c.steps == nil {
			c.steps = map[string]*claimSteps{}
		}
		s = &claimSteps{}
		c.steps[id] = s
	}
	f(s)
}

// effect notes the step that an effect is.
func (c *claimTraces) effect(e core.Effect) {
	if c.underWay.Load() == 0 {
		return
	}
	switch e := e.(type) {
	case core.Write:
		c.writing(e.Facts)
	case core.SendRoute:
		c.note(e.Sandbox.ID, func(s *claimSteps) { s.sent = time.Now() })
	case core.Configure:
		c.note(e.Sandbox.ID, func(s *claimSteps) { s.configuring = time.Now() })
	}
}

// writing notes that facts are being written.
func (c *claimTraces) writing(facts []core.Fact) {
	_, batch := c.tracer.Begin(context.Background(), "batch of the journal", "")
	now := time.Now()
	for _, f := range facts {
		if id, ok := f.Thing().(fact.SandboxID); ok {
			c.note(string(id), func(s *claimSteps) {
				if s.written.IsZero() {
					s.written, s.batch = now, tracing.LinkTo(batch)
				}
			})
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.batch = batch
}

// durable notes that the facts have been written.
func (c *claimTraces) durable(facts []core.Fact) {
	c.mu.Lock()
	c.batch.End("")
	c.batch = nil
	c.mu.Unlock()
	now := time.Now()
	for _, f := range facts {
		if id, ok := f.Thing().(fact.SandboxID); ok {
			c.note(string(id), func(s *claimSteps) {
				if s.durable.IsZero() {
					s.durable = now
				}
			})
		}
	}
}
