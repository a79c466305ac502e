package core

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

var everyTeam = Scope{All: true}

// sim is a core with a clock, names that count up, and a writer.
type sim struct {
	t         *testing.T
	core      *Core
	guard     Watcher
	now       Instant
	effects   []Effect // of the last step
	ids, pods int
	cfg       Config
	// slow: writes wait for written. Otherwise they are done within the step.
	slow bool
	// unchecked: the tables are too large to be checked after each step.
	unchecked bool
}

func (s *sim) check() {
	s.t.Helper()
	if !s.unchecked {
		checkTables(s.t, s.core)
	}
}

var (
	poolA = PoolKey{Namespace: "ns", Name: "a"}
	start = Instant{Boot: time.Hour, Wall: time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)}
)

func newSim(t *testing.T) *sim { return newSimAt(t, 1, start) }

func newSimAt(t *testing.T, term uint64, now Instant) *sim {
	s := &sim{t: t, now: now}
	s.cfg = Config{
		Term: term, MaxStale: maxStale, ConnectWindow: window, Lease: lease, Linger: -1, // nothing is kept back
		NewID:     func() string { s.ids++; return fmt.Sprintf("term%d-id%d", term, s.ids) },
		NewSuffix: func() string { s.pods++; return strconv.Itoa(s.pods) },
	}
	s.restart()
	return s
}

// restart applies a changed cfg.
func (s *sim) restart() {
	var err error
	if s.core, err = New(s.cfg, s.now); err != nil {
		s.t.Fatal(err)
	}
	s.guard = NewWatcher(s.cfg.ConnectWindow)
	s.core.pools.SetStart(pools.MaxWindow, unbounded) // a slow start has tests of its own
}

func (s *sim) step(ev Event) []Effect {
	s.t.Helper()
	s.effects = s.stepCore(ev)
	s.check()
	if !s.slow {
		s.writeAll()
	}
	return s.effects
}

// stepCore steps the core. The guard must find nothing wrong with the effects.
func (s *sim) stepCore(ev Event) []Effect {
	s.t.Helper()
	effects := s.core.Step(s.now, ev)
	s.guarded(ev, effects)
	return effects
}

func (s *sim) guarded(ev Event, effects []Effect) {
	s.t.Helper()
	for _, what := range s.guard.Check(s.now.Boot, ev, effects) {
		s.t.Fatalf("guard: %s", what)
	}
}

// writeAll does the writes among the effects, and those that follow from them,
// and adds what comes of it to the effects.
func (s *sim) writeAll() {
	s.t.Helper()
	for done := 0; len(of[Write](s.effects)) > done; done++ {
		for _, ev := range []Event{Written{}, WriterReady{}} {
			s.effects = append(s.effects, s.stepCore(ev)...)
			s.check()
		}
	}
}

// written says that the last write is done, and that there may be another.
func (s *sim) written() []Effect {
	s.t.Helper()
	s.effects = nil
	for _, ev := range []Event{Written{}, WriterReady{}} {
		s.effects = append(s.effects, s.stepCore(ev)...)
		s.check()
	}
	return s.effects
}

// recover begins the term with these pools and pods, on one node, and what was
// journaled.
func (s *sim) recover(pools []Pool, pods []Pod, facts ...Fact) []Effect {
	s.t.Helper()
	return s.recoverState(State{Pools: pools, Pods: pods, Nodes: []string{"n1"}, Facts: facts})
}

func (s *sim) recoverState(st State) []Effect {
	s.t.Helper()
	var err error
	if s.effects, err = s.core.Recover(st); err != nil {
		s.t.Fatal(err)
	}
	s.guard.Recover(s.now.Boot, st)
	s.guarded(nil, s.effects)
	s.check()
	if !s.slow {
		s.writeAll()
	}
	return s.effects
}

func (s *sim) pass(d time.Duration) []Effect {
	s.t.Helper()
	s.now.Boot += d
	s.now.Wall = s.now.Wall.Add(d)
	return s.step(Tick{})
}

// of returns the effects of one type among all.
func of[T Effect](all []Effect) []T {
	var found []T
	for _, e := range all {
		if e, ok := e.(T); ok {
			found = append(found, e)
		}
	}
	return found
}

// one returns the only effect of one type in the last step.
func one[T Effect](s *sim) T {
	s.t.Helper()
	found := of[T](s.effects)
	if len(found) != 1 {
		s.t.Fatalf("%d effects %T, expected 1, among %+v", len(found), *new(T), s.effects)
	}
	return found[0]
}

func none[T Effect](s *sim) {
	s.t.Helper()
	if found := of[T](s.effects); len(found) > 0 {
		s.t.Fatalf("unexpected %+v", found)
	}
}

func key(name string) PodKey { return PodKey{Namespace: "ns", Name: name, UID: "uid-" + name} }

// warmPod is an observation of a pod that can be handed out.
func warmPod(name string) Pod {
	n, _ := strconv.Atoi(name[len(name)-1:])
	return Pod{
		Key: key(name), Pool: "a", Node: "n1", IP: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Template: "t1", Version: "1", Ready: true,
		CreatedAt: start.Wall.Add(-time.Hour + time.Duration(n)*time.Second),
	}
}

func with(p Pod, change func(*Pod)) Pod {
	change(&p)
	return p
}

// on is the fact that a sandbox of an earlier term runs on a pod; released, that
// it was released.
func on(name, id string) Fact {
	revision := Revision{Term: 1, Counter: 5}
	return Fact{Revision: revision, Subject: &SandboxFact{Sandbox: Sandbox{
		Binding: Binding{ID: id}, Pool: poolA, Pod: key(name), IP: warmPod(name).IP, DefaultPort: 80, Phase: Running, Revision: revision,
	}}}
}

func released(name, id string) Fact {
	f := on(name, id)
	sandboxOf(f).Phase, sandboxOf(f).Reason, sandboxOf(f).ReleasedAt = Released, fact.ReasonKilled, start.Wall.Add(-time.Minute)
	return f
}

func specA(warm int) Pool { return Pool{Key: poolA, Warm: warm, Template: "t1", DefaultPort: 80} }

// wait is how long claims wait for a pod.
const wait = 10 * time.Second

// claim takes a sandbox, durably and on record.
func (s *sim) claim() Sandbox {
	s.t.Helper()
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	c := one[Claimed](s)
	s.step(ObjectWritten{ID: c.Sandbox.ID, Revision: c.Sandbox.Revision})
	return c.Sandbox
}

// release ends a sandbox, durably and on record.
func (s *sim) release(id string) []Effect {
	s.t.Helper()
	released := s.step(Release{Scope: everyTeam, Token: 2, ID: id, Reason: fact.ReasonKilled})
	s.record(released)
	s.effects = released
	return released
}

// given returns the claim in the write that is under way.
func (s *sim) given() Sandbox {
	s.t.Helper()
	facts := one[Write](s).Facts
	if len(facts) != 1 || sandboxOf(facts[0]) == nil {
		s.t.Fatalf("written: %+v", facts)
	}
	return *sandboxOf(facts[0])
}

// record confirms all records among effects.
func (s *sim) record(effects []Effect) {
	s.t.Helper()
	for _, r := range of[WriteObject](effects) {
		s.step(ObjectWritten{ID: r.Sandbox.ID, Revision: r.Sandbox.Revision})
	}
}

func (s *sim) join(session string, stream uint64) {
	s.t.Helper()
	s.step(SessionJoined{Session: session, Stream: stream})
	if snapshot := one[SendSnapshot](s); snapshot.Stream != stream || snapshot.Sequence != 1 {
		s.t.Fatalf("snapshot %+v", snapshot)
	}
}

func (s *sim) ack(session string, stream, sequence uint64) {
	s.t.Helper()
	s.step(SessionAck{Session: session, Stream: stream, Sequence: sequence})
}

// deletedAfter lets time pass in steps and returns how long it took until the
// pod was deleted.
func (s *sim) deletedAfter(pod PodKey, most time.Duration) time.Duration {
	s.t.Helper()
	began := s.now.Boot
	for s.now.Boot-began < most {
		for _, d := range of[DeletePod](s.pass(100 * time.Millisecond)) {
			if d.Pod == pod {
				return s.now.Boot - began
			}
		}
	}
	return most
}

const never = 3 * time.Minute

func TestNewRefusesAConfigThatCannotWork(t *testing.T) {
	id := func() string { return "x" }
	for name, cfg := range map[string]Config{
		"no term":     {MaxStale: 1, ConnectWindow: 1, Lease: 1, NewID: id, NewSuffix: id},
		"no maxStale": {Term: 1, ConnectWindow: 1, Lease: 1, NewID: id, NewSuffix: id},
		"no window":   {Term: 1, MaxStale: 1, Lease: 1, NewID: id, NewSuffix: id},
		"no lease":    {Term: 1, MaxStale: 1, ConnectWindow: 1, NewID: id, NewSuffix: id},
		"no ids":      {Term: 1, MaxStale: 1, ConnectWindow: 1, Lease: 1},
	} {
		if _, err := New(cfg, start); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Whatever fails can then be done again. What a snapshot holds is in no order: it is a set.
func TestSameEventsHaveTheSameEffects(t *testing.T) {
	const many = 8
	history := func() (all []Effect) {
		s := newSimAt(t, 2, start)
		do := func(effects []Effect) { all = append(all, effects...) }
		pool := changed(specA(6), func(p *Pool) { p.PostStart = true })
		var pods []Pod
		for i := range pool.Warm {
			pods = append(pods, warmPod(fmt.Sprintf("a-%d", i+1)))
		}
		var facts []Fact
		for i := range uint64(many) {
			facts = append(facts,
				Fact{Revision: Revision{Term: 1, Counter: 2*i + 1}, Subject: &SessionFact{ID: fmt.Sprintf("earlier-%d", i)}},
				Fact{Revision: Revision{Term: 1, Counter: 2*i + 2}, Subject: &RetirementFact{Pod: key(fmt.Sprintf("gone-%d", i))}})
		}
		do(s.recover([]Pool{pool}, pods, facts...))
		for i := range uint64(many) {
			do(s.step(SessionJoined{Session: fmt.Sprintf("r%d", i), Stream: many - i}))
		}
		claims := func(first uint64) {
			for token := first; token < first+3; token++ {
				do(s.step(Claim{Token: token, Pool: poolA, Wait: wait}))
			}
		}
		claims(1)
		do(s.pass(wait))
		answered := of[Claimed](all)
		if len(answered) != 3 {
			t.Fatalf("answered %+v", answered)
		}
		for _, c := range answered {
			do(s.step(Started{ID: c.Sandbox.ID, OK: true}))
			do(s.step(Release{Scope: everyTeam, Token: 10, ID: c.Sandbox.ID}))
		}
		claims(4)
		do(s.step(Closing{}))
		if answered := of[Claimed](all); len(answered) != 6 {
			t.Fatalf("answered %+v", answered)
		}
		do(s.pass(2 * maxStale)) // all routers expire
		return all
	}
	want := history()
	for range 20 {
		got := history()
		for i := range min(len(want), len(got)) {
			if !reflect.DeepEqual(got[i], want[i]) {
				t.Fatalf("effect %d is %T %+v, and was %T %+v", i, got[i], got[i], want[i], want[i])
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d effects, and there were %d", len(got), len(want))
		}
	}
}

func TestPagesShowEachLiveSandboxOnceOldestFirst(t *testing.T) {
	s := newSim(t)
	var pods []Pod
	for i := range 12 {
		pods = append(pods, with(warmPod("a-"+strconv.Itoa(i)), func(p *Pod) { p.IP = netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}) }))
	}
	s.recover([]Pool{specA(12)}, pods)
	var ids []string
	for token := range uint64(9) {
		if token%3 == 0 { // three at a time are of one moment
			s.now.Wall = s.now.Wall.Add(time.Second)
		}
		s.step(Claim{Token: token, Pool: poolA, Wait: wait})
		ids = append(ids, one[Claimed](s).Sandbox.ID)
	}
	for at := 0; at < len(ids); at += 3 {
		slices.Sort(ids[at : at+3])
	}
	page := func(after Mark, most int) (got []string, next Mark, more bool) {
		p := s.core.View().List(Query{Selection: sandboxes.Everything(), Live: true, After: after, Most: most})
		for _, sb := range p.List {
			got = append(got, sb.ID)
		}
		return got, p.Next, p.More
	}
	first, next, more := page(Mark{}, 4)
	if !slices.Equal(first, ids[:4]) || !more {
		t.Fatalf("first page %v, expected %v", first, ids[:4])
	}
	// Between two pages the one that was shown last goes, and one that comes next, and
	// another one begins.
	s.release(ids[3])
	s.release(ids[4])
	s.now.Wall = s.now.Wall.Add(time.Second)
	s.step(Claim{Token: 100, Pool: poolA, Wait: wait})
	want := append(slices.Clone(ids[5:]), one[Claimed](s).Sandbox.ID)
	second, next, more := page(next, 4)
	if !slices.Equal(second, want[:4]) || !more {
		t.Fatalf("second page %v, expected %v", second, want[:4])
	}
	third, _, more := page(next, 4)
	if !slices.Equal(third, want[4:]) || more {
		t.Fatalf("third page %v, expected %v; more: %v", third, want[4:], more)
	}
	all, _, more := page(Mark{}, 8)
	if len(all) != 8 || more {
		t.Errorf("all are %v; more: %v", all, more)
	}
	// The other way round.
	var backward []string
	for next, more := (Mark{}), true; more; {
		p := s.core.View().List(Query{Selection: sandboxes.Everything(), Live: true, After: next, Order: NewestFirst, Most: 3})
		for _, sb := range p.List {
			backward = append(backward, sb.ID)
		}
		next, more = p.Next, p.More
	}
	slices.Reverse(backward)
	if !slices.Equal(backward, all) {
		t.Errorf("newest first: %v, oldest first: %v", backward, all)
	}
	// The next leader has the same order: what it knows is exact to a microsecond.
	s.step(Claim{Token: 101, Pool: poolA, Wait: wait})
	before, next, _ := page(Mark{}, 5)
	after, _, _ := page(Mark{ClaimedAt: next.ClaimedAt.Truncate(time.Microsecond), ID: next.ID}, 5)
	if len(before) != 5 || len(after) != 4 || slices.Contains(after, next.ID) {
		t.Errorf("%v, then %v", before, after)
	}
}

func TestListSelectsByPoolTeamAndPhase(t *testing.T) {
	s := newSim(t)
	var pods []Pod
	for i := range 6 {
		pods = append(pods, with(warmPod("a-"+strconv.Itoa(i)), func(p *Pod) { p.IP = netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}) }))
		pods = append(pods, with(warmPod("b-"+strconv.Itoa(i)), func(p *Pod) { p.Pool, p.IP = "b", netip.AddrFrom4([4]byte{10, 0, 2, byte(i)}) }))
	}
	poolB := PoolKey{Namespace: poolA.Namespace, Name: "b"}
	s.recover([]Pool{specA(6), changed(specA(6), func(p *Pool) { p.Key = poolB })}, pods)
	names := map[string]string{} // of sandboxes: pool, team, number
	for i := range 6 {
		for _, pool := range []PoolKey{poolA, poolB} {
			s.now.Wall = s.now.Wall.Add(time.Second)
			team := []string{"x", "y", ""}[i%3]
			s.step(Claim{Token: 1, Pool: pool, Wait: wait, Binding: Binding{Team: team}})
			sb := one[Claimed](s).Sandbox
			names[sb.ID] = pool.Name + team + strconv.Itoa(i)
			if i >= 3 {
				s.release(sb.ID)
			}
		}
	}
	of := func(pool PoolKey, team string) Selection {
		return Selection{Scope: Scope{All: team == "", Team: team}, Pool: pool}
	}
	for _, c := range []struct {
		query Query
		want  string
		more  bool
	}{
		{Query{Selection: of(PoolKey{}, ""), Live: true, Most: 9}, "ax0 bx0 ay1 by1 a2 b2", false},
		{Query{Selection: of(PoolKey{}, ""), Live: true, Most: 5}, "ax0 bx0 ay1 by1 a2", true},
		{Query{Selection: of(poolB, ""), Live: true, Most: 9}, "bx0 by1 b2", false},
		{Query{Selection: of(PoolKey{}, "y"), Live: true, Most: 9}, "ay1 by1", false},
		{Query{Selection: of(poolA, "x"), Live: true, Most: 9}, "ax0", false},
		{Query{Selection: of(PoolKey{Namespace: poolA.Namespace, Name: "c"}, ""), Live: true, Most: 9}, "", false},
		{Query{Selection: of(poolA, ""), Gone: true, Most: 9}, "ax3 ay4 a5", false},
		{Query{Selection: of(PoolKey{}, ""), Gone: true, Most: 1, Order: NewestFirst}, "b5", true},
		{Query{Selection: of(PoolKey{}, "x"), Live: true, Gone: true, Most: 4}, "ax0 bx0 ax3 bx3", false},
		{Query{Selection: of(PoolKey{}, "x"), Live: true, Gone: true, Most: 3}, "ax0 bx0 ax3", true},
		{Query{Selection: of(PoolKey{}, "x"), Live: true, Gone: true, Most: 3, Order: NewestFirst}, "bx3 ax3 bx0", true},
		{Query{Selection: of(PoolKey{}, ""), Most: 9}, "", false},
	} {
		var got []string
		p := s.core.View().List(c.query)
		for i := range p.List {
			got = append(got, names[p.List[i].ID])
		}
		if strings.Join(got, " ") != c.want || p.More != c.more {
			t.Errorf("%+v: %v, more: %v", c.query, got, p.More)
		}
		// It looks at no other sandbox, and in parts of one it has the same.
		passed := 0
		c.query.Keep = func(*Sandbox) bool { passed++; return true }
		if s.core.View().List(c.query); passed > len(got)+1 || passed > len(got) && !c.more {
			t.Errorf("%+v: it passes over %d sandboxes", c.query, passed)
		}
		c.query.Scan = 1
		for i, more := 0, true; more && i < len(got); i, more = i+1, p.More {
			if p = s.core.View().List(c.query); len(p.List) != 1 || names[p.List[0].ID] != got[i] {
				t.Errorf("%+v: part %d: %+v", c.query, i, p)
			}
			c.query.After = p.Next
		}
	}
	at := s.now.Wall.Add(-4 * time.Second) // of the fourth of six pairs of claims
	for _, order := range []Order{OldestFirst, NewestFirst} {
		since := s.core.View().List(Query{Selection: sandboxes.Everything(), Live: true, Gone: true, Since: at, Order: order, Most: 9})
		if len(since.List) != 5 || since.More {
			t.Errorf("since %v: %+v", at, since)
		}
	}
	if err := s.core.sandboxes.Check(); err != nil {
		t.Fatal(err)
	}
}

// sandboxOf returns the sandbox of a fact; nil: it is about another thing.
func sandboxOf(f Fact) *Sandbox {
	if s, ok := f.Subject.(*SandboxFact); ok {
		return &s.Sandbox
	}
	return nil
}

// sessionOf returns what a fact says about a session, and retirementOf what it says about a retirement; zero: it is
// about another thing.
func sessionOf(f Fact) *SessionFact {
	if s, ok := f.Subject.(*SessionFact); ok {
		return s
	}
	return &SessionFact{}
}

func retirementOf(f Fact) *RetirementFact {
	if r, ok := f.Subject.(*RetirementFact); ok {
		return r
	}
	return &RetirementFact{}
}
