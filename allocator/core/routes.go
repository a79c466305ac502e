package core

// pushRoute tells all connected routers where a sandbox is.
func (c *Core) pushRoute(sb *sandbox) {
	if !sb.routable() {
		return
	}
	for _, s := range c.connected() { // others get it with the snapshot
		s.sequence++
		c.emit(SendRoute{Stream: s.stream, Sequence: s.sequence, Sandbox: sb.Sandbox})
	}
}

func (c *Core) resolve(ev Resolve) {
	if s := c.streams[ev.Stream]; s == nil || !s.durable {
		return
	}
	e := SendResolved{Stream: ev.Stream, ID: ev.ID}
	if s := c.sandboxes[ev.ID]; s != nil {
		switch {
		case s.routable():
			found := s.Sandbox
			e.Sandbox = &found
		case s.Phase == Released || s.Phase == Ended:
			e.Gone = true
		default:
			// It starts, or its release is not durable yet: gone is for ever.
			e.Starting = true
			if s.reaping == decided {
				e.Hold = reapHold
			} else if p := c.pools[s.Pool]; p != nil && !s.lost {
				e.Hold = p.Hold
			}
		}
	}
	c.emit(e)
}

// pushPorts gives the pool's live sandboxes the ports that it asks for now and
// tells all connected routers, one route for each sandbox.
func (c *Core) pushPorts(p *pool) {
	for _, q := range p.sorted(podClaimed) {
		q.sandbox.takePorts(p)
		c.pushRoute(q.sandbox)
	}
}

// routable reports whether routers may be told where it is.
func (s *sandbox) routable() bool {
	return (s.Phase == Running || s.Phase == Releasing && s.ran) && !s.lost && s.reaping != decided
}

// takePorts gives s what its pool says of ports.
func (s *sandbox) takePorts(p *pool) { s.DefaultPort, s.Ports = p.DefaultPort, p.Ports }
