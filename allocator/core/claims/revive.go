package claims

import (
	"cmp"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/lines"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// A stopped sandbox that is to run again takes a pod as a claim does, in the line of its pool and in the turn of its team.
// The claim has one caller, the sandbox itself, with a token of its own. It costs the team nothing, because the sandbox
// counts already.

const (
	// reviveWait is how long it waits for a pod.
	reviveWait = 30 * time.Second
	// ownTokens begin the tokens of these claims. Those of calls are below.
	ownTokens = 1 << 63
)

// Revive has a stopped sandbox get a pod. It is revived, or hears why not.
func (t *Table) Revive(sb *sandboxes.Sandbox) {
	t.tokens++
	token, pool := ownTokens|t.tokens, t.pools.Find(sb.Pool)
	if pool == nil || !pool.Known || pool.Deleting {
		t.notRevived(sb, step.ClaimRefused{Why: step.NoPool})
		return
	}
	req := request{
		pool: pool, binding: sb.Binding, count: 1, atLeast: 1, since: t.Now.Boot, revives: sb,
		waited: pool.CountWarm() == 0,
	}
	req.binding.IdempotencyKey = ""
	t.revivals[token] = &Claim{Request: req}
	refused := t.refusal(pool, token, 0)
	refused.Why, refused.Wait = t.hopeless(&req, reviveWait)
	if t.admit(pool, sb.Team, 0, req.waited, refused) != 0 {
		return
	}
	t.pools.Claimed(pool, 1)
	caller := lines.Caller{Token: token, Until: t.Now.Boot + reviveWait}
	t.revivals[token] = t.Add(t.line(pool.Key), caller, lines.Key{Team: sb.Team}, lines.Hash{}, 1, req)
	pool.Touch()
}

// refused answers a caller whose claim is refused.
func (t *Table) refused(e step.ClaimRefused) {
	cl := t.revivals[e.Token]
	if cl == nil {
		t.Emit(e)
		return
	}
	delete(t.revivals, e.Token)
	t.notRevived(cl.Request.revives, e)
}

// notRevived says for people why a stopped sandbox got no pod.
func (t *Table) notRevived(sb *sandboxes.Sandbox, e step.ClaimRefused) {
	status, why := step.CallNotReady, "its pool has no pod for it"
	switch e.Why {
	case step.NoPool:
		status, why = step.CallRefused, "its pool does not exist, or is being deleted"
	case step.NotConfigured, step.NotAccepted:
		status, why = step.CallRefused, cmp.Or(e.Problem, "no pod of its pool could be configured")
	case step.Ending: // its callers go to the next leader
		return
	case step.Overloaded, step.LineFull:
		why = "too many claims wait"
	case step.OverLimit:
		why = "its team has reached its limit " + string(e.Excess.Limit)
	default:
	}
	t.sandboxes.NotRevived(sb, status, why)
}

// rebind gives the pod of a claim to its stopped sandbox, and journals that.
func (t *Table) rebind(cl *Claim) {
	req := &cl.Request
	pool, p := req.pool, req.pods[0]
	start := sandboxes.Start{
		Agent:       fact.Agent{Port: p.Seen().AgentPort, Public: pool.Agent.Public, Egress: p.Seen().Egress},
		DefaultPort: pool.DefaultPort, Ports: pool.Ports,
	}
	if pool.PostStart && pool.StartupTimeout > 0 {
		start.By = t.Now.Wall.Add(pool.StartupTimeout + configureWithin)
	}
	f := t.sandboxes.Rebind(req.revives, p, start)
	req.facts = []*fact.Pending{t.outbox.Commit(t.Now.Boot, f, true, func(fact.Revision, time.Duration) { t.claimed(cl, f) })}
}

// configureWithin is how long a start after a stop may take before the postStart hook is called: the restore of the files
// is part of it.
const configureWithin = 10 * time.Minute

// revive gives a stopped sandbox its pod when the agent has answered, or takes the pod away from it.
func (t *Table) revive(cl *Claim) {
	req := &cl.Request
	sb, bound := req.revives, req.got[0]
	req.pods, req.facts, req.got = nil, nil, nil
	cause := t.notGrantedFor(bound)
	if cause.Reason == fact.ReasonConfigurationFailed {
		req.problem = cause.Message
	}
	if cause != (fact.Cause{}) || sb.Doomed() != nil {
		t.sandboxes.Unrevive(sb, bound, func() { t.tryAgain(cl, true) })
		return
	}
	t.forgetRevival(cl)
	t.sandboxes.Revive(sb, bound, req.boundAt)
}

// Doomed notes that a stopped sandbox is to end, to which a claim has given a pod. It does not wait for the agent.
func (t *Table) Doomed(sb *sandboxes.Sandbox) {
	if cl := t.configuring[sb.ID]; cl != nil && cl.Request.revives == sb {
		delete(t.configuring, sb.ID)
		t.revive(cl)
	}
}

// forgetRevival drops the claim of a stopped sandbox. Its caller hears nothing.
func (t *Table) forgetRevival(cl *Claim) {
	for _, x := range t.Drop(cl) {
		delete(t.revivals, x.Token)
	}
}

// dropDead drops the claim of a stopped sandbox that ends. It reports whether it has done that.
func (t *Table) dropDead(cl *Claim) bool {
	sb := cl.Request.revives
	if sb == nil || sb.Lives() {
		return false
	}
	t.forgetRevival(cl)
	return true
}

// dropRevival drops the claim of a sandbox that was released while it was stopped.
func (t *Table) dropRevival(sb *sandboxes.Sandbox) {
	for _, cl := range t.revivals {
		if cl.Request.revives == sb {
			t.dropDead(cl)
			cl.Request.pool.Touch()
			return
		}
	}
}

// revivalsOf is how many claims are for stopped sandboxes of a team. These sandboxes count already.
func (t *Table) revivalsOf(team string) (n int) {
	for _, cl := range t.revivals {
		if cl.Request.binding.Team == team {
			n++
		}
	}
	return n
}
