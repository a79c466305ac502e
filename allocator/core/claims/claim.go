package claims

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/demand"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/lines"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Claim is a claim that has no answer yet.
type Claim = lines.Claim[request]

// request is what a claim asks for, and what it has got so far.
type request struct {
	pool     *pools.Pool
	binding  fact.Binding
	lifetime time.Duration
	idle     *time.Duration // nil: what the pool says
	minBytes *uint64        // the same
	sleep    SleepAsk
	// A claim gets count pods, or atLeast of them when the wait of a caller is over. batch: it may ask for more
	// than one, and is answered with a list.
	count, atLeast int
	batch          bool
	values         step.Values
	sealHeaders    func(id string) []byte // nil: there are none
	configuring    time.Duration
	since          time.Duration // boot clock: when it came
	waited         bool          // not all of its pods were warm then, or one of them was lost
	failures       int           // how often it was not granted after agents of its pods were to be configured
	problem        string        // why the last agent was not configured
	ends           bool          // the wait of a caller is over, and it has enough
	// pods are those that it has. While it waits it collects them, see Table.filling.
	pods    []*pods.Pod
	boundAt step.Instant         // when its ends were set
	facts   []*fact.Pending      // of the pods, while it is bound
	got     []*sandboxes.Sandbox // of the facts, until the last of them is durable
	// revives is the stopped sandbox that the pod is for; nil: the claim is for new ones.
	revives *sandboxes.Sandbox
}

// hasRules reports whether it asks for rules of egress.
func (req *request) hasRules() bool {
	return req.sealHeaders != nil || !req.binding.Network.Equal(fact.EgressRules{})
}

// handed reports whether the facts of a bound claim were handed to a Write.
func (req *request) handed() bool { return len(req.facts) > 0 && req.facts[0].Handed() }

// callOff takes a claim off its pods, before its facts were handed to a Write, and returns them.
func (t *Table) callOff(cl *Claim) (off []*pods.Pod) {
	req := &cl.Request
	for _, pf := range req.facts {
		pf.Withdraw()
	}
	off, req.pods, req.facts = req.pods, nil, nil
	for _, p := range off {
		delete(t.taken, p.Key())
	}
	if req.revives != nil && len(off) > 0 {
		t.sandboxes.Unbound(req.revives)
	}
	if t.filling[req.pool.Key] == cl {
		delete(t.filling, req.pool.Key)
	}
	return off
}

// KeyOf is the idempotency key of a claim.
func KeyOf(b *fact.Binding) lines.Key { return lines.Key{Team: b.Team, Key: b.IdempotencyKey} }

// Ask is a claim as its caller makes it. Token comes back in the answer.
type Ask struct {
	Token   uint64
	Pool    fact.PoolKey
	Binding fact.Binding // ID, ClaimedAt and EndAt are filled in by the table, and Access is at least that of the pool
	// Lifetime is how long the sandbox may live. 0: for ever.
	Lifetime time.Duration
	// IdleTimeout is after how long without activity it is released; 0: never; nil: the
	// default of the pool.
	IdleTimeout *time.Duration
	// MinBytes is how many bytes a minute must move over an open connection for it to
	// count; 0: it counts in any case; nil: the default of the pool.
	MinBytes *uint64
	Sleep    SleepAsk
	// Configuring is how long its agents may need to be configured. The startup timeout of the pool begins after it.
	Configuring time.Duration
	// Wait is how long the claim may wait for a pod, and its caller for the
	// pool's hook.
	Wait time.Duration
	// Count, if not 0, asks for a batch of so many sandboxes, at most Pool.MaxPods. BatchClaimed
	// answers it then. When Wait is over, or the pool cannot make a pod before a sandbox is
	// released, AtLeast sandboxes are enough; 0: all. Fewer are none. The facts of a batch must
	// fit into one write of the journal.
	Count, AtLeast int
	// Values come back in Configure. They are kept until the claim has its answer. nil: there are none.
	Values step.Values
	// SealHeaders returns Binding.Network.Headers for a sandbox with this ID. nil: there are none. It must not block.
	SealHeaders func(id string) []byte
}

// SleepAsk is the fact.SleepPolicy that a claim asks for; nil: the default of the pool.
type SleepAsk struct {
	WhenIdle, AtEnd, WakeOnTraffic *bool
	StopAfter                      *time.Duration
}

func (a SleepAsk) of(pool fact.SleepPolicy) fact.SleepPolicy {
	for _, x := range []struct{ asked, set *bool }{{a.WhenIdle, &pool.WhenIdle}, {a.AtEnd, &pool.AtEnd}, {a.WakeOnTraffic, &pool.WakeOnTraffic}} {
		if x.asked != nil {
			*x.set = *x.asked
		}
	}
	if a.StopAfter != nil {
		pool.StopAfter = *a.StopAfter
	}
	return pool
}

// Claim takes a claim, or refuses it.
func (t *Table) Claim(ev Ask) {
	caller := lines.Caller{Token: ev.Token, Until: t.Now.Boot + ev.Wait}
	if k := t.Of(KeyOf(&ev.Binding)); k != nil {
		t.claimAgain(ev, caller, k)
		return
	}
	pool := t.pools.Find(ev.Pool)
	if pool == nil || !pool.Known || pool.Deleting {
		t.Emit(step.ClaimRefused{Token: ev.Token, Why: step.NoPool})
		return
	}
	req := request{
		pool: pool, binding: ev.Binding, lifetime: ev.Lifetime, idle: ev.IdleTimeout, minBytes: ev.MinBytes, sleep: ev.Sleep,
		count: max(1, ev.Count), batch: ev.Count > 0, ends: ev.Wait <= 0, values: ev.Values, sealHeaders: ev.SealHeaders, configuring: ev.Configuring,
		since: t.Now.Boot,
	}
	req.atLeast = req.count
	if ev.AtLeast > 0 {
		req.atLeast = min(ev.AtLeast, req.count)
	}
	if pool.MaxPods > 0 { // the pool cannot have more, except for a surplus that is not deleted yet
		req.count = max(req.atLeast, min(req.count, pool.MaxPods))
	}
	refused := t.refusal(pool, ev.Token, 0)
	refused.Why, refused.Wait = t.hopeless(&req, ev.Wait)
	req.waited = ev.Wait > 0 && pool.CountWarm() < req.count
	why := t.admit(pool, ev.Binding.Team, req.count, req.waited, refused)
	if why == 0 || why == step.PoolEmpty {
		t.pools.Claimed(pool, req.count)
	}
	if why != 0 {
		return
	}
	t.Add(t.line(pool.Key), caller, KeyOf(&ev.Binding), ev.Binding.RequestHash, req.count, req)
	pool.Touch()
}

// admit takes what a call costs its team, and a place in the line of the pool if it waits. It emits a
// refusal, with what refused has already, if a limit refuses the call, and returns why; 0: the call is admitted.
// The limits of the team come before an empty pool: a call that the team may not make is no demand for pods.
func (t *Table) admit(pool *pools.Pool, team string, sandboxes int, waits bool, refused step.ClaimRefused) step.Refusal {
	var crowding *Claim
	if refused.Why == 0 && waits && t.line(pool.Key).Callers() >= t.cfg.MaxWaiting {
		if crowding = t.line(pool.Key).Crowding(team); crowding == nil {
			refused.Why = step.LineFull
		}
	}
	if refused.Why == 0 || refused.Why == step.PoolEmpty {
		if refused.Excess = t.excess(pool, team, sandboxes, waits, refused.Why == 0); refused.Excess.Limit != "" {
			refused.Why = step.OverLimit
		}
	}
	if refused.Why != 0 {
		t.refused(refused)
	} else if crowding != nil {
		t.displace(crowding)
	}
	return refused.Why
}

// displace refuses the newest caller of a claim that waits. The claim goes on for its other callers.
func (t *Table) displace(cl *Claim) {
	if cl.Callers() == 1 {
		t.refuse(cl, step.LineFull)
		return
	}
	token := cl.Newest()
	t.Abandon(token)
	t.refused(t.refusalOf(cl, token, step.LineFull))
}

// hopeless says why a new claim cannot get its pods within a wait; 0: it may.
func (t *Table) hopeless(req *request, wait time.Duration) (step.Refusal, time.Duration) {
	pool, quarantine := req.pool, t.cfg.Quarantine(t.Now.Boot)
	switch short := pool.CountWarm() < req.atLeast; {
	case short && pool.MaxPods > 0 && req.atLeast > pool.MaxPods: // a surplus that is warm may be enough
		return step.TooMany, 0
	case t.pressure || t.outbox.Len() >= fact.MaxPending:
		return step.Overloaded, 0
	case !short:
	case quarantine > wait:
		return step.Quarantined, quarantine
	case pool.Refused != "":
		return step.NotAccepted, 0
	case wait <= 0:
		return step.PoolEmpty, 0
	}
	return 0, 0
}

// claimAgain answers a claim whose idempotency key was used before.
func (t *Table) claimAgain(ev Ask, caller lines.Caller, k *lines.Holder[request]) {
	switch sb := t.sandboxes.Get(k.Grant); {
	case k.Hash != ev.Binding.RequestHash:
		t.Emit(step.ClaimRefused{Token: ev.Token, Why: step.KeyReused})
	case k.Claim != nil && k.Claim.Waits():
		if pool := k.Claim.Request.pool; t.admit(pool, ev.Binding.Team, 0, true, t.refusal(pool, ev.Token, 0)) == 0 {
			t.AddCaller(k.Claim, caller)
		}
	case k.Claim != nil && !k.Claim.Waits() && k.Claim.Callers() >= t.cfg.MaxWaiting:
		// Claims that have a pod are as many as pods at most. So only their callers are bounded.
		t.Emit(step.ClaimRefused{Token: ev.Token, Why: step.Overloaded})
	case k.Claim != nil:
		t.AddCaller(k.Claim, caller)
	case sb != nil && sb.Over():
		t.Emit(step.ClaimRefused{Token: ev.Token, Why: step.KeyEnded, Sandbox: sb.Sandbox})
	case t.CountAwaiting(k.Grant) >= t.cfg.MaxWaiting:
		t.Emit(step.ClaimRefused{Token: ev.Token, Why: step.Overloaded})
	default: // wait until its start or release is durable
		t.Await(k.Grant, caller)
		t.Answer(k.Grant)
	}
}

// PodChanged acts on a change of a pod that a claim has. One that can no longer serve is taken away from the claim,
// before the facts of that were handed to a Write. A claim that is bound returns to its place in the line.
func (t *Table) PodChanged(cl *Claim, p *pods.Pod) {
	if cl.Request.handed() || p.Withheld() == 0 && !p.Seen().Used {
		return
	}
	pool := cl.Request.pool
	if cl.Waits() {
		delete(t.taken, p.Key())
		cl.Request.pods = slices.DeleteFunc(cl.Request.pods, func(q *pods.Pod) bool { return q == p })
		if len(cl.Request.pods) == 0 {
			delete(t.filling, pool.Key)
		}
		pool.Touch()
		t.pods.Return(p)
		return
	}
	t.pods.Return(append(t.callOff(cl), t.comesBack(cl)...)...)
}

// comesBack returns a bound claim to its place in the line. A batch that collects pods meanwhile
// gives them back, because the claim may come before it.
func (t *Table) comesBack(cl *Claim) []*pods.Pod {
	cl.Return()
	req := &cl.Request
	req.waited = true
	req.ends = false // the caller that was late may be gone before it has enough again
	req.pool.Touch()
	if filling := t.filling[req.pool.Key]; req.count > 1 && filling != nil {
		return t.callOff(filling)
	}
	return nil
}

// Abandoned notes that a caller has gone.
func (t *Table) Abandoned(token uint64) {
	cl, grant := t.Abandon(token)
	switch {
	case cl != nil && (cl.Waits() || !cl.Request.handed()): // a claim that was handed to a Write goes on
		t.cancel(cl)
	case grant != "":
		for _, sb := range t.sandboxes.Granted(grant) {
			if !sb.Keyed() {
				t.sandboxes.End(sb, sandboxes.Serving, fact.Because(fact.ReasonCanceled))
			}
		}
	}
}

// cancel drops a claim that has no caller any more.
func (t *Table) cancel(cl *Claim) {
	t.Drop(cl)
	t.Emit(step.ClaimCanceled{Pool: cl.Request.pool.Key})
	t.dropped(cl)
}

// dropped acts on a claim that has ended without a sandbox. Its pods return. For a while those that are being created
// for it count for its team: see leftBy.
func (t *Table) dropped(cl *Claim) {
	req := &cl.Request
	if at := (share{req.pool.Key, req.binding.Team}); req.revives == nil {
		t.left[at] = leftover{min(t.left[at].pods+req.count, req.pool.MaxSpare()), t.Now.Boot + 2*demand.Spare}
	}
	t.pods.Return(t.callOff(cl)...)
	req.pool.Touch()
}

// refusal is the answer to a caller whose claim is refused.
func (t *Table) refusal(pool *pools.Pool, token uint64, why step.Refusal) step.ClaimRefused {
	counts := pool.Refusal()
	counts.Waiting = t.Waiting(pool.Key)
	return step.ClaimRefused{
		Token: token, Pool: pool.Key, Why: why, Counts: counts, Warm: pool.Warm, MaxPods: pool.MaxPods, Paused: pool.Paused, Problem: pool.Refused,
	}
}

// refusalOf is the answer to one caller of a refused claim.
func (t *Table) refusalOf(cl *Claim, token uint64, why step.Refusal) step.ClaimRefused {
	e := t.refusal(cl.Request.pool, token, why)
	if why == step.NotConfigured {
		e.Problem = cl.Request.problem
	}
	return e
}

// refuse answers all callers of a claim.
func (t *Table) refuse(cl *Claim, why step.Refusal) {
	for _, x := range t.Drop(cl) {
		t.refused(t.refusalOf(cl, x.Token, why))
	}
	t.dropped(cl)
}
