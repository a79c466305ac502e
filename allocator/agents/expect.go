package agents

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/core"
)

const (
	// maxKnown bounds the keys of agents that are kept, maxExpected the agents that are to be asked. A claim
	// asks for a key that is not known.
	maxKnown    = 16384
	maxExpected = 4096
	// keyWait bounds one question for a key, keyCalls the questions at one time.
	keyWait  = time.Second
	keyCalls = 4
)

// incarnation is a pod between two restarts of its containers. The agent in it has one key.
type incarnation struct {
	pod      core.PodKey
	restarts int
}

// idle is an agent that can be claimed.
type idle struct {
	incarnation
	at netip.AddrPort
}

// Expect has Run ask the agent of a pod for its key, if the pod can be claimed and the key is not known. It
// never blocks.
func (c *Caller) Expect(p *core.Pod) {
	if p.AgentPort == 0 || !p.Ready || p.Used || p.Deleting || p.Finished || !p.IP.IsValid() {
		return
	}
	agent := idle{incarnation{p.Key.Whole(), p.Restarts}, netip.AddrPortFrom(p.IP, p.AgentPort)}
	if c.known.Contains(agent.incarnation) {
		return
	}
	select {
	case c.expected <- agent:
	default:
	}
}

// Run asks the expected agents for their keys, and looks up the egress gateway, until ctx ends. It is called once.
func (c *Caller) Run(ctx context.Context) {
	var all sync.WaitGroup
	if c.proxy != nil {
		all.Go(func() { c.proxy.keep(ctx) })
	}
	for range keyCalls {
		all.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case agent := <-c.expected:
					c.learn(ctx, agent)
				}
			}
		})
	}
	all.Wait()
}

// learn asks an agent for its key. A failure costs the claim a question of its own.
func (c *Caller) learn(ctx context.Context, agent idle) {
	if c.known.Contains(agent.incarnation) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, keyWait)
	defer cancel()
	var peer *initbox.Peer
	err := c.call(ctx, agent.at, func(l *line) (err error) {
		peer, err = c.meet(l)
		return err
	})
	if err == nil {
		c.known.Add(agent.incarnation, peer)
	}
}
