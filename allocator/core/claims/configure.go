package claims

import (
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// MaxFailures is how often agents of the pods of a claim may fail to be configured, each time with
// other pods, until the claim is refused.
const MaxFailures = 3

// configure has the agents of a claim's pods configured.
func (t *Table) configure(cl *Claim) {
	for _, sb := range cl.Request.got {
		if sb.Agent.Port != 0 { // else its pod is of another template
			t.configuring[sb.ID] = cl
			t.Emit(step.Configure{Sandbox: sb.Sandbox, Values: cl.Request.values})
		}
	}
}

// Configured acts on the answer of an agent. hopeless: the agents of other pods would answer the same.
func (t *Table) Configured(id string, ok bool, why string, hopeless bool) {
	if sb := t.sandboxes.Get(id); sb != nil && sb.Asking() {
		t.asked(sb, ok)
		return
	}
	cl := t.configuring[id]
	if cl == nil {
		return
	}
	delete(t.configuring, id)
	if !ok && hopeless {
		cl.Request.failures = MaxFailures - 1 // this one is the last
	}
	waits := false
	for _, sb := range cl.Request.got {
		if sb.ID == id && !ok {
			t.sandboxes.Doom(sb, fact.Cause{Reason: fact.ReasonConfigurationFailed, Message: why})
		}
		waits = waits || t.configuring[sb.ID] != nil
	}
	if !waits {
		t.grant(cl)
	}
}

// asked acts on the answer of an agent that an earlier leader may have configured.
func (t *Table) asked(sb *sandboxes.Sandbox, configured bool) {
	if !configured {
		t.unanswered(sb)
		return
	}
	t.sandboxes.Configured(sb)
	t.adopt(sb.Grant())
}

// NeverConfigured is the message of a ConfigurationFailed that a change of leaders has caused.
const NeverConfigured = "the allocator that made the claim ended before the agent was configured"

// unanswered releases a sandbox of an earlier term whose agent is not configured. So its claim was not
// answered, unless it needs fewer sandboxes. If too few are left, they are released too: none of the
// claim was granted, and its key is free.
func (t *Table) unanswered(sb *sandboxes.Sandbox) {
	if sb.Archive != "" { // it was stopped, and is so again
		t.sandboxes.End(sb, sandboxes.Rejected, fact.Cause{Reason: fact.ReasonConfigurationFailed, Message: NeverConfigured})
		return
	}
	members, first := t.sandboxes.Granted(sb.Grant()), t.outbox.Len()
	reject := func(sb *sandboxes.Sandbox, cause fact.Cause) {
		t.Free(KeyOf(&sb.Binding), sb.Grant())
		t.sandboxes.End(sb, sandboxes.Rejected, cause)
	}
	reject(sb, fact.Cause{Reason: fact.ReasonConfigurationFailed, Message: NeverConfigured})
	var left []*sandboxes.Sandbox
	for _, other := range members {
		if other.Ungranted() == 0 { // it was granted, so the claim was
			return
		}
		if other.Lives() {
			left = append(left, other)
		}
	}
	if len(left) < sb.Ungranted() {
		for _, other := range left {
			reject(other, fact.Because(fact.ReasonBatchIncomplete))
		}
		t.outbox.Join(first)
	}
}

// adopt writes the objects of a grant of an earlier term when no agent of it is asked any more, and answers
// its callers.
func (t *Table) adopt(grant string) {
	t.sandboxes.Adopt(grant)
	t.decided = append(t.decided, grant)
}
