package core

import (
	"cmp"
	"slices"

	"github.com/berth-sandbox/berth/api/activity"
)

// The agents of pods. A pod with an agent is handed out in three steps: the claim is durable, then the
// agent is configured for the sandbox, then the claim is granted. Between the first two the journal
// has the sandbox, and there is no Sandbox object. That an agent is configured is no fact. So the next
// leader asks the agents of the sandboxes that the journal has as Fact.Ungranted and that have no object.
// It sends their routes to no router before.
//
// The next leader does not know whether such a claim was answered. Only one answer proves that it was not:
// that of an agent that is not configured, in a pod whose containers have not restarted. Any other end of a
// sandbox ends that sandbox alone, and its key holds as that of every sandbox that was claimed.
// Not covered: an agent that restarts while the leader changes, before the restart is observed.

// maxFailures is how often agents of the pods of a claim may fail to be configured, each time with
// other pods, until the claim is refused.
const maxFailures = 3

// configure has the agents of a claim's pods configured.
func (c *Core) configure(cl *claim) {
	for _, sb := range cl.Request.got {
		if sb.Agent.Port != 0 { // else its pod is of another template
			c.configuring[sb.ID] = sb
			c.emit(Configure{Sandbox: sb.Sandbox, Values: cl.Request.values})
		}
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
		sb.doomed = cmp.Or(sb.doomed, &Cause{Reason: ReasonConfigurationFailed, Message: ev.Why})
	}
	for _, other := range sb.claim.Request.got {
		if c.configuring[other.ID] != nil {
			return
		}
	}
	c.grant(sb.claim)
}

// asked acts on the answer of an agent that an earlier leader may have configured.
func (c *Core) asked(sb *sandbox, configured bool) {
	switch {
	case sb.Phase >= Releasing:
		return
	case !configured:
		c.unanswered(sb)
		return
	}
	sb.asking = false
	if sb.Phase == Starting {
		c.emit(StartSandbox{sb.Sandbox})
	} else {
		c.markRunning(sb, c.now.Boot, activity.Claim) // routers of the earlier leader are waited for: see idle.Expect
		c.routers.sendRoute(sb)                       // the earlier leader may have said that it is ready
	}
	c.adopt(sb.Grant())
}

// neverConfigured is the message of a ConfigurationFailed that a change of leaders has caused.
const neverConfigured = "the allocator that made the claim ended before the agent was configured"

// unanswered releases a sandbox of an earlier term whose agent is not configured. So its claim was not
// answered, unless it needs fewer sandboxes. If too few are left, they are released too: none of the
// claim was granted, and its key is free.
func (c *Core) unanswered(sb *sandbox) {
	members, first := c.sandboxes.granted(sb.Grant()), c.outbox.Len()
	withdraw := func(sb *sandbox, cause Cause) {
		c.claims.Free(claimKey(&sb.Binding), sb.Grant())
		sb.IdempotencyKey = ""
		c.lost(sb, cause)
	}
	withdraw(sb, Cause{Reason: ReasonConfigurationFailed, Message: neverConfigured})
	var left []*sandbox
	for _, other := range members {
		if other.ungranted == 0 { // it was granted, so the claim was
			return
		}
		if other.Phase < Releasing {
			left = append(left, other)
		}
	}
	if len(left) < sb.ungranted {
		for _, other := range left {
			withdraw(other, because(ReasonIncomplete))
		}
		c.outbox.Join(first)
	}
}

// adopt writes the objects of a grant of an earlier term when no agent of it is asked any more, and answers
// its callers.
func (c *Core) adopt(grant string) {
	members := c.sandboxes.granted(grant)
	if !slices.ContainsFunc(members, func(sb *sandbox) bool { return sb.asking && sb.Phase < Releasing }) {
		for _, sb := range members {
			if sb.ungranted > 0 && sb.Phase < Releasing {
				sb.ungranted = 0
				c.show(sb)
			}
		}
	}
	c.answer(grant)
}
