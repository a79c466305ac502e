package core

import (
	"container/list"
	"crypto/sha256"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// claim is a claim of one caller, or of several with one idempotency key.
type claim struct {
	number   uint64 // in the order of arrival
	callers  []caller
	pool     *pool
	binding  Binding
	lifetime time.Duration
	idle     *time.Duration // nil: what the pool says
	minBytes *uint64        // the same
	elem     *list.Element  // in the pool's waiting, while it has no pod
	pod      *pod           // from then on
	fact     *pendingFact
}

// claimKey is an idempotency key of a team.
type claimKey struct{ team, key string }

// keyed is what an idempotency key stands for: a claim, and later its sandbox.
type keyed struct {
	hash    [sha256.Size]byte
	claim   *claim
	sandbox *sandbox
}

// caller waits for a sandbox, until its deadline on the boot clock.
type caller struct {
	token    uint64
	deadline time.Duration
}

func (b Binding) claimKey() claimKey { return claimKey{b.Team, b.IdempotencyKey} }

func (c *Core) claim(ev Claim) {
	if ev.Binding.IdempotencyKey != "" {
		if k := c.keys[ev.Binding.claimKey()]; k != nil {
			c.claimAgain(ev, k)
			return
		}
	}
	pool := c.pools.byKey[ev.Pool]
	switch {
	case pool == nil || !pool.known || pool.Deleting:
		c.emit(ClaimRefused{Token: ev.Token, Why: NoPool})
		return
	case c.pressure || len(c.outbox.pending) >= maxPendingFacts:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
		return
	case pool.queue.Len() == 0 && c.routers.members.Quarantine(c.now.Boot) > ev.Wait:
		c.emit(ClaimRefused{Token: ev.Token, Why: Quarantined, Wait: c.routers.members.Quarantine(c.now.Boot)})
		return
	case pool.queue.Len() == 0 && (pool.callers >= c.cfg.MaxWaiting || pool.hopeless() || ev.Wait <= 0):
		c.emit(ClaimRefused{Token: ev.Token, Why: PoolEmpty, Counts: pool.counts()})
		return
	}
	c.claimNumber++
	cl := &claim{
		number: c.claimNumber, callers: []caller{{ev.Token, c.now.Boot + ev.Wait}}, pool: pool,
		binding: ev.Binding, lifetime: ev.Lifetime, idle: ev.IdleTimeout, minBytes: ev.MinBytes,
	}
	c.claims[ev.Token] = cl
	if cl.binding.IdempotencyKey != "" {
		c.keys[cl.binding.claimKey()] = &keyed{hash: cl.binding.RequestHash, claim: cl}
	}
	pool.line(cl)
}

// claimAgain answers a claim whose idempotency key was used before.
func (c *Core) claimAgain(ev Claim, k *keyed) {
	switch sb := k.sandbox; {
	case k.hash != ev.Binding.RequestHash:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyReused})
	case k.claim != nil:
		// Claims that have a pod are as many as pods at most. So only their callers are bounded.
		pool := k.claim.pool
		switch {
		case k.claim.elem != nil && pool.callers >= c.cfg.MaxWaiting:
			c.emit(ClaimRefused{Token: ev.Token, Why: PoolEmpty, Counts: pool.counts()})
			return
		case k.claim.elem == nil && len(k.claim.callers) >= c.cfg.MaxWaiting:
			c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
			return
		}
		k.claim.callers = append(k.claim.callers, caller{ev.Token, c.now.Boot + ev.Wait})
		c.claims[ev.Token] = k.claim
		if k.claim.elem != nil {
			pool.callers++
		}
	case sb.Phase == Running:
		c.emit(Claimed{Token: ev.Token, Sandbox: sb.Sandbox})
	case sb.Phase == Starting && c.closing:
		c.emit(Claimed{Token: ev.Token, Sandbox: sb.Sandbox})
	case (sb.Phase == Starting || sb.Phase == Releasing) && len(sb.callers) >= c.cfg.MaxWaiting:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	case sb.Phase == Starting || sb.Phase == Releasing: // wait until its start or release is durable
		sb.callers = append(sb.callers, caller{ev.Token, c.now.Boot + ev.Wait})
		c.starting[sb] = struct{}{}
	default:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyEnded, Sandbox: sb.Sandbox})
	}
}

// hopeless reports whether no pod of the pool will become warm, unless a release makes room.
func (pool *pool) hopeless() bool {
	return pool.spec().Wanted(pool.sum(podClaiming)+pool.sum(podClaimed)) == 0 && pool.sum(podPending) == 0 && len(pool.creating) == 0 && pool.queue.Len() == 0
}

// serve gives warm pods to the claims that wait, in the order in which they came.
func (c *Core) serve(pool *pool) {
	for !c.recovering && pool.waiting.Len() > 0 {
		cl := pool.waiting.Front().Value.(*claim)
		switch key, ok := pool.queue.Next(); {
		case ok:
			pool.unline(cl)
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
	p.pool.queue.Passed(p.seen.Key)
	p.enter(podClaiming, c.now.Boot)
	cl.binding.ID, cl.binding.ClaimedAt = c.cfg.NewID(), c.now.Wall
	if cl.lifetime > 0 {
		cl.binding.EndAt = c.now.Wall.Add(cl.lifetime)
	}
	pool := p.pool
	cl.binding.IdleTimeout, cl.binding.MinBytes = pool.IdleTimeout, pool.MinBytes
	if cl.idle != nil {
		cl.binding.IdleTimeout = *cl.idle
	}
	if cl.minBytes != nil {
		cl.binding.MinBytes = *cl.minBytes
	}
	cl.binding.LifetimeEnd, cl.binding.StartBy = time.Time{}, time.Time{}
	if pool.MaxLifetime > 0 {
		cl.binding.LifetimeEnd = c.now.Wall.Add(pool.MaxLifetime)
	}
	if pool.PostStart && pool.StartupTimeout > 0 {
		cl.binding.StartBy = c.now.Wall.Add(pool.StartupTimeout)
	}
	sb := &Sandbox{
		Binding: cl.binding, Pool: p.pool.Key, Pod: p.seen.Key, IP: p.seen.IP,
		DefaultPort: p.pool.DefaultPort, Ports: p.pool.Ports, Restarts: p.seen.Restarts, Phase: Running,
	}
	if p.pool.PostStart {
		sb.Phase = Starting
	}
	p.claim, cl.pod = cl, p
	cl.fact = c.outbox.commit(Fact{Sandbox: sb}, true, func(f Fact, _ time.Duration) { c.claimed(cl, f) })
}

// takeBack withdraws a binding that was not handed to a Write. The claim returns to its place in
// the line.
func (cl *claim) takeBack() {
	cl.callOff()
	cl.pool.line(cl)
}

// callOff takes a claim off its pod, before it was handed to a Write.
func (cl *claim) callOff() {
	cl.fact.withdrawn = true
	cl.pod.claim = nil
	cl.pod, cl.fact = nil, nil
}

// line puts a claim into the line of its pool, ordered by arrival. unline takes it out.
func (pool *pool) line(cl *claim) {
	pool.touch()
	pool.callers += len(cl.callers)
	if last := pool.waiting.Back(); last == nil || last.Value.(*claim).number < cl.number {
		cl.elem = pool.waiting.PushBack(cl)
		return
	}
	at := pool.waiting.Front()
	for at.Value.(*claim).number < cl.number {
		at = at.Next()
	}
	cl.elem = pool.waiting.InsertBefore(cl, at)
}

func (pool *pool) unline(cl *claim) {
	pool.waiting.Remove(cl.elem)
	cl.elem = nil
	pool.callers -= len(cl.callers)
}

func (c *Core) claimAbandoned(token uint64) {
	if cl := c.claims[token]; cl != nil {
		delete(c.claims, token)
		cl.callers = slices.DeleteFunc(cl.callers, func(x caller) bool { return x.token == token })
		if cl.elem != nil {
			cl.pool.callers--
		}
		switch {
		case len(cl.callers) > 0:
		case cl.elem != nil: // it waits
			cl.pool.unline(cl)
			c.dropClaim(cl)
		case !cl.fact.handed:
			p := cl.pod
			cl.callOff()
			c.dropClaim(cl)
			p.enter(podPending, c.now.Boot)
			c.consider(p) // back to its place in the queue
		}
		return // a claim that was handed to a Write goes on
	}
	for sb := range c.starting {
		n := len(sb.callers)
		sb.callers = slices.DeleteFunc(sb.callers, func(x caller) bool { return x.token == token })
		if len(sb.callers) == n {
			continue
		}
		if len(sb.callers) == 0 {
			delete(c.starting, sb)
			if sb.IdempotencyKey == "" && sb.Phase == Starting {
				c.startRelease(sb, ReasonAbandoned)
			}
		}
		return
	}
}

// dropClaim forgets a claim that got no sandbox.
func (c *Core) dropClaim(cl *claim) {
	for _, x := range cl.callers {
		delete(c.claims, x.token)
	}
	if cl.binding.IdempotencyKey != "" {
		delete(c.keys, cl.binding.claimKey())
	}
}

// refuse answers all callers of a claim that waits.
func (c *Core) refuse(cl *claim, why Refusal) {
	cl.pool.unline(cl)
	for _, x := range cl.callers {
		c.emit(ClaimRefused{Token: x.token, Why: why, Counts: cl.pool.counts()})
	}
	c.dropClaim(cl)
}

// expireWaiting refuses the callers whose wait is over.
func (c *Core) expireWaiting(pool *pool) {
	for e := pool.waiting.Front(); e != nil; {
		cl := e.Value.(*claim)
		e = e.Next()
		late := func(x caller) bool { return c.now.Boot >= x.deadline }
		if !slices.ContainsFunc(cl.callers, func(x caller) bool { return !late(x) }) {
			c.refuse(cl, PoolEmpty)
			continue
		}
		cl.callers = slices.DeleteFunc(cl.callers, func(x caller) bool {
			if late(x) {
				delete(c.claims, x.token)
				pool.callers--
				c.emit(ClaimRefused{Token: x.token, Why: PoolEmpty, Counts: pool.counts()})
			}
			return late(x)
		})
	}
}

// claimed acts on a committed claim.
func (c *Core) claimed(cl *claim, f Fact) {
	sb := &sandbox{Sandbox: *f.Sandbox}
	if cl.pool.known {
		sb.takePorts(cl.pool) // they may have changed while the claim was written
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
		cl.pod, cl.fact = nil, nil
		if len(cl.callers) == 0 {
			c.dropClaim(cl)
			return
		}
		cl.pool.line(cl)
		if pool := cl.pool; !pool.known || pool.Deleting {
			c.refuse(cl, NoPool)
		}
		return
	}
	for _, x := range cl.callers {
		delete(c.claims, x.token)
	}
	sb.callers = cl.callers
	keyed := sb.IdempotencyKey != ""
	abandoned := len(sb.callers) == 0 && !keyed
	if keyed {
		k := c.keys[sb.claimKey()]
		k.claim, k.sandbox = nil, sb
	}
	c.emit(LabelPod{Pod: sb.Pod, Pool: sb.Pool.Name, ID: sb.ID})
	if sb.Phase == Starting {
		c.emit(WriteObject{Sandbox: sb.Sandbox})
		if c.closing {
			c.answerCallers(sb, Claimed{Sandbox: sb.Sandbox})
		}
		if len(sb.callers) > 0 {
			c.starting[sb] = struct{}{}
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
	c.answerCallers(sb, Claimed{Sandbox: sb.Sandbox})
}

func (c *Core) answerCallers(sb *sandbox, with Effect) {
	for _, x := range sb.callers {
		switch e := with.(type) {
		case Claimed:
			e.Token = x.token
			c.emit(e)
		case ClaimRefused:
			e.Token = x.token
			c.emit(e)
		}
	}
	sb.callers = nil
	delete(c.starting, sb)
}

// close ends all waits, because this leader is about to end.
func (c *Core) close() {
	c.closing = true
	for _, pool := range c.pools.byKey {
		pool.touch()
	}
	for _, sb := range c.sortedStarting() {
		if sb.Phase == Starting {
			c.answerCallers(sb, Claimed{Sandbox: sb.Sandbox})
		}
	}
}

// answerStarting answers the callers whose wait is over with a sandbox that is still starting.
func (c *Core) answerStarting() {
	for _, sb := range c.sortedStarting() {
		sb.callers = slices.DeleteFunc(sb.callers, func(x caller) bool {
			if c.now.Boot < x.deadline || sb.Phase != Starting {
				return false
			}
			c.emit(Claimed{Token: x.token, Sandbox: sb.Sandbox})
			return true
		})
		if len(sb.callers) == 0 {
			delete(c.starting, sb)
		}
	}
}

// sortedStarting lists the starting sandboxes that have callers, by ID.
func (c *Core) sortedStarting() []*sandbox {
	return slices.SortedFunc(maps.Keys(c.starting), func(a, b *sandbox) int { return strings.Compare(a.ID, b.ID) })
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

// keyEnds begins the time for which the idempotency key of an ended sandbox still holds.
func (c *Core) keyEnds(sb *sandbox) {
	if sb.IdempotencyKey != "" && sb.keyElem == nil {
		sb.keyElem = c.keysEnded.PushBack(sb)
	}
}

// forgetKeys drops the idempotency keys whose time is over.
func (c *Core) forgetKeys() {
	for e := c.keysEnded.Front(); e != nil; e = c.keysEnded.Front() {
		sb := e.Value.(*sandbox)
		if c.now.Boot-sb.endedAt < c.cfg.KeepKeys {
			return
		}
		c.dropKey(sb)
	}
}

func (c *Core) dropKey(sb *sandbox) {
	if sb.keyElem == nil {
		return
	}
	c.keysEnded.Remove(sb.keyElem)
	sb.keyElem = nil
	if k := c.keys[sb.claimKey()]; k != nil && k.sandbox == sb {
		delete(c.keys, sb.claimKey())
	}
	c.letGo(sb)
}
