package core

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"strconv"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/journal"
	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// disk is where the journal's slots are, and what is durable because of them.
type disk struct {
	slots   map[int]journal.Slot
	version int
	// late are writes that their callers have given up, and that may still land.
	late []journal.Slot
	// facts are all that were ever to be written, batches those of one write.
	facts   map[string]map[Revision]Fact
	batches map[string][]Fact // by nonce
	term    uint64
	// sandboxes is the last state of each that has become durable.
	sandboxes map[string]Sandbox
	sessions  map[string]bool // durable, and has not left
}

const diskSlots = 6

func newDisk() *disk {
	d := &disk{
		slots: map[int]journal.Slot{}, facts: map[string]map[Revision]Fact{}, batches: map[string][]Fact{}, sandboxes: map[string]Sandbox{}, sessions: map[string]bool{},
	}
	for i := range diskSlots {
		d.slots[i] = journal.Slot{Index: i, Version: "0", Slots: diskSlots, Format: 1}
	}
	return d
}

// land carries out a write to a slot, if it still may.
func (d *disk) land(w *world, s journal.Slot) (string, error) {
	if d.slots[s.Index].Version != s.Version {
		return "", errors.New("conflict")
	}
	if s.Term < d.term {
		w.t.Fatalf("a leader of term %d commits in term %d", s.Term, d.term)
	}
	d.version++
	d.term = s.Term
	s.Version = strconv.Itoa(d.version)
	d.slots[s.Index] = s
	before := maps.Clone(w.batches)
	for _, f := range d.batches[s.Nonce] {
		w.durable(f)
	}
	w.judgeLanded(before)
	return s.Version, nil
}

func (d *disk) landLate(w *world) {
	if len(d.late) > 0 {
		s := d.late[0]
		d.late = d.late[1:]
		_, _ = d.land(w, s)
	}
}

// durable notes a fact that can not be lost any more, and judges it: a pod has one
// owner, ever, and what is released or discarded stays so.
func (w *world) durable(f Fact) {
	if sessionOf(f).ID != "" {
		w.disk.sessions[sessionOf(f).ID] = !sessionOf(f).Left
		return
	}
	if sandboxOf(f) == nil {
		p := w.pod(retirementOf(f).Pod)
		if len(p.bound) > 0 && !w.tampered[p.bound[0]] && !w.left(p) {
			w.t.Fatalf("pod %s is discarded with %v on it", p.Key.Name, p.bound)
		}
		p.discarded = true
		return
	}
	s := *sandboxOf(f)
	p := w.pod(s.Pod)
	if before, known := w.disk.sandboxes[s.ID]; known {
		// A late write of a deposed leader can bring back an object that a user has deleted after
		// the end. The next leader finds it without its pod, and releases the sandbox again.
		again := before.Phase == Released && s.Phase == Released && w.forgotten[s.ID]
		next := before.Phase == Stopped && s.Incarnation == before.Incarnation+1 && len(p.bound) == 0 && !p.discarded
		if before.Phase == Released && !again || s.Pod != before.Pod && !w.tampered[s.ID] && !next || !before.Revision.Less(s.Revision) {
			w.t.Fatalf("%s goes from %+v to %+v", s.ID, before, s)
		}
		if s.Pod != before.Pod {
			p.bound = append(p.bound, s.ID)
		}
		if next {
			w.judgeHandOver(s)
		}
		if s.Phase == Stopped {
			w.judgeStopped(s)
		}
	} else {
		if len(p.bound) > 0 || p.discarded {
			w.t.Fatalf("pod %s is given to %s; it had %v, discarded: %v", p.Key.Name, s.ID, p.bound, p.discarded)
		}
		p.bound = append(p.bound, s.ID)
		w.judgeHandOver(s)
		if s.Batch != "" {
			w.batches[s.Batch] = append(slices.Clip(w.batches[s.Batch]), s)
		}
	}
	w.disk.sandboxes[s.ID] = s
	w.judgeQuota(s.Team)
}

// judgeDeleted judges a deletion that takes place, by any leader and at any time.
func (w *world) judgeDeleted(p *simPod) {
	switch {
	case len(p.bound) == 0 && !p.discarded:
		w.t.Fatalf("pod %s is deleted, and that was never durable", p.Key.Name)
	case len(p.bound) > 0 && !w.released(p.bound[0]) && !w.left(p):
		w.t.Fatalf("pod %s is deleted with %s on it", p.Key.Name, p.bound[0])
	}
}

// process is a leader: a core, and a journal in a coroutine that stops at every
// call to the API server.
type process struct {
	w     *world
	core  *Core
	guard Watcher
	log   *journal.Log
	// opened is what the journal held when this leader took it over.
	opened []journal.Record

	next func() (*storeCall, bool)
	stop func()
	end  context.CancelFunc
	ctx  context.Context

	pending    *storeCall // what the journal waits for; nil: nothing, or it has ended
	committing []Fact
	written    bool // the core has not received Written yet
	paced      bool // WriterReady has not
	dead       bool
}

// storeCall is a question to the API server, or a pause.
type storeCall struct {
	list  bool
	read  int
	write *journal.Slot
	pause bool

	slots []journal.Slot
	slot  journal.Slot
	err   error
}

type processStore struct {
	yield func(*storeCall) bool
}

func (s processStore) ask(c *storeCall) *storeCall {
	if !s.yield(c) {
		c.err = context.Canceled
	}
	return c
}

func (s processStore) List(_ context.Context, f func(journal.Slot) error) error {
	c := s.ask(&storeCall{list: true})
	for _, slot := range c.slots {
		if err := f(slot); err != nil {
			return err
		}
	}
	return c.err
}

func (s processStore) Versions(context.Context) (map[int]string, error) {
	return nil, errors.New("no audit in here")
}

func (s processStore) Read(_ context.Context, index int) (journal.Slot, error) {
	c := s.ask(&storeCall{read: index})
	return c.slot, c.err
}

func (s processStore) Write(_ context.Context, slot journal.Slot) (string, error) {
	c := s.ask(&storeCall{write: &slot})
	return c.slot.Version, c.err
}

func (s processStore) Create(context.Context, journal.Slot) (string, error) {
	return "", errors.New("all slots are there")
}

func (w *world) newProcess() *process {
	p := &process{w: w}
	p.ctx, p.end = context.WithCancel(context.Background())
	p.next, p.stop = iter.Pull(p.run)
	w.leader = p // elected
	p.resume()
	return p
}

// run is the journal's side of a leader. Between two commits it yields nil.
func (p *process) run(yield func(*storeCall) bool) {
	w := p.w
	nonces := 0
	log, opened, err := journal.Open(p.ctx, journal.Options{
		Store: processStore{yield},
		Valid: func() bool { return w.leader == p },
		Begin: func(context.Context) error { return nil },
		Nonce: func() string {
			nonces++
			w.versions++
			nonce := strconv.Itoa(w.versions)
			w.disk.batches[nonce] = p.committing
			return nonce
		},
		Pause: func(ctx context.Context, _ int) {
			if ctx.Err() == nil {
				yield(&storeCall{pause: true})
			}
		},
		Log: zap.NewNop(),
	})
	if err != nil {
		p.dead = true
		return
	}
	p.log, p.opened = log, opened
	for yield(nil) {
		if err := log.Commit(p.ctx, w.encode(p.committing)); err != nil {
			if p == w.leader && p.ctx.Err() == nil {
				w.t.Fatalf("the leader cannot commit: %v", err)
			}
			p.dead = true
			return
		}
		p.committing, p.written, p.paced = nil, true, true
	}
}

// encode encodes facts, as far as the journal looks into them.
func (w *world) encode(facts []Fact) (all []journal.Record) {
	for _, f := range facts {
		key := keyOf(f.Thing())
		raw, err := proto.Marshal(&journalv1.Record{Key: key, Term: f.Revision.Term, Counter: f.Revision.Counter})
		if err != nil {
			w.t.Fatal(err)
		}
		if w.disk.facts[key] == nil {
			w.disk.facts[key] = map[Revision]Fact{}
		}
		w.disk.facts[key][f.Revision] = f
		all = append(all, journal.Record{Key: key, Term: f.Revision.Term, Counter: f.Revision.Counter, Raw: raw, Joined: f.Joined})
	}
	return all
}

func keyOf(t fact.Thing) string {
	switch t := t.(type) {
	case SandboxID:
		return "sandbox/" + string(t)
	case SessionID:
		return "session/" + string(t)
	}
	return "pod/" + t.(PodKey).ID()
}

// resume lets the journal go on to its next call, or to the end of its work.
func (p *process) resume() {
	c, ok := p.next()
	if p.pending = c; !ok {
		p.pending, p.dead = nil, true
	}
}

// commit has facts written. They are copied: what the core has handed over must
// not change.
func (p *process) commit(facts []Fact) {
	if p.committing != nil {
		p.w.t.Fatal("a write while one is under way")
	}
	for i, f := range facts {
		if s, ok := f.Subject.(*SandboxFact); ok {
			copied := *s
			facts[i].Subject = &copied
		}
	}
	p.committing = facts
	p.resume()
}

func (w *world) settleFact(p *process, e Settle) {
	p.log.Settle(keyOf(e.Thing), e.Revision.Term, e.Revision.Counter)
}

// journal lets a process's journal go on by one step: a call is answered, or the
// core receives the outcome.
func (w *world) journal(p *process, luck int) {
	switch {
	case p.dead:
	case p.written:
		p.written = false
		w.writes++
		w.tell(p, Written{})
	case p.pending != nil:
		w.answerCall(p, luck)
	case p.paced && p.core != nil:
		p.paced = false
		w.tell(p, WriterReady{})
	}
}

func (w *world) answerCall(p *process, luck int) {
	c, d := p.pending, w.disk
	lost := errors.New("no answer")
	switch {
	case c.pause:
	case c.list:
		for _, i := range slices.Sorted(maps.Keys(d.slots)) {
			c.slots = append(c.slots, d.slots[i])
		}
		if luck > 0 {
			c.slots, c.err = nil, lost
		}
	case c.write != nil:
		w.log("  journal: position %d of term %d (%d)", c.write.Position, c.write.Term, luck)
		switch luck {
		case 0, 1:
			if c.slot.Version, c.err = d.land(w, *c.write); luck == 1 {
				c.err = lost
			}
		case 2:
			d.late = append(d.late, *c.write)
			c.err = lost
		default:
			c.err = lost
		}
	default:
		if c.slot = d.slots[c.read]; luck > 0 {
			c.err = lost
		}
	}
	p.resume()
}

// tell hands an event to a process's core.
func (w *world) tell(p *process, ev Event) {
	if p == w.leader {
		w.step(ev)
		return
	}
	w.log("  old leader: %v", traced{ev})
	w.doOld(p, p.guarded(ev, p.core.Step(w.now, ev)))
}

// oldWorks lets a leader that was deposed go on, as long as it does not know.
func (w *world) oldWorks() {
	w.old = slices.DeleteFunc(w.old, func(p *process) bool { return p.dead })
	if len(w.old) == 0 {
		return
	}
	p := w.old[w.draw(len(w.old))]
	if w.draw(4) == 0 && p.core != nil {
		w.tell(p, Tick{})
		return
	}
	w.journal(p, w.draw(4))
}

// doOld carries out what a deposed leader does. Routers refuse to hear it, its
// callers may be answered.
func (w *world) doOld(p *process, effects []Effect) {
	for _, e := range effects {
		switch e := e.(type) {
		case Write:
			p.commit(e.Facts)
		case Settle:
			w.settleFact(p, e)
		case Claimed:
			if _, ok := w.disk.sandboxes[e.Sandbox.ID]; !ok {
				w.t.Fatalf("a deposed leader answers with %s, which is not durable", e.Sandbox.ID)
			}
			w.answered[e.Sandbox.ID] = true
		case BatchClaimed:
			for _, s := range e.Sandboxes {
				w.answered[s.ID], w.complete[s.Batch] = true, true
			}
		case SandboxReady:
			if w.ready[e.Sandbox.ID] {
				w.t.Fatalf("%s is said to be ready twice", e.Sandbox.ID)
			}
			w.ready[e.Sandbox.ID] = true
		case DeleteObject:
			w.forgotten[e.ID] = true
			delete(w.ended, e.ID)
			w.jobs = append(w.jobs, &job{term: p.core.cfg.Term, effect: e})
		case LabelPod, SyncPod, ResizePod, DeletePod, RecyclePod, WriteObject, ReadLog, PoolDrained, Configure, DropArchive:
			w.jobs = append(w.jobs, &job{term: p.core.cfg.Term, effect: e})
		case CreatePod:
			w.extra++
			w.jobs = append(w.jobs, &job{term: p.core.cfg.Term, effect: e})
		}
	}
}

// kill ends a process. What it was writing may land later.
func (w *world) end(p *process) {
	if c := p.pending; c != nil && c.write != nil {
		w.disk.late = append(w.disk.late, *c.write)
	}
	p.pending, p.dead = nil, true
	p.end()
	p.stop()
	w.old = slices.DeleteFunc(w.old, func(o *process) bool { return o == p })
}

func (w *world) endAll() {
	for _, p := range append(slices.Clone(w.old), w.leader) {
		if p != nil {
			w.end(p)
		}
	}
}
