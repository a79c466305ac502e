package core

import "cmp"

// The agents of pods. A pod with an agent is handed out in three steps: the claim is durable, then the
// agent is configured for the sandbox, then the claim is granted. Between the first two the journal says
// has the sandbox, and there is no Sandbox object. That an agent is configured is no fact: the next
// leader asks the agents of the sandboxes without an object. It sends their routes to no router before.

// maxFailures is how often agents of the pods of a claim may fail to be configured, each time with
// other pods, until the claim is refused.
const maxFailures = 3

// configure has the agents of a claim's pods configured.
func (c *Core) configure(cl *claim) {
	for _, sb := range cl.Request.got {
		sb.claim, c.configuring[sb.ID] = cl, sb
		c.emit(Configure{Sandbox: sb.Sandbox, Values: cl.Request.values})
	}
}

// configured acts on the answer of an agent.
func (c *Core) configured(ev Configured) {
	if sb := c.sandboxes.byID[ev.ID]; sb != nil && sb.asking {
		c.asked(sb, ev.OK)
		return
	}
	sb := c.configuring[ev.ID]
	if sb == nil {
		return
	}
	delete(c.configuring, ev.ID)
	if !ev.OK {
		sb.doomed = cmp.Or(sb.doomed, ReasonNotConfigured)
	}
	for _, other := range sb.claim.Request.got {
		if c.configuring[other.ID] != nil {
			return
		}
	}
	c.grant(sb.claim)
}

// asked acts on the answer of an agent that an earlier leader may have configured. If it has not, it has
// not answered the claim either. Then the key of the claim is free again.
func (c *Core) asked(sb *sandbox, configured bool) {
	sb.asking = false
	switch {
	case sb.Phase >= Released:
		return
	case !configured:
		if sb.Phase != Releasing {
			c.claims.Free(sb.claimKey(), sb.grant())
			sb.IdempotencyKey = ""
		}
		c.lost(sb, ReasonNotConfigured)
		return
	}
	c.emit(WriteObject{Sandbox: sb.Sandbox})
	if sb.Phase == Starting {
		c.emit(StartSandbox{sb.Sandbox})
	} else {
		c.routers.sendRoute(sb) // the earlier leader may have said that it is ready
	}
	c.answer(sb.grant())
}
