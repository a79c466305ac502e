package core

import (
	"container/list"
	"slices"
	"strings"
	"time"
)

// Back-off of pod creation after a failure.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// pool is a pool and its pods. A pool that was deleted, or not seen yet, but
// still has pods is kept without a spec.
type pool struct {
	Pool
	known    bool // its object exists
	drained  bool // PoolDrained was emitted
	pods     map[*pod]struct{}
	queue    *list.List // of *pod: warm, oldest first
	creating map[string]struct{}
	// again are the names of pods whose creation failed. They are asked for
	// again before new ones: one that was made all the same is not made twice.
	again []string
	n     [podPhases]int
	// outdated counts pending and warm pods of an older template.
	outdatedPending, outdatedWarm int

	backOff time.Duration
	retryAt time.Duration // boot clock; 0: no retry pending
}

func (p *pool) counts() Counts {
	return Counts{
		Pending:   p.n[podPending] + len(p.creating),
		Warm:      p.n[podWarm],
		Claimed:   p.n[podBinding] + p.n[podClaimed],
		Releasing: p.n[podReleased] + p.n[podDeleting],
	}
}

// poolOf returns the pool of that name, making a place for one whose object was
// not seen: its pods must not be forgotten.
func (c *Core) poolOf(key PoolKey) *pool {
	p := c.pools[key]
	if p == nil {
		p = &pool{
			Pool: Pool{Key: key}, pods: map[*pod]struct{}{}, queue: list.New(),
			creating: map[string]struct{}{},
		}
		c.pools[key] = p
	}
	return p
}

func (c *Core) poolSeen(spec Pool) {
	p := c.poolOf(spec.Key)
	changed := p.Template != spec.Template
	otherPorts := p.DefaultPort != spec.DefaultPort || !slices.Equal(p.Ports, spec.Ports)
	p.Pool, p.known = spec, true
	if !spec.Deleting {
		p.drained = false
	}
	if changed {
		p.outdatedPending, p.outdatedWarm = 0, 0
		for q := range p.pods {
			q.outdated = q.seen.Template != p.Template
			p.count(q, +1, false)
		}
	}
	if otherPorts {
		c.pushPorts(p)
	}
	c.reconcile(p)
}

// pushPorts gives the pool's live sandboxes the ports that it asks for now and
// tells all connected routers, one route for each sandbox.
func (c *Core) pushPorts(p *pool) {
	var live []*sandbox
	for q := range p.pods {
		if q.phase == podClaimed {
			live = append(live, q.sandbox)
		}
	}
	// In an order of their own, like pending: the same events say the same.
	slices.SortFunc(live, func(a, b *sandbox) int { return strings.Compare(a.ID, b.ID) })
	for _, s := range live {
		s.takePorts(p)
		c.pushRoute(s)
	}
}

func (c *Core) poolGone(key PoolKey) {
	p := c.pools[key]
	if p == nil {
		return
	}
	p.known, p.Deleting = false, true
	c.reconcile(p)
}

// count adds d for a pod in its present state, to both kinds of counters or
// only to those of outdated pods.
func (p *pool) count(q *pod, d int, phase bool) {
	if phase {
		p.n[q.phase] += d
	}
	if q.outdated {
		switch q.phase {
		case podPending:
			p.outdatedPending += d
		case podWarm:
			p.outdatedWarm += d
		}
	}
}

// reconcile brings the number of warm pods to what the pool asks for.
func (c *Core) reconcile(p *pool) {
	switch {
	case c.recovering:
		return
	case p.Deleting:
		c.drain(p)
		return
	case !p.known: // a pool not seen yet: nothing is decided about its pods
		if len(p.pods) == 0 {
			delete(c.pools, p.Key)
		}
		return
	case p.Refused:
		c.withhold(p)
		return
	}
	idle := len(p.creating) + p.n[podPending] - p.outdatedPending + p.n[podWarm] - p.outdatedWarm
	if p.retryAt == 0 {
		missing := p.Warm - idle
		if p.MaxPods > 0 {
			missing = min(missing, p.MaxPods-len(p.pods)-len(p.creating))
		}
		for range missing {
			name := p.Key.Name + "-" + c.cfg.NewSuffix()
			if len(p.again) > 0 {
				name, p.again = p.again[0], p.again[1:]
			}
			if _, taken := p.creating[name]; taken {
				continue // as good as never; the next event makes up for it
			}
			p.creating[name] = struct{}{}
			c.emit(CreatePod{Pool: p.Key, Name: name})
		}
	}
	c.shrink(p, idle)
}

// shrink deletes idle pods that are too many: outdated ones that are not ready,
// then outdated warm ones as far as current warm ones stand in, then current
// ones that are not ready, then the youngest.
func (c *Core) shrink(p *pool, idle int) {
	if p.outdatedPending > 0 {
		for _, q := range p.pending() {
			if q.outdated {
				c.discard(q)
			}
		}
	}
	want := p.want()
	surplus := min(p.n[podWarm]-want, p.outdatedWarm)
	if underWay := len(p.creating) + p.n[podPending] + p.n[podDeleting]; surplus <= 0 && p.outdatedWarm > 0 && p.full() && underWay == 0 {
		surplus = 1 // no room for a current one to stand in: one makes room at a time
	}
	for e := p.queue.Front(); e != nil && surplus > 0; {
		q := e.Value.(*pod)
		e = e.Next()
		if q.outdated {
			c.discard(q)
			surplus--
		}
	}
	surplus = idle - want
	if surplus <= 0 {
		return
	}
	for _, q := range p.pending() {
		if surplus > 0 {
			c.discard(q)
			surplus--
		}
	}
	// Not more than there are, less those that are still being created.
	surplus = min(surplus, p.n[podWarm]-p.outdatedWarm-want)
	for e := p.queue.Back(); e != nil && surplus > 0; {
		q := e.Value.(*pod)
		e = e.Prev()
		if !q.outdated {
			c.discard(q)
			surplus--
		}
	}
}

// withhold deletes the idle pods of a pool whose template is refused, but for
// warm ones that were made from an earlier template.
func (c *Core) withhold(p *pool) {
	for _, q := range p.pending() {
		c.discard(q)
	}
	surplus := p.outdatedWarm - p.want()
	for e := p.queue.Front(); e != nil; {
		q := e.Value.(*pod)
		e = e.Next()
		switch {
		case !q.outdated:
			c.discard(q)
		case surplus > 0:
			c.discard(q)
			surplus--
		}
	}
}

// pending lists the pods that are not ready, in an order of their own: the same
// events choose the same pods.
func (p *pool) pending() []*pod {
	var all []*pod
	for q := range p.pods {
		if q.phase == podPending {
			all = append(all, q)
		}
	}
	slices.SortFunc(all, func(a, b *pod) int { return strings.Compare(a.seen.Key.Name, b.seen.Key.Name) })
	return all
}

// drain releases and deletes everything of a pool that is going away.
func (c *Core) drain(p *pool) {
	for q := range p.pods {
		switch q.phase {
		case podPending, podWarm:
			c.discard(q)
		case podClaimed:
			c.startRelease(q.sandbox, ReasonPoolDeleted)
		}
	}
	p.again = nil
	switch {
	case len(p.pods)+len(p.creating) > 0:
	case !p.known:
		delete(c.pools, p.Key)
	case !p.drained:
		p.drained = true
		c.emit(PoolDrained{p.Key})
	}
}

// want is how many warm pods the pool is to have, as far as MaxPods leaves room
// beside those that are in use.
func (p *pool) want() int {
	if p.MaxPods == 0 {
		return p.Warm
	}
	return max(0, min(p.Warm, p.MaxPods-p.n[podBinding]-p.n[podClaimed]))
}

// full reports whether MaxPods allows no more pods.
func (p *pool) full() bool { return p.MaxPods > 0 && len(p.pods)+len(p.creating) >= p.MaxPods }

// made notes that a pod of that name exists.
func (p *pool) made(name string) {
	delete(p.creating, name)
	p.again = slices.DeleteFunc(p.again, func(n string) bool { return n == name })
	p.backOff = 0
}

func (c *Core) createFailed(key PoolKey, name string) {
	p := c.pools[key]
	if p == nil {
		return
	}
	if _, asked := p.creating[name]; !asked {
		return // it was made all the same, and has been seen
	}
	delete(p.creating, name)
	p.again = append(p.again, name)
	if p.retryAt == 0 { // failures side by side count once
		p.backOff = min(max(2*p.backOff, retryFirst), retryMost)
		p.retryAt = c.now.Boot + p.backOff
	}
	if p.Deleting {
		c.reconcile(p)
	}
}
