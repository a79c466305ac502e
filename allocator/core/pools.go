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
	firstRetry = time.Second
	maxRetry   = 30 * time.Second
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

func (pool *pool) counts() Counts {
	return Counts{
		Pending:   pool.sum(podPending) + len(pool.creating),
		Warm:      pool.sum(podWarm),
		Claimed:   pool.sum(podClaiming) + pool.sum(podClaimed),
		Releasing: pool.sum(podReleased) + pool.sum(podDeleting),
		Waiting:   pool.callers,
	}
}

// sum is how many pods are in a phase.
func (pool *pool) sum(phase podPhase) int { return pool.outdated(phase) + pool.current(phase) }

// outdated and current are how many of them were created from an older template, and from the
// current one.
func (pool *pool) outdated(phase podPhase) int { return pool.n[phase][1][0] + pool.n[phase][1][1] }
func (pool *pool) current(phase podPhase) int  { return pool.n[phase][0][0] + pool.n[phase][0][1] }

// touch has a pool settled at the end of the step, because something has changed on which that
// depends: its object, its pods, the claims that wait, or the time.
func (pool *pool) touch() {
	if !pool.touched {
		pool.touched = true
		*pool.list = append(*pool.list, pool)
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
		for _, pool := range pools {
			if c.pools[pool.Key] == pool {
				c.serve(pool)
				c.reconcile(pool)
			}
			pool.touched = false // what settling it has changed is settled already
		}
	}
}

// count adds d for a pod as it is now.
func (pool *pool) count(p *pod, d int) {
	pool.touch()
	outdated, stranded := 0, 0
	if p.outdated {
		outdated = 1
	}
	if p.stranded() {
		stranded = 1
	}
	pool.n[p.phase][outdated][stranded] += d
}

// poolOf returns the pool of that name. It creates an entry for a pool whose object was not seen,
// because the pods of such a pool must be kept.
func (c *Core) poolOf(key PoolKey) *pool {
	if c.pools[key] == nil {
		c.pools[key] = &pool{
			Pool: Pool{Key: key}, pods: map[*pod]struct{}{}, queue: warm.NewQueue[PodKey](), waiting: list.New(),
			creating: map[string]struct{}{}, list: &c.unsettled,
		}
	}
	return c.pools[key]
}

// sortedPools lists the pools by namespace and name.
func (c *Core) sortedPools() []*pool {
	all := make([]*pool, 0, len(c.pools))
	for _, pool := range c.pools {
		all = append(all, pool)
	}
	slices.SortFunc(all, byKey)
	return all
}

func byKey(a, b *pool) int {
	return cmp.Or(strings.Compare(a.Key.Namespace, b.Key.Namespace), strings.Compare(a.Key.Name, b.Key.Name))
}

func (c *Core) poolSeen(spec Pool) {
	pool := c.poolOf(spec.Key)
	changed := pool.Template != spec.Template
	otherPorts := pool.DefaultPort != spec.DefaultPort || !slices.Equal(pool.Ports, spec.Ports)
	pool.Pool, pool.known = spec, true
	if !spec.Deleting {
		pool.drained = false
	}
	if changed {
		pool.backOff = backOff{}
		for p := range pool.pods {
			p.recount(func() { p.outdated = p.seen.Template != pool.Template })
		}
	}
	if otherPorts {
		c.pushPorts(pool)
	}
	pool.touch()
}

func (c *Core) poolGone(key PoolKey) {
	pool := c.pools[key]
	if pool == nil {
		return
	}
	pool.known, pool.Deleting = false, true
	pool.touch()
}

// reconcile brings the number of warm pods to what the pool asks for.
func (c *Core) reconcile(pool *pool) {
	switch {
	case c.recovering:
		return
	case pool.Deleting:
		c.drain(pool)
		return
	case !pool.known: // its object was not seen yet, so nothing is decided about its pods
		if len(pool.pods) == 0 {
			delete(c.pools, pool.Key)
		}
		return
	case pool.Refused:
		c.withhold(pool)
		return
	}
	// Stranded pods do not count. They may come back with their node and are a surplus then. A
	// pod that was reached never comes back.
	idle := len(pool.creating) + pool.n[podPending][0][0] + pool.current(podWarm)
	if pool.retryAt == 0 {
		missing := pool.Warm - idle - pool.backOff.held
		if room := pool.MaxPods - len(pool.pods) - len(pool.creating); pool.MaxPods > 0 && missing > room {
			c.retireStranded(pool, missing-room)
			missing = room
		}
		for range missing {
			name := pool.Key.Name + "-" + c.cfg.NewSuffix()
			if len(pool.again) > 0 {
				name, pool.again = pool.again[0], pool.again[1:]
			}
			if _, taken := pool.creating[name]; taken {
				continue // a name collision; the next settling tries another suffix
			}
			pool.creating[name] = struct{}{}
			c.emit(CreatePod{Pool: pool.Key, Name: name})
		}
	}
	c.shrink(pool, idle)
}

// retireStranded makes room for new pods below MaxPods. It retires as many stranded pods as pods
// are missing, less those that are being deleted already.
func (c *Core) retireStranded(pool *pool, most int) {
	most -= pool.sum(podDeleting)
	if most <= 0 || pool.n[podPending][0][1]+pool.n[podPending][1][1] == 0 {
		return
	}
	for _, p := range pool.sorted(podPending) {
		// A pod that was reached keeps its address until that is no longer tainted.
		if p.stranded() && !p.reached && most > 0 && pool.want() > pool.sum(podWarm) {
			c.retire(p)
			most--
		}
	}
}

// shrink retires surplus idle pods in this order: outdated pods that are not ready; outdated warm
// pods as far as current warm pods replace them; current pods that are not ready; the youngest.
func (c *Core) shrink(pool *pool, idle int) {
	if pool.outdated(podPending) > 0 {
		for _, p := range pool.sorted(podPending) {
			if p.outdated {
				c.retire(p)
			}
		}
	}
	want := pool.want()
	surplus := min(pool.sum(podWarm)-want, pool.outdated(podWarm))
	if underWay := len(pool.creating) + pool.sum(podPending) + pool.sum(podDeleting); surplus <= 0 && pool.outdated(podWarm) > 0 && pool.full() && underWay == 0 {
		surplus = 1 // MaxPods leaves no room for a replacement, so one pod at a time makes room
	}
	if surplus > 0 {
		for _, p := range c.warm(pool, func(p *pod) bool { return p.outdated })[:surplus] {
			c.retire(p)
		}
	}
	surplus = idle - want
	if surplus <= 0 {
		return
	}
	for _, p := range pool.sorted(podPending) {
		if surplus > 0 && !p.stranded() {
			c.retire(p)
			surplus--
		}
	}
	// Pods that are still being created cannot be retired.
	surplus = min(surplus, pool.current(podWarm)-want)
	if surplus > 0 {
		young := c.warm(pool, func(p *pod) bool { return !p.outdated })
		for _, p := range young[len(young)-surplus:] {
			c.retire(p)
		}
	}
}

// withhold retires the idle pods of a pool whose template is refused, except warm pods that were
// created from an earlier template.
func (c *Core) withhold(pool *pool) {
	for _, p := range pool.sorted(podPending) {
		c.retire(p)
	}
	surplus := pool.outdated(podWarm) - pool.want()
	for _, p := range c.warm(pool, func(*pod) bool { return true }) {
		switch {
		case !p.outdated:
			c.retire(p)
		case surplus > 0:
			c.retire(p)
			surplus--
		}
	}
}

// warm lists the warm pods of a pool that fit, oldest first.
func (c *Core) warm(pool *pool, fits func(*pod) bool) (found []*pod) {
	for _, key := range pool.queue.ByAge() {
		if p := c.pods[key]; fits(p) {
			found = append(found, p)
		}
	}
	return found
}

// sorted lists the pods in these phases by UID, so that the same events choose the same pods.
func (pool *pool) sorted(phases ...podPhase) []*pod {
	found := map[*pod]struct{}{}
	for p := range pool.pods {
		if slices.Contains(phases, p.phase) {
			found[p] = struct{}{}
		}
	}
	return sortedPods(found)
}

// drain refuses the claims, releases the sandboxes and retires the pods of a pool that is deleted.
func (c *Core) drain(pool *pool) {
	for pool.waiting.Len() > 0 {
		c.refuse(pool.waiting.Front().Value.(*claim), NoPool)
	}
	if pool.sum(podPending)+pool.sum(podWarm)+pool.sum(podClaimed) > 0 {
		for _, p := range pool.sorted(podPending, podWarm, podClaimed) {
			if p.phase == podClaimed {
				c.startRelease(p.sandbox, ReasonPoolDeleted)
			} else {
				c.retire(p)
			}
		}
	}
	pool.again, pool.backOff = nil, backOff{}
	switch {
	case len(pool.pods)+len(pool.creating) > 0:
	case !pool.known:
		delete(c.pools, pool.Key)
	case !pool.drained:
		pool.drained = true
		c.emit(PoolDrained{pool.Key})
	}
}

// want is how many warm pods the pool should have, as far as MaxPods leaves room beside the pods in
// use.
func (pool *pool) want() int {
	if pool.MaxPods == 0 {
		return pool.Warm
	}
	return max(0, min(pool.Warm, pool.MaxPods-pool.sum(podClaiming)-pool.sum(podClaimed)))
}

// full reports whether MaxPods allows no more pods.
func (pool *pool) full() bool {
	return pool.MaxPods > 0 && len(pool.pods)+len(pool.creating) >= pool.MaxPods
}

// made notes that a pod of that name exists.
func (pool *pool) made(name string) {
	delete(pool.creating, name)
	pool.again = slices.DeleteFunc(pool.again, func(n string) bool { return n == name })
	pool.createPause = 0
}

func (c *Core) createFailed(key PoolKey, name string) {
	pool := c.pools[key]
	if pool == nil {
		return
	}
	if _, asked := pool.creating[name]; !asked {
		return // the pod was created all the same, and was seen
	}
	delete(pool.creating, name)
	pool.again = append(pool.again, name)
	if pool.retryAt == 0 { // failures side by side count once
		pool.createPause = min(max(2*pool.createPause, firstRetry), maxRetry)
		pool.retryAt = c.now.Boot + pool.createPause
	}
	pool.touch()
}
