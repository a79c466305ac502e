package allocator

import (
	"context"
	"runtime"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// eventQueue bounds the events waiting for the core. Who submits one waits
	// when it is full: watches, callers and routers are slowed down together.
	eventQueue = 4 << 10
	// tickEvery is how late a deadline may be noticed.
	tickEvery = 50 * time.Millisecond
	// A tick that is late by more than stillMost means that this process stood still. What
	// has come meanwhile is heard for hearFirst before anything is taken to be overdue.
	stillMost = 500 * time.Millisecond
	hearFirst = time.Second
)

// loop owns the core.
type loop struct {
	core *core.Core
	wall func() time.Time
	in   chan any // core.Event, or func(*core.Core) to look at it
	do   func(core.Effect)
	done chan struct{} // closed when run has returned: nothing is taken any more
	// versions are the resource versions of the last observation of each pod.
	// Older ones, from a watch that lags behind our own reads, are dropped.
	versions map[core.PodKey]string
	// listed is the resource version of the list that the term began with: pods
	// that were not in it and were seen before it are gone.
	listed string
	// pools are the resource versions of the last observation of each pool, also of
	// those that are gone; poolsListed is that of the list the term began with.
	pools       map[core.PoolKey]string
	poolsListed string
	// gone are the pods that are not there any more, and goneBefore those of some
	// time ago: a UID never comes back, so observations that lag behind must not
	// bring one back. No watch lags for longer than goneFor.
	gone, goneBefore map[core.PodKey]struct{}
	goneSince        time.Duration // boot clock
	ticks            ticks
}

// ticks says which ticks count. A leader that stood still finds its routers silent, and
// what they have said in its sockets: if it looked at the time first, it would take them
// for gone, and what is in use through them for over.
type ticks struct {
	last  time.Duration // boot clock
	still time.Duration // since when ticks do not count; 0: they do
}

func (t *ticks) count(now time.Duration) bool {
	if t.still == 0 && now-t.last > stillMost {
		t.still = now
	}
	t.last = now
	if t.still != 0 && now-t.still < hearFirst {
		return false
	}
	t.still = 0
	return true
}

const goneFor = time.Minute

func newLoop(c *core.Core, wall func() time.Time, do func(core.Effect)) *loop {
	return &loop{core: c, wall: wall, in: make(chan any, eventQueue), do: do, done: make(chan struct{}), versions: map[core.PodKey]string{}, pools: map[core.PoolKey]string{}, gone: map[core.PodKey]struct{}{}}
}

func now(wall func() time.Time) core.Instant {
	return core.Instant{Boot: bootclock.Now(), Wall: wall()}
}

// run feeds the core until ctx ends.
func (l *loop) run(ctx context.Context) {
	defer close(l.done)
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	l.ticks.last = bootclock.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if l.ticks.count(bootclock.Now()) {
				l.step(core.Tick{})
			}
		case in := <-l.in:
			switch in := in.(type) {
			case func(*core.Core):
				in(l.core)
			case core.Event:
				l.step(in)
			}
		}
	}
}

func (l *loop) step(ev core.Event) {
	switch ev := ev.(type) {
	case core.PodSeen:
		if l.isGone(ev.Pod.Key) {
			return
		}
		last, known := l.versions[ev.Pod.Key]
		if !known {
			last = l.listed
		}
		if older(ev.Pod.Version, last) {
			return
		}
		l.versions[ev.Pod.Key] = ev.Pod.Version
	case core.PoolSeen:
		if l.poolIsOlder(ev.Pool.Key, ev.Pool.Version) {
			return
		}
		l.pools[ev.Pool.Key] = ev.Pool.Version
	case core.PoolGone:
		if l.poolIsOlder(ev.Key, ev.Version) {
			return // another one has its name
		}
		l.pools[ev.Key] = ev.Version
	case core.PodGone:
		delete(l.versions, ev.Key)
		if now := bootclock.Now(); now-l.goneSince > goneFor {
			l.goneBefore, l.gone, l.goneSince = l.gone, map[core.PodKey]struct{}{}, now
		}
		l.gone[ev.Key] = struct{}{}
	}
	told := false
	for _, e := range l.core.Step(now(l.wall), ev) {
		if _, is := e.(core.SendRelease); is != told {
			if told {
				// Callers wait until the routers have answered: those who send go first.
				runtime.Gosched()
			}
			told = is
		}
		l.do(e)
	}
}

// older reports whether one resource version is known to be older than another.
func older(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)
	return err == nil && order < 0
}

func (l *loop) poolIsOlder(key core.PoolKey, version string) bool {
	last, known := l.pools[key]
	if !known {
		last = l.poolsListed
	}
	return older(version, last)
}

// knows notes what the term begins with.
func (l *loop) knows(st core.State) {
	for _, p := range st.Pods {
		l.versions[p.Key] = p.Version
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

// Submit hands an event to the core. It waits while the queue is full, and
// drops the event when the loop has ended.
func (l *loop) Submit(ev core.Event) { l.put(ev) }

func (l *loop) put(in any) bool {
	select {
	case l.in <- in:
		return true
	case <-l.done:
		return false
	}
}

// look calls f with the core, from the loop, and waits for it.
func (l *loop) look(ctx context.Context, f func(*core.Core)) error {
	looked := make(chan struct{})
	call := func(c *core.Core) {
		f(c)
		close(looked)
	}
	select {
	case l.in <- call:
	case <-l.done:
		return errStepDown
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-looked:
		return nil
	case <-l.done:
		return errStepDown
	case <-ctx.Done():
		// f may still run: what it writes to must not be read by the caller now.
		return ctx.Err()
	}
}

// answers hands the core's answers to the callers that wait for them.
type answers struct {
	mu   sync.Mutex
	last uint64
	wait map[uint64]chan core.Effect // each has room for its one answer
}

func newAnswers() *answers { return &answers{wait: map[uint64]chan core.Effect{}} }

func (a *answers) expect() (uint64, <-chan core.Effect) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last++
	ch := make(chan core.Effect, 1)
	a.wait[a.last] = ch
	return a.last, ch
}

// forget stops to wait. The answer is returned if it has come already.
func (a *answers) forget(token uint64) core.Effect {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch := a.wait[token]
	delete(a.wait, token)
	select {
	case e := <-ch:
		return e
	default:
		return nil
	}
}

// deliver reports whether somebody still waits for the answer.
func (a *answers) deliver(token uint64, e core.Effect) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch, ok := a.wait[token]
	if ok {
		ch <- e
	}
	return ok
}
