package agents

import (
	"context"

	"github.com/berth-sandbox/berth/allocator/core"
)

// Knows reports whether the key of the agent in a pod is known.
func (c *Caller) Knows(p *core.Pod) bool {
	return c.known.Contains(incarnation{p.Key.Whole(), p.Restarts})
}

// Waiting is the number of agents that are to be asked.
func (c *Caller) Waiting() int { return len(c.expected) }

// ProxyOf is what a sandbox is configured with.
func (c *Caller) ProxyOf(ctx context.Context, s core.Sandbox) (string, error) {
	return c.proxyOf(ctx, s)
}
