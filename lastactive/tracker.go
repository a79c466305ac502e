package lastactive

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/puzpuzpuz/xsync/v4"
	"golang.org/x/sys/cpu"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/lastactive/sockets"
)

// Options configure a Tracker. All but Sockets are required.
type Options struct {
	// Now is a monotonic clock that counts suspended time (CLOCK_BOOTTIME) and is above 0.
	// It may be called with a lock held.
	Now func() time.Duration
	// Look asks what Envoy holds open; look.Reader has it. It ends in bounded time.
	Look func(context.Context) (look.Look, error)
	// Sockets asks how many bytes connections have moved. Default sockets.Read.
	Sockets func() ([]sockets.Socket, error)
	// Window is for how long a request can be open at Envoy without a look showing it,
	// after its answer was read. Only Last needs it: the shortest idle timeout is not less.
	Window time.Duration
}

// Activity is how a sandbox was used.
type Activity struct {
	ID   string // empty: of the sandbox at Addr, whichever it is
	Addr netip.Addr
	// Age is how long ago it was in use last. 0: it is, or may be.
	Age time.Duration
	// Open is how many requests the newest good look has shown, and Unread how many were
	// admitted whose answer Envoy may not have read.
	Open, Unread int
	Kind         activity.Kind
}

// Report says what a look has changed.
type Report struct {
	Activities []Activity
	// Gateway, Ended, Began and Took are of the newest look: its place, whether Envoy has
	// ended, when the look began by Options.Now, and how long it took. If the look failed,
	// only Took is set, of the newest good one.
	Gateway     string
	Ended       bool
	Began, Took time.Duration
	// Blind says why the newest look failed. Empty: it did not.
	Blind string
}

// Question asks how a sandbox was used that is at Addr.
type Question struct {
	ID       string
	Addr     netip.Addr
	MinBytes uint64 // as in Begin
}

// Tracker remembers when each sandbox was last in use. See the package comment.
type Tracker struct {
	o        Options
	_        cpu.CacheLinePad
	looked   atomic.Int64          // when the newest look began
	shown    atomic.Pointer[shown] // by the newest good look
	_        cpu.CacheLinePad
	entries  *xsync.Map[string, *Entry] // by ID, or by the address if no sandbox is known there
	metering atomic.Bool                // there is, or was, an entry whose bytes count

	looking, lookEnded chan struct{} // have room for one

	mu       sync.Mutex
	newest   Report        // of the newest look, without activities
	ended    time.Duration // the newest good look
	reported time.Duration // what was idle by then is reported
	buckets  map[uint64]bucket
}

// New returns a Tracker that has not looked yet.
func New(o Options) (*Tracker, error) {
	if o.Now == nil || o.Look == nil || o.Window <= 0 {
		return nil, errors.New("lastactive: Options.Now, Look and Window are required")
	}
	if o.Sockets == nil {
		o.Sockets = sockets.Read
	}
	t := &Tracker{
		o: o, entries: xsync.NewMap[string, *Entry](), looking: make(chan struct{}, 1), lookEnded: make(chan struct{}, 1),
		newest: Report{Blind: "there was no look yet"},
	}
	t.shown.Store(&shown{})
	return t, nil
}

// Begin says that a request for a sandbox is about to be admitted, to this address, over
// HTTP/2 or 1.1. Whether it may be must be looked at afterwards; then it is Cancel, or Read
// as soon as Envoy has read the answer. minBytes: an open connection is use only while so
// many bytes a minute move over it; 0: in any case.
//
// nil: nothing has begun, because Envoy's list of this sandbox would become too long. After
// wait there may be room; 0: only once Envoy lists less. Begin takes no lock and does not
// allocate if the sandbox is known and its port is listed.
func (t *Tracker) Begin(id string, to netip.AddrPort, http2 bool, minBytes uint64) (e *Entry, wait time.Duration) {
	e = t.entry(id, id, to.Addr().Unmap(), minBytes)
	if wait, ok := e.room(listed{to.Port(), http2}); !ok {
		return nil, wait
	}
	e.unread.Add(1)
	return e, 0
}

// Expect says that a sandbox has a route. If only bytes count, they are counted from now on:
// connections may be open that no request of this router has opened.
func (t *Tracker) Expect(id string, addr netip.Addr, minBytes uint64) {
	if minBytes > 0 {
		t.entry(id, id, addr.Unmap(), minBytes)
	}
}

func (t *Tracker) entry(key, id string, addr netip.Addr, minBytes uint64) *Entry {
	if e, ok := t.entries.Load(key); ok && e.addr == addr {
		return e
	}
	if minBytes > 0 {
		t.metering.Store(true)
	}
	e, _ := t.entries.Compute(key, func(e *Entry, ok bool) (*Entry, xsync.ComputeOp) {
		if ok && e.addr == addr {
			return e, xsync.CancelOp
		}
		e = &Entry{t: t, id: id, addr: addr, minBytes: minBytes, ports: map[listed]time.Duration{}}
		e.touched.Store(-1)
		return e, xsync.UpdateOp
	})
	return e
}

// Forget drops a sandbox that has been released. What is open at its address yet is
// reported without an ID from the next look on.
func (t *Tracker) Forget(id string) { t.entries.Delete(id) }

// Retain drops the sandboxes for which keep returns false and that are not in use. Their
// routes have gone: a request that begins meanwhile is not admitted.
func (t *Tracker) Retain(keep func(id string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, e := range t.entries.All() {
		if a, _ := t.activity(e, 0); a.Age > 0 && !keep(id) {
			t.entries.Delete(id)
		}
	}
}

// activity is that of an entry; !ok: it was never used. t.mu is held.
func (t *Tracker) activity(e *Entry, now time.Duration) (a Activity, ok bool) {
	unread, touched := e.use()
	look := t.shown.Load()
	a = Activity{ID: e.id, Addr: e.addr, Open: look.addrs[e.addr].open, Unread: int(e.unread.Load()), Kind: e.kind}
	admitted := unread || touched >= look.began
	switch {
	case !admitted && !e.inUse:
		a.Age = max(now-e.until, 1)
	case t.newest.Blind != "" && !unread:
		a.Kind = activity.Unknown
	case !e.inUse:
		a.Kind = activity.Admission
	}
	return a, a.Age == 0 || e.until > 0
}

// list returns what is in use, or was in use last at this moment or later. t.mu is held.
func (t *Tracker) list(since time.Duration) (list []Activity) {
	now := t.o.Now()
	for _, e := range t.entries.All() {
		if a, ok := t.activity(e, now); ok && (a.Age == 0 || e.until >= since) {
			list = append(list, a)
		}
	}
	return list
}

// Report returns what is in use, and what looks have found to be in use no more since
// Report was called before. all: everything that is remembered.
func (t *Tracker) Report(all bool) Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	if all {
		t.reported = 0
	}
	r := t.newest
	r.Activities = t.list(t.reported)
	t.reported = t.ended + 1
	return r
}

// Dump lists everything that is remembered.
func (t *Tracker) Dump() []Activity {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.list(0)
}

// Blind says why the newest look failed. Empty: it did not.
func (t *Tracker) Blind() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.newest.Blind
}

// Ask takes two looks that begin after it was called, and says how these sandboxes were
// used. Those that are not among the answers were never in use. A caller that stops
// admissions first learns of every use: see the package comment. An error says why it
// cannot be told.
func (t *Tracker) Ask(ctx context.Context, questions []Question) ([]Activity, error) {
	for _, q := range questions {
		if q.MinBytes > 0 && q.Addr.IsValid() {
			t.entry(q.ID, q.ID, q.Addr.Unmap(), q.MinBytes)
		}
	}
	err := t.Look(ctx)
	if err == nil {
		sleep(ctx, askPause)
		err = t.Look(ctx)
	}
	if err != nil {
		return nil, err
	}
	return t.Answer(questions), nil
}

// Answer is what Ask says after its looks.
func (t *Tracker) Answer(questions []Question) (list []Activity) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.o.Now()
	for _, q := range questions {
		addr := q.Addr.Unmap()
		newest, used := Activity{}, false
		e, known := t.entries.Load(q.ID)
		stray, strays := t.entries.Load(addr.String()) // what another router beside this Envoy had open there
		if known {
			newest, used = t.activity(e, now)
		} else if open := t.shown.Load().addrs[addr].open; open > 0 {
			newest, used = Activity{Addr: q.Addr, Open: open, Kind: activity.Open}, true
		}
		if strays {
			if a, ok := t.activity(stray, now); ok && (!used || a.Age < newest.Age) {
				newest, used = a, true
			}
		}
		if newest.ID = q.ID; used {
			list = append(list, newest)
		}
	}
	return list
}

// Last is the report of a router that has ended its admissions, and whose answers Envoy
// has read: it rests on a look that begins after Last was called. Blind: there was no good
// look until ctx ended.
func (t *Tracker) Last(ctx context.Context) Report {
	err := t.Look(ctx)
	for err != nil && ctx.Err() == nil {
		sleep(ctx, askPause)
		err = t.Look(ctx)
	}
	r := t.Final()
	if err != nil && r.Blind == "" {
		r.Blind = err.Error()
	}
	return r
}

// Final is what Last says after its look. What was in use less than Options.Window ago is
// in use, because it may be, unless Envoy has ended. So is what is open, also if only bytes
// count: from here on no router counts them.
func (t *Tracker) Final() Report {
	r := t.Report(true)
	for i, a := range r.Activities {
		if a.Open > 0 || a.Age < t.o.Window && !r.Ended {
			r.Activities[i].Age = 0
		}
	}
	return r
}

// Looked has something when a look has ended since it was received from before. It has
// room for one.
func (t *Tracker) Looked() <-chan struct{} { return t.lookEnded }

// Len is the number of sandboxes remembered.
func (t *Tracker) Len() int { return t.entries.Size() }
