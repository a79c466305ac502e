package lastactive

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/cpu"
)

const (
	// tickEvery is how often Run ticks. A gap of up to tickSlack between two ticks is
	// taken for granted; longer ones are remembered, and those over pauseMost are a
	// pause of this process: log entries may have waited in it.
	tickEvery = 50 * time.Millisecond
	tickSlack = 100 * time.Millisecond
	pauseMost = 500 * time.Millisecond
	// lateMost bounds the late ticks that are remembered one by one.
	lateMost = 64
	// logBuffer is how long Envoy may keep a log entry back.
	logBuffer = time.Second
	// shortMost is how long a request can have been open of which the log said nothing.
	shortMost = time.Second
	// doubtFlushes is for how many flush intervals there is doubt.
	doubtFlushes = 3
)

// never is the time of what has not happened. Nothing that is added to it overflows.
const never = time.Duration(math.MinInt64 / 2)

// forever is later than anything.
const forever = time.Duration(math.MaxInt64)

// clock is the coarse clock, and what must be known of its past.
type clock struct {
	now    func() time.Duration
	_      cpu.CacheLinePad
	coarse atomic.Int64 // the newest tick
	_      cpu.CacheLinePad

	mu   sync.Mutex
	late late
	// doubtUntil is when everything was known again, and doubtWhy what made it unknown.
	doubtUntil time.Duration
	doubtWhy   string
	doubts     uint64
	// gaps are those that followed one another while there was doubt, as one; toBridge is
	// what Tracker.bridge has not seen yet.
	gaps, toBridge gap
	// window is the longest that Envoy has announced; it never shrinks.
	window time.Duration
}

// gap is a time in which entries of the log can have been lost, so that ends of requests
// are not known.
type gap struct {
	// from: what can have been open since then without the log having said so may have
	// ended at until. all: so may everything else, because it was not known what was open.
	from, until time.Duration
	all         bool
}

var noGap = gap{from: forever, until: never}

// late are the ticks that were followed late. Those of ticks up to droppedTo are not
// remembered one by one; each was followed within droppedGap.
type late struct {
	ticks      []lateTick // ascending
	droppedTo  time.Duration
	droppedGap time.Duration
}

// lateTick is a tick and a moment at which the next one was in effect.
type lateTick struct{ at, next time.Duration }

// Run ticks until ctx ends.
func (t *Tracker) Run(ctx context.Context) {
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			t.Tick()
		}
	}
}

// Tick sets the clock that touches store. A gap of more than 500 ms since the tick
// before means that this process was paused: there is doubt for three flush intervals.
func (t *Tracker) Tick() {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	t.tick()
}

// tick returns a moment at which the tick was in effect. t.clock.mu is held.
func (t *Tracker) tick() time.Duration {
	c := &t.clock
	before := time.Duration(c.coarse.Load())
	at := max(c.now(), before)
	c.coarse.Store(int64(at))
	// The clock is read again, because a touch can have loaded the tick before until
	// now: this goroutine may have been stopped between reading and storing.
	next := max(c.now(), at)
	if gap := next - before; gap > tickSlack {
		c.late.add(lateTick{before, next})
		if gap > pauseMost {
			c.lost(before, next, max(t.window, c.window))
			c.doubt(next+doubtFlushes*t.flush, "this router was paused")
		}
	}
	return next
}

func (l *late) add(tick lateTick) {
	if n := len(l.ticks); n > 0 && l.ticks[n-1].at == tick.at { // the clock was read twice within its resolution
		l.ticks[n-1].next = tick.next
		return
	}
	l.ticks = append(l.ticks, tick)
	if len(l.ticks) <= lateMost {
		return
	}
	// The shortest goes: what is not remembered makes all touches before it later by as
	// much, for good.
	shortest := 0
	for i, t := range l.ticks {
		if s := l.ticks[shortest]; t.next-t.at < s.next-s.at {
			shortest = i
		}
	}
	t := l.ticks[shortest]
	l.droppedTo, l.droppedGap = max(l.droppedTo, t.at), max(l.droppedGap, t.next-t.at)
	l.ticks = slices.Delete(l.ticks, shortest, shortest+1)
}

// doubt says that not everything is known until then. c.mu is held.
func (c *clock) doubt(until time.Duration, why string) {
	if until > c.doubtUntil {
		c.doubtUntil, c.doubtWhy = until, why
		c.doubts++
	}
}

// lost says that entries of the log can have been lost in this time. A request that the
// log has not shown to be open may have been, for a window after its admission, and its
// end will not be told any more. c.mu is held, and the doubt that follows is not noted yet.
func (c *clock) lost(since, now, window time.Duration) {
	if c.doubtUntil <= since {
		c.gaps = noGap
	}
	c.gaps.from, c.gaps.until = min(c.gaps.from, since-window), now
	b := &c.toBridge
	b.from, b.until, b.all = min(b.from, c.gaps.from), max(b.until, now), b.all || c.gaps.all
}

// lostFrom says that entries of the log can have been lost since then, and that there is
// doubt for three flush intervals of this length. t.mu is held.
func (l *Log) lostFrom(since, now time.Duration, why string) {
	c := &l.t.clock
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost(since, now, l.silenceMost())
	c.doubt(now+doubtFlushes*l.flush, why)
}

// doubtFrom says that it is not known what is open for three flush intervals of this length.
func (t *Tracker) doubtFrom(now, flush time.Duration, why string) {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	t.clock.gaps.all = true // until there is no doubt any more
	t.clock.doubt(now+doubtFlushes*flush, why)
}

// view is one look at the clock. What has been touched later is in use.
type view struct {
	now, tick     time.Duration
	flush, window time.Duration
	late          late
	blind         time.Duration // from then on the log says nothing
}

// look ticks, so that no touch looks older than it is, and returns the time.
func (t *Tracker) look() *view {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	now := t.tick()
	v := &view{now: now, tick: time.Duration(t.clock.coarse.Load()), flush: t.flush, window: t.window, late: t.clock.late, blind: forever}
	v.late.ticks = slices.Clone(v.late.ticks)
	return v
}

// upper is the latest moment at which something can have happened that was recorded by
// storing the tick at touched: when the tick after it was in effect.
func (v *view) upper(touched time.Duration) time.Duration {
	if touched >= v.tick {
		return v.now
	}
	next := touched + tickSlack
	if i, found := slices.BinarySearchFunc(v.late.ticks, touched, func(l lateTick, at time.Duration) int {
		return int(min(max(l.at-at, -1), 1))
	}); found {
		next = v.late.ticks[i].next
	} else if touched <= v.late.droppedTo {
		next = max(next, touched+v.late.droppedGap)
	}
	return min(next, v.now)
}

// use is what is known of the use of one ID.
type use struct {
	unread        int64
	touched       time.Duration // latest moment of the newest touch; never: it was not touched
	logged, moved time.Duration // receipt of the newest log entry, and of the newest that showed moved bytes
	open          int           // streams
	unheard       bool          // one of them has not been reported for longer than it should
}

// admitted reports whether a request that was admitted may be open without the log
// having said so.
func (v *view) admitted(u use) bool {
	return u.unread > 0 || min(v.now, v.blind) < u.touched+v.window
}

// settles is for how much longer a request may be open that was admitted, without the
// log having said so. What it is after that does not depend on it. 0: there is none, or
// its answer has not been read.
func (v *view) settles(u use) time.Duration {
	if u.unread > 0 || v.blind != forever || !v.admitted(u) {
		return 0
	}
	return u.touched + v.window - v.now
}

// age is for how long there has been no activity at all.
func (v *view) age(u use) time.Duration {
	if u.open > 0 || v.admitted(u) {
		return 0
	}
	return max(v.now-max(u.touched+shortMost, u.logged), 0)
}

// quiet is for how long no request has been admitted and no bytes have moved.
func (v *view) quiet(u use) time.Duration {
	if u.unheard || v.admitted(u) {
		return 0
	}
	moved := u.moved
	if u.open > 0 {
		moved += v.flush + logBuffer // what moved since then has not been shown yet
	}
	return max(v.now-max(u.touched+shortMost, moved), 0)
}
