package sandboxes

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/api/activity"
)

// SetNetwork replaces what the claim of a sandbox lets it reach. The rules count when they are durable, and Ruled says so.
func (t *Table) SetNetwork(token uint64, scope step.Scope, id string, rules fact.EgressRules) {
	sb := t.use(token, scope, id, false)
	if sb == nil {
		return
	}
	if !sb.Agent.Egress {
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallUnfit, Sandbox: sb.Sandbox})
		return
	}
	sb.pendingRules++
	sb.nextNetwork = rules
	next := &fact.SandboxFact{Sandbox: sb.next(), Ungranted: sb.ungranted}
	t.outbox.Commit(t.Now.Boot, next, true, func(fact.Revision, time.Duration) {
		sb.pendingRules--
		sb.Network, sb.Revision = next.Network, next.Revision
		t.idle.Note(sb.ID, activity.Keepalive, t.Now.Boot)
		t.show(sb, next)
		t.Notify(Ruled{sb, token})
	})
}
