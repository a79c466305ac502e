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
	p := c.pools[ev.Pool]
	switch {
	case p == nil || !p.known || p.Deleting:
		c.emit(ClaimRefused{Token: ev.Token, Why: NoPool})
		return
	case c.pressure || len(c.outbox.pending) >= pendingMost:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
		return
	case p.queue.Len() == 0 && c.Quarantine() > ev.Wait:
		c.emit(ClaimRefused{Token: ev.Token, Why: Quarantined, Wait: c.Quarantine()})
		return
	case p.queue.Len() == 0 && (p.callers >= c.cfg.MaxWaiting || p.hopeless() || ev.Wait <= 0):
		c.emit(ClaimRefused{Token: ev.Token, Why: PoolEmpty, Counts: p.counts()})
		return
	}
	c.claimNumber++
	cl := &claim{
		number: c.claimNumber, callers: []caller{{ev.Token, c.now.Boot + ev.Wait}}, pool: p,
		binding: ev.Binding, lifetime: ev.Lifetime, idle: ev.IdleTimeout, minBytes: ev.MinBytes,
	}
	c.claims[ev.Token] = cl
	if cl.binding.IdempotencyKey != "" {
		c.keys[cl.binding.claimKey()] = &keyed{hash: cl.binding.RequestHash, claim: cl}
	}
	p.line(cl)
}

// claimAgain answers a claim whose idempotency key was used before.
func (c *Core) claimAgain(ev Claim, k *keyed) {
	switch s := k.sandbox; {
	case k.hash != ev.Binding.RequestHash:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyReused})
	case k.claim != nil:
		// Claims that have a pod are as many as pods at most. So only their callers are bounded.
		p, n := k.claim.pool, len(k.claim.callers)
		if k.claim.elem != nil {
			n = p.callers
		}
		if n >= c.cfg.MaxWaiting {
			c.emit(ClaimRefused{Token: ev.Token, Why: PoolEmpty, Counts: p.counts()})
			return
		}
		k.claim.callers = append(k.claim.callers, caller{ev.Token, c.now.Boot + ev.Wait})
		c.claims[ev.Token] = k.claim
		if k.claim.elem != nil {
			p.callers++
		}
	case s.Phase == Running:
		c.emit(Claimed{Token: ev.Token, Sandbox: s.Sandbox})
	case s.Phase == Starting && c.closing:
		c.emit(Claimed{Token: ev.Token, Sandbox: s.Sandbox})
	case (s.Phase == Starting || s.Phase == Releasing) && len(s.callers) >= c.cfg.MaxWaiting:
		c.emit(ClaimRefused{Token: ev.Token, Why: Overloaded})
	case s.Phase == Starting || s.Phase == Releasing: // wait until its start or release is durable
		s.callers = append(s.callers, caller{ev.Token, c.now.Boot + ev.Wait})
		c.starting[s] = struct{}{}
	default:
		c.emit(ClaimRefused{Token: ev.Token, Why: KeyEnded, Sandbox: s.Sandbox})
	}
}

// hopeless reports whether no pod of the pool will become warm, unless a release makes room.
func (p *pool) hopeless() bool {
	return p.want() == 0 && p.sum(podPending) == 0 && len(p.creating) == 0 && p.queue.Len() == 0
}

// serve gives warm pods to the claims that wait, in the order in which they came.
func (c *Core) serve(p *pool) {
	for !c.recovering && p.waiting.Len() > 0 {
		cl := p.waiting.Front().Value.(*claim)
		switch key, ok := p.queue.Next(); {
		case ok:
			p.unline(cl)
			c.bind(cl, c.pods[key])
		case c.closing:
			c.refuse(cl, Ending)
		default:
			return
		}
	}
}

// bind gives a pod to a claim under an ID that was never used, and journals it.
func (c *Core) bind(cl *claim, q *pod) {
	q.pool.queue.Passed(q.seen.Key)
	c.enter(q, podClaiming)
	cl.binding.ID, cl.binding.ClaimedAt = c.cfg.NewID(), c.now.Wall
	if cl.lifetime > 0 {
		cl.binding.EndAt = c.now.Wall.Add(cl.lifetime)
	}
	p := q.pool
	cl.binding.IdleTimeout, cl.binding.MinBytes = p.IdleTimeout, p.MinBytes
	if cl.idle != nil {
		cl.binding.IdleTimeout = *cl.idle
	}
	if cl.minBytes != nil {
		cl.binding.MinBytes = *cl.minBytes
	}
	cl.binding.LifetimeEnd, cl.binding.StartBy = time.Time{}, time.Time{}
	if p.MaxLifetime > 0 {
		cl.binding.LifetimeEnd = c.now.Wall.Add(p.MaxLifetime)
	}
	if p.PostStart && p.StartupTimeout > 0 {
		cl.binding.StartBy = c.now.Wall.Add(p.StartupTimeout)
	}
	s := &Sandbox{
		Binding: cl.binding, Pool: q.pool.Key, Pod: q.seen.Key, IP: q.seen.IP,
		DefaultPort: q.pool.DefaultPort, Ports: q.pool.Ports, Restarts: q.seen.Restarts, Phase: Running,
	}
	if q.pool.PostStart {
		s.Phase = Starting
	}
	q.claim, cl.pod = cl, q
	cl.fact = c.commit(Fact{Sandbox: s}, true, func(f Fact, _ time.Duration) { c.claimed(cl, f) })
}

// takeBack withdraws a binding that was not handed to a Write. The claim returns to its place in
// the line.
func (c *Core) takeBack(cl *claim) {
	c.callOff(cl)
	cl.pool.line(cl)
}

// callOff takes a claim off its pod, before it was handed to a Write.
func (c *Core) callOff(cl *claim) {
	cl.fact.withdrawn = true
	cl.pod.claim = nil
	cl.pod, cl.fact = nil, nil
}

// line puts a claim into the line of its pool, ordered by arrival. unline takes it out.
func (p *pool) line(cl *claim) {
	p.touch()
	p.callers += len(cl.callers)
	if last := p.waiting.Back(); last == nil || last.Value.(*claim).number < cl.number {
		cl.elem = p.waiting.PushBack(cl)
		return
	}
	at := p.waiting.Front()
	for at.Value.(*claim).number < cl.number {
		at = at.Next()
	}
	cl.elem = p.waiting.InsertBefore(cl, at)
}

func (p *pool) unline(cl *claim) {
	p.waiting.Remove(cl.elem)
	cl.elem = nil
	p.callers -= len(cl.callers)
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
			q := cl.pod
			c.callOff(cl)
			c.dropClaim(cl)
			c.enter(q, podPending)
			c.consider(q) // back to its place in the queue
		}
		return // a claim that was handed to a Write goes on
	}
	for s := range c.starting {
		n := len(s.callers)
		s.callers = slices.DeleteFunc(s.callers, func(x caller) bool { return x.token == token })
		if len(s.callers) == n {
			continue
		}
		if len(s.callers) == 0 {
			delete(c.starting, s)
			if s.IdempotencyKey == "" && s.Phase == Starting {
				c.startRelease(s, ReasonAbandoned)
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
func (c *Core) expireWaiting(p *pool) {
	for e := p.waiting.Front(); e != nil; {
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
				p.callers--
				c.emit(ClaimRefused{Token: x.token, Why: PoolEmpty, Counts: p.counts()})
			}
			return late(x)
		})
	}
}

// claimed acts on a committed claim.
func (c *Core) claimed(cl *claim, f Fact) {
	s := &sandbox{Sandbox: *f.Sandbox}
	if cl.pool.known {
		s.takePorts(cl.pool) // they may have changed while the claim was written
	}
	c.add(s)
	q := c.pods[s.Pod]
	if q != nil {
		q.claim, q.sandbox = nil, s
		c.enter(q, podClaimed)
	}
	c.times(s)
	s.at, s.kind = c.now.Boot, activity.Claim
	c.schedule(s)
	reason := q.unfit(s)
	if reason == "" && (q.reached || q.early) {
		reason = ReasonAddressShared
	}
	if reason != "" {
		// The pod ended while the claim was written. The callers get another sandbox at their
		// place, and their key stands for that one. So this sandbox has no key, and its object
		// is written only with its release.
		s.IdempotencyKey = ""
		c.lost(s, reason)
		cl.pod, cl.fact = nil, nil
		if len(cl.callers) == 0 {
			c.dropClaim(cl)
			return
		}
		cl.pool.line(cl)
		if p := cl.pool; !p.known || p.Deleting {
			c.refuse(cl, NoPool)
		}
		return
	}
	for _, x := range cl.callers {
		delete(c.claims, x.token)
	}
	s.callers = cl.callers
	keyed := s.IdempotencyKey != ""
	abandoned := len(s.callers) == 0 && !keyed
	if keyed {
		k := c.keys[s.claimKey()]
		k.claim, k.sandbox = nil, s
	}
	c.emit(LabelPod{Pod: s.Pod, Pool: s.Pool.Name, ID: s.ID})
	if s.Phase == Starting {
		c.emit(Record{Sandbox: s.Sandbox})
		if c.closing {
			c.answerCallers(s, Claimed{Sandbox: s.Sandbox})
		}
		if len(s.callers) > 0 {
			c.starting[s] = struct{}{}
		}
		if !abandoned {
			c.emit(StartSandbox{s.Sandbox})
		}
	} else {
		c.running(s)
	}
	if abandoned {
		c.startRelease(s, ReasonAbandoned)
	}
}

// running sends the route of a sandbox to the routers and answers its callers.
func (c *Core) running(s *sandbox) {
	c.begin(s)
	c.emit(Record{Sandbox: s.Sandbox})
	c.pushRoute(s)
	c.emit(SandboxReady{s.Sandbox})
	c.answerCallers(s, Claimed{Sandbox: s.Sandbox})
}

func (c *Core) answerCallers(s *sandbox, with Effect) {
	for _, x := range s.callers {
		switch e := with.(type) {
		case Claimed:
			e.Token = x.token
			c.emit(e)
		case ClaimRefused:
			e.Token = x.token
			c.emit(e)
		}
	}
	s.callers = nil
	delete(c.starting, s)
}

// close ends all waits, because this leader is about to end.
func (c *Core) close() {
	c.closing = true
	for _, p := range c.pools {
		p.touch()
	}
	for _, s := range c.sortedStarting() {
		if s.Phase == Starting {
			c.answerCallers(s, Claimed{Sandbox: s.Sandbox})
		}
	}
}

// answerStarting answers the callers whose wait is over with a sandbox that is still starting.
func (c *Core) answerStarting() {
	for _, s := range c.sortedStarting() {
		s.callers = slices.DeleteFunc(s.callers, func(x caller) bool {
			if c.now.Boot < x.deadline || s.Phase != Starting {
				return false
			}
			c.emit(Claimed{Token: x.token, Sandbox: s.Sandbox})
			return true
		})
		if len(s.callers) == 0 {
			delete(c.starting, s)
		}
	}
}

// sortedStarting lists the starting sandboxes that have callers, by ID.
func (c *Core) sortedStarting() []*sandbox {
	return slices.SortedFunc(maps.Keys(c.starting), func(a, b *sandbox) int { return strings.Compare(a.ID, b.ID) })
}

// startDone acts on the outcome of the postStart hook.
func (c *Core) startDone(ev Started) {
	s := c.sandboxes[ev.ID]
	if s == nil || s.Phase != Starting || s.readying {
		return
	}
	if !ev.OK {
		c.startRelease(s, ReasonStartFailed)
		return
	}
	s.readying = true
	ready := s.next()
	c.commit(Fact{Sandbox: &ready}, true, func(f Fact, _ time.Duration) { c.ready(s, f) })
}

// ready acts on a committed start.
func (c *Core) ready(s *sandbox, f Fact) {
	s.readying = false
	s.Revision, s.EndAt = f.Revision, f.Sandbox.EndAt
	if s.Phase != Starting { // it is being released
		c.emit(Record{Sandbox: s.Sandbox})
		return
	}
	s.Phase = Running
	c.running(s)
}

// keyEnds begins the time for which the idempotency key of an ended sandbox still holds.
func (c *Core) keyEnds(s *sandbox) {
	if s.IdempotencyKey != "" && s.keyElem == nil {
		s.keyElem = c.keysEnded.PushBack(s)
	}
}

// forgetKeys drops the idempotency keys whose time is over.
func (c *Core) forgetKeys() {
	for e := c.keysEnded.Front(); e != nil; e = c.keysEnded.Front() {
		s := e.Value.(*sandbox)
		if c.now.Boot-s.endedAt < c.cfg.KeepKeys {
			return
		}
		c.dropKey(s)
	}
}

func (c *Core) dropKey(s *sandbox) {
	if s.keyElem == nil {
		return
	}
	c.keysEnded.Remove(s.keyElem)
	s.keyElem = nil
	if k := c.keys[s.claimKey()]; k != nil && k.sandbox == s {
		delete(c.keys, s.claimKey())
	}
	c.letGo(s)
}
