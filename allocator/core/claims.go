package core

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/api/activity"
)

// The claims: see package claims. Here they get pods, sandboxes and answers.

type claim = claims.Claim[claimState]

// claimState is what a claim asks for, and what it has got so far.
type claimState struct {
	pool     *pool
	binding  Binding
	lifetime time.Duration
	idle     *time.Duration // nil: what the pool says
	minBytes *uint64        // the same
	pod      *pod           // while it is bound
	fact     *pendingFact   // the same
}

func (b Binding) claimKey() claims.Key { return claims.Key{Team: b.Team, Key: b.IdempotencyKey} }

func (c *Core) claim(ev Claim) {
	caller := claims.Caller{Token: ev.Token, Until: c.now.Boot + ev.Wait}
	if k := c.claims.Of(ev.Binding.claimKey()); k != nil {
		c.claimAgain(ev, caller, k)
		return
	}
	pool := c.pools.byKey[ev.Pool]
	quarantine := c.routers.members.Quarantine(c.now.Boot)
	switch {
	case pool == nil || !pool.known || pool.Deleting:
		c.emit(ClaimRefused{Token: ev.Token, Why: NoPool})
	case c.pressure || len(c.outbox.pending) >= maxPendingFacts:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	case pool.queue.Len() == 0 && quarantine > ev.Wait:
		c.emit(ClaimRefused{Token: ev.Token, Why: Quarantined, Wait: quarantine})
	case pool.queue.Len() == 0 && (pool.line.Callers() >= c.cfg.MaxWaiting || pool.hopeless() || ev.Wait <= 0):
		c.emit(ClaimRefused{Token: ev.Token, Why: PoolEmpty, Counts: pool.counts()})
	default:
		c.claims.Add(pool.line, caller, ev.Binding.claimKey(), ev.Binding.RequestHash, claimState{
			pool: pool, binding: ev.Binding, lifetime: ev.Lifetime, idle: ev.IdleTimeout, minBytes: ev.MinBytes,
		})
		pool.touch()
	}
}

// claimAgain answers a claim whose idempotency key was used before.
func (c *Core) claimAgain(ev Claim, caller claims.Caller, k *claims.Holder[claimState]) {
	switch sb := c.sandboxes.byID[k.Sandbox]; {
	case k.Hash != ev.Binding.RequestHash:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyReused})
	case k.Claim != nil && k.Claim.Waits() && k.Claim.Request.pool.line.Callers() >= c.cfg.MaxWaiting:
		c.emit(ClaimRefused{Token: ev.Token, Why: PoolEmpty, Counts: k.Claim.Request.pool.counts()})
	case k.Claim != nil && !k.Claim.Waits() && k.Claim.Callers() >= c.cfg.MaxWaiting:
		// Claims that have a pod are as many as pods at most. So only their callers are bounded.
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	case k.Claim != nil:
		c.claims.Join(k.Claim, caller)
	case sb.Phase == Running || sb.Phase == Starting && c.closing:
		c.emit(Claimed{Token: ev.Token, Sandbox: sb.Sandbox})
	case sb.Phase == Released || sb.Phase == Ended:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyEnded, Sandbox: sb.Sandbox})
	case c.claims.CountAwaiting(sb.ID) >= c.cfg.MaxWaiting:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	default: // wait until its start or release is durable
		c.claims.Await(sb.ID, caller)
	}
}

// serve gives warm pods to the claims that wait, in the order in which they came.
func (c *Core) serve(pool *pool) {
	for cl := pool.line.First(); cl != nil; cl = pool.line.First() {
		switch key, ok := pool.queue.Next(); {
		case ok:
			c.bind(cl, c.pods[key])
		case c.closing:
			c.refuse(cl, Ending)
		default:
			return
		}
	}
}

// bind gives a pod to a claim under an ID that was never used, and journals it.
func (c *Core) bind(cl *claim, p *pod) {
	req := &cl.Request
	cl.Bind()
	p.pool.queue.Passed(p.seen.Key)
	p.enter(podClaiming, c.now.Boot)
	req.binding.ID, req.binding.ClaimedAt = c.cfg.NewID(), c.now.Wall
	if req.lifetime > 0 {
		req.binding.EndAt = c.now.Wall.Add(req.lifetime)
	}
	pool := p.pool
	req.binding.IdleTimeout, req.binding.MinBytes = pool.IdleTimeout, pool.MinBytes
	if req.idle != nil {
		req.binding.IdleTimeout = *req.idle
	}
	if req.minBytes != nil {
		req.binding.MinBytes = *req.minBytes
	}
	req.binding.LifetimeEnd, req.binding.StartBy = time.Time{}, time.Time{}
	if pool.MaxLifetime > 0 {
		req.binding.LifetimeEnd = c.now.Wall.Add(pool.MaxLifetime)
	}
	if pool.PostStart && pool.StartupTimeout > 0 {
		req.binding.StartBy = c.now.Wall.Add(pool.StartupTimeout)
	}
	sb := &Sandbox{
		Binding: req.binding, Pool: p.pool.Key, Pod: p.seen.Key, IP: p.seen.IP,
		DefaultPort: p.pool.DefaultPort, Ports: p.pool.Ports, Restarts: p.seen.Restarts, Phase: Running,
	}
	if p.pool.PostStart {
		sb.Phase = Starting
	}
	p.claim, req.pod = cl, p
	req.fact = c.outbox.commit(Fact{Sandbox: sb}, true, func(f Fact, _ time.Duration) { c.claimed(cl, f) })
}

// callOff takes the claim off a pod, before it was handed to a Write. takeBack also returns it to its
// place in the line.
func (p *pod) callOff() (cl *claim) {
	cl = p.claim
	cl.Request.fact.withdrawn = true
	p.claim, cl.Request.pod, cl.Request.fact = nil, nil, nil
	return cl
}

func (p *pod) takeBack() {
	p.callOff().Return()
	p.pool.touch()
}

func (c *Core) claimAbandoned(token uint64) {
	cl, id := c.claims.Abandon(token)
	switch sb := c.sandboxes.byID[id]; {
	case cl != nil && cl.Waits():
		c.claims.Drop(cl)
	case cl != nil && !cl.Request.fact.handed: // a claim that was handed to a Write goes on
		p := cl.Request.pod
		c.claims.Drop(p.callOff())
		p.enter(podPending, c.now.Boot)
		c.consider(p) // back to its place in the queue
	case sb != nil && sb.IdempotencyKey == "" && sb.Phase == Starting:
		c.startRelease(sb, ReasonAbandoned)
	}
}

// refuse answers all callers of a claim.
func (c *Core) refuse(cl *claim, why Refusal) {
	for _, x := range c.claims.Drop(cl) {
		c.emit(ClaimRefused{Token: x.Token, Why: why, Counts: cl.Request.pool.counts()})
	}
}

// claimed acts on a committed claim.
func (c *Core) claimed(cl *claim, f Fact) {
	sb, pool := &sandbox{Sandbox: *f.Sandbox}, cl.Request.pool
	cl.Request.pod, cl.Request.fact = nil, nil
	if pool.known {
		sb.takePorts(pool) // they may have changed while the claim was written
	}
	c.sandboxes.add(sb)
	c.addRoutes(sb)
	p := c.pods[sb.Pod]
	if p != nil {
		p.claim, p.sandbox = nil, sb
		p.enter(podClaimed, c.now.Boot)
	}
	sb.setTimes(c.now)
	c.schedule(sb)
	reason := p.unfit(sb)
	if reason == "" && (p.tainted || p.quarantined) {
		reason = ReasonAddressShared
	}
	if reason != "" {
		// The pod ended while the claim was written. The callers get another sandbox at their
		// place, and their key stands for that one. So this sandbox has no key, and its object
		// is written only with its release.
		sb.IdempotencyKey = ""
		c.lost(sb, reason)
		switch {
		case cl.Callers() == 0:
			c.claims.Drop(cl)
		case !pool.known || pool.Deleting:
			c.refuse(cl, NoPool)
		default:
			cl.Return()
			pool.touch()
		}
		return
	}
	abandoned := cl.Callers() == 0 && sb.IdempotencyKey == ""
	c.claims.Grant(cl, sb.ID)
	c.emit(LabelPod{Pod: sb.Pod, Pool: sb.Pool.Name, ID: sb.ID})
	if sb.Phase == Starting {
		c.emit(WriteObject{Sandbox: sb.Sandbox})
		if c.closing {
			c.answerCallers(sb, claims.All)
		}
		if !abandoned {
			c.emit(StartSandbox{sb.Sandbox})
		}
	} else {
		c.running(sb)
	}
	if abandoned {
		c.startRelease(sb, ReasonAbandoned)
	}
}

// running sends the route of a sandbox to the routers and answers its callers.
func (c *Core) running(sb *sandbox) {
	c.markRunning(sb, c.now.Boot, activity.Claim)
	c.emit(WriteObject{Sandbox: sb.Sandbox})
	c.routers.sendRoute(sb)
	c.emit(SandboxReady{sb.Sandbox})
	c.answerCallers(sb, claims.All)
}

// answerCallers answers the callers of a sandbox whose wait is over by a time.
func (c *Core) answerCallers(sb *sandbox, by time.Duration) {
	for _, x := range c.claims.Answer(sb.ID, by) {
		c.emit(Claimed{Token: x.Token, Sandbox: sb.Sandbox})
	}
}

// answerStarting answers the callers whose wait is over by a time with a sandbox that is still
// starting.
func (c *Core) answerStarting(by time.Duration) {
	for _, id := range c.claims.Awaited() {
		if sb := c.sandboxes.byID[id]; sb.Phase == Starting {
			c.answerCallers(sb, by)
		}
	}
}

// close ends all waits, because this leader is about to end.
func (c *Core) close() {
	c.closing = true
	for _, pool := range c.pools.byKey {
		pool.touch()
	}
	c.answerStarting(claims.All)
}

// startDone acts on the outcome of the postStart hook.
func (c *Core) startDone(ev Started) {
	sb := c.sandboxes.byID[ev.ID]
	if sb == nil || sb.Phase != Starting || sb.readying {
		return
	}
	if !ev.OK {
		c.startRelease(sb, ReasonStartFailed)
		return
	}
	sb.readying = true
	ready := sb.next()
	c.outbox.commit(Fact{Sandbox: &ready}, true, func(f Fact, _ time.Duration) { c.ready(sb, f) })
}

// ready acts on a committed start.
func (c *Core) ready(sb *sandbox, f Fact) {
	sb.readying = false
	sb.Revision, sb.EndAt = f.Revision, f.Sandbox.EndAt
	if sb.Phase != Starting { // it is being released
		c.emit(WriteObject{Sandbox: sb.Sandbox})
		return
	}
	sb.Phase = Running
	c.running(sb)
}
