package allocator

import (
	"context"
	"runtime"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// eventQueue bounds the events that wait for the core. Submitters wait while it is full, which
	// slows down watches, callers and routers together.
	eventQueue = 4 << 10
)

// loop owns the core: it alone calls it, one event at a time. put may be called concurrently.
type loop struct {
	core *core.Core
	// guard checks the effects. violated acts on violations, and returns false if the term ends: over is set then, and
	// nothing is carried out any more.
	guard    *guard.Guard
	violated func([]guard.Violation) bool
	over     bool
	wall     func() time.Time
	in       chan any // a core.Event, or a func(core.View)
	do       func(core.Effect)
	done     chan struct{} // closed when run has returned
	// versions are the resource versions of the latest observation of each pod. Older observations,
	// from a watch that lags behind other reads, are dropped.
	versions map[core.PodKey]string
	// listed is the resource version of the list that the term began with. A pod that is not in it
	// and was observed before it is gone.
	listed string
	// pools are the resource versions of the latest observation of each pool, deleted ones
	// included. poolsListed is the resource version of the list that the term began with.
	pools       map[core.PoolKey]string
	poolsListed string
	// gone and goneBefore are the deleted pods of the current and the previous goneRetention. A UID
	// never returns, so a late observation must not revive its pod. No watch lags for longer than
	// goneRetention.
	gone, goneBefore map[core.PodKey]struct{}
	goneSince        time.Duration // boot clock
	ticks            ticks
}

const goneRetention = time.Minute

func newLoop(c *core.Core, g *guard.Guard, wall func() time.Time, do func(core.Effect)) *loop {
	return &loop{core: c, guard: g, wall: wall, in: make(chan any, eventQueue), do: do, done: make(chan struct{}), versions: map[core.PodKey]string{}, pools: map[core.PoolKey]string{}, gone: map[core.PodKey]struct{}{}}
}

func now(wall func() time.Time) core.Instant {
	return core.Instant{Boot: bootclock.Now(), Wall: wall()}
}

// run steps the core until ctx ends.
func (l *loop) run(ctx context.Context) {
	defer close(l.done)
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	l.ticks.last = bootclock.Now()
	for !l.over {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if l.ticks.count(bootclock.Now()) {
				l.step(core.Tick{})
			}
		case in := <-l.in:
			switch in := in.(type) {
			case func(core.View):
				in(l.core.View())
			case core.Event:
				l.step(in)
			}
		}
	}
}

func (l *loop) step(ev core.Event) {
	switch ev := ev.(type) {
	case core.PodSeen:
		whole := ev.Pod.Key.Whole()
		if l.isGone(whole) {
			return
		}
		last, known := l.versions[whole]
		if !known {
			last = l.listed
		}
		if kube.Older(ev.Pod.Version, last) {
			return
		}
		l.versions[whole] = ev.Pod.Version
	case core.PoolSeen:
		if l.poolIsOlder(ev.Pool.Key, ev.Pool.Version) {
			return
		}
		l.pools[ev.Pool.Key] = ev.Pool.Version
	case core.PoolGone:
		if l.poolIsOlder(ev.Key, ev.Version) {
			return // a new pool has the name
		}
		l.pools[ev.Key] = ev.Version
	case core.PodGone:
		delete(l.versions, ev.Key)
		if now := bootclock.Now(); now-l.goneSince > goneRetention {
			l.goneBefore, l.gone, l.goneSince = l.gone, map[core.PodKey]struct{}{}, now
		}
		l.gone[ev.Key] = struct{}{}
	}
	at := now(l.wall)
	l.carryOut(at, ev, l.core.Step(at, ev))
}

// carryOut carries out the effects of a step, or of the recovery if ev is nil, if none of them violates an assertion.
func (l *loop) carryOut(at core.Instant, ev core.Event, effects []core.Effect) {
	if l.over {
		return
	}
	effects, violations := l.guard.Step(at.Boot, ev, effects)
	if len(violations) > 0 && !l.violated(violations) {
		l.over = true
		return
	}
	releasing := false
	for _, e := range effects {
		switch e.(type) {
		case core.SendRelease, core.SendClose:
			releasing = true
		}
		l.do(e)
	}
	if releasing {
		// Callers wait for the routers' acknowledgements, so the senders run before the next event.
		runtime.Gosched()
	}
}

func (l *loop) poolIsOlder(key core.PoolKey, version string) bool {
	last, known := l.pools[key]
	if !known {
		last = l.poolsListed
	}
	return kube.Older(version, last)
}

// knows records the resource versions that the term begins with.
func (l *loop) knows(st core.State) {
	for _, p := range st.Pods {
		l.versions[p.Key.Whole()] = p.Version
	}
	for _, p := range st.Pools {
		l.pools[p.Key] = p.Version
	}
}

func (l *loop) isGone(key core.PodKey) bool {
	_, gone := l.gone[key]
	_, before := l.goneBefore[key]
	return gone || before
}

// Submit queues an event. It waits while the queue is full, and drops the event when the loop has
// ended.
func (l *loop) Submit(ev core.Event) { l.put(ev) }

func (l *loop) put(in any) bool {
	select {
	case l.in <- in:
		return true
	case <-l.done:
		return false
	}
}

// look calls f with the core in the loop's goroutine and returns its results. It returns
// errStepDown when the loop has ended, and ctx's error when ctx ends first. f may then
// still run later, so f must not write to variables of its caller.
func look[T, U any](ctx context.Context, l *loop, f func(core.View) (T, U)) (first T, second U, err error) {
	type results struct {
		first  T
		second U
	}
	found := make(chan results, 1)
	in := any(func(c core.View) {
		first, second := f(c)
		found <- results{first, second}
	})
	for queue := l.in; ; {
		select {
		case queue <- in:
			queue = nil // queued
		case r := <-found:
			return r.first, r.second, nil
		case <-l.done:
			return first, second, errStepDown
		case <-ctx.Done():
			return first, second, ctx.Err()
		}
	}
}
