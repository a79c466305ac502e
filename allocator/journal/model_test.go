package journal

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"testing"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// The model runs leaders that follow and overlap each other against a store
// whose calls are delayed, lost, answered in doubt, and carried out long after
// their caller has given up or is gone. Each leader runs in a coroutine that stops
// at every call to the store, so that a history is a list of choices: rapid
// shrinks it, and the same seed is the same history.

// record makes a record as allocator would, small.
func record(key string, term, counter uint64) Record {
	raw, err := proto.Marshal(&journalv1.Record{Key: key, Term: term, Counter: counter})
	if err != nil {
		panic(err)
	}
	return Record{Key: key, Term: term, Counter: counter, Raw: raw}
}

// world is the store and all who use it.
type world struct {
	t       *rapid.T
	slots   map[int]Slot
	version int
	landed  []Slot // every write that took place, in order
	// late are writes that were given up by their callers and may still land.
	late    []Slot
	leaders []*leader
	nonces  int
	// elected is the last leader that was made: the others have lost the lease,
	// though they may not know.
	elected int
	// durable is the revision of each key that some Commit has said is durable.
	durable map[string]revision
	// safe is what was settled, by anybody.
	safe map[string]revision
}

type revision struct{ term, counter uint64 }

func (r revision) less(o revision) bool {
	return r.term < o.term || r.term == o.term && r.counter < o.counter
}

// leader is one process, in a coroutine.
type leader struct {
	w    *world
	id   int
	next func() (*call, bool)
	stop func()
	end  context.CancelFunc

	pending *call // what it waits for
	log     *Log
	opened  []Record
	counter uint64
	// committed are the revisions of each key that it knows to be in the log.
	committed map[string][]revision
	settled   map[string]revision
	err       error // it has ended
}

// call is a question to the store, or a pause.
type call struct {
	list  bool
	read  int
	write *Slot
	make  *Slot
	pause bool

	slots []Slot
	slot  Slot
	err   error
}

var errLost = errors.New("no answer")

// storeOf is the Store of one leader: every call is handed to the scheduler.
type storeOf struct {
	*leader
	yield func(*call) bool
}

func (s storeOf) ask(c *call) *call {
	if !s.yield(c) {
		c.err = context.Canceled
	}
	return c
}

func (s storeOf) List(_ context.Context, f func(Slot) error) error {
	c := s.ask(&call{list: true})
	for _, slot := range c.slots {
		if err := f(slot); err != nil {
			return err
		}
	}
	return c.err
}

func (s storeOf) Versions(context.Context) (map[int]string, error) { return nil, errLost }

func (s storeOf) Read(_ context.Context, index int) (Slot, error) {
	c := s.ask(&call{read: index})
	return c.slot, c.err
}

func (s storeOf) Write(_ context.Context, slot Slot) (string, error) {
	if s.log == nil && s.id != s.w.elected {
		s.w.t.Fatalf("leader %d takes over although it has lost the lease", s.id)
	}
	c := s.ask(&call{write: &slot})
	return c.slot.Version, c.err
}

func (s storeOf) Create(_ context.Context, slot Slot) (string, error) {
	c := s.ask(&call{make: &slot})
	return c.slot.Version, c.err
}

const modelSlots = 4

func newWorld(t *rapid.T) *world {
	w := &world{t: t, slots: map[int]Slot{}, durable: map[string]revision{}, safe: map[string]revision{}}
	if rapid.Bool().Draw(t, "begun") {
		for i := range modelSlots {
			w.put(Slot{Index: i, Slots: modelSlots, Format: format})
		}
	} else { // one was made, by a leader that died
		w.put(Slot{Index: modelSlots - 1, Slots: modelSlots, Format: format})
	}
	return w
}

func (w *world) put(s Slot) string {
	w.version++
	s.Version = strconv.Itoa(w.version)
	w.slots[s.Index] = s
	return s.Version
}

// elect starts another leader. Those before it go on.
func (w *world) elect() {
	w.elected++
	l := &leader{w: w, id: w.elected, committed: map[string][]revision{}, settled: map[string]revision{}}
	ctx, cancel := context.WithCancel(context.Background())
	l.end = cancel
	l.next, l.stop = iter.Pull(func(yield func(*call) bool) { l.err = l.run(ctx, yield) })
	w.leaders = append(w.leaders, l)
	l.resume()
}

// run is what a leader does: it opens the log and commits.
func (l *leader) run(ctx context.Context, yield func(*call) bool) error {
	w := l.w
	log, records, err := Open(ctx, Options{
		Store: storeOf{l, yield},
		Valid: func() bool { return l.id == w.elected },
		Begin: func(context.Context) error { return nil },
		Nonce: func() string { w.nonces++; return fmt.Sprintf("%d of leader %d", w.nonces, l.id) },
		Pause: func(ctx context.Context, _ int) {
			if ctx.Err() == nil {
				yield(&call{pause: true})
			}
		},
		Log: zap.NewNop(),
	})
	if err != nil {
		return err
	}
	l.log, l.opened = log, records
	w.recovered(l)
	for {
		var batch []Record
		for range rapid.IntRange(1, 3).Draw(w.t, "records") {
			l.counter++
			batch = append(batch, record(rapid.SampledFrom([]string{"a", "b", "c", "d", "e"}).Draw(w.t, "key"), log.Term(), l.counter))
		}
		if err := log.Commit(ctx, batch); err != nil {
			return err
		}
		for _, r := range batch {
			rev := revision{r.Term, r.Counter}
			l.committed[r.Key] = append(l.committed[r.Key], rev)
			if w.durable[r.Key].less(rev) {
				w.durable[r.Key] = rev
			}
		}
		for key, n := range log.ring.newest {
			if settled := l.settled[key]; !settled.less(revision{n.Term, n.Counter}) {
				w.t.Fatalf("leader %d carries %s on at %v, which was settled at %v", l.id, key, n, settled)
			}
		}
	}
}

// settles lets something become safe elsewhere, at any moment: also while a batch
// is being written that it rides along in.
func (l *leader) settles() {
	keys := slices.Sorted(maps.Keys(l.committed))
	if l.pending == nil || len(keys) == 0 {
		return
	}
	key := rapid.SampledFrom(keys).Draw(l.w.t, "key")
	rev := rapid.SampledFrom(l.committed[key]).Draw(l.w.t, "revision")
	for _, at := range []map[string]revision{l.settled, l.w.safe} {
		if at[key].less(rev) {
			at[key] = rev
		}
	}
	l.log.Settle(key, rev.term, rev.counter)
}

// recovered judges what a new leader has found: everything that was said to be
// durable, or later, unless it is safe elsewhere.
func (w *world) recovered(l *leader) {
	found := map[string]revision{}
	for _, r := range l.opened {
		found[r.Key] = revision{r.Term, r.Counter}
		l.committed[r.Key] = append(l.committed[r.Key], found[r.Key])
		if w.durable[r.Key].less(found[r.Key]) {
			w.durable[r.Key] = found[r.Key] // its writer does not know, but it is
		}
	}
	for key, rev := range w.durable {
		if found[key].less(rev) && w.safe[key].less(rev) {
			w.t.Fatalf("leader %d (term %d) finds %s at %v; %v was durable, and only %v is safe elsewhere", l.id, l.log.stamp.Term, key, found[key], rev, w.safe[key])
		}
	}
}

// resume lets a leader go on to its next call.
func (l *leader) resume() {
	c, ok := l.next()
	l.pending = c
	if ok {
		return
	}
	l.pending = nil
	if l.log != nil && errors.Is(l.err, ErrDeposed) && !l.w.overtaken(l) {
		l.w.t.Fatalf("leader %d ended, but no other leader has written: %v", l.id, l.err)
	}
}

// kill ends a process. What it was writing may land later.
func (l *leader) kill() {
	if c := l.pending; c != nil && c.write != nil {
		l.w.late = append(l.w.late, *c.write)
	}
	l.pending = nil
	l.end()
	l.stop()
}

// land carries out a write, and judges it.
func (w *world) land(s Slot) (string, error) {
	if w.slots[s.Index].Version != s.Version {
		return "", errors.New("conflict")
	}
	if n := len(w.landed); n > 0 {
		last := w.landed[n-1]
		if s.Position != last.Position+1 {
			w.t.Fatalf("position %d was written after position %d", s.Position, last.Position)
		}
		if s.Term < last.Term {
			w.t.Fatalf("term %d commits position %d after term %d has begun", s.Term, s.Position, last.Term)
		}
	}
	w.landed = append(w.landed, s)
	return w.put(s), nil
}

// answer carries out the pending call of a leader.
func (w *world) answer(l *leader, luck int) {
	c := l.pending
	w.t.Logf("  leader %d: %s (%d)", l.id, c, luck)
	lost := luck != 0
	switch {
	case c.pause:
	case c.list:
		for _, i := range slices.Sorted(maps.Keys(w.slots)) {
			c.slots = append(c.slots, w.slots[i])
		}
		if lost {
			c.slots, c.err = nil, errLost
		}
	case c.write != nil:
		switch luck {
		case 0, 1: // it takes place, as far as it can
			c.slot.Version, c.err = w.land(*c.write)
			if luck == 1 {
				c.err = errLost
			}
		case 2: // it may take place later
			w.late = append(w.late, *c.write)
			c.err = errLost
		default:
			c.err = errLost
		}
	case c.make != nil:
		if _, ok := w.slots[c.make.Index]; !ok && luck < 2 {
			w.put(*c.make)
		}
		if lost {
			c.err = errLost
		}
	default:
		c.slot, c.err = w.slots[c.read], nil
		if lost {
			c.err = errLost
		}
	}
	l.resume()
}

func (c *call) String() string {
	switch {
	case c.pause:
		return "pause"
	case c.list:
		return "list"
	case c.write != nil:
		return fmt.Sprintf("write position %d of term %d", c.write.Position, c.write.Term)
	case c.make != nil:
		return fmt.Sprintf("create %d", c.make.Index)
	}
	return fmt.Sprintf("read %d", c.read)
}

// overtaken reports whether another leader has written in a later term.
func (w *world) overtaken(l *leader) bool {
	return slices.ContainsFunc(w.landed, func(s Slot) bool { return s.Term > l.log.stamp.Term })
}

func (w *world) running() []*leader {
	return slices.DeleteFunc(slices.Clone(w.leaders), func(l *leader) bool { return l.pending == nil })
}

// Invariant: I5, I9
func TestCommittedRecordsSurviveLeaderChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		w.elect()
		defer func() {
			for _, l := range w.leaders {
				l.kill()
			}
		}()
		t.Repeat(map[string]func(*rapid.T){
			"works": func(t *rapid.T) {
				w.t = t
				for range 12 {
					if all := w.running(); len(all) > 0 {
						w.answer(all[rapid.IntRange(0, len(all)-1).Draw(t, "leader")], 0)
					}
				}
			},
			"call": func(t *rapid.T) {
				w.t = t
				if all := w.running(); len(all) > 0 {
					w.answer(all[rapid.IntRange(0, len(all)-1).Draw(t, "leader")], rapid.IntRange(0, 3).Draw(t, "luck"))
				}
			},
			"settles": func(t *rapid.T) {
				w.t = t
				for _, l := range w.running() {
					l.settles()
				}
			},
			"late write": func(t *rapid.T) {
				w.t = t
				if n := len(w.late); n > 0 {
					i := rapid.IntRange(0, n-1).Draw(t, "which")
					s := w.late[i]
					w.late = slices.Delete(w.late, i, i+1)
					_, _ = w.land(s)
				}
			},
			"leader dies": func(t *rapid.T) {
				w.t = t
				if all := w.running(); len(all) > 0 {
					all[rapid.IntRange(0, len(all)-1).Draw(t, "leader")].kill()
				}
			},
			"another is elected": func(t *rapid.T) {
				w.t = t
				w.elect()
			},
		})
		// Whatever has happened: the next one can take over and commit, and all
		// others find out that they are deposed.
		w.elect()
		last := w.leaders[len(w.leaders)-1]
		for range 40 {
			if last.pending != nil {
				w.answer(last, 0)
			}
		}
		for range 40 {
			for _, l := range w.running() {
				w.answer(l, 0)
			}
		}
		if last.log == nil || last.counter < 2 {
			t.Fatalf("the last leader could not take over or commit: %v", last.err)
		}
		if all := w.running(); len(all) != 1 || all[0] != last {
			t.Fatalf("%d leaders are still at work", len(all))
		}
		for _, l := range w.leaders {
			if l.err != nil && !errors.Is(l.err, ErrDeposed) && !errors.Is(l.err, context.Canceled) {
				t.Fatalf("leader %d ended with %v", l.id, l.err)
			}
		}
	})
}
