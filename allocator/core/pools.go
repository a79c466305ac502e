package core

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/demand"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// maxLacking bounds the pods that are being created for waiting claims.
const maxLacking = 1000

// Back-off of pod creation after a failure.
const (
	firstRetry = time.Second
	maxRetry   = 30 * time.Second
)

// The creations under way of a pool: at first and after a failure, and at most, which keeps the writers of the
// leader busy.
const (
	minWindow = 1
	maxWindow = 128
)

// firstSurge bounds the pods of a pool that start at one time, and those that are kept for claims that have gone,
// if its owner has set no bound. The first grows, see pool.surge.
const firstSurge = 10

// surgeKept is how long the bound that a pool has reached holds without a start.
const surgeKept = time.Minute

// poolTable has the pools, and those that this step has changed.
type poolTable struct {
	byKey     map[PoolKey]*pool
	unsettled []*pool
	window    int // of a new pool
	surge     int // the same: firstSurge
}

// pool is a pool and its pods. A pool that has pods is kept while its object does not exist, or was
// not seen yet.
type pool struct {
	Pool
	known   bool     // its object exists
	list    *[]*pool // poolTable.unsettled
	touched bool     // it is on that list
	drained bool     // PoolDrained was emitted
	pods    census
	queue   *warm.Queue[PodKey]
	line    *claims.Line[claimState] // the claims that wait
	// filling is the claim of line that collects pods for its batch.
	filling  *claim
	creating map[string]time.Duration // when on the boot clock, by name
	// again are the names of pods whose creation failed. They are used before new names, so that
	// a pod that was created although the call failed is not created twice.
	again []string
	// window bounds the creations under way. It grows by 1 with each pod that is created, so that it doubles
	// with each round of calls, and begins anew when a creation fails: a quota, or a webhook that refuses,
	// costs few calls.
	window      int
	lateCheckAt time.Duration // boot clock: when late pods are looked for next
	failed      PodFailure    // the last one
	unready     *pod          // of the latest observation with a reason why a pod is not ready; nil: none

	// surge bounds the pods that start, if MaxSurge does not. While it holds others back, each pod adds one that
	// takes no more than twice the fastest start, so that the bound doubles with each round of starts. On nodes that
	// are busy pods start more slowly, and then it stays. Both begin anew when no pod is starting and none has become
	// warm for surgeKept, so that a batch that was too large for its wait finds a higher bound when it is tried
	// again, and the bound when one ends early.
	surge      int
	fastest    time.Duration // 0: none has started
	surgeUntil time.Duration // boot clock

	createPause time.Duration
	retryAt     time.Duration // boot clock; 0: no retry pending
	backOff     backOff       // of pods that were made

	demand demand.Tracker
	target demand.Target // of the last settling
	// left is what claims of a team asked for that have ended without a sandbox a short while ago. The pods that
	// were created for them count for the team: see leftBy.
	left map[string]leftover
}

// leftover are so many pods, until then on the boot clock.
type leftover struct {
	pods  int
	until time.Duration
}

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
	for len(c.pools.unsettled) > 0 {
		pools := c.pools.unsettled
		c.pools.unsettled = nil
		slices.SortFunc(pools, byKey)
		for _, pool := range pools {
			if c.pools.byKey[pool.Key] == pool {
				c.serve(pool)
				c.settle(pool)
			}
			pool.touched = false // what settling it has changed is settled already
		}
	}
}

// of returns the pool of that name. It creates an entry for a pool whose object was not seen,
// because the pods of such a pool must be kept.
func (t *poolTable) of(key PoolKey) *pool {
	if t.byKey[key] == nil {
		t.byKey[key] = &pool{
			Pool: Pool{Key: key}, pods: census{}, queue: warm.NewQueue[PodKey](), line: claims.NewLine[claimState](),
			creating: map[string]time.Duration{}, left: map[string]leftover{}, list: &t.unsettled, window: t.window, surge: t.surge,
		}
	}
	return t.byKey[key]
}

// gone notes that the object of a pool does not exist any more.
func (t *poolTable) gone(key PoolKey) {
	if pool := t.byKey[key]; pool != nil {
		pool.known, pool.Deleting = false, true
		pool.touch()
	}
}

// sorted lists the pools by namespace and name.
func (t *poolTable) sorted() []*pool { return slices.SortedFunc(maps.Values(t.byKey), byKey) }

func byKey(a, b *pool) int {
	return cmp.Or(strings.Compare(a.Key.Namespace, b.Key.Namespace), strings.Compare(a.Key.Name, b.Key.Name))
}

func (c *Core) poolSeen(spec Pool) {
	pool := c.pools.of(spec.Key)
	changed := pool.Template != spec.Template
	otherPorts := pool.DefaultPort != spec.DefaultPort || !slices.Equal(pool.Ports, spec.Ports)
	syncs := changed || pool.Metadata != spec.Metadata || pool.Refused != spec.Refused
	pool.Pool, pool.known = spec, true
	if !spec.Deleting {
		pool.drained = false
	}
	if changed {
		pool.backOff = backOff{}
		for _, p := range pool.pods.sorted(everyPhase...) {
			p.recount(func() { p.outdated = p.seen.Template != pool.Template })
		}
	}
	if syncs {
		for _, p := range pool.pods.sorted(podPending, podWarm) {
			c.sync(p)
		}
	}
	if otherPorts {
		for _, p := range pool.pods.sorted(podClaimed) {
			p.sandbox.takePorts(pool)
			c.routers.sendRoute(p.sandbox)
		}
	}
	pool.touch()
}

// settle brings the number of warm pods of a pool to what it asks for.
func (c *Core) settle(pool *pool) {
	switch {
	case pool.Deleting:
		c.drain(pool)
		return
	case !pool.known: // its object was not seen yet, so nothing is decided about its pods
		if pool.pods.total() == 0 {
			delete(c.pools.byKey, pool.Key)
		}
		return
	}
	pool.aim(c.ticked)
	if pool.starting() == 0 && c.ticked >= pool.surgeUntil {
		pool.surge, pool.fastest = c.pools.surge, 0
	}
	plan := warm.PlanFor(pool.spec(), pool.warmCounts())
	if plan.Retires() {
		for _, p := range pool.toRetire(plan, c.pods) {
			if p.stranded() && p.away && !p.node.cordoned {
				c.recordFailure(p, PodNodeLost, "node "+p.node.name+" is not ready or is gone")
			}
			c.retire(p)
		}
	}
	for range plan.Create {
		if name := pool.nextName(c.cfg.NewSuffix, c.now.Boot); name != "" {
			c.emit(CreatePod{Pool: pool.Key, Name: name})
		}
	}
}

// aim finds how many warm pods the demand asks for.
func (pool *pool) aim(now time.Duration) {
	spare := cmp.Or(pool.MaxSurge, firstSurge)
	for team, pods := range pool.line.TakeDropped() {
		pool.left[team] = leftover{min(pool.left[team].pods+pods, spare), now + 2*demand.Spare}
	}
	maps.DeleteFunc(pool.left, func(_ string, l leftover) bool { return l.until <= now })
	limits := demand.Limits{Min: pool.Warm, Max: pool.MaxWarm, Spare: spare}
	target := pool.demand.Target(now, limits, pool.lacking())
	if target != pool.target {
		pool.target = target
		pool.touch()
	}
}

// starting is how many pods start: they count for the surge.
func (pool *pool) starting() int {
	n := pool.warmCounts()
	return n.Creating + n.Coming
}

// started notes that a pod that was asked for has become warm.
func (pool *pool) started(took, now time.Duration) {
	pool.demand.Started(took)
	pool.surgeUntil = now + surgeKept
	if pool.fastest == 0 || took < pool.fastest {
		pool.fastest = took
	}
	if pool.starting()+1 >= pool.surge && took <= 2*pool.fastest {
		pool.surge++
	}
}

// leftBy is how many of the idle pods beyond what the pool asks for were created for claims of a team that have ended.
func (pool *pool) leftBy(team string) int {
	left := pool.left[team].pods
	if left == 0 {
		return 0
	}
	n := pool.warmCounts()
	return min(left, max(0, n.Creating+n.Recycling+n.Coming+n.Warm-pool.target.Warm-pool.target.Lacking))
}

// lacking is how many pods the waiting claims still need. It is bounded, so that one step has few effects.
func (pool *pool) lacking() int {
	lacking := pool.line.Pods()
	if f := pool.filling; f != nil {
		lacking -= len(f.Request.pods)
	}
	return min(lacking, maxLacking)
}

// spec is what the plan of a pool is made for.
func (pool *pool) spec() warm.Spec {
	return warm.Spec{
		Warm: pool.target.Warm, Lacking: pool.target.Lacking, Spare: pool.target.Spare,
		MaxPods: pool.MaxPods, MaxSurge: cmp.Or(pool.MaxSurge, pool.surge), MaxUnavailable: pool.MaxUnavailable, Window: pool.window,
		Held: pool.backOff.held, Retrying: pool.retryAt != 0, Paused: pool.Paused, Refused: pool.Refused != "",
	}
}

// toRetire chooses the idle pods that a plan deletes. A stranded pod that is tainted keeps its
// address until that is no longer tainted.
func (pool *pool) toRetire(plan warm.Plan, pods map[PodKey]*pod) (chosen []*pod) {
	if plan.AllPending || plan.OutdatedPending || plan.Stranded > 0 || plan.Coming > 0 {
		for _, p := range pool.pods.sorted(podPending) {
			switch {
			case p.stranded() && !p.tainted && plan.Stranded > 0:
				plan.Stranded--
			case plan.AllPending || p.outdated && plan.OutdatedPending:
			case !p.stranded() && plan.Coming > 0:
				plan.Coming--
			default:
				continue
			}
			chosen = append(chosen, p)
		}
	}
	for key := range pool.queue.ByAge() {
		p, left := pods[key], &plan.Warm
		if p.outdated {
			left = &plan.OutdatedWarm
		}
		if *left > 0 {
			*left--
			chosen = append(chosen, p)
		}
		if plan.OutdatedWarm+plan.Warm == 0 {
			break
		}
	}
	return chosen
}

// refusal is the answer to a caller whose claim is refused.
func (pool *pool) refusal(token uint64, why Refusal) ClaimRefused {
	counts := pool.counts()
	counts.Trouble = pool.backOff.trouble
	if p := pool.unready; p != nil && p.phase == podPending && p.seen.Reason != "" { // View.Counts looks at all pods
		counts.Stuck = Stuck{Reason: p.seen.Reason, Pod: p.seen.Key.Name, Why: p.seen.Why, Pods: 1}
	}
	return ClaimRefused{
		Token: token, Pool: pool.Key, Why: why, Counts: counts, Warm: pool.Warm, MaxPods: pool.MaxPods, Paused: pool.Paused, Problem: pool.Refused,
	}
}

// nextName returns the name of a pod to be created. Names whose creation failed come first. It is
// empty after a name collision; the next settling tries another suffix.
func (pool *pool) nextName(suffix func() string, now time.Duration) string {
	name := pool.Key.Name + "-" + suffix()
	if len(pool.again) > 0 {
		name, pool.again = pool.again[0], pool.again[1:]
	}
	if _, taken := pool.creating[name]; taken {
		return ""
	}
	pool.creating[name] = now
	return name
}

// drain refuses the claims, releases the sandboxes, unless they are kept, and retires the idle pods of a pool
// that is deleted.
func (c *Core) drain(pool *pool) {
	for cl := pool.line.First(); cl != nil; cl = pool.line.First() {
		c.refuse(cl, NoPool)
	}
	for _, p := range pool.pods.sorted(podPending, podWarm) {
		c.retire(p)
	}
	if !pool.KeepSandboxes || !pool.known { // without the object the garbage collector deletes the pods
		for _, p := range pool.pods.sorted(podClaimed) {
			c.startRelease(p.sandbox, because(ReasonPoolDeleted))
		}
	}
	pool.again, pool.backOff = nil, backOff{}
	switch {
	case pool.pods.total()+len(pool.creating) > 0:
	case !pool.known:
		delete(c.pools.byKey, pool.Key)
		c.letGoOf(pool.Key)
	case !pool.drained:
		pool.drained = true
		c.letGoOf(pool.Key)
		c.emit(PoolDrained{pool.Key})
	}
}

// made notes that a pod of that name exists.
func (pool *pool) made(name string) {
	if _, asked := pool.creating[name]; asked {
		pool.window = min(pool.window+1, maxWindow)
	}
	delete(pool.creating, name)
	pool.again = slices.DeleteFunc(pool.again, func(n string) bool { return n == name })
	pool.createPause = 0
}

// createFailed has a pod created again under the same name, after a pause.
func (pool *pool) createFailed(ev CreateFailed, now time.Duration) {
	if _, asked := pool.creating[ev.Name]; !asked {
		return // the pod was created all the same, and was seen
	}
	delete(pool.creating, ev.Name)
	if ev.Taken {
		pool.touch()
		return
	}
	pool.again = append(pool.again, ev.Name)
	pool.window = minWindow
	if pool.retryAt == 0 { // failures side by side count once
		pool.createPause = min(max(2*pool.createPause, firstRetry), maxRetry)
		pool.retryAt = now + pool.createPause
	}
	pool.touch()
}
