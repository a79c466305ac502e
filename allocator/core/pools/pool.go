package pools

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/demand"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// maxLacking bounds the pods that are being created for waiting claims.
const maxLacking = 1000

// Back-off of pod creation after a failure.
const (
	FirstRetry = time.Second
	MaxRetry   = 30 * time.Second
)

// The creations under way of a pool: at first and after a failure, and at most, which keeps the writers of the
// leader busy.
const (
	MinWindow = 1
	MaxWindow = 128
)

// FirstSurge bounds the pods of a pool that start at one time, and those that are kept for claims that have gone,
// if its owner has set no bound. The first grows, see pool.surge.
const FirstSurge = 10

// SurgeKept is how long the bound that a pool has reached holds without a start.
const SurgeKept = time.Minute

// Table has the pools.
type Table struct {
	*step.Current
	pods      *pods.Table
	newSuffix func() string
	// ticked is the boot clock at the last Tick. The demand goes by it, so that what a pool asks for changes with
	// events only.
	ticked time.Duration
	byKey  map[fact.PoolKey]*Pool
	window int // of a new pool
	surge  int // the same: FirstSurge
}

// New returns an empty table. newSuffix returns the end of a pod's name.
func New(current *step.Current, pods *pods.Table, newSuffix func() string) *Table {
	return &Table{
		Current: current, pods: pods, newSuffix: newSuffix, ticked: current.Now.Boot, byKey: map[fact.PoolKey]*Pool{},
		window: MinWindow, surge: FirstSurge,
	}
}

// SetStart sets the bounds of new pools on creations under way and on pods that start. It is for tests.
func (t *Table) SetStart(window, surge int) { t.window, t.surge = window, surge }

// Pool is a pool. One that has pods is kept while its object does not exist, or was not seen yet. Only its Table
// changes it.
type Pool struct {
	*pods.Group
	drained  bool                     // PoolDrained was emitted
	creating map[string]time.Duration // when on the boot clock, by name
	// again are the names of pods whose creation failed. They are used before new names, so that
	// a pod that was created although the call failed is not created twice.
	again []string
	// window bounds the creations under way. It grows by 1 with each pod that is created, so that it doubles
	// with each round of calls, and begins anew when a creation fails: a quota, or a webhook that refuses,
	// costs few calls.
	window      int
	lateCheckAt time.Duration     // boot clock: when late pods are looked for next
	failures    []step.PodFailure // the latest first, at most MaxFailures

	// surge bounds the pods that start, if MaxSurge does not. While it holds others back, each pod adds one that
	// takes no more than twice the fastest start, so that the bound doubles with each round of starts. On nodes that
	// are busy pods start more slowly, and then it stays. Both begin anew when no pod is starting and none has become
	// warm for SurgeKept, so that a batch that was too large for its wait finds a higher bound when it is tried
	// again, and the bound when one ends early.
	surge      int
	fastest    time.Duration // 0: none has started
	surgeUntil time.Duration // boot clock

	createPause time.Duration
	retryAt     time.Duration // boot clock; 0: no retry pending
	backOff     backOff       // of pods that were made

	demand demand.Tracker
	target demand.Target // of the last adjustment
}

// Of returns the pool of that name. It creates an entry for a pool whose object was not seen,
// because the pods of such a pool must be kept.
func (t *Table) Of(key fact.PoolKey) *Pool {
	if t.byKey[key] == nil {
		t.byKey[key] = &Pool{
			Group: t.pods.Group(key), creating: map[string]time.Duration{}, window: t.window, surge: t.surge,
		}
	}
	return t.byKey[key]
}

// Find returns the pool of that name; nil: neither the pool nor a pod of it is known.
func (t *Table) Find(key fact.PoolKey) *Pool { return t.byKey[key] }

// Gone notes that the object of a pool does not exist any more.
func (t *Table) Gone(key fact.PoolKey) {
	if pool := t.byKey[key]; pool != nil {
		pool.Gone()
	}
}

// drop forgets a pool without pods whose object does not exist.
func (t *Table) drop(pool *Pool) {
	delete(t.byKey, pool.Key)
	t.pods.Drop(pool.Key)
}

// All has the pools, in no order.
func (t *Table) All() iter.Seq[*Pool] { return maps.Values(t.byKey) }

// Len is how many pools there are.
func (t *Table) Len() int { return len(t.byKey) }

// Sorted lists the pools by namespace and name.
func (t *Table) Sorted() []*Pool {
	return slices.SortedFunc(t.All(), func(a, b *Pool) int { return fact.ComparePools(a.Key, b.Key) })
}

// Observe notes what a pool asks for now.
func (t *Table) Observe(spec step.Pool) {
	pool := t.Of(spec.Key)
	if !spec.Deleting {
		pool.drained = false
	}
	if pool.Template != spec.Template {
		pool.backOff = backOff{}
	}
	t.pods.Observe(spec)
}

// Adjust brings the number of warm pods of a pool to what it asks for. lacking is how many pods the claims that wait
// still need. It reports, once, that nothing is left of a pool that is deleted.
func (t *Table) Adjust(pool *Pool, lacking int) (gone bool) {
	switch {
	case pool.Deleting:
		return t.drain(pool)
	case !pool.Known: // its object was not seen yet, so nothing is decided about its pods
		if gone = pool.Total() == 0; gone {
			t.drop(pool)
		}
		return gone
	}
	t.aim(pool, lacking)
	if pool.starting() == 0 && t.ticked >= pool.surgeUntil {
		pool.surge, pool.fastest = t.surge, 0
	}
	plan := warm.PlanFor(pool.spec(), pool.warmCounts())
	if plan.Retires() {
		for _, p := range pool.toRetire(plan) {
			if p.Lost() {
				t.recordFailure(pool, p, step.PodNodeLost, "node "+p.Node()+" is not ready or is gone")
			}
			t.pods.Retire(p)
		}
	}
	for range plan.Create {
		if name := pool.nextName(t.newSuffix, t.Now.Boot); name != "" {
			t.Emit(step.CreatePod{Pool: pool.Key, Name: name})
		}
	}
	return false
}

// Tick begins a tick. TickPool acts on what is due in a pool.
func (t *Table) Tick() { t.ticked = t.Now.Boot }

// TickPool acts on what is due in a pool.
func (t *Table) TickPool(pool *Pool, lacking int) {
	pool.retry(t.Now.Boot)
	t.replaceLate(pool)
	if pool.Known {
		t.aim(pool, lacking)
	}
}

// Claimed notes that a claim has asked a pool for so many pods.
func (t *Table) Claimed(pool *Pool, count int) {
	pool.demand.Claimed(t.ticked, count)
	pool.Touch()
}

// Recovered begins to decide about a pool, when a new leader has seen all of its pods.
func (t *Table) Recovered(pool *Pool) {
	if !pool.Known { // its object is gone, only its pods are left
		pool.Deleting = true
	}
	pool.demand.Found(t.ticked, pool.Count(pods.Pending, pods.Warm), pool.maybeLacked(t.Now.Wall))
	t.pods.Sync(pool.Group)
	pool.Touch()
}

// maybeLacked is how many idle pods the claims of an earlier leader may have lacked: those above what the pool keeps
// that are not ready, or were created a short while ago. The callers of those claims come again.
func (pool *Pool) maybeLacked(now time.Time) int {
	recent := pool.Count(pods.Pending)
	for p := range pool.In(pods.Warm) {
		if now.Sub(p.Seen().CreatedAt) < demand.Spare {
			recent++
		}
	}
	return max(0, min(recent, pool.Count(pods.Pending, pods.Warm)-pool.Warm))
}

// aim finds how many warm pods the demand asks for.
func (t *Table) aim(pool *Pool, lacking int) {
	limits := demand.Limits{Min: pool.Warm, Max: pool.MaxWarm, Spare: pool.MaxSpare()}
	target := pool.demand.Target(t.ticked, limits, min(lacking, maxLacking))
	if target != pool.target {
		pool.target = target
		pool.Touch()
	}
}

// starting is how many pods start: they count for the surge.
func (pool *Pool) starting() int {
	n := pool.warmCounts()
	return n.Creating + n.Coming
}

// started notes that a pod that was asked for has become warm.
func (pool *Pool) started(took, now time.Duration) {
	pool.demand.Started(took)
	pool.surgeUntil = now + SurgeKept
	if pool.fastest == 0 || took < pool.fastest {
		pool.fastest = took
	}
	if pool.starting()+1 >= pool.surge && took <= 2*pool.fastest {
		pool.surge++
	}
}

// MaxSpare bounds the pods that are kept for claims that have gone.
func (pool *Pool) MaxSpare() int { return cmp.Or(pool.MaxSurge, FirstSurge) }

// Surplus is how many idle pods there are, or are coming, beyond what the pool asks for.
func (pool *Pool) Surplus() int {
	n := pool.warmCounts()
	return max(0, n.Creating+n.Recycling+n.Coming+n.Warm-pool.target.Warm-pool.target.Lacking)
}

// Keeps reports whether the pool keeps a pod that could be recycled.
func (pool *Pool) Keeps() bool { return pool.spec().Keeps(pool.warmCounts()) }

// spec is what the plan of a pool is made for.
func (pool *Pool) spec() warm.Spec {
	return warm.Spec{
		Warm: pool.target.Warm, Lacking: pool.target.Lacking, Spare: pool.target.Spare,
		MaxPods: pool.MaxPods, MaxSurge: cmp.Or(pool.MaxSurge, pool.surge), MaxUnavailable: pool.MaxUnavailable, Window: pool.window,
		Held: pool.backOff.held, Retrying: pool.retryAt != 0, Paused: pool.Paused, Refused: pool.Refused != "",
	}
}

// toRetire chooses the idle pods that a plan deletes. A stranded pod that is tainted keeps its
// address until that is no longer tainted.
func (pool *Pool) toRetire(plan warm.Plan) (chosen []*pods.Pod) {
	if plan.AllPending || plan.OutdatedPending || plan.Stranded > 0 || plan.Coming > 0 {
		for _, p := range pool.Sorted(pods.Pending) {
			switch {
			case p.Stranded() && p.Withheld()&pods.Tainted == 0 && plan.Stranded > 0:
				plan.Stranded--
			case plan.AllPending || p.Outdated() && plan.OutdatedPending:
			case !p.Stranded() && plan.Coming > 0:
				plan.Coming--
			default:
				continue
			}
			chosen = append(chosen, p)
		}
	}
	for p := range pool.ByAge() {
		left := &plan.Warm
		if p.Outdated() {
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

// nextName returns the name of a pod to be created. Names whose creation failed come first. It is
// empty after a name collision; the next adjustment tries another suffix.
func (pool *Pool) nextName(suffix func() string, now time.Duration) string {
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

// drain retires the idle pods of a pool that is deleted. It reports, once, that nothing is left of the pool.
func (t *Table) drain(pool *Pool) (gone bool) {
	for _, p := range pool.Sorted(pods.Pending, pods.Warm) {
		t.pods.Retire(p)
	}
	pool.again, pool.backOff = nil, backOff{}
	switch {
	case pool.Total()+len(pool.creating) > 0 || pool.Known && pool.drained:
		return false
	case !pool.Known:
		t.drop(pool)
	default:
		pool.drained = true
		t.Emit(step.PoolDrained{Key: pool.Key})
	}
	return true
}

// Made notes that a pod of that name exists.
func (pool *Pool) Made(name string) {
	if _, asked := pool.creating[name]; asked {
		pool.window = min(pool.window+1, MaxWindow)
	}
	delete(pool.creating, name)
	pool.again = slices.DeleteFunc(pool.again, func(n string) bool { return n == name })
	pool.createPause = 0
}

// CreateFailed has a pod created again under the same name, after a pause.
func (t *Table) CreateFailed(key fact.PoolKey, name string, taken bool) {
	pool := t.byKey[key]
	if pool == nil {
		return
	}
	if _, asked := pool.creating[name]; !asked {
		return // the pod was created all the same, and was seen
	}
	delete(pool.creating, name)
	if taken {
		pool.Touch()
		return
	}
	pool.again = append(pool.again, name)
	pool.window = MinWindow
	if pool.retryAt == 0 { // failures side by side count once
		pool.createPause = min(max(2*pool.createPause, FirstRetry), MaxRetry)
		pool.retryAt = t.Now.Boot + pool.createPause
	}
	pool.Touch()
}

// AskedAt is when the creation of a pod of that name was asked for, on the boot clock; 0: it is not under way.
func (pool *Pool) AskedAt(name string) time.Duration { return pool.creating[name] }

// Creating has the names of the pods whose creation is under way, in no order.
func (pool *Pool) Creating() iter.Seq[string] { return maps.Keys(pool.creating) }

// Target is how many warm pods the pool keeps, by the last adjustment.
func (pool *Pool) Target() demand.Target { return pool.target }

// Surge bounds the pods that start now, if MaxSurge does not. It is for tests.
func (pool *Pool) Surge() int { return pool.surge }

// BackedOff reports whether the replacement of pods that ended early is delayed. It is for tests.
func (pool *Pool) BackedOff() bool { return pool.backOff.pause != 0 }
