package core

func (c *Core) resolve(ev Resolve) {
	if s := c.routers.members.OfStream(ev.Stream); s == nil || !s.Durable {
		return
	}
	e := SendResolved{Stream: ev.Stream, ID: ev.ID}
	if s := c.sandboxes.byID[ev.ID]; s != nil {
		switch {
		case s.routable():
			found := s.Sandbox
			e.Sandbox = &found
		case s.Phase == Released || s.Phase == Ended:
			e.Gone = true
		default:
			// It starts, or its release is not durable yet. Gone would be final.
			e.Starting = true
			if s.reaped {
				e.Hold = reapHold
			} else if p := c.pools.byKey[s.Pool]; p != nil && !s.lost {
				e.Hold = p.Hold
			}
		}
	}
	c.emit(e)
}

// routable reports whether routers may receive its route.
func (s *sandbox) routable() bool {
	return (s.Phase == Running || s.Phase == Releasing && s.ran) && !s.lost && !s.reaped
}

// takePorts gives s the ports of its pool.
func (s *sandbox) takePorts(p *pool) { s.DefaultPort, s.Ports = p.DefaultPort, p.Ports }
