package eventlog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Bounds of the log.
const (
	// KeepFor and KeepEvents are how long events are kept, and how many: the oldest segment is deleted when one of
	// them is reached without it. KeepBytes bounds the compressed bytes of all segments.
	KeepFor    = 7 * 24 * time.Hour
	KeepEvents = 100_000
	KeepBytes  = 16 << 20
	// maxWaiting bounds the states that wait to be compared, beyond those of the recovery.
	maxWaiting = 20_000
)

const (
	// gather is how long the first state waits for others. writeEvery spaces writes of a segment that is not full.
	gather     = 100 * time.Millisecond
	writeEvery = time.Second
	// bytesPerSecond bounds the rate of writes, because etcd keeps every version of a segment until its compaction.
	bytesPerSecond = 256 << 10
	// minRetry and maxRetry bound the back-off after a failed call.
	minRetry, maxRetry = 100 * time.Millisecond, 10 * time.Second
	// offRetry is the pause between looks for the CRD. expireEvery is that between looks for old segments.
	offRetry, expireEvery = 30 * time.Second, time.Minute
)

// ErrLoading and ErrOff are why events cannot be read.
var (
	ErrLoading = errors.New("the log of events is being read")
	ErrOff     = errors.New("the CRD eventsegments.berth.sh is missing")
)

// errDeposed ends the writer: a later leader writes.
var errDeposed = errors.New("a later leader writes the log of events")

// Options configure a Log. All are required unless their comment says otherwise.
type Options struct {
	Store Store
	// Term is that of the leader.
	Term uint64
	// Valid reports whether this replica certainly leads. Nothing is written otherwise.
	Valid func() bool
	// Yield is called before each write and may wait.
	Yield func(context.Context)
	// Build returns the UID of a pool, "" if it is not known.
	Build func(pool string) string
	Wall  func() time.Time
	Log   *zap.Logger
	// keep is KeepEvents but in tests.
	keep int
}

// Log is the log of events of one leader. Its methods may be called concurrently. Only Run writes.
type Log struct {
	o     Options
	codec *codec

	mu sync.Mutex
	// err is why events cannot be read: ErrLoading, ErrOff, or nil.
	err error
	// waiting are the states to be compared, in the order of their revisions, and waits how many of each sandbox there are.
	waiting []told
	waits   map[string]int
	most    int    // of waiting
	gone    uint64 // how many states have been removed from waiting: the position of the first one
	// wake has a value when there is a state, or a look for old segments is due.
	wake     chan struct{}
	segments []*segment // by first
	known    map[string]*known
	through  fact.Revision
	latest   uint64 // term of the segments that were loaded
	events   int    // of all segments
	bytes    int
	stats    Stats
	changed  chan struct{} // closed at the next event; nil: no reader waits
}

// told is a durable state, and when it was seen.
type told struct {
	s  *fact.Sandbox
	at time.Time
}

// Stats describe a log.
type Stats struct {
	// Events and Bytes are those of the segments, Bytes compressed. Written counts the compressed bytes of all writes.
	Events, Bytes  int
	Written        uint64
	Waiting        int
	Failed, Missed uint64 // writes that failed, and states that were dropped
}

// New returns a log that is loading, or an error that names the missing options.
func New(o Options) (*Log, error) {
	if err := options.Require(o, "Store", "Term", "Valid", "Yield", "Build", "Wall", "Log"); err != nil {
		return nil, err
	}
	o.keep = cmp.Or(o.keep, KeepEvents)
	c, err := newCodec()
	return &Log{o: o, codec: c, err: ErrLoading, waits: map[string]int{}, most: maxWaiting, wake: make(chan struct{}, 1), known: map[string]*known{}}, err
}

// Recover gives the log the states that exist when the term begins. It is called once, before Tell.
func (l *Log) Recover(states []*fact.Sandbox) {
	slices.SortFunc(states, func(a, b *fact.Sandbox) int {
		if a.Revision.Less(b.Revision) {
			return -1
		}
		return 1
	})
	l.mu.Lock()
	l.most += len(states)
	l.mu.Unlock()
	l.Tell(states...)
}

// Tell gives the log states that are durable, in the order of their revisions. The caller must not change them any
// more. It never blocks.
func (l *Log) Tell(states ...*fact.Sandbox) {
	if len(states) == 0 {
		return
	}
	at := l.o.Wall()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range states {
		l.waiting = append(l.waiting, told{s, at})
		l.waits[s.ID]++
	}
	if over := len(l.waiting) - l.most; over > 0 {
		l.stats.Missed += uint64(over)
		l.done(over)
	}
	l.signal()
}

// done removes the first states.
func (l *Log) done(n int) {
	for _, t := range l.waiting[:n] {
		if l.waits[t.s.ID]--; l.waits[t.s.ID] == 0 {
			delete(l.waits, t.s.ID)
		}
	}
	rest := copy(l.waiting, l.waiting[n:])
	clear(l.waiting[rest:])
	l.waiting = l.waiting[:rest]
	l.gone += uint64(n)
}

// doneUntil removes the states before a position.
func (l *Log) doneUntil(position uint64) {
	if position > l.gone {
		l.done(int(position - l.gone))
	}
}

func (l *Log) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Stored reports whether every state of a sandbox that the log was told is in it, or was dropped.
func (l *Log) Stored(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waits[id] == 0
}

// Stats returns the current values.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Events, s.Bytes, s.Waiting = l.events, l.bytes, len(l.waiting)
	return s
}

// Run loads the log and writes it until ctx ends or a later leader writes.
func (l *Log) Run(ctx context.Context) {
	if l.load(ctx) != nil {
		return
	}
	ticker := time.NewTicker(expireEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			l.expire(ctx)
			continue
		case <-l.wake:
		}
		if !wait.Sleep(ctx, gather) {
			return
		}
		for l.Stats().Waiting > 0 {
			l.o.Yield(ctx)
			began := time.Now()
			full, n, err := l.write(ctx)
			if err != nil {
				if ctx.Err() == nil { // a later leader, or a segment that cannot be decompressed
					l.o.Log.Error("the log of events is not written any more", zap.Error(err))
				}
				return
			}
			pause := time.Duration(n) * time.Second / bytesPerSecond
			if !full && n > 0 {
				pause = max(pause, writeEvery)
			}
			if !wait.Sleep(ctx, pause-time.Since(began)) {
				return
			}
			l.expire(ctx)
		}
	}
}

// load reads all segments. It tries again until it succeeds or ctx ends, and returns ctx's error then.
func (l *Log) load(ctx context.Context) error {
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		began := time.Now()
		var all []*segment
		err := l.o.Store.List(ctx, func(o *v1alpha1.EventSegment) {
			l.o.Yield(ctx) // decoding would compete with claims
			all = append(all, l.read(o))
		})
		if err == nil {
			l.open(all)
			l.o.Log.Info("log of events read", zap.Int("segments", len(all)), zap.Int("events", l.Stats().Events), zap.Duration("took", time.Since(began)))
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if apierrors.IsNotFound(err) { // the resource itself
			l.off()
			pause = offRetry
		} else {
			l.o.Log.Warn("the log of events was not read, retrying", zap.Error(err))
		}
		if !wait.Sleep(ctx, pause) {
			return ctx.Err()
		}
	}
}

// off drops what waits: nothing can be written.
func (l *Log) off() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !errors.Is(l.err, ErrOff) {
		l.o.Log.Error("events are neither kept nor sent: install the CRD (docs/operations.md)", zap.Error(ErrOff))
	}
	l.err, l.most = ErrOff, 0
	l.stats.Missed += uint64(len(l.waiting))
	l.done(len(l.waiting))
}

// read returns a segment. One that cannot be read has no events to show, but keeps its numbers.
func (l *Log) read(o *v1alpha1.EventSegment) *segment {
	s, err := l.codec.fromObject(o)
	if err != nil {
		l.o.Log.Error("events cannot be read and are left out", zap.String("segment", o.Name), zap.Error(err))
	}
	return s
}

// open enters the segments.
func (l *Log) open(all []*segment) {
	slices.SortFunc(all, func(a, b *segment) int { return int(int64(a.first) - int64(b.first)) })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.most = nil, max(l.most, maxWaiting)
	for _, s := range all {
		l.enter(s)
	}
	if n := len(all); n > 0 {
		l.latest = all[n-1].term
	}
	// A journal that was begun anew may have a term that is not above those of the log. Then all is compared.
	if n := len(all); n > 0 && all[n-1].through.Term < l.o.Term {
		l.through = all[n-1].through
		// What has waited since the recovery is told up to there.
		told := 0
		for told < len(l.waiting) && !l.through.Less(l.waiting[told].s.Revision) {
			told++
		}
		l.done(told)
	}
	if len(l.waiting) > 0 {
		l.signal()
	}
}

// enter makes a segment the last one, or replaces the last one, and notes what its new events tell.
func (l *Log) enter(s *segment) {
	had := 0
	if n := len(l.segments); n > 0 && l.segments[n-1].first == s.first {
		last := l.segments[n-1]
		had, l.events, l.bytes = len(last.events), l.events-last.n, l.bytes-len(last.data)
		l.segments[n-1] = s
	} else {
		l.segments = append(l.segments, s)
	}
	l.events += s.n
	l.bytes += len(s.data)
	before := len(s.events)
	for i := range s.decoded {
		e := &s.decoded[i]
		k := l.known[e.Sandbox]
		if k == nil {
			k = &known{id: e.Sandbox, team: e.Team}
			l.known[e.Sandbox] = k
		}
		if before+i >= had {
			k.note(e)
		}
		s.events = append(s.events, entry{k, kindOf(e.Type)})
	}
	s.decoded = nil
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// note enters what an event tells.
func (k *known) note(e *Event) {
	k.events++
	switch e.Type {
	case Created, Updated:
		k.end = e.End
	case Paused:
		k.asleep = e.At
	case Resumed:
		k.end, k.asleep, k.woken = e.End, 0, e.At
	case Killed:
		k.killed = true
	}
}

// expire deletes the oldest segments that need not be kept.
func (l *Log) expire(ctx context.Context) {
	for {
		l.mu.Lock()
		n := len(l.segments)
		if n < 2 {
			l.mu.Unlock()
			return
		}
		oldest := l.segments[0]
		keep := l.events-oldest.n < l.o.keep && l.bytes <= KeepBytes && l.o.Wall().Sub(oldest.newest) < KeepFor
		l.mu.Unlock()
		if keep || !l.o.Valid() {
			return
		}
		err := l.o.Store.Delete(ctx, oldest.name(), oldest.version)
		if err != nil && !apierrors.IsNotFound(err) {
			l.failed(fmt.Errorf("delete segment %s: %w", oldest.name(), err))
			return
		}
		l.mu.Lock()
		l.segments = slices.Delete(l.segments, 0, 1)
		l.events -= oldest.n
		l.bytes -= len(oldest.data)
		for _, e := range oldest.events {
			if e.of.events--; e.of.events == 0 && e.of.killed {
				delete(l.known, e.of.id)
			}
		}
		l.mu.Unlock()
	}
}

func (l *Log) failed(err error) {
	l.mu.Lock()
	l.stats.Failed++
	l.mu.Unlock()
	l.o.Log.Warn("log of events: a call failed, retrying", zap.Error(err))
}
