package lastactive

import (
	"errors"
	"math/rand/v2"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/puzpuzpuz/xsync/v4"
)

// Options configure a Tracker.
type Options struct {
	// Size is how many IDs to remember, 1 or more. Those that are in use are
	// remembered beyond it. Default 200,000: twice the route cache, so that an ID
	// outlives its route's place there.
	Size int
	// Streams is the most open streams to remember, 1 or more. Beyond it there is
	// doubt. Default 1,048,576.
	Streams int
	// Flush is how often Envoy's access log reports an open request, 1 s or more.
	// Required.
	Flush time.Duration
	// Window is how long a request that was admitted counts as open if the log says
	// nothing of it. More than Flush by what Envoy may keep an entry back and a second.
	// Required.
	Window time.Duration
	// Now is a monotonic clock that counts suspended time (CLOCK_BOOTTIME). It may be
	// called with a lock held. Required.
	Now func() time.Duration
	// Gone reports whether a sandbox has been released. It is asked, with no lock held,
	// when the log names an ID that is not tracked. Default: none has.
	Gone func(id string) bool
	// IdleTimeout is after how long without activity a sandbox is released (0: never),
	// if that is known. It is asked as Gone is. Default: it is not known.
	IdleTimeout func(id string) (time.Duration, bool)
}

// Tracker remembers when each ID was last in use. See the package comment.
type Tracker struct {
	flush, window time.Duration
	size          int
	streamsMost   int
	gone          func(string) bool
	idleTimeout   func(string) (time.Duration, bool)

	clock   clock
	queue   atomic.Pointer[Entry]      // what is to be reported
	entries *xsync.Map[string, *Entry] // changed with mu held

	mu      sync.Mutex
	all     []*Entry // the same as entries
	streams map[string]*logStream
	logs    map[*Log]struct{} // open, or with streams
	evicted uint64
	// blind is when this side has ended a stream of the log; forever: it has not.
	blind time.Duration
	// envoyEnded: so nothing can be open any more.
	envoyEnded bool
	// dropped is what an ID that is not tracked can have been used at most: the newest
	// of all that are not remembered any more though they may exist.
	dropped    use
	droppedAny bool
	// untold: one that was dropped for want of room was used after it was last reported.
	untold bool
}

// New returns an empty Tracker. It is in doubt: what was open before is not known.
func New(o Options) (*Tracker, error) {
	var errs []error
	if o.Now == nil {
		errs = append(errs, errors.New("lastactive: Options.Now is required"))
	}
	if o.Size < 0 || o.Streams < 0 {
		errs = append(errs, errors.New("lastactive: Options.Size and Streams must not be negative"))
	}
	if o.Flush < time.Second {
		errs = append(errs, errors.New("lastactive: Options.Flush must be at least 1s"))
	}
	if o.Window < o.Flush+logBuffer {
		errs = append(errs, errors.New("lastactive: Options.Window must be longer than Flush by at least 1s"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.Size == 0 {
		o.Size = 200_000
	}
	if o.Streams == 0 {
		o.Streams = 1 << 20
	}
	if o.Gone == nil {
		o.Gone = func(string) bool { return false }
	}
	if o.IdleTimeout == nil {
		o.IdleTimeout = func(string) (time.Duration, bool) { return 0, false }
	}
	t := &Tracker{
		flush: o.Flush, window: o.Window, size: o.Size, streamsMost: o.Streams, gone: o.Gone, idleTimeout: o.IdleTimeout,
		entries: xsync.NewMap[string, *Entry](),
		streams: map[string]*logStream{}, logs: map[*Log]struct{}{},
		blind: forever, dropped: use{touched: never, logged: never, moved: never},
	}
	t.clock.now = o.Now
	now := o.Now()
	t.clock.coarse.Store(int64(now))
	t.clock.late.droppedTo = never
	t.clock.toBridge = noGap
	t.clock.gaps = gap{from: forever, all: true}
	t.clock.doubt(now+doubtFlushes*o.Flush, "this router has just started")
	return t, nil
}

// Begin says that a request for id is about to be admitted. Whether it may be must be
// looked at afterwards; then it is Cancel, or Read as soon as Envoy has read the answer.
// idleTimeout is that of the sandbox; 0: it is never released for being idle. It does
// not allocate if id is tracked.
func (t *Tracker) Begin(id string, idleTimeout time.Duration) *Entry {
	every := int64(t.reportEvery(idleTimeout, true))
	e, tracked := t.entries.Load(id)
	if !tracked || !e.begin() {
		t.mu.Lock()
		if e, tracked = t.entries.Load(id); !tracked {
			e = t.add(id, time.Duration(every))
		}
		e.begin() // nothing leaves while mu is held
		t.mu.Unlock()
	}
	if e.every.Load() != every {
		e.every.Store(every)
	}
	return e
}

// sample is how many entries are looked at to find one to drop, and sampleMost how many
// if all are in use.
const (
	sample     = 16
	sampleMost = 128
)

// add returns a new entry, and makes room for it. t.mu is held.
func (t *Tracker) add(id string, every time.Duration) *Entry {
	for range 2 { // twice, so that it shrinks again when less is in use
		if len(t.all) >= t.size {
			t.evict()
		}
	}
	e := &Entry{t: t, id: id, place: len(t.all), logged: never, moved: never, reported: never}
	e.touched.Store(int64(never))
	e.due.Store(int64(never))
	e.every.Store(int64(every))
	t.all = append(t.all, e)
	t.entries.Store(id, e)
	return e
}

// evict drops the ID that has been silent longest, of a few. One that is in use stays.
// t.mu is held.
func (t *Tracker) evict() {
	var oldest *Entry
	var oldestUse time.Duration
	for i := 0; i < sample || oldest == nil && i < sampleMost; i++ {
		e := t.all[rand.IntN(len(t.all))]
		if e.open > 0 || e.unread.Load() > 0 {
			continue
		}
		if at := max(time.Duration(e.touched.Load()), e.logged); oldest == nil || at < oldestUse {
			oldest, oldestUse = e, at
		}
	}
	if oldest == nil {
		return
	}
	oldest.left.Store(true) // before unread is looked at: see Entry.begin
	if oldest.unread.Load() > 0 {
		oldest.left.Store(false)
		return
	}
	t.evicted++
	v := t.look()
	t.untold = t.untold || v.now-v.age(t.use(v, oldest)) > oldest.reported
	t.remember(v, oldest)
	t.remove(oldest)
}

// remember notes how an entry was used that leaves though its ID may exist. t.mu is
// held.
func (t *Tracker) remember(v *view, e *Entry) {
	u := t.use(v, e)
	if u.open > 0 || u.unread > 0 {
		u.touched = v.now // it goes on where it is not seen until the log names it again
	}
	d := &t.dropped
	d.touched, d.logged, d.moved = max(d.touched, u.touched), max(d.logged, u.logged), max(d.moved, u.moved)
	t.droppedAny = true
}

// remove takes an entry and its streams out. t.mu is held.
func (t *Tracker) remove(e *Entry) {
	t.entries.Delete(e.id)
	e.left.Store(true)
	last := t.all[len(t.all)-1]
	t.all[e.place], last.place = last, e.place
	t.all[len(t.all)-1] = nil
	t.all = t.all[:len(t.all)-1]
	for e.streams != nil {
		t.drop(e.streams)
	}
}

// Forget drops id: its sandbox has been released.
func (t *Tracker) Forget(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e, ok := t.entries.Load(id); ok {
		t.remove(e)
	}
}

// Retain drops every ID for which keep returns false. keep is called with a lock held.
// IDs that are not known any more may exist nevertheless, so what was known of these is
// remembered for all that are not tracked.
func (t *Tracker) Retain(keep func(id string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.look()
	for i := len(t.all) - 1; i >= 0; i-- { // what takes the place of one that leaves has been looked at
		if e := t.all[i]; !keep(e.id) {
			t.remember(v, e)
			t.remove(e)
		}
	}
}

// Activity is how an ID was used.
type Activity struct {
	ID string
	// Age is how long ago a request, or anything else that Envoy holds open, was last in
	// progress. 0: one is, or may be.
	Age time.Duration
	// Quiet is how long ago a request was last admitted, or bytes last moved. 0: at this
	// moment, for all that is known.
	Quiet time.Duration
	// Open is how many streams the log has shown to be open.
	Open int
	// Settles is in how long it will be known whether a request that was admitted a short
	// while ago is open still. Until then it counts as open. 0: that is known.
	Settles time.Duration
}

// use returns what is known of an entry. t.mu is held.
func (t *Tracker) use(v *view, e *Entry) use {
	// In this order: who counts down has touched before.
	unread := e.unread.Load()
	u := use{unread: unread, touched: v.upper(time.Duration(e.touched.Load())), logged: e.logged, moved: e.moved, open: e.open}
	for s := e.streams; s != nil && !u.unheard; s = s.next {
		u.unheard = v.now-s.seen > s.log.silenceMost()
	}
	return u
}

func (t *Tracker) activity(v *view, e *Entry) Activity {
	return v.activity(e.id, t.use(v, e))
}

func (v *view) activity(id string, u use) Activity {
	return Activity{ID: id, Age: v.age(u), Quiet: v.quiet(u), Open: u.open, Settles: v.settles(u)}
}

// bridge takes what can have ended unseen to have been in use until it could be seen
// again. t.mu is held.
func (t *Tracker) bridge() {
	t.clock.mu.Lock()
	g := t.clock.toBridge
	t.clock.toBridge = noGap
	t.clock.mu.Unlock()
	if g == noGap {
		return
	}
	v := t.look()
	for _, e := range t.all {
		if g.all || v.upper(time.Duration(e.touched.Load())) >= g.from {
			e.logged, e.moved = max(e.logged, g.until), max(e.moved, g.until)
		}
		for s := e.streams; s != nil; s = s.next {
			s.until = g.until
		}
	}
	d := &t.dropped
	if t.droppedAny = t.droppedAny || g.all; t.droppedAny && (g.all || d.touched >= g.from) {
		d.logged, d.moved = max(d.logged, g.until), max(d.moved, g.until)
	}
}

// lookSwept looks at the clock, bridges gaps of the log, and drops the streams whose end
// was lost. t.mu is held.
func (t *Tracker) lookSwept() *view {
	v := t.look()
	v.blind = t.blind
	t.bridge()
	for l := range t.logs {
		l.sweep(v.now)
	}
	return v
}

// Ask says how these IDs were used, and for how much longer it is not known what is
// open: until then what is said is a lower bound. IDs that are not among the answers
// were never used. A caller that stops admissions first learns of every use: see the
// package comment.
func (t *Tracker) Ask(ids []string) (activities []Activity, doubt time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.lookSwept()
	for _, id := range ids {
		if e, ok := t.entries.Load(id); ok {
			activities = append(activities, t.activity(v, e))
		} else if t.droppedAny {
			activities = append(activities, v.activity(id, t.dropped))
		}
	}
	doubt, _ = t.doubt(v.now)
	return activities, doubt
}

// Report returns what is to be reported: all, or the IDs whose last activity has moved
// by a quarter of their idle timeout since they were reported (a minute, if they have
// none). They are taken to be reported then.
func (t *Tracker) Report(all bool) []Activity {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.lookSwept()
	var activities []Activity
	report := func(e *Entry) {
		activities = append(activities, t.activity(v, e))
		e.reported = v.now
		e.due.Store(int64(v.now) + e.every.Load())
	}
	for e := t.drain(); e != nil; {
		next := e.next // before somebody can queue e again
		if !e.left.Load() && !all {
			report(e)
		}
		e.queued.Store(false)
		if e.touched.Load() >= e.due.Load() && !all {
			e.enqueue() // was touched meanwhile, and not queued because it was
		}
		e = next
	}
	if all {
		activities = make([]Activity, 0, len(t.all))
		for _, e := range t.all {
			report(e)
		}
	}
	return activities
}

// EnvoyEnded says that Envoy has ended.
func (t *Tracker) EnvoyEnded() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.envoyEnded = true
}

// Final returns, for a router that ends, what may be in use, was within Options.Window,
// or was after it was last reported, and whether there may be more that it does not
// know of. handover: what is in use may go on, because Envoy has not ended.
func (t *Tracker) Final() (activities []Activity, doubt, handover bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.lookSwept()
	for _, e := range t.all {
		if a := t.activity(v, e); a.Age < t.window || v.now-a.Age > e.reported {
			activities = append(activities, a)
		}
	}
	left, _ := t.doubt(v.now)
	doubt = left > 0 || t.untold
	if t.envoyEnded && left > 0 {
		// Nothing is open. What may have ended unseen is known, unless anything may have.
		t.clock.mu.Lock()
		doubt = t.untold || t.clock.gaps.all
		t.clock.mu.Unlock()
	}
	return activities, doubt, !t.envoyEnded
}

// Status is one line of Dump.
type Status struct {
	Activity
	// Unread is how many requests were admitted, or are about to be, whose answer Envoy
	// may not have read.
	Unread int
}

// Dump lists the IDs for which keep returns true, sorted by ID. A nil keep keeps all.
// keep is called with a lock held.
func (t *Tracker) Dump(keep func(id string) bool) []Status {
	t.mu.Lock()
	v := t.lookSwept()
	dump := make([]Status, 0, len(t.all))
	for _, e := range t.all {
		if keep == nil || keep(e.id) {
			dump = append(dump, Status{t.activity(v, e), int(e.unread.Load())})
		}
	}
	t.mu.Unlock()
	sort.Slice(dump, func(i, j int) bool { return dump[i].ID < dump[j].ID })
	return dump
}

// doubt returns how long it is not known what is open, and why. t.mu is held.
func (t *Tracker) doubt(now time.Duration) (left time.Duration, why string) {
	t.clock.mu.Lock()
	left, why = t.clock.doubtUntil-now, t.clock.doubtWhy
	t.clock.mu.Unlock()
	for l := range t.logs {
		if of, reason := l.doubtNow(now); of > left {
			left, why = of, reason
		}
	}
	if left <= 0 {
		return 0, ""
	}
	return left, why
}

// Doubt is for how much longer it is not known what is open. 0: it is known.
func (t *Tracker) Doubt() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	left, _ := t.doubt(t.look().now)
	return left
}

// Doubts is how often there was a reason for doubt; the first is the start.
func (t *Tracker) Doubts() uint64 {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	return t.clock.doubts
}

// DoubtReason says why there is doubt; empty: there is none.
func (t *Tracker) DoubtReason() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, why := t.doubt(t.look().now)
	return why
}

// Len is the number of IDs remembered.
func (t *Tracker) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.all)
}

// Evicted is the number of IDs dropped for want of room.
func (t *Tracker) Evicted() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.evicted
}

// Streams is the number of open streams remembered.
func (t *Tracker) Streams() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.streams)
}
