package core

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/activity"
)

// The claims: see package claims. Here they get pods, sandboxes and answers. The answers are in
// answers.go.

type claim = claims.Claim[claimState]

// claimState is what a claim asks for, and what it has got so far.
type claimState struct {
	pool     *pool
	binding  Binding
	lifetime time.Duration
	idle     *time.Duration // nil: what the pool says
	minBytes *uint64        // the same
	// A claim gets count pods, or atLeast of them when the wait of a caller is over. batch: it may ask for more
	// than one, and is answered with a list.
	count, atLeast int
	batch          bool
	values         Values
	since          time.Duration // boot clock: when it came
	waited         bool          // not all of its pods were warm then, or one of them was lost
	failures       int           // how often it was not granted after agents of its pods were to be configured
	problem        string        // why the last agent was not configured
	ends           bool          // the wait of a caller is over, and it has enough
	// pods are those that it has. While it waits it collects them, see pool.filling.
	pods  []*pod
	facts []*fact.Pending // of the pods, while it is bound
	got   []*sandbox      // of the facts, until the last of them is durable
}

// handed reports whether the facts of a bound claim were handed to a Write.
func (req *claimState) handed() bool { return len(req.facts) > 0 && req.facts[0].Handed() }

// callOff takes a claim off its pods, before its facts were handed to a Write, and returns them.
func (req *claimState) callOff() (pods []*pod) {
	for _, pf := range req.facts {
		pf.Withdraw()
	}
	pods, req.pods, req.facts = req.pods, nil, nil
	for _, p := range pods {
		p.claim = nil
	}
	if f := req.pool.filling; f != nil && &f.Request == req {
		req.pool.filling = nil
	}
	return pods
}

func claimKey(b *Binding) claims.Key { return claims.Key{Team: b.Team, Key: b.IdempotencyKey} }

func (c *Core) claim(ev Claim) {
	caller := claims.Caller{Token: ev.Token, Until: c.now.Boot + ev.Wait}
	if k := c.claims.Of(claimKey(&ev.Binding)); k != nil {
		c.claimAgain(ev, caller, k)
		return
	}
	pool := c.pools.byKey[ev.Pool]
	if pool == nil || !pool.known || pool.Deleting {
		c.emit(ClaimRefused{Token: ev.Token, Why: NoPool})
		return
	}
	req := claimState{
		pool: pool, binding: ev.Binding, lifetime: ev.Lifetime, idle: ev.IdleTimeout, minBytes: ev.MinBytes,
		count: max(1, ev.Count), batch: ev.Count > 0, ends: ev.Wait <= 0, values: ev.Values,
		since: c.now.Boot,
	}
	req.atLeast = req.count
	if ev.AtLeast > 0 {
		req.atLeast = min(ev.AtLeast, req.count)
	}
	if pool.MaxPods > 0 { // the pool cannot have more, except for a surplus that is not deleted yet
		req.count = max(req.atLeast, min(req.count, pool.MaxPods))
	}
	refused := pool.refusal(ev.Token, 0)
	refused.Why, refused.Wait = c.hopeless(&req, ev.Wait)
	req.waited = ev.Wait > 0 && pool.queue.Len() < req.count
	why := c.admit(pool, ev.Binding.Team, req.count, req.waited, refused)
	if possible := pool.MaxPods == 0 || req.atLeast <= pool.MaxPods; possible && (why == 0 || why == PoolEmpty) {
		pool.demand.Claimed(c.ticked, req.count)
		pool.touch()
	}
	if why != 0 {
		return
	}
	c.claims.Add(pool.line, caller, claimKey(&ev.Binding), ev.Binding.RequestHash, req.count, req)
	pool.touch()
}

// admit takes what a call costs its team, and a place in the line of the pool if it waits. It emits a
// refusal, with what refused has already, if a limit refuses the call, and returns why; 0: the call is admitted.
// The limits of the team come before an empty pool: a call that the team may not make is no demand for pods.
func (c *Core) admit(pool *pool, team string, sandboxes int, waits bool, refused ClaimRefused) Refusal {
	var crowding *claim
	if refused.Why == 0 && waits && pool.line.Callers() >= c.cfg.MaxWaiting {
		if crowding = pool.line.Crowding(team); crowding == nil {
			refused.Why = LineFull
		}
	}
	if refused.Why == 0 || refused.Why == PoolEmpty {
		if refused.Excess = c.claims.admit(&c.pools, pool, team, sandboxes, waits, refused.Why == 0); refused.Excess.Limit != "" {
			refused.Why = OverLimit
		}
	}
	if refused.Why != 0 {
		c.emit(refused)
	} else if crowding != nil {
		c.displace(crowding)
	}
	return refused.Why
}

// displace refuses the newest caller of a claim that waits. The claim goes on for its other callers.
func (c *Core) displace(cl *claim) {
	if cl.Callers() == 1 {
		c.refuse(cl, LineFull)
		return
	}
	token := cl.Newest()
	c.claims.Abandon(token)
	c.emit(cl.Request.refusal(token, LineFull))
}

// hopeless says why a new claim cannot get its pods within a wait; 0: it may.
func (c *Core) hopeless(req *claimState, wait time.Duration) (Refusal, time.Duration) {
	pool, quarantine := req.pool, c.routers.members.Quarantine(c.now.Boot)
	switch short := pool.queue.Len() < req.atLeast; {
	case c.pressure || c.outbox.Len() >= fact.MaxPending:
		return Overloaded, 0
	case !short:
	case quarantine > wait:
		return Quarantined, quarantine
	case pool.Refused != "":
		return NotAccepted, 0
	case wait <= 0 || pool.MaxPods > 0 && req.atLeast > pool.MaxPods:
		return PoolEmpty, 0
	}
	return 0, 0
}

// claimAgain answers a claim whose idempotency key was used before.
func (c *Core) claimAgain(ev Claim, caller claims.Caller, k *claims.Holder[claimState]) {
	switch sb := c.sandboxes.byID[k.Grant]; {
	case k.Hash != ev.Binding.RequestHash:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyReused})
	case k.Claim != nil && k.Claim.Waits():
		if pool := k.Claim.Request.pool; c.admit(pool, ev.Binding.Team, 0, true, pool.refusal(ev.Token, 0)) == 0 {
			c.claims.Join(k.Claim, caller)
		}
	case k.Claim != nil && !k.Claim.Waits() && k.Claim.Callers() >= c.cfg.MaxWaiting:
		// Claims that have a pod are as many as pods at most. So only their callers are bounded.
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	case k.Claim != nil:
		c.claims.Join(k.Claim, caller)
	case sb != nil && (sb.Phase == Released || sb.Phase == Ended):
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyEnded, Sandbox: sb.Sandbox})
	case c.claims.CountAwaiting(k.Grant) >= c.cfg.MaxWaiting:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	default: // wait until its start or release is durable
		c.claims.Await(k.Grant, caller)
		c.answer(k.Grant)
	}
}

// serve gives warm pods to the claims that wait, one team after the other. A batch that waits collects
// its pods.
func (c *Core) serve(pool *pool) {
	for cl := pool.next(); cl != nil; cl = pool.next() {
		switch key, ok := pool.queue.Next(); {
		case ok && cl.Request.values != nil && c.pods[key].seen.AgentPort == 0: // of an older template
			c.refuse(cl, NotConfigured)
		case ok:
			p := c.pods[key]
			pool.queue.Passed(key)
			p.enter(podClaiming, c.now.Boot)
			p.claim, cl.Request.pods = cl, append(cl.Request.pods, p)
			if len(cl.Request.pods) < cl.Request.count {
				pool.filling = cl
				cl.Pass()
			} else {
				c.bind(cl)
			}
		case pool.enough(c.closing):
			c.bind(pool.filling)
		case pool.Refused != "":
			c.refuse(cl, NotAccepted)
		case c.closing:
			c.refuse(cl, Ending)
		default:
			return
		}
	}
}

// next returns the claim whose turn it is; nil: there is none. Only one batch at a time collects
// pods, because two could wait for each other.
func (pool *pool) next() *claim {
	return pool.line.Next(func(cl *claim) bool {
		return cl.Request.count == 1 || pool.filling == nil || pool.filling == cl
	})
}

// enough reports whether the batch that collects pods takes those that it has, when no pod is warm.
func (pool *pool) enough(closing bool) bool {
	cl := pool.filling
	return cl != nil && len(cl.Request.pods) >= cl.Request.atLeast &&
		(closing || pool.Refused != "" || cl.Request.ends || pool.exhausted())
}

// exhausted reports whether a pool that is paused, or at its MaxPods, makes no pod before a sandbox is released.
func (pool *pool) exhausted() bool {
	n := pool.counts()
	return (pool.Paused || pool.MaxPods > 0 && pool.pods.total() >= pool.MaxPods) && n.Pending+n.Releasing == 0
}

// bind gives the pods of a claim to sandboxes with IDs that were never used, and journals them in one
// Write.
func (c *Core) bind(cl *claim) {
	req := &cl.Request
	pool, b := req.pool, req.binding
	if pool.filling == cl {
		pool.filling = nil
	}
	cl.Bind()
	b.ClaimedAt = c.now.Wall
	if req.lifetime > 0 {
		b.EndAt = c.now.Wall.Add(req.lifetime)
	}
	b.IdleTimeout, b.MinBytes = pool.IdleTimeout, pool.MinBytes
	if req.idle != nil {
		b.IdleTimeout = *req.idle
	}
	if req.minBytes != nil {
		b.MinBytes = *req.minBytes
	}
	b.Access = max(b.Access, pool.Access)
	if pool.MaxLifetime > 0 {
		b.LifetimeEnd = c.now.Wall.Add(pool.MaxLifetime)
	}
	if pool.PostStart && pool.StartupTimeout > 0 {
		b.StartBy = c.now.Wall.Add(pool.StartupTimeout)
	}
	if req.batch {
		b.Batch = c.cfg.NewID()
	}
	ungranted, first := 0, c.outbox.Len()
	if slices.ContainsFunc(req.pods, func(p *pod) bool { return p.seen.AgentPort != 0 }) {
		ungranted = req.atLeast
	}
	for _, p := range req.pods {
		b.ID = c.cfg.NewID()
		b.Agent = Agent{}
		if p.seen.AgentPort != 0 {
			b.Agent = Agent{Port: p.seen.AgentPort, Public: pool.Agent.Public}
		}
		sb := Sandbox{
			Binding: b, Pool: pool.Key, Pod: p.seen.Key, IP: p.seen.IP,
			DefaultPort: pool.DefaultPort, Ports: pool.Ports, Restarts: p.seen.Restarts, Phase: Running, StartedAt: b.ClaimedAt,
			Workload: p.seen.Workload,
		}
		if pool.PostStart {
			sb.Phase, sb.StartedAt = Starting, time.Time{}
		}
		f := &SandboxFact{Sandbox: sb, Ungranted: ungranted}
		req.facts = append(req.facts, c.outbox.Commit(c.now.Boot, f, true, func(Revision, time.Duration) { c.claimed(cl, f) }))
	}
	c.outbox.Join(first)
}

// takeBack takes a pod that can no longer serve away from its claim, before the facts of that were
// handed to a Write. A claim that is bound returns to its place in the line.
func (c *Core) takeBack(p *pod) {
	cl := p.claim
	if cl.Waits() {
		p.claim = nil
		cl.Request.pods = slices.DeleteFunc(cl.Request.pods, func(q *pod) bool { return q == p })
		if len(cl.Request.pods) == 0 {
			p.pool.filling = nil
		}
		p.pool.touch()
		return
	}
	pods := cl.Request.callOff()
	pods = append(pods, p.pool.comesBack(cl)...)
	c.free(slices.DeleteFunc(pods, func(q *pod) bool { return q == p }))
}

// comesBack returns a bound claim to its place in the line. A batch that collects pods meanwhile
// gives them back, because the claim may come before it.
func (pool *pool) comesBack(cl *claim) (pods []*pod) {
	cl.Return()
	cl.Request.waited = true
	cl.Request.ends = false // the caller that was late may be gone before it has enough again
	pool.touch()
	if cl.Request.count > 1 && pool.filling != nil {
		return pool.filling.Request.callOff()
	}
	return nil
}

// free returns pods that no claim has any more to their places in the queue.
func (c *Core) free(pods []*pod) {
	for _, p := range pods {
		p.enter(podPending, c.now.Boot)
		c.consider(p)
	}
}

func (c *Core) claimAbandoned(token uint64) {
	cl, grant := c.claims.Abandon(token)
	switch {
	case cl != nil && (cl.Waits() || !cl.Request.handed()): // a claim that was handed to a Write goes on
		c.claims.Drop(cl)
		c.emit(ClaimCanceled{cl.Request.pool.Key})
		c.free(cl.Request.callOff())
		cl.Request.pool.touch()
	case grant != "":
		for _, sb := range c.sandboxes.granted(grant) {
			if sb.IdempotencyKey == "" {
				c.startRelease(sb, because(ReasonCanceled))
			}
		}
	}
}

// refusal returns the answer to one caller of a refused claim.
func (req *claimState) refusal(token uint64, why Refusal) ClaimRefused {
	e := req.pool.refusal(token, why)
	if why == NotConfigured {
		e.Problem = req.problem
	}
	return e
}

// refuse answers all callers of a claim.
func (c *Core) refuse(cl *claim, why Refusal) {
	for _, x := range c.claims.Drop(cl) {
		c.emit(cl.Request.refusal(x.Token, why))
	}
	c.free(cl.Request.callOff())
}

// claimed acts on one durable fact of a claim. All of them are in one Write.
func (c *Core) claimed(cl *claim, f *SandboxFact) {
	req, sb := &cl.Request, &sandbox{Sandbox: f.Sandbox, claim: cl}
	if req.pool.known {
		sb.takePorts(req.pool) // they may have changed while the claim was written
	}
	c.sandboxes.byPod[sb.Pod] = sb
	c.addRoutes(sb)
	if p := c.pods[sb.Pod]; p != nil {
		p.claim, p.sandbox = nil, sb
		p.enter(podClaimed, c.now.Boot)
	}
	switch req.got = append(req.got, sb); {
	case len(req.got) < len(req.pods):
	case f.Ungranted == 0:
		c.grant(cl)
	default:
		c.configure(cl)
	}
}

// grant gives a claim its sandboxes when all of them are durable, and their agents have answered. Those
// whose pods have ended meanwhile, or whose agents are not configured, do not count. If too few are
// left, the callers get others at their place, and their key stands for those. So a sandbox that is not
// granted has no key, and its object is written only with its release.
func (c *Core) grant(cl *claim) {
	req := &cl.Request
	got, first := req.got, c.outbox.Len()
	req.pods, req.facts, req.got = nil, nil, nil
	configured := slices.ContainsFunc(got, func(sb *sandbox) bool { return sb.Agent.Port != 0 })
	for _, sb := range got {
		sb.claim = nil
		c.sandboxes.add(sb) // until now no caller could know its ID
		c.emit(SandboxCreated{sb.Sandbox})
		sb.setTimes(c.now)
		c.sandboxes.schedule(sb)
	}
	fit := got[:0]
	for _, sb := range got {
		switch cause := c.notGrantedFor(sb); {
		case cause == (Cause{}):
			fit = append(fit, sb)
		case cause.Reason == ReasonConfigurationFailed:
			req.problem = cause.Message
			fallthrough
		default:
			c.dropUngranted(sb, cause)
		}
	}
	if len(fit) < req.atLeast {
		for _, sb := range fit {
			c.dropUngranted(sb, because(ReasonIncomplete))
		}
		c.outbox.Join(first) // the next leader must not find some of them live under the key
		c.tryAgain(cl, configured)
		return
	}
	abandoned, id := cl.Callers() == 0 && req.binding.IdempotencyKey == "", fit[0].Grant()
	c.claims.Grant(cl, id, len(fit))
	if req.batch {
		for _, sb := range fit {
			c.sandboxes.join(sb)
		}
		c.sandboxes.batches[id].atLeast = req.atLeast
	}
	for _, sb := range fit {
		c.emit(LabelPod{Pod: sb.Pod, Pool: sb.Pool.Name, ID: sb.ID})
		switch {
		case sb.Phase == Running:
			c.running(sb)
		case abandoned:
			c.emit(WriteObject{Sandbox: sb.Sandbox})
		default:
			c.emit(WriteObject{Sandbox: sb.Sandbox})
			c.emit(StartSandbox{sb.Sandbox})
		}
	}
	if abandoned {
		for _, sb := range fit {
			c.startRelease(sb, because(ReasonCanceled))
		}
		c.emit(ClaimCanceled{req.pool.Key})
		return
	}
	c.emit(ClaimGranted{Pool: req.pool.Key, Waited: req.waited, Wait: c.now.Boot - req.since})
	c.answer(id)
}

// notGrantedFor returns why a durable sandbox is not granted; zero: it is.
func (c *Core) notGrantedFor(sb *sandbox) Cause {
	p := c.pods[sb.Pod]
	cause, _ := p.unfit(sb)
	switch {
	case sb.doomed != nil:
		return *sb.doomed
	case cause == (Cause{}) && (p.tainted || p.quarantined):
		return because(ReasonAddressShared)
	}
	return cause
}

// dropUngranted releases a sandbox that its claim does not get. The key of the claim does not stand for it.
func (c *Core) dropUngranted(sb *sandbox, cause Cause) {
	sb.IdempotencyKey, sb.Batch = "", ""
	c.sandboxes.live.remove(sb) // the claim counts for its team, or others of it do
	c.lost(sb, cause)
}

// tryAgain returns a claim that got too few sandboxes to its place in the line, or refuses it. configured: agents of
// its pods were to be configured.
func (c *Core) tryAgain(cl *claim, configured bool) {
	req := &cl.Request
	if configured {
		req.failures++
		for _, x := range c.claims.ExpireBound(cl, c.now.Boot) {
			c.emit(req.refusal(x.Token, NotConfigured))
		}
	}
	switch {
	case cl.Callers() == 0:
		c.claims.Drop(cl)
		c.emit(ClaimCanceled{req.pool.Key})
	case req.failures == maxFailures:
		c.refuse(cl, NotConfigured)
	case !req.pool.known || req.pool.Deleting:
		c.refuse(cl, NoPool)
	case configured && c.closing:
		c.refuse(cl, Ending)
	default:
		c.free(req.pool.comesBack(cl))
	}
}

// running sends the route of a sandbox to the routers.
func (c *Core) running(sb *sandbox) {
	c.markRunning(sb, c.now.Boot, activity.Claim)
	c.emit(WriteObject{Sandbox: sb.Sandbox})
	c.routers.sendRoute(sb)
	c.emit(SandboxReady{sb.Sandbox})
}

// answer answers the callers of grants, as far as its sandboxes have started. It releases those of a
// batch that has failed.
func (c *Core) answer(grants ...string) {
	by := c.now.Boot
	if c.closing {
		by = claims.All
	}
	for _, grant := range grants {
		for _, sb := range c.claims.answer(grant, by) {
			c.startRelease(sb, because(ReasonIncomplete))
		}
	}
}

// startDone acts on the outcome of the postStart hook.
func (c *Core) startDone(ev Started) {
	sb := c.sandboxes.byID[ev.ID]
	if sb == nil || sb.Phase != Starting || sb.readying {
		return
	}
	if !ev.OK {
		c.startRelease(sb, Cause{Reason: ReasonStartFailed, Message: ev.Why})
		return
	}
	sb.readying, sb.StartedAt = true, c.now.Wall
	ready := &SandboxFact{Sandbox: sb.next()}
	c.outbox.Commit(c.now.Boot, ready, true, func(Revision, time.Duration) {
		sb.readying = false
		sb.Revision, sb.EndAt = ready.Revision, ready.EndAt
		if sb.Phase != Starting { // it is being released
			c.emit(WriteObject{Sandbox: sb.Sandbox})
			return
		}
		sb.Phase = Running
		c.running(sb)
		c.answer(sb.Grant())
	})
}
