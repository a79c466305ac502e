package lastactive

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/puzpuzpuz/xsync/v4"
	"golang.org/x/sys/cpu"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/wait"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/lastactive/sockets"
)

// Options configure a Tracker.
type Options struct {
	// Now is a monotonic clock that counts suspended time (CLOCK_BOOTTIME) and is above 0.
	// It may be called with a lock held. Required.
	Now func() time.Duration
	// Look reads what Envoy holds open, as look.Reader does. It ends in bounded time.
	// Required.
	Look func(context.Context) (look.Look, error)
	// Sockets returns how many bytes connections have moved. Default sockets.Read.
	Sockets func() ([]sockets.Socket, error)
	// ConnectWindow is how long after its answer was read a request may need until a look
	// shows it. Only FinalReport uses it. No idle timeout is shorter. Required.
	ConnectWindow time.Duration
	// Rate bounds the requests that Begin lets pass for each sandbox. Zero: no limit.
	Rate rate.Limit
	// MaxOpen is how many requests a sandbox may have open. While the newest look shows so many, Begin lets none pass for
	// it. 0: no limit.
	MaxOpen int
}

// Why says why Begin has begun nothing.
type Why int

// What a caller of Begin does next.
const (
	// Begun: it goes on.
	Begun Why = iota
	// Again: it may look the route up again after the wait, because the sandbox has no such route, or because Envoy's
	// threads do not know the port yet.
	Again
	// TooManyPorts: Envoy's list of this sandbox, or of all, would become too long. It must not try again until Envoy
	// lists fewer ports.
	TooManyPorts
	// TooFast: the limit of the rate is reached. The next request may pass after the wait.
	TooFast
	// TooManyOpen: the sandbox has as many requests open as it may have.
	TooManyOpen
)

// Refusal is why Begin has begun nothing. Zero: it has begun.
type Refusal struct {
	Why  Why
	Wait time.Duration
}

// Activity is how a sandbox was used.
type Activity struct {
	ID   string
	Addr netip.Addr
	// Age is the time since the last use. 0: it is in use, or may be.
	Age time.Duration
	// Open is how many requests the newest good look has shown. Unread is how many admitted
	// requests have an answer that Envoy may not have read.
	Open, Unread int
	Kind         activity.Kind
}

// Report is what a look has changed.
type Report struct {
	Activities []Activity
	// Gateway, EnvoyEnded, Began and Took describe the newest look: the gateway that was
	// looked at, whether its Envoy has ended, the begin of the look by Options.Now, and its
	// duration. If the look failed, only Took is set, to that of the newest good look.
	Gateway     string
	EnvoyEnded  bool
	Began, Took time.Duration
	// LookError says why the newest look failed. Empty: it succeeded.
	LookError string
}

// Tracker remembers when each sandbox was last in use. See the package comment.
type Tracker struct {
	o         Options
	started   time.Time // of the clock of rates
	_         cpu.CacheLinePad
	lookBegan atomic.Int64          // begin of the newest look
	shown     atomic.Pointer[shown] // by the newest good look
	_         cpu.CacheLinePad
	entries   *xsync.Map[sandboxid.Key, *Entry]
	first     atomic.Uint64 // first requests to new ports so far
	metering  atomic.Bool   // an entry whose bytes count exists or has existed

	lookTurn, lookDone chan struct{} // capacity 1

	mu         sync.Mutex
	newest     Report        // of the newest look, without activities
	lookEnded  time.Duration // end of the newest good look
	reportFrom time.Duration // the next Report has what was last used from here on
	buckets    map[uint64]bucket
}

// New returns a Tracker that has not looked yet.
func New(o Options) (*Tracker, error) {
	if err := options.Require(o, "Now", "Look", "ConnectWindow"); err != nil {
		return nil, err
	}
	if o.Sockets == nil {
		o.Sockets = sockets.Read
	}
	t := &Tracker{
		o: o, started: time.Now(), entries: xsync.NewMap[sandboxid.Key, *Entry](),
		lookTurn: make(chan struct{}, 1), lookDone: make(chan struct{}, 1),
		newest: Report{LookError: "there was no look yet"},
	}
	t.shown.Store(&shown{})
	return t, nil
}

// Begin records that a request for a sandbox is about to be admitted, to this address without
// zone, over HTTP/2 or 1.1. The caller must check afterwards whether it may be admitted, and
// then call Cancel, or Read as soon as Envoy has read the answer.
//
// A nil Entry means that nothing has begun, and the Refusal says why. What the request costs of Options.Rate is taken once
// it has begun, and Cancel gives it back.
//
// Begin takes no lock and does not allocate if its port is listed.
func (t *Tracker) Begin(id sandboxid.Key, to netip.AddrPort, http2 bool) (*Entry, Refusal) {
	e, ok := t.entries.Load(id)
	if !ok || e.addr != to.Addr() {
		return nil, Refusal{Again, lookUpAgain}
	}
	// The limits come before the use: a look between the two would find the sandbox in use.
	if e.crowded.Load() {
		return nil, Refusal{Why: TooManyOpen}
	}
	if wait := e.take(); wait > 0 {
		return nil, Refusal{TooFast, wait}
	}
	if wait, ok := e.room(look.Host{AddrPort: to, HTTP2: http2}); !ok {
		e.giveBack()
		if wait == 0 {
			return nil, Refusal{Why: TooManyPorts}
		}
		return nil, Refusal{Again, wait}
	}
	e.unread.Add(1)
	return e, Refusal{}
}

// Expect records that a sandbox has a route, before a request can find the route. Another
// router may have admitted requests for it already. minBytes is how many bytes per minute must
// move over an open connection for it to count as use. 0: it always counts.
func (t *Tracker) Expect(id string, addr netip.Addr, minBytes uint64) {
	key, ok := sandboxid.KeyOf(id)
	if !ok {
		return // no request can name it
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if e, ok := t.entries.Load(key); ok && e.addr == addr {
		return
	}
	if minBytes > 0 {
		t.metering.Store(true)
	}
	e := &Entry{t: t, addr: addr, minBytes: minBytes, newPorts: map[look.Host]newPort{}, kind: activity.Open}
	e.lastRead.Store(-1)
	e.inUse = t.shown.Load().addrs[addr].open > 0
	t.entries.Store(key, e)
}

// Forget drops a released sandbox.
func (t *Tracker) Forget(id string) {
	if key, ok := sandboxid.KeyOf(id); ok {
		t.entries.Delete(key)
	}
}

// Retain drops the sandboxes for which keep returns false and that are not in use. Their
// routes are gone, so a request that begins meanwhile is not admitted.
func (t *Tracker) Retain(keep func(id string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, e := range t.entries.All() {
		if a, _ := t.activity(e, 0); a.Age > 0 && !keep(key.String()) {
			t.entries.Delete(key)
		}
	}
}

// activity returns how e was used, without its ID. used is false if it never was. t.mu is held.
func (t *Tracker) activity(e *Entry, now time.Duration) (a Activity, used bool) {
	unread, lastRead := e.use()
	shown := t.shown.Load()
	a = Activity{Addr: e.addr, Open: shown.addrs[e.addr].open, Unread: int(e.unread.Load()), Kind: e.kind}
	admitted := unread || lastRead >= shown.began
	switch {
	case !admitted && !e.inUse:
		a.Age = max(now-e.lastUsed, 1)
	case t.newest.LookError != "" && !unread:
		a.Kind = activity.Unknown
	case !e.inUse:
		a.Kind = activity.Admission
	}
	return a, a.Age == 0 || e.lastUsed > 0
}

// list returns what is in use or was last used at or after from. t.mu is held.
func (t *Tracker) list(from time.Duration) (list []Activity) {
	now := t.o.Now()
	for key, e := range t.entries.All() {
		if a, used := t.activity(e, now); used && (a.Age == 0 || e.lastUsed >= from) {
			a.ID = key.String()
			list = append(list, a)
		}
	}
	return list
}

// Report returns what is in use, and what looks have found to be no longer in use since the
// previous Report. If all is set, it returns everything that is remembered.
func (t *Tracker) Report(all bool) Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	if all {
		t.reportFrom = 0
	}
	r := t.newest
	r.Activities = t.list(t.reportFrom)
	t.reportFrom = t.lookEnded + 1
	return r
}

// Dump lists everything that is remembered.
func (t *Tracker) Dump() []Activity {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.list(0)
}

// LookError says why the newest look failed. Empty: it succeeded.
func (t *Tracker) LookError() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.newest.LookError
}

// Ask takes two looks that begin after the call, and returns how these sandboxes were used.
// A sandbox without an activity was never in use. A caller that stops admissions first
// learns of every use, see the package comment. An error says why a look failed.
func (t *Tracker) Ask(ctx context.Context, ids []string) ([]Activity, error) {
	err := t.Look(ctx)
	if err == nil {
		wait.Sleep(ctx, askPause)
		err = t.Look(ctx)
	}
	if err != nil {
		return nil, err
	}
	return t.Answer(ids), nil
}

// Answer returns what Ask returns after its looks. A sandbox without a route may be in use.
func (t *Tracker) Answer(ids []string) (list []Activity) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.o.Now()
	for _, id := range ids {
		key, _ := sandboxid.KeyOf(id) // the zero Key has no entry
		if e, ok := t.entries.Load(key); !ok {
			list = append(list, Activity{ID: id, Kind: activity.Unknown})
		} else if a, used := t.activity(e, now); used {
			a.ID = id
			list = append(list, a)
		}
	}
	return list
}

// FinalReport is the last report of a router that has stopped admissions and whose answers
// Envoy has read. It rests on a look that begins after the call. If no look succeeds until
// ctx ends, LookError is set.
func (t *Tracker) FinalReport(ctx context.Context) Report {
	err := t.Look(ctx)
	for err != nil && ctx.Err() == nil {
		wait.Sleep(ctx, askPause)
		err = t.Look(ctx)
	}
	r := t.FinalReportNow()
	if err != nil && r.LookError == "" {
		r.LookError = err.Error()
	}
	return r
}

// FinalReportNow returns what FinalReport returns after its look. A sandbox counts as in use
// if a request is open, even if only bytes count, because this router stops counting them.
// It also counts as in use if it was used less than Options.ConnectWindow ago, unless Envoy
// has ended.
func (t *Tracker) FinalReportNow() Report {
	r := t.Report(true)
	for i, a := range r.Activities {
		if a.Open > 0 || a.Age < t.o.ConnectWindow && !r.EnvoyEnded {
			r.Activities[i].Age = 0
		}
	}
	return r
}

// LookDone receives a value when a look has ended since the last receive. Its capacity is 1.
func (t *Tracker) LookDone() <-chan struct{} { return t.lookDone }

// Len is the number of sandboxes remembered.
func (t *Tracker) Len() int { return t.entries.Size() }
