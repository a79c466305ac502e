package core

import (
	"cmp"
	"container/list"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// Back-off of pod creation after a failure.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// pool is a pool and its pods. A pool that has pods is kept while its object does not exist, or was
// not seen yet.
type pool struct {
	Pool
	known    bool     // its object exists
	list     *[]*pool // Core.unsettled
	touched  bool     // it is on that list
	drained  bool     // PoolDrained was emitted
	pods     map[*pod]struct{}
	queue    *warm.Queue[PodKey]
	waiting  *list.List // of *claim without a pod, in the order they came
	callers  int        // of those claims: claims with one idempotency key have several
	creating map[string]struct{}
	// again are the names of pods whose creation failed. They are used before new names, so that
	// a pod that was created although the call failed is not created twice.
	again []string
	// n counts pods by phase, by whether they are outdated, and stranded.
	n [podPhases][2][2]int

	createPause time.Duration
	retryAt     time.Duration // boot clock; 0: no retry pending
	backOff     backOff       // of pods that were made
}

func (p *pool) counts() Counts {
	return Counts{
		Pending:   p.sum(podPending) + len(p.creating),
		Warm:      p.sum(podWarm),
		Claimed:   p.sum(podClaiming) + p.sum(podClaimed),
		Releasing: p.sum(podReleased) + p.sum(podDeleting),
		Waiting:   p.callers,
	}
}

// sum is how many pods are in a phase.
func (p *pool) sum(phase podPhase) int { return p.outdated(phase) + p.current(phase) }

// outdated and current are how many of them were created from an older template, and from the
// current one.
func (p *pool) outdated(phase podPhase) int { return p.n[phase][1][0] + p.n[phase][1][1] }
func (p *pool) current(phase podPhase) int  { return p.n[phase][0][0] + p.n[phase][0][1] }

// touch has a pool settled at the end of the step, because something has changed on which that
// depends: its object, its pods, the claims that wait, or the time.
func (p *pool) touch() {
	if !p.touched {
		p.touched = true
		*p.list = append(*p.list, p)
	}
}

// settlePools gives pods to the claims that wait, and brings the number of warm pods to what
// each pool asks for.
func (c *Core) settlePools() {
	if c.recovering {
		return
	}
	for len(c.unsettled) > 0 {
		pools := c.unsettled
		c.unsettled = nil
		slices.SortFunc(pools, byKey)
		for _, p := range pools {
			if c.pools[p.Key] == p {
				c.serve(p)
				c.reconcile(p)
			}
			p.touched = false // what settling it has changed is settled already
		}
	}
}

// count adds d for a pod as it is now.
func (p *pool) count(q *pod, d int) {
	p.touch()
	outdated, stranded := 0, 0
	if q.outdated {
		outdated = 1
	}
	if q.stranded() {
		stranded = 1
	}
	p.n[q.phase][outdated][stranded] += d
}

// poolOf returns the pool of that name. It creates an entry for a pool whose object was not seen,
// because the pods of such a pool must be kept.
func (c *Core) poolOf(key PoolKey) *pool {
	p := c.pools[key]
	if p == nil {
		p = &pool{
			Pool: Pool{Key: key}, pods: map[*pod]struct{}{}, queue: warm.NewQueue[PodKey](), waiting: list.New(),
			creating: map[string]struct{}{}, list: &c.unsettled,
		}
		c.pools[key] = p
	}
	return p
}

// sortedPools lists the pools by namespace and name.
func (c *Core) sortedPools() []*pool {
	all := make([]*pool, 0, len(c.pools))
	for _, p := range c.pools {
		all = append(all, p)
	}
	slices.SortFunc(all, byKey)
	return all
}

func byKey(a, b *pool) int {
	return cmp.Or(strings.Compare(a.Key.Namespace, b.Key.Namespace), strings.Compare(a.Key.Name, b.Key.Name))
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
		p.backOff = backOff{}
		for q := range p.pods {
			q.change(func() { q.outdated = q.seen.Template != p.Template })
		}
	}
	if otherPorts {
		c.pushPorts(p)
	}
	p.touch()
}

func (c *Core) poolGone(key PoolKey) {
	p := c.pools[key]
	if p == nil {
		return
	}
	p.known, p.Deleting = false, true
	p.touch()
}

// reconcile brings the number of warm pods to what the pool asks for.
func (c *Core) reconcile(p *pool) {
	switch {
	case c.recovering:
		return
	case p.Deleting:
		c.drain(p)
		return
	case !p.known: // its object was not seen yet, so nothing is decided about its pods
		if len(p.pods) == 0 {
			delete(c.pools, p.Key)
		}
		return
	case p.Refused:
		c.withhold(p)
		return
	}
	// Stranded pods do not count. They may come back with their node and are a surplus then. A
	// pod that was reached never comes back.
	idle := len(p.creating) + p.n[podPending][0][0] + p.current(podWarm)
	if p.retryAt == 0 {
		missing := p.Warm - idle - p.backOff.held
		if room := p.MaxPods - len(p.pods) - len(p.creating); p.MaxPods > 0 && missing > room {
			c.discardStranded(p, missing-room)
			missing = room
		}
		for range missing {
			name := p.Key.Name + "-" + c.cfg.NewSuffix()
			if len(p.again) > 0 {
				name, p.again = p.again[0], p.again[1:]
			}
			if _, taken := p.creating[name]; taken {
				continue // a name collision; the next settling tries another suffix
			}
			p.creating[name] = struct{}{}
			c.emit(CreatePod{Pool: p.Key, Name: name})
		}
	}
	c.shrink(p, idle)
}

// discardStranded makes room for new pods below MaxPods. It discards as many stranded pods as pods
// are missing, less those that are being deleted already.
func (c *Core) discardStranded(p *pool, most int) {
	most -= p.sum(podDeleting)
	if most <= 0 || p.n[podPending][0][1]+p.n[podPending][1][1] == 0 {
		return
	}
	for _, q := range p.sorted(podPending) {
		// A pod that was reached keeps its address until that is no longer tainted.
		if q.stranded() && !q.reached && most > 0 && p.want() > p.sum(podWarm) {
			c.discard(q)
			most--
		}
	}
}

// shrink discards surplus idle pods in this order: outdated pods that are not ready; outdated warm
// pods as far as current warm pods replace them; current pods that are not ready; the youngest.
func (c *Core) shrink(p *pool, idle int) {
	if p.outdated(podPending) > 0 {
		for _, q := range p.sorted(podPending) {
			if q.outdated {
				c.discard(q)
			}
		}
	}
	want := p.want()
	surplus := min(p.sum(podWarm)-want, p.outdated(podWarm))
	if underWay := len(p.creating) + p.sum(podPending) + p.sum(podDeleting); surplus <= 0 && p.outdated(podWarm) > 0 && p.full() && underWay == 0 {
		surplus = 1 // MaxPods leaves no room for a replacement, so one pod at a time makes room
	}
	if surplus > 0 {
		for _, q := range c.warm(p, func(q *pod) bool { return q.outdated })[:surplus] {
			c.discard(q)
		}
	}
	surplus = idle - want
	if surplus <= 0 {
		return
	}
	for _, q := range p.sorted(podPending) {
		if surplus > 0 && !q.stranded() {
			c.discard(q)
			surplus--
		}
	}
	// Pods that are still being created cannot be discarded.
	surplus = min(surplus, p.current(podWarm)-want)
	if surplus > 0 {
		young := c.warm(p, func(q *pod) bool { return !q.outdated })
		for _, q := range young[len(young)-surplus:] {
			c.discard(q)
		}
	}
}

// withhold discards the idle pods of a pool whose template is refused, except warm pods that were
// created from an earlier template.
func (c *Core) withhold(p *pool) {
	for _, q := range p.sorted(podPending) {
		c.discard(q)
	}
	surplus := p.outdated(podWarm) - p.want()
	for _, q := range c.warm(p, func(*pod) bool { return true }) {
		switch {
		case !q.outdated:
			c.discard(q)
		case surplus > 0:
			c.discard(q)
			surplus--
		}
	}
}

// warm lists the warm pods of a pool that fit, oldest first.
func (c *Core) warm(p *pool, fits func(*pod) bool) (found []*pod) {
	for _, key := range p.queue.ByAge() {
		if q := c.pods[key]; fits(q) {
			found = append(found, q)
		}
	}
	return found
}

// sorted lists the pods in these phases by UID, so that the same events choose the same pods.
func (p *pool) sorted(phases ...podPhase) []*pod {
	found := map[*pod]struct{}{}
	for q := range p.pods {
		if slices.Contains(phases, q.phase) {
			found[q] = struct{}{}
		}
	}
	return sortedPods(found)
}

// drain refuses the claims, releases the sandboxes and discards the pods of a pool that is deleted.
func (c *Core) drain(p *pool) {
	for p.waiting.Len() > 0 {
		c.refuse(p.waiting.Front().Value.(*claim), NoPool)
	}
	if p.sum(podPending)+p.sum(podWarm)+p.sum(podClaimed) > 0 {
		for _, q := range p.sorted(podPending, podWarm, podClaimed) {
			if q.phase == podClaimed {
				c.startRelease(q.sandbox, ReasonPoolDeleted)
			} else {
				c.discard(q)
			}
		}
	}
	p.again, p.backOff = nil, backOff{}
	switch {
	case len(p.pods)+len(p.creating) > 0:
	case !p.known:
		delete(c.pools, p.Key)
	case !p.drained:
		p.drained = true
		c.emit(PoolDrained{p.Key})
	}
}

// want is how many warm pods the pool should have, as far as MaxPods leaves room beside the pods in
// use.
func (p *pool) want() int {
	if p.MaxPods == 0 {
		return p.Warm
	}
	return max(0, min(p.Warm, p.MaxPods-p.sum(podClaiming)-p.sum(podClaimed)))
}

// full reports whether MaxPods allows no more pods.
func (p *pool) full() bool { return p.MaxPods > 0 && len(p.pods)+len(p.creating) >= p.MaxPods }

// made notes that a pod of that name exists.
func (p *pool) made(name string) {
	delete(p.creating, name)
	p.again = slices.DeleteFunc(p.again, func(n string) bool { return n == name })
	p.createPause = 0
}

func (c *Core) createFailed(key PoolKey, name string) {
	p := c.pools[key]
	if p == nil {
		return
	}
	if _, asked := p.creating[name]; !asked {
		return // the pod was created all the same, and was seen
	}
	delete(p.creating, name)
	p.again = append(p.again, name)
	if p.retryAt == 0 { // failures side by side count once
		p.createPause = min(max(2*p.createPause, retryFirst), retryMost)
		p.retryAt = c.now.Boot + p.createPause
	}
	p.touch()
}
