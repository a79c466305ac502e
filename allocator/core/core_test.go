package core

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// sim is a core with a clock, names that count up, and a writer.
type sim struct {
	t         *testing.T
	core      *Core
	now       Instant
	effects   []Effect // of the last step
	ids, pods int
	cfg       Config
	// slow: writes wait for written. Otherwise they are done within the step.
	slow bool
}

var (
	poolA = PoolKey{"ns", "a"}
	start = Instant{Boot: time.Hour, Wall: time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)}
)

func newSim(t *testing.T) *sim { return newSimAt(t, 1, start) }

func newSimAt(t *testing.T, term uint64, now Instant) *sim {
	s := &sim{t: t, now: now}
	s.cfg = Config{
		Term: term, MaxStale: maxStale, Window: window, Linger: -1, // nothing is kept back
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
}

func (s *sim) step(ev Event) []Effect {
	s.t.Helper()
	s.effects = s.core.Step(s.now, ev)
	checkTables(s.t, s.core)
	if !s.slow {
		s.writeAll()
	}
	return s.effects
}

// writeAll does the writes among the effects, and those that follow from them,
// and adds what comes of it to the effects.
func (s *sim) writeAll() {
	s.t.Helper()
	for done := 0; len(of[Write](s.effects)) > done; done++ {
		for _, ev := range []Event{Written{}, WriterReady{}} {
			s.effects = append(s.effects, s.core.Step(s.now, ev)...)
			checkTables(s.t, s.core)
		}
	}
}

// written says that the last write is done, and that there may be another.
func (s *sim) written() []Effect {
	s.t.Helper()
	s.effects = nil
	for _, ev := range []Event{Written{}, WriterReady{}} {
		s.effects = append(s.effects, s.core.Step(s.now, ev)...)
		checkTables(s.t, s.core)
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
	checkTables(s.t, s.core)
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

func key(name string) PodKey { return PodKey{"ns", name, "uid-" + name} }

// warmPod is an observation of a pod that can be handed out.
func warmPod(name string) Pod {
	n, _ := strconv.Atoi(name[len(name)-1:])
	return Pod{
		Key: key(name), Pool: "a", Node: "n1", IP: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Template: "t1", Version: "1", Ready: true,
		CreatedAt: start.Wall.Add(time.Duration(n) * time.Second),
	}
}

func with(p Pod, change func(*Pod)) Pod {
	change(&p)
	return p
}

// on is the fact that a sandbox of an earlier term runs on a pod; released, that
// it was released.
func on(name, id string) Fact {
	revision := Revision{1, 5}
	return Fact{Revision: revision, Sandbox: &Sandbox{
		Binding: Binding{ID: id}, Pool: poolA, Pod: key(name), IP: warmPod(name).IP, DefaultPort: 80, Phase: Running, Revision: revision,
	}}
}

func released(name, id string) Fact {
	f := on(name, id)
	f.Sandbox.Phase, f.Sandbox.Reason, f.Sandbox.EndedAt = Released, ReasonKilled, start.Wall.Add(-time.Minute)
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
	s.step(Recorded{ID: c.Sandbox.ID, Revision: c.Sandbox.Revision})
	return c.Sandbox
}

// release ends a sandbox, durably and on record.
func (s *sim) release(id string) []Effect {
	s.t.Helper()
	released := s.step(Release{Token: 2, ID: id, Reason: ReasonKilled})
	s.record(released)
	s.effects = released
	return released
}

// given returns the claim in the write that is under way.
func (s *sim) given() Sandbox {
	s.t.Helper()
	facts := one[Write](s).Facts
	if len(facts) != 1 || facts[0].Sandbox == nil {
		s.t.Fatalf("written: %+v", facts)
	}
	return *facts[0].Sandbox
}

// record confirms all records among effects.
func (s *sim) record(effects []Effect) {
	s.t.Helper()
	for _, r := range of[Record](effects) {
		s.step(Recorded{ID: r.Sandbox.ID, Revision: r.Sandbox.Revision})
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
		"no term":     {MaxStale: 1, Window: 1, NewID: id, NewSuffix: id},
		"no maxStale": {Term: 1, Window: 1, NewID: id, NewSuffix: id},
		"no window":   {Term: 1, MaxStale: 1, NewID: id, NewSuffix: id},
		"no ids":      {Term: 1, MaxStale: 1, Window: 1},
	} {
		if _, err := New(cfg, start); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// ---- claims

func TestClaimIsAnsweredOnlyOnceItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.slow = true
	s.step(Claim{Token: 7, Pool: poolA, Binding: Binding{Metadata: map[string]string{"k": "v"}, Team: "t", User: "u"}})
	given := s.given()
	if given.Pod != key("a-1") || given.Phase != Running || given.Team != "t" || given.User != "u" {
		t.Errorf("written %+v", given)
	}
	none[Claimed](s)
	none[SendRoute](s)
	none[Record](s)
	none[SandboxReady](s)
	s.step(Resolve{Session: "r", Stream: 1, ID: given.ID})
	if r := one[SendResolved](s); r.Sandbox != nil || r.Gone {
		t.Errorf("resolved %+v", r)
	}
	s.written()
	c := one[Claimed](s)
	if c.Token != 7 || c.Sandbox.ID != given.ID || c.Sandbox.Metadata["k"] != "v" || c.Sandbox.IP != warmPod("a-1").IP || c.Sandbox.DefaultPort != 80 {
		t.Errorf("answer %+v", c)
	}
	if r := one[SendRoute](s); r.Sandbox.ID != given.ID || r.Sequence != 2 {
		t.Errorf("route %+v", r)
	}
	one[Record](s)
	one[SandboxReady](s)
	if l := one[LabelPod](s); l.Pod != key("a-1") || l.ID != given.ID || l.Released {
		t.Errorf("label %+v", l)
	}
}

// What comes while a write is under way goes together into the next one.
func TestClaimsThatWaitForTheWriterAreWrittenTogether(t *testing.T) {
	s := newSim(t)
	var pods []Pod
	for n := range 9 {
		pods = append(pods, warmPod("a-"+strconv.Itoa(n)))
	}
	s.recover([]Pool{specA(9)}, pods)
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA})
	one[Write](s)
	for token := uint64(2); token <= 9; token++ {
		s.step(Claim{Token: token, Pool: poolA})
		none[Write](s)
	}
	s.step(Written{})
	one[Claimed](s)
	none[Write](s) // the writer paces itself
	s.step(WriterReady{})
	if facts := one[Write](s).Facts; len(facts) != 8 {
		t.Errorf("%d facts", len(facts))
	}
	s.written()
	for i, c := range of[Claimed](s.effects) {
		if c.Token != uint64(i+2) {
			t.Errorf("answer %d to caller %d", i, c.Token)
		}
	}
}

func TestFactsThatNobodyWaitsForAreKeptBackForOthers(t *testing.T) {
	s := newSim(t)
	s.cfg.Linger = 25 * time.Millisecond
	s.restart()
	s.slow = true
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.step(PoolSeen{specA(2)})
	none[Write](s)
	s.pass(24 * time.Millisecond)
	none[Write](s)
	s.pass(time.Millisecond)
	one[Write](s)
	s.written()
	s.step(PoolSeen{specA(1)})
	none[Write](s)
	s.step(Claim{Token: 1, Pool: poolA})
	if facts := one[Write](s).Facts; len(facts) != 2 {
		t.Errorf("%d facts", len(facts))
	}
}

func TestPodsAreHandedOutOnceOldestFirstAndFromOneNodeAfterTheOther(t *testing.T) {
	s := newSim(t)
	at := func(name, node string) Pod { return with(warmPod(name), func(p *Pod) { p.Node = node }) }
	s.recoverState(State{
		Pools: []Pool{specA(6)}, Nodes: []string{"n1", "n2", "n3"},
		Pods: []Pod{at("a-6", "n2"), at("a-1", "n1"), at("a-3", "n1"), at("a-2", "n1"), at("a-5", "n3"), at("a-4", "n2")},
	})
	var got []string
	for token := range uint64(7) {
		for _, c := range of[Claimed](s.step(Claim{Token: token, Pool: poolA})) {
			got = append(got, c.Sandbox.Pod.Name)
		}
	}
	slices.Sort(got[:3]) // which node is first is not said
	slices.Sort(got[3:5])
	if !slices.Equal(got, []string{"a-1", "a-4", "a-5", "a-2", "a-6", "a-3"}) {
		t.Errorf("handed out %v", got)
	}
	if r := one[ClaimRefused](s); r.Token != 6 || r.Why != PoolEmpty || r.Counts.Claimed != 6 {
		t.Errorf("refused %+v", r)
	}
}

func TestPodsThatCannotServeAreNotHandedOut(t *testing.T) {
	for name, change := range map[string]func(*Pod){
		"not ready":            func(p *Pod) { p.Ready = false },
		"terminating":          func(p *Pod) { p.Deleting = true },
		"finished":             func(p *Pod) { p.Finished = true },
		"without an address":   func(p *Pod) { p.IP = netip.Addr{} },
		"not scheduled":        func(p *Pod) { p.Node = "" },
		"on an unusable node":  func(p *Pod) { p.Node = "n2" },
		"on a node not seen":   func(p *Pod) { p.Node = "n3" },
		"marked as used":       func(p *Pod) { p.Used = true },
		"in a pool that is no": func(p *Pod) { p.Pool = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, nil)
			s.step(NodeSeen{Name: "n2", Usable: false})
			s.step(PodSeen{with(warmPod("a-1"), change)})
			s.step(Claim{Token: 1, Pool: poolA})
			none[Write](s)
			one[ClaimRefused](s)
			// One that was handed out could serve, whatever it is now.
			s.step(PodSeen{warmPod("a-2")})
			s.step(PodSeen{with(with(warmPod("a-2"), change), func(p *Pod) { p.Version = "2" })})
			s.step(Claim{Token: 2, Pool: poolA})
			if name == "in a pool that is no" { // a pod stays in the pool it was made for
				one[Claimed](s)
			} else {
				one[ClaimRefused](s)
			}
		})
	}
}

func TestPodsOfANodeThatIsCordonedAreReplacedAndComeBackWithIt(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(NodeSeen{Name: "n1"})
	if made := of[CreatePod](s.effects); len(made) != 2 {
		t.Errorf("made %+v", made)
	}
	none[DeletePod](s) // whoever drains the node does that
	if counts, _ := s.core.Counts(poolA); counts.Warm != 0 {
		t.Errorf("counts %+v", counts)
	}
	other := func(name string) Pod { return with(warmPod(name), func(p *Pod) { p.Node = "n2" }) }
	s.step(NodeSeen{Name: "n2", Usable: true})
	s.step(PodSeen{other("a-3")})
	s.step(PodSeen{other("a-4")})
	s.step(NodeSeen{Name: "n1", Usable: true})
	if gone := of[DeletePod](s.effects); len(gone) != 2 || gone[0].Pod.Name != "a-3" || gone[1].Pod.Name != "a-4" {
		t.Errorf("deleted %+v, expected the two youngest", gone)
	}
	s.step(NodeGone{Name: "n1"})
	if counts, _ := s.core.Counts(poolA); counts.Warm != 0 {
		t.Errorf("counts %+v", counts)
	}
}

func TestClaimOfAPoolThatIsNotThereIsRefused(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Deleting = true })}, []Pod{warmPod("a-1")})
	for _, p := range []PoolKey{poolA, {"ns", "other"}} {
		s.step(Claim{Token: 1, Pool: p, Wait: wait})
		if r := one[ClaimRefused](s); r.Why != NoPool {
			t.Errorf("%v: %+v", p, r)
		}
	}
}

func changed(p Pool, change func(*Pool)) Pool {
	change(&p)
	return p
}

// ---- claims that wait

func TestClaimsWaitForPodsInTheOrderInWhichTheyCame(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, nil)
	for token := range uint64(3) {
		if s.step(Claim{Token: token + 1, Pool: poolA, Wait: wait}); len(s.effects) > 0 {
			t.Errorf("unexpected %+v", s.effects)
		}
	}
	if counts, _ := s.core.Counts(poolA); counts.Waiting != 3 {
		t.Errorf("counts %+v", counts)
	}
	s.step(ClaimAbandoned{Token: 2})
	for i, want := range []uint64{1, 3} {
		s.step(PodSeen{warmPod("a-" + strconv.Itoa(i+1))})
		if c := one[Claimed](s); c.Token != want {
			t.Errorf("pod %d went to caller %d, expected %d", i+1, c.Token, want)
		}
	}
	s.step(PodSeen{warmPod("a-3")})
	none[Claimed](s)
}

func TestClaimWaitsNoLongerThanItSaid(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: 2 * time.Second})
	s.step(Claim{Token: 2, Pool: poolA, Wait: time.Second})
	s.pass(time.Second)
	if r := one[ClaimRefused](s); r.Token != 2 || r.Why != PoolEmpty || r.Counts.Waiting == 0 || r.Counts.Pending != 1 {
		t.Errorf("refused %+v", r)
	}
	s.pass(time.Second)
	if r := one[ClaimRefused](s); r.Token != 1 {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	none[Claimed](s)
}

func TestClaimsThatCannotWaitAreRefusedAtOnce(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 2
	s.restart()
	s.recover([]Pool{specA(1)}, nil)
	for token := range uint64(3) {
		s.step(Claim{Token: token, Pool: poolA, Wait: wait})
	}
	if r := one[ClaimRefused](s); r.Token != 2 || r.Counts.Waiting != 2 {
		t.Errorf("refused %+v", r)
	}
	// No pod would ever come.
	s.step(PoolSeen{Pool{Key: PoolKey{"ns", "b"}, DefaultPort: 80}})
	s.step(Claim{Token: 9, Pool: PoolKey{"ns", "b"}, Wait: wait})
	one[ClaimRefused](s)
}

func TestThoseWhoWaitAreToldWhenThePoolGoes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(PoolSeen{changed(specA(1), func(p *Pool) { p.Deleting = true })})
	if r := one[ClaimRefused](s); r.Why != NoPool {
		t.Errorf("refused %+v", r)
	}
}

func TestNotifyThatAPodIsAvailableWakesThoseWhoWait(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(IdleAvailable{poolA})
	s.step(IdleAvailable{PoolKey{"ns", "nobody"}})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(IdleAvailable{poolA})
	none[Claimed](s) // there is none, whatever was said
	s.step(PodSeen{warmPod("a-1")})
	one[Claimed](s)
}

func TestNobodyWaitsForALeaderThatIsAboutToEnd(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(Closing{})
	if r := one[ClaimRefused](s); r.Token != 1 || r.Why != Ending {
		t.Errorf("refused %+v", r)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Why != Ending {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	one[Claimed](s) // what can be done at once is done
	s.step(PodSeen{warmPod("a-2")})
	s.slow = true
	s.step(Claim{Token: 4, Pool: poolA, Wait: wait})
	s.step(PodGone{key("a-2")})
	s.written()
	if r := one[ClaimRefused](s); r.Token != 4 || r.Why != Ending {
		t.Errorf("refused %+v", r)
	}

	s, sb := startingSim(t)
	s.step(Closing{})
	if c := one[Claimed](s); c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Starting {
		t.Errorf("answer %+v", c)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	one[Claimed](s)
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	one[Claimed](s)
}

func TestNewClaimsAreRefusedUnderPressure(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(Pressure{On: true})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Why != Overloaded {
		t.Errorf("refused %+v", r)
	}
	s.step(Pressure{})
	s.claim()
}

// ---- claims whose pod goes

func TestClaimWhosePodGoesKeepsItsPlaceAndGetsAnotherOneUnderANewID(t *testing.T) {
	for _, handed := range []bool{false, true} {
		for name, cause := range map[string]Event{
			"gone":     PodGone{key("a-1")},
			"deleted":  PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })},
			"finished": PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })},
			"moved":    PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") })},
		} {
			if !handed && name == "moved" {
				continue // it is given to the claim at its new address
			}
			t.Run(fmt.Sprintf("%s, handed to the writer: %v", name, handed), func(t *testing.T) {
				s := newSim(t)
				s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1")})
				s.slow = true
				if !handed { // the writer is busy with something else
					s.step(PodSeen{with(warmPod("a-7"), func(p *Pod) { p.Finished = true })})
					one[Write](s)
				}
				s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
				first := s.core.claims[1].binding.ID
				s.step(Claim{Token: 2, Pool: poolA, Wait: wait}) // waits behind
				s.step(cause)
				none[Claimed](s)
				s.written()
				none[Claimed](s)
				s.step(PodSeen{warmPod("a-2")})
				for range 3 {
					if len(of[Claimed](s.effects)) == 0 {
						s.written()
					}
				}
				c := one[Claimed](s)
				if c.Token != 1 || c.Sandbox.Pod != key("a-2") || c.Sandbox.ID == first {
					t.Errorf("answer %+v after %s", c, first)
				}
				sb, known := s.core.Sandbox(first)
				if known != handed || known && sb.Phase == Running {
					t.Errorf("the first one is %+v", sb)
				}
				s.slow = false
				s.written()
				s.step(Claim{Token: 3, Pool: poolA, Binding: Binding{IdempotencyKey: "k"}})
				if again := one[Claimed](s); again.Sandbox.ID != c.Sandbox.ID {
					t.Errorf("the key stands for %s", again.Sandbox.ID)
				}
			})
		}
	}
}

func TestPodsOfOneNameAreToldApartByUID(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA})
	namesake := PodKey{"ns", "a-1", "uid-of-an-earlier-one"}
	s.step(PodGone{namesake})
	if len(s.effects) > 0 {
		t.Fatalf("unexpected %+v", s.effects)
	}
	s.written()
	one[Claimed](s)
	s.step(PodGone{namesake})
	none[Write](s)
}

// ---- callers who go

func TestAbandonedClaimThatWasNotHandedToTheWriterGivesItsPodBackToItsPlace(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA}) // a-1, keeps the writer busy
	s.step(Claim{Token: 2, Pool: poolA, Binding: Binding{IdempotencyKey: "k"}})
	s.step(ClaimAbandoned{Token: 2})
	s.step(Claim{Token: 3, Pool: poolA})
	s.written()
	if given := s.given(); given.Pod != key("a-2") {
		t.Errorf("written %+v, expected the oldest that is left", given)
	}
	s.written()
	one[Claimed](s)
	s.slow = false
	s.step(Claim{Token: 4, Pool: poolA, Binding: Binding{IdempotencyKey: "k", RequestHash: [32]byte{1}}})
	one[Claimed](s) // the key stands for nothing
}

func TestAbandonedClaimThatWasHandedToTheWriterIsReleasedOnceItIsWritten(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA})
	given := s.given()
	s.step(ClaimAbandoned{Token: 1})
	s.written()
	none[Claimed](s)
	if f := s.given(); f.ID != given.ID || f.Reason != ReasonAbandoned {
		t.Errorf("written %+v", f)
	}
}

func TestAbandonedClaimWithAnIdempotencyKeyIsKeptForTheRetry(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.slow = true
	keyed := Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k"}}
	s.step(keyed)
	given := s.given()
	s.step(ClaimAbandoned{Token: 1})
	s.written()
	none[Claimed](s)
	none[Write](s)
	keyed.Token = 2
	s.step(keyed)
	if c := one[Claimed](s); c.Token != 2 || c.Sandbox.ID != given.ID {
		t.Errorf("answer %+v", c)
	}
}

// ---- idempotency

func TestClaimsWithOneIdempotencyKeyAreOne(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.slow = true
	keyed := func(token uint64, team string, body byte) Claim {
		return Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{Team: team, IdempotencyKey: "k", RequestHash: [32]byte{body}}}
	}
	s.step(keyed(1, "t", 1))
	s.step(keyed(2, "t", 1)) // joins it
	s.step(keyed(3, "t", 2)) // another body
	if r := one[ClaimRefused](s); r.Token != 3 || r.Why != KeyReused {
		t.Errorf("refused %+v", r)
	}
	s.step(keyed(4, "other", 2)) // another team's key
	s.written()
	answers := of[Claimed](s.effects)
	if len(answers) != 2 || answers[0].Token != 1 || answers[1].Token != 2 || answers[0].Sandbox.ID != answers[1].Sandbox.ID {
		t.Fatalf("answers %+v", answers)
	}
	id := answers[0].Sandbox.ID
	s.slow = false
	s.written()
	if c := one[Claimed](s); c.Token != 4 || c.Sandbox.ID == id {
		t.Errorf("the other team got %+v", c)
	}

	s.step(keyed(5, "t", 1))
	if c := one[Claimed](s); c.Sandbox.ID != id {
		t.Errorf("a later retry got %+v", c)
	}
	s.step(keyed(6, "t", 2))
	one[ClaimRefused](s)
	s.release(id)
	s.pass(10*time.Minute - time.Second)
	s.step(keyed(7, "t", 1))
	if r := one[ClaimRefused](s); r.Why != KeyEnded || r.Sandbox.ID != id {
		t.Errorf("refused %+v", r)
	}
	s.pass(time.Second)
	s.step(keyed(8, "t", 2))
	if c := one[Claimed](s); c.Sandbox.ID == id {
		t.Errorf("answer %+v", c)
	}
}

func TestIdempotencyKeyHoldsUnderTheNextLeader(t *testing.T) {
	for _, object := range []bool{false, true} {
		s := newSimAt(t, 2, start)
		running, ended := on("a-1", "x"), released("a-2", "y")
		running.Sandbox.Team, running.Sandbox.IdempotencyKey, running.Sandbox.RequestHash = "t", "k1", [32]byte{1}
		ended.Sandbox.Team, ended.Sandbox.IdempotencyKey = "t", "k2"
		st := State{Pools: []Pool{specA(1)}, Nodes: []string{"n1"}, Pods: []Pod{warmPod("a-1"), warmPod("a-3")}}
		if object {
			st.Records = []Sandbox{*running.Sandbox, *ended.Sandbox}
		} else {
			st.Facts = []Fact{running, ended}
		}
		s.recoverState(st)
		s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k1", RequestHash: [32]byte{1}}})
		if c := one[Claimed](s); c.Sandbox.ID != "x" {
			t.Errorf("answer %+v", c)
		}
		s.step(Claim{Token: 2, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k1", RequestHash: [32]byte{2}}})
		if r := one[ClaimRefused](s); r.Why != KeyReused {
			t.Errorf("refused %+v", r)
		}
		s.step(Claim{Token: 3, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k2"}})
		if r := one[ClaimRefused](s); r.Why != KeyEnded || r.Sandbox.ID != "y" {
			t.Errorf("refused %+v", r)
		}
		s.pass(9 * time.Minute) // it was released a minute before this term
		s.step(Claim{Token: 4, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k2"}})
		one[Claimed](s)
	}
}

// ---- the pool's hook

func startingSim(t *testing.T) (*sim, Sandbox) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(2), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	none[Claimed](s)
	none[SandboxReady](s)
	none[SendRoute](s)
	return s, one[StartSandbox](s).Sandbox
}

func TestSandboxIsStartingUntilItsPoolsHookHasAnswered(t *testing.T) {
	s, sb := startingSim(t)
	if r := one[Record](s); r.Sandbox.Phase != Starting {
		t.Errorf("recorded %+v", r)
	}
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if r := one[SendResolved](s); !r.Starting || r.Gone || r.Sandbox != nil {
		t.Errorf("resolved %+v", r)
	}
	s.slow = true
	s.step(Started{ID: sb.ID, OK: true})
	none[Claimed](s)
	s.step(Started{ID: sb.ID, OK: true})
	s.slow = false
	s.written()
	if c := one[Claimed](s); c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Running {
		t.Errorf("answer %+v", c)
	}
	one[SandboxReady](s)
	one[SendRoute](s)
	if r := one[Record](s); r.Sandbox.Phase != Running || !sb.Revision.Less(r.Sandbox.Revision) {
		t.Errorf("recorded %+v", r)
	}
}

func TestCallerThatHasWaitedLongEnoughIsAnsweredWithASandboxThatIsStarting(t *testing.T) {
	s, sb := startingSim(t)
	s.step(Claim{Token: 2, Pool: poolA, Wait: 20 * time.Second, Binding: Binding{IdempotencyKey: "k"}})
	s.pass(wait)
	if c := one[Claimed](s); c.Token != 1 || c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Starting {
		t.Errorf("answer %+v", c)
	}
	s.step(Started{ID: sb.ID, OK: true})
	if c := one[Claimed](s); c.Token != 2 || c.Sandbox.Phase != Running {
		t.Errorf("answer %+v", c)
	}
	one[SandboxReady](s)
}

func TestSandboxWhoseHookFailsIsReleased(t *testing.T) {
	s, sb := startingSim(t)
	s.step(Started{ID: sb.ID})
	if r := one[ClaimRefused](s); r.Token != 1 || r.Why != StartFailed || r.Sandbox.ID != sb.ID {
		t.Errorf("refused %+v", r)
	}
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonStartFailed {
		t.Errorf("released %+v", r)
	}
	none[SandboxReady](s)
}

func TestSandboxThatIsReleasedWhileItsStartIsWrittenStaysReleased(t *testing.T) {
	s, sb := startingSim(t)
	s.slow = true
	s.step(Started{ID: sb.ID, OK: true})
	s.step(Release{Token: 9, ID: sb.ID, Reason: ReasonKilled})
	s.written()
	none[SandboxReady](s)
	none[SendRoute](s)
	s.written()
	if r := one[SandboxReleased](s); r.Sandbox.Phase != Released {
		t.Errorf("released %+v", r)
	}
	if got, _ := s.core.Sandbox(sb.ID); got.Phase != Released {
		t.Errorf("it is %+v", got)
	}
}

func TestCallersOfASandboxThatIsStartingMayGo(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(2), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	s.step(ClaimAbandoned{Token: 1})
	none[SandboxReleased](s) // the retry must find it
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	s.step(ClaimAbandoned{Token: 2})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonAbandoned {
		t.Errorf("released %+v", r)
	}
}

func TestNextLeaderCallsTheHookOfASandboxThatIsStartingAgain(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	f.Sandbox.Phase = Starting
	s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, f)
	if e := one[StartSandbox](s); e.Sandbox.ID != "x" {
		t.Errorf("starts %+v", e)
	}
	s.step(Started{ID: "x", OK: true})
	one[SandboxReady](s)
}

// ---- Sandbox objects that people delete

func TestSandboxIsReleasedWhenItsObjectIsDeleted(t *testing.T) {
	for name, ev := range map[string]Event{
		"deleted": RecordSeen{ID: "term1-id1", Revision: Revision{1, 1}, Deleting: true},
		"gone":    RecordGone{ID: "term1-id1"},
	} {
		s := newSim(t)
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
		s.step(RecordGone{ID: "term1-id1"}) // of somebody else's
		s.claim()
		s.step(RecordSeen{ID: "term1-id1", Revision: Revision{1, 1}})
		none[SandboxReleased](s)
		s.step(ev)
		if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonDeleted {
			t.Errorf("%s: released %+v", name, r)
		}
		if records := of[Record](s.effects); len(records) == 0 || records[len(records)-1].Sandbox.Phase != Released {
			t.Errorf("%s: recorded %+v", name, records)
		}
	}
}

func TestObjectOfASandboxThatHasNotEndedIsWrittenAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.release(sb.ID)
	s.step(PodGone{sb.Pod})
	s.step(RecordGone{ID: sb.ID}) // its fence is not complete
	if r := one[Record](s); r.Sandbox.Phase != Released {
		t.Errorf("recorded %+v", r)
	}
	s.record(s.pass(window))
	s.step(RecordGone{ID: sb.ID})
	none[Record](s)
	// A leader that was deposed long ago wrote it once more.
	s.step(RecordSeen{ID: sb.ID, Revision: Revision{1, 1}})
	if f := one[ForgetRecord](s); f.ID != sb.ID {
		t.Errorf("forgotten %+v", f)
	}
}

func TestObjectThatADeposedLeaderWroteLateIsDeleted(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover(nil, nil)
	s.step(RecordSeen{ID: "x", Pool: poolA, Revision: Revision{2, 1}})
	none[ForgetRecord](s)
	s.step(RecordSeen{ID: "made-by-hand", Pool: poolA})
	none[ForgetRecord](s)
	s.step(RecordSeen{ID: "x", Pool: poolA, Revision: Revision{1, 9}})
	if f := one[ForgetRecord](s); f.ID != "x" {
		t.Errorf("forgotten %+v", f)
	}
}

// ---- releases and fences

func TestReleaseIsToldOnlyOnceItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.slow = true
	s.step(Release{Token: 2, ID: sb.ID, Reason: ReasonKilled})
	if f := s.given(); f.Phase != Released || f.Reason != ReasonKilled || !f.EndedAt.Equal(s.now.Wall) {
		t.Errorf("written %+v", f)
	}
	none[SendRelease](s)
	none[ReleaseAnswered](s)
	none[Record](s)
	s.step(Release{Token: 3, ID: sb.ID, Reason: ReasonKilled})
	if len(s.core.outbox.pending) > 0 { // one fact is enough for two callers
		t.Errorf("waits: %+v", s.core.outbox.pending)
	}
	s.written()
	one[SendRelease](s)
	one[SandboxReleased](s)
	none[ReleaseAnswered](s)
	s.ack("r", 1, 3)
	if answers := of[ReleaseAnswered](s.effects); len(answers) != 2 || answers[0].Status != ReleaseOK || answers[0].Outstanding != 0 {
		t.Errorf("answers %+v", answers)
	}
}

func TestReleaseIsAnsweredAfterAckWaitAtTheLatest(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.release(sb.ID)
	s.pass(900 * time.Millisecond)
	none[ReleaseAnswered](s)
	s.pass(100 * time.Millisecond)
	if a := one[ReleaseAnswered](s); a.Outstanding != 1 {
		t.Errorf("answer %+v", a)
	}
}

func TestReleaseDoesNotKeepCallersWaitingForARouterThatIsNotConnected(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.release(sb.ID)
	s.step(SessionLeft{Session: "r", Stream: 1})
	if a := one[ReleaseAnswered](s); a.Outstanding != 1 {
		t.Errorf("answer %+v", a)
	}
}

func TestReleaseSaysWhetherThereWasSuchASandbox(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Release{Token: 1, ID: "nobody"})
	if a := one[ReleaseAnswered](s); a.Status != ReleaseUnknown {
		t.Errorf("unknown: %+v", a)
	}
	sb := s.claim()
	s.release(sb.ID)
	s.step(Release{Token: 3, ID: sb.ID})
	if a := one[ReleaseAnswered](s); a.Status != ReleaseGone {
		t.Errorf("released: %+v", a)
	}
	s.step(PodGone{key("a-1")})
	s.step(Release{Token: 4, ID: sb.ID})
	if a := one[ReleaseAnswered](s); a.Status != ReleaseGone {
		t.Errorf("ended: %+v", a)
	}
}

func TestReleasedPodIsNotDeletedBeforeEveryRouterAcknowledged(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r1", 1)
	s.join("r2", 2)
	sb := s.claim()
	s.release(sb.ID)
	s.ack("r1", 1, 3)
	for range 50 { // both are alive and keep asking
		s.step(SessionPing{Session: "r1", Stream: 1})
		s.step(SessionPing{Session: "r2", Stream: 2})
		if s.deletedAfter(sb.Pod, 2*time.Second) < 2*time.Second {
			t.Fatal("deleted without the acknowledgement of r2")
		}
	}
	s.ack("r2", 2, 2) // of the route, not of the release
	if s.deletedAfter(sb.Pod, 10*time.Second) < 10*time.Second {
		t.Fatal("deleted after an acknowledgement of an earlier message")
	}
	s.ack("r2", 2, 3)
	if after := s.deletedAfter(sb.Pod, never); after != window {
		t.Errorf("deleted %v after the last acknowledgement, expected the window, %v", after, window)
	}
}

func TestSilentRouterHoldsTheFenceUntilItMustHaveGoneStale(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.pass(10 * time.Second)
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 9})
	if p := one[SendPong](s); p.Nonce != 9 {
		t.Errorf("pong %+v", p)
	}
	s.release(sb.ID)
	s.step(SessionLeft{Session: "r", Stream: 1})
	want := maxStale + maxStale/100 + window
	if after := s.deletedAfter(sb.Pod, never); after < want || after > want+time.Second {
		t.Errorf("deleted %v after the last ping, expected %v", after, want)
	}
}

func TestRouterThatIsNotConnectedWhenASandboxIsReleasedIsWaitedFor(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.release(sb.ID)
	none[SendRelease](s)
	if after := s.deletedAfter(sb.Pod, maxStale); after < maxStale {
		t.Errorf("deleted after %v, the router may still be fresh", after)
	}
	s.join("r2", 2) // another router: it never knew the sandbox
	if after := s.deletedAfter(sb.Pod, never); after > 2*window {
		t.Errorf("deleted only after %v more", after)
	}
}

func TestGoodbyeClearsTheFenceButNotTheWindow(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.release(sb.ID)
	s.step(SessionGoodbye{Session: "r"})
	one[CloseStream](s)
	if after := s.deletedAfter(sb.Pod, never); after != window {
		t.Errorf("deleted %v after the Goodbye, expected %v", after, window)
	}
}

func TestRouterThatRejoinsDuringAReleaseAcknowledgesItWithTheSnapshot(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.release(sb.ID)
	s.join("r", 2) // before the end of the old stream was noticed
	if c := one[CloseStream](s); c.Stream != 1 {
		t.Errorf("closed %+v", c)
	}
	if routes := one[SendSnapshot](s).Routes; len(routes) != 0 {
		t.Errorf("snapshot with %+v", routes)
	}
	// On the old stream: what the router had then is not what it has now.
	s.ack("r", 1, 1)
	s.ack("r", 1, 3)
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.ack("r", 2, 9) // nothing of that number was sent
	if s.deletedAfter(sb.Pod, 20*time.Second) < 20*time.Second {
		t.Fatal("deleted before the snapshot was acknowledged")
	}
	s.ack("r", 2, 1)
	if after := s.deletedAfter(sb.Pod, never); after != window {
		t.Errorf("deleted %v after the acknowledgement, expected %v", after, window)
	}
}

func TestSnapshotHoldsWhatRunsAndNothingElse(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	s.claim()
	releasing, released := s.claim(), s.claim()
	s.release(released.ID)
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait}) // not durable yet
	s.step(Release{ID: releasing.ID, Reason: ReasonKilled})
	s.step(SessionJoined{Session: "r", Stream: 1})
	var got []string
	for _, r := range one[SendSnapshot](s).Routes {
		got = append(got, r.ID)
	}
	slices.Sort(got)
	if !slices.Equal(got, []string{"term1-id1", "term1-id2"}) {
		t.Errorf("snapshot with %v", got)
	}
}

func TestResolveTellsRunningGoneAndUnknownApart(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	running, released := s.claim(), s.claim()
	s.release(released.ID)
	for id, want := range map[string]SendResolved{
		running.ID: {Stream: 1, ID: running.ID, Sandbox: &running}, released.ID: {Stream: 1, ID: released.ID, Gone: true}, "x": {Stream: 1, ID: "x"},
	} {
		s.step(Resolve{Session: "r", Stream: 1, ID: id})
		if got := one[SendResolved](s); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, expected %+v", id, got, want)
		}
	}
	s.step(Resolve{Session: "r", Stream: 9, ID: "x"})
	none[SendResolved](s)
}

func TestSandboxIsReleasedAtItsEndTime(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Minute, Wait: wait})
	if c := one[Claimed](s); !c.Sandbox.EndAt.Equal(s.now.Wall.Add(time.Minute)) {
		t.Errorf("claimed %+v", c)
	}
	s.pass(59 * time.Second)
	none[SandboxReleased](s)
	s.pass(time.Second)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonTimeout {
		t.Errorf("release %+v", r)
	}
}

func TestSandboxWhosePodCannotServeItIsReleasedAndNotToldToAnybodyMeanwhile(t *testing.T) {
	for reason, ev := range map[string]Event{
		ReasonPodDeleted: PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })},
		ReasonPodFailed:  PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })},
		ReasonPodGone:    PodGone{key("a-1")},
		ReasonPodMoved:   PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") })},
	} {
		t.Run(reason, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			sb := s.claim()
			s.slow = true
			s.step(ev)
			none[SandboxReleased](s) // it is not durable yet
			s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
			if one[SendResolved](s).Sandbox != nil {
				t.Error("it is still told where it is")
			}
			s.step(SessionJoined{Session: "r2", Stream: 2})
			if routes := one[SendSnapshot](s).Routes; len(routes) > 0 {
				t.Errorf("snapshot with %+v", routes)
			}
			s.written()
			if r := one[SandboxReleased](s); r.Sandbox.Reason != reason {
				t.Errorf("released %+v", r)
			}
			if n := len(of[SendRelease](s.effects)); n != 2 {
				t.Errorf("%d routers were told", n)
			}
			none[DeletePod](s)
			s.step(ev)
			none[SandboxReleased](s)
			none[Write](s)
		})
	}
}

func TestReleaseUnderWayIsAnsweredWhenThePodVanishes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.slow = true
	s.step(Release{Token: 5, ID: sb.ID, Reason: ReasonKilled})
	s.step(PodGone{sb.Pod})
	s.written()
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonKilled {
		t.Errorf("released %+v", r)
	}
	if a := one[ReleaseAnswered](s); a.Token != 5 || a.Status != ReleaseOK {
		t.Errorf("answer %+v", a)
	}
	if r := one[Record](s); r.Sandbox.Phase != Released {
		t.Errorf("recorded %+v", r)
	}
	s.pass(window)
	if r := one[Record](s); r.Sandbox.Phase != Ended {
		t.Errorf("recorded %+v", r)
	}
}

// ---- ports

// opens is the spec with other ports.
func opens(p Pool, defaultPort uint16, ports ...uint16) Pool {
	p.DefaultPort, p.Ports = defaultPort, ports
	return p
}

// ported requires that s has these ports.
func ported(t *testing.T, s Sandbox, defaultPort uint16, ports ...uint16) {
	t.Helper()
	if s.DefaultPort != defaultPort || !slices.Equal(s.Ports, ports) {
		t.Errorf("%s has default port %d and ports %v, expected %d and %v", s.ID, s.DefaultPort, s.Ports, defaultPort, ports)
	}
}

func TestChangedPortsOfAPoolCountForItsSandboxesAndAreToldToEveryRouter(t *testing.T) {
	s := newSim(t)
	b := Pool{Key: PoolKey{"ns", "b"}, Template: "t1", DefaultPort: 1}
	inB := with(warmPod("b-9"), func(p *Pod) { p.Pool = "b" })
	s.recover([]Pool{opens(specA(5), 80, 80), b}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4"), inB}, on("b-9", "in-b"))
	s.join("r1", 1)
	running, releasing, released := s.claim(), s.claim(), s.claim()
	ported(t, running, 80, 80)
	s.release(released.ID)
	s.slow = true
	s.step(Release{ID: releasing.ID, Reason: ReasonKilled})
	s.step(Claim{Token: 7, Pool: poolA, Wait: wait})
	s.join("r2", 2)
	s.join("left", 3)
	s.step(SessionLeft{Session: "left", Stream: 3})

	spec := opens(specA(5), 8080, 22, 8080)
	s.step(PoolSeen{spec})
	type told struct {
		stream, sequence uint64
		id               string
	}
	var got []told
	for _, r := range of[SendRoute](s.effects) {
		ported(t, r.Sandbox, 8080, 22, 8080)
		got = append(got, told{r.Stream, r.Sequence, r.Sandbox.ID})
	}
	slices.SortFunc(got, func(a, b told) int {
		return cmp.Or(cmp.Compare(a.stream, b.stream), cmp.Compare(a.sequence, b.sequence))
	})
	if want := []told{{1, 6, running.ID}, {1, 7, releasing.ID}, {2, 2, running.ID}, {2, 3, releasing.ID}}; !slices.Equal(got, want) {
		t.Errorf("told %+v, expected %+v", got, want)
	}
	none[Record](s) // ports are the pool's, and not on record
	none[SendSnapshot](s)

	// Whatever is told later says the same.
	s.step(Resolve{Session: "r1", Stream: 1, ID: running.ID})
	ported(t, *one[SendResolved](s).Sandbox, 8080, 22, 8080)
	s.written()
	s.written()
	ported(t, one[Claimed](s).Sandbox, 8080, 22, 8080)
	for _, r := range of[SendRoute](s.effects) {
		ported(t, r.Sandbox, 8080, 22, 8080)
	}
	s.slow = false
	s.join("r3", 4)
	s.step(SessionJoined{Session: "r3", Stream: 5})
	for _, r := range one[SendSnapshot](s).Routes {
		if r.ID == "in-b" {
			ported(t, r, 1)
		} else {
			ported(t, r, 8080, 22, 8080)
		}
	}

	// Pools are seen whenever their status is written: that says nothing new.
	for range 2 {
		s.step(PoolSeen{changed(spec, func(p *Pool) { p.Warm, p.Ports = 4, slices.Clone(p.Ports) })})
		none[SendRoute](s)
	}
	// Each of the two alone is a change, to all ports too.
	for _, ports := range [][]uint16{{8080}, {443, 8080}, nil} {
		if s.step(PoolSeen{opens(spec, 8080, ports...)}); len(of[SendRoute](s.effects)) == 0 {
			t.Errorf("a change to ports %v was not told", ports)
		}
	}
	if s.step(PoolSeen{opens(spec, 443)}); len(of[SendRoute](s.effects)) == 0 {
		t.Error("a change of the default port was not told")
	}
}

func TestRecoveredSandboxHasThePortsThatItsPoolAsksForNow(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{opens(specA(0), 443, 443, 8080)}, []Pod{warmPod("a-1")}, on("a-1", "x"))
	s.step(SessionJoined{Session: "r", Stream: 1})
	ported(t, one[SendSnapshot](s).Routes[0], 443, 443, 8080)
}

func TestRecoveredSandboxWhosePoolIsGoneKeepsThePortsItHad(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.slow = true // its release is under way for long
	f := on("a-1", "x")
	f.Sandbox.DefaultPort, f.Sandbox.Ports = 443, []uint16{443}
	s.recover(nil, []Pod{warmPod("a-1")}, f)
	s.step(SessionJoined{Session: "r", Stream: 1})
	ported(t, one[SendSnapshot](s).Routes[0], 443, 443)
}

// ---- leaders that follow each other

func TestRecoveryLeavesAPoolThatIsAsItShouldBeAlone(t *testing.T) {
	s := newSim(t)
	effects := s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), with(warmPod("a-2"), func(p *Pod) { p.Ready = false })})
	if len(effects) > 0 {
		t.Errorf("unexpected %+v", effects)
	}
}

func TestRecoveryDoesNotTakeAPoolForDrainedThatHoldsASandbox(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Deleting = true })}, []Pod{warmPod("a-1")}, on("a-1", "x"))
	none[PoolDrained](s)
	if r := one[SandboxReleased](s); r.Sandbox.ID != "x" || r.Sandbox.Reason != ReasonPoolDeleted {
		t.Errorf("release %+v", r)
	}
}

// What a leader finds in the journal, in the Sandbox object and of the pod, and
// what it makes of it.
func TestRecoveryFindsEverySandboxInItsState(t *testing.T) {
	fact := func(phase Phase, counter uint64) []Fact {
		f := on("a-1", "x")
		if phase == Released {
			f = released("a-1", "x")
		}
		f.Revision.Counter, f.Sandbox.Revision.Counter, f.Sandbox.Phase = counter, counter, phase
		return []Fact{f}
	}
	object := func(phase Phase, counter uint64) []Sandbox {
		return []Sandbox{*fact(phase, counter)[0].Sandbox}
	}
	there := []Pod{warmPod("a-1")}
	seen := func(change func(*Pod)) []Pod { return []Pod{with(warmPod("a-1"), change)} }
	for _, tt := range []struct {
		name    string
		pods    []Pod
		facts   []Fact
		objects []Sandbox
		want    Phase
		reason  string // of the release that recovery finds out about
		record  bool   // a state is to be recorded
	}{
		{"in the journal only", there, fact(Running, 5), nil, Running, "", true},
		{"in the object only", there, nil, object(Running, 5), Running, "", false},
		{"in both", there, fact(Running, 5), object(Running, 5), Running, "", false},
		{"the journal is ahead", there, fact(Released, 6), object(Running, 5), Released, "", true},
		{"the object is ahead", there, fact(Running, 5), object(Released, 6), Released, "", false},
		{"ended, but its pod is still there", there, nil, object(Ended, 7), Released, "", true},
		{"its labels say that it was used", seen(func(p *Pod) { p.Used = true }), fact(Running, 5), nil, Running, "", true},
		{"being deleted", seen(func(p *Pod) { p.Deleting = true }), fact(Running, 5), nil, Released, ReasonPodDeleted, true},
		{"finished", seen(func(p *Pod) { p.Finished = true }), nil, object(Running, 5), Released, ReasonPodFailed, true},
		{"moved", seen(func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") }), nil, object(Running, 5), Released, ReasonPodMoved, true},
		{"replaced by another of its name", seen(func(p *Pod) { p.Key.UID = "other" }), fact(Running, 5), nil, Released, ReasonPodGone, true},
		{"gone", nil, fact(Running, 5), nil, Released, ReasonPodGone, true},
		{"gone, while it was starting", nil, fact(Starting, 5), nil, Released, ReasonPodGone, true},
		{"gone, released before", nil, fact(Released, 6), nil, Released, "", true},
		{"gone, ended before", nil, nil, object(Ended, 7), Ended, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.recoverState(State{Pools: []Pool{specA(0)}, Nodes: []string{"n1"}, Pods: tt.pods, Facts: tt.facts, Records: tt.objects})
			sb, ok := s.core.Sandbox("x")
			if !ok || sb.Phase != tt.want {
				t.Fatalf("found %+v %v, expected phase %d", sb, ok, tt.want)
			}
			if len(tt.pods) > 0 && tt.pods[0].Key == key("a-1") {
				none[DeletePod](s) // not before the fence
			}
			none[SandboxReady](s) // that was another leader's to say
			releases := of[SandboxReleased](s.effects)
			if got := len(releases) == 1; got != (tt.reason != "") || got && releases[0].Sandbox.Reason != tt.reason {
				t.Errorf("released %+v, expected %q", releases, tt.reason)
			}
			if got := len(of[Record](s.effects)) > 0; got != tt.record {
				t.Errorf("recorded: %v, expected %v", got, tt.record)
			}
			s.step(Claim{Token: 1, Pool: poolA})
			one[ClaimRefused](s) // whatever it is, it is not warm
			if tt.want != Released || len(tt.pods) > 0 && tt.pods[0].Key == key("a-1") {
				return
			}
			s.pass(maxStale) // routers of the earlier term may still know it
			none[Record](s)
			s.pass(maxStale/100 + time.Second)
			if s.pass(window); one[Record](s).Sandbox.Phase != Ended {
				t.Errorf("recorded %+v", s.effects)
			}
		})
	}
}

func TestRecordsThatContradictEachOtherStopTheLeader(t *testing.T) {
	s := newSimAt(t, 2, start)
	_, err := s.core.Recover(State{Facts: []Fact{on("a-1", "x"), on("a-1", "y")}})
	if err == nil || !strings.Contains(err.Error(), "both on record with pod a-1") {
		t.Errorf("error %v", err)
	}
}

func TestPodThatSomebodyMarkedAsUsedIsNeverHandedOutAndDeleted(t *testing.T) {
	s := newSim(t)
	used := with(warmPod("a-1"), func(p *Pod) { p.Used = true })
	s.recover([]Pool{specA(0)}, []Pod{used})
	one[Repaired](s)
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
	// Routers of an earlier term may know a route to it.
	if after := s.deletedAfter(key("a-1"), never); after < maxStale+window {
		t.Errorf("deleted after %v", after)
	}
}

func TestIdlePodIsDeletedOnlyOnceThatIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(PoolSeen{specA(0)})
	facts := one[Write](s).Facts
	if len(facts) != 1 || facts[0].Sandbox != nil || facts[0].Discard != key("a-1") {
		t.Errorf("written %+v", facts)
	}
	none[DeletePod](s)
	s.step(PoolSeen{specA(1)}) // too late: the intent is final
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
	s.written()
	one[DeletePod](s)
	s.step(PodGone{key("a-1")})
	if st := one[Settle](s); st.Pod != key("a-1") {
		t.Errorf("settled %+v", st)
	}
}

func TestIntentToDeleteHoldsUnderTheNextLeader(t *testing.T) {
	s := newSimAt(t, 2, start)
	intent := Fact{Revision: Revision{1, 3}, Discard: key("a-1")}
	late := Fact{Revision: Revision{1, 4}, Discard: key("a-2")}
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, intent, late)
	if d := one[DeletePod](s); d.Pod != key("a-1") {
		t.Errorf("deleted %+v", d)
	}
	if st := one[Settle](s); st.Pod != key("a-2") || st.Revision != late.Revision {
		t.Errorf("settled %+v", st) // it is gone
	}
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
}

func TestIntentWhosePodGoesMeanwhileIsSettledOnceItIsWritten(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(PoolSeen{specA(0)})
	s.step(PodGone{key("a-1")})
	none[Settle](s)
	s.written()
	one[Settle](s)
	none[DeletePod](s)
}

func TestSandboxOfAnEarlierTermIsFencedAgainstRoutersThatWereNotHeardOf(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"))
	s.pass(20 * time.Second)
	s.release("x")
	want := maxStale + maxStale/100 + window - 20*time.Second
	if after := s.deletedAfter(key("a-1"), never); after < want || after > want+time.Second {
		t.Errorf("deleted after %v, expected %v", after, want)
	}
}

func TestSandboxOfThisTermIsNotFencedAgainstEarlierOnes(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.release(sb.ID)
	if after := s.deletedAfter(sb.Pod, never); after != window {
		t.Errorf("deleted after %v, expected %v", after, window)
	}
}

func TestUsedPodIsNeverHandedOutAgainByAnObservationThatIsOld(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	gone := s.step(PodGone{sb.Pod})
	s.record(gone)
	s.step(PodSeen{warmPod("a-1")}) // the watch lags behind what an audit found out
	s.step(Claim{Token: 2, Pool: poolA})
	one[ClaimRefused](s)
	// It is not left over either: the fence was complete, or goes on.
	s.record(s.step(PodSeen{warmPod("a-1")}))
	if after := s.deletedAfter(sb.Pod, never); after > window {
		t.Errorf("deleted after %v", after)
	}
}

func TestPodThatComesBackAfterItsFenceIsDeleted(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.record(s.step(PodGone{sb.Pod}))
	s.pass(window)
	s.step(PodSeen{warmPod("a-1")})
	if d := one[DeletePod](s); d.Pod != sb.Pod {
		t.Errorf("deleted %+v", d)
	}
}

func TestRecordsOfEndedSandboxesAreBounded(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded, s.cfg.KeepEndedFor = 1, time.Hour
	s.restart()
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	first, second, third := s.claim(), s.claim(), s.claim()
	s.step(PodGone{first.Pod})
	s.step(PodGone{second.Pod})
	var last []Effect
	for _, r := range of[Record](s.pass(window)) {
		if r.Sandbox.ID == first.ID {
			last = append(last, r)
		} else {
			s.record([]Effect{r})
		}
	}
	s.pass(time.Second)
	// The last state of the first one is not written: that would bring it back. The
	// second need not wait for it.
	if f := one[ForgetRecord](s); f.ID != second.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.record(last)
	s.pass(time.Second)
	none[ForgetRecord](s)
	s.step(PodGone{third.Pod})
	s.pass(window)
	if f := one[ForgetRecord](s); f.ID != first.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.record(s.effects)
	s.pass(time.Hour)
	if f := one[ForgetRecord](s); f.ID != third.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.step(Recorded{ID: third.ID, Revision: third.Revision})
}

func TestRecordIsKeptUntilTheFenceIsComplete(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEndedFor = time.Second
	s.restart()
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.record(s.step(PodGone{sb.Pod}))
	s.pass(maxStale)
	none[ForgetRecord](s)
	s.step(SessionGoodbye{Session: "r"})
	s.record(s.pass(window))
	s.pass(time.Second)
	one[ForgetRecord](s)
}

// ---- pools

func TestPoolIsFilledToWhatItAsksFor(t *testing.T) {
	claimed := warmPod("a-9")
	for _, tt := range []struct {
		name         string
		warm, most   int
		pods         []Pod
		made, undone int
	}{
		{"empty", 3, 0, nil, 3, 0},
		{"bounded", 3, 2, nil, 2, 0},
		{"bounded by claimed pods", 3, 3, []Pod{claimed, warmPod("a-2")}, 1, 0},
		{"bound lowered", 3, 2, []Pod{claimed, warmPod("a-2"), warmPod("a-3")}, 0, 1},
		{"too many", 1, 0, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")}, 0, 2},
		{"older template, room beside it", 1, 0, []Pod{with(warmPod("a-1"), old)}, 1, 0},
		{"older template, replaced", 1, 0, []Pod{with(warmPod("a-1"), old), warmPod("a-2")}, 0, 1},
		{"older template, not ready", 1, 0, []Pod{with(warmPod("a-1"), func(p *Pod) { old(p); p.Ready = false })}, 1, 1},
		{"older template, no room beside it", 2, 2, []Pod{with(warmPod("a-1"), old), with(warmPod("a-2"), old)}, 0, 1},
		{"older template, one makes room", 2, 2, []Pod{with(warmPod("a-1"), old), with(warmPod("a-2"), func(p *Pod) { p.Ready = false })}, 0, 0},
		{"finished", 1, 0, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })}, 1, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSim(t)
			p := specA(tt.warm)
			p.MaxPods = tt.most
			s.recover([]Pool{p}, tt.pods, facts(tt.pods)...)
			if made, undone := len(of[CreatePod](s.effects)), len(of[DeletePod](s.effects)); made != tt.made || undone != tt.undone {
				t.Errorf("%d made and %d deleted, expected %d and %d: %+v", made, undone, tt.made, tt.undone, s.effects)
			}
		})
	}
}

// facts are those of the pods that are used: a-9 is claimed, a-8 released.
func facts(pods []Pod) (all []Fact) {
	for _, p := range pods {
		switch p.Key.Name {
		case "a-9":
			all = append(all, on("a-9", "x"))
		case "a-8":
			all = append(all, released("a-8", "y"))
		}
	}
	return all
}

func old(p *Pod) { p.Template = "t0" }

func TestTemplateChangeReplacesWarmPodsWithoutEmptyingThePool(t *testing.T) {
	for _, most := range []int{0, 2} {
		t.Run(fmt.Sprintf("at most %d", most), func(t *testing.T) {
			s := newSim(t)
			p := specA(2)
			p.MaxPods = most
			s.recover([]Pool{p}, []Pod{warmPod("a-1"), warmPod("a-2")})
			p.Template = "t2"
			queue := slices.Clone(s.step(PoolSeen{p}))
			least := 2
			for n := 0; len(queue) > 0; n++ {
				if n > 50 {
					t.Fatal("no end")
				}
				e := queue[0]
				queue = queue[1:]
				var ev Event
				switch e := e.(type) {
				case CreatePod:
					made := warmPod(e.Name)
					made.Template = "t2"
					ev = PodSeen{made}
				case DeletePod:
					ev = PodGone{e.Pod}
				default:
					continue
				}
				queue = append(queue, s.step(ev)...)
				counts, _ := s.core.Counts(poolA)
				least = min(least, counts.Warm)
			}
			if want := map[int]int{0: 2, 2: 1}[most]; least < want {
				t.Errorf("%d warm pods at the least, expected %d", least, want)
			}
			for q := range s.core.pools[poolA].pods {
				if q.seen.Template != "t2" || q.phase != podWarm {
					t.Errorf("left: %+v", q.seen)
				}
			}
		})
	}
}

func notAllowed(p *Pool) { p.Refused = true }

func TestRefusedTemplateIsWithheld(t *testing.T) {
	unready := func(p *Pod) { p.Ready = false }
	for _, tt := range []struct {
		name       string
		warm, most int
		pods       []Pod
		deleted    []string
	}{
		{"none are made", 3, 0, nil, nil},
		{"warm ones made from it", 2, 0, []Pod{warmPod("a-1"), warmPod("a-2")}, []string{"a-1", "a-2"}},
		{"ones made from it that are not ready", 2, 0, []Pod{with(warmPod("a-1"), unready)}, []string{"a-1"}},
		{"warm ones of an earlier template stay", 2, 0, []Pod{with(warmPod("a-1"), old), warmPod("a-2"), with(warmPod("a-3"), old)}, []string{"a-2"}},
		{"none of an earlier template becomes ready", 2, 0, []Pod{with(warmPod("a-1"), func(p *Pod) { old(p); unready(p) })}, []string{"a-1"}},
		{"too many of an earlier template", 1, 0, []Pod{with(warmPod("a-1"), old), with(warmPod("a-2"), old), with(warmPod("a-3"), old)}, []string{"a-1", "a-2"}},
		{"bound lowered", 3, 2, []Pod{warmPod("a-9"), with(warmPod("a-2"), old), with(warmPod("a-3"), old)}, []string{"a-2"}},
		{"claimed and released ones are untouched", 1, 0, []Pod{with(warmPod("a-9"), old), with(warmPod("a-8"), old)}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSim(t)
			p := changed(specA(tt.warm), notAllowed)
			p.MaxPods = tt.most
			s.recover([]Pool{p}, tt.pods, facts(tt.pods)...)
			none[CreatePod](s)
			none[SandboxReleased](s)
			var deleted []string
			for _, d := range of[DeletePod](s.effects) {
				deleted = append(deleted, d.Pod.Name)
			}
			slices.Sort(deleted)
			if !slices.Equal(deleted, tt.deleted) {
				t.Errorf("deleted %v, expected %v", deleted, tt.deleted)
			}
		})
	}
}

func TestPoolWhoseTemplateIsRefusedHandsOutWhatItHasAndIsFilledOnceItIsMended(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	bad := changed(specA(2), func(p *Pool) { p.Template, p.Refused = "t2", true })
	s.step(PoolSeen{bad})
	if len(s.effects) > 0 {
		t.Errorf("unexpected %+v", s.effects)
	}
	s.claim()
	s.step(PodSeen{with(warmPod("a-3"), func(p *Pod) { p.Template = "t2" })}) // was being made meanwhile
	if d := one[DeletePod](s); d.Pod != key("a-3") {
		t.Errorf("deleted %+v", d)
	}
	s.pass(time.Minute)
	none[CreatePod](s)
	s.step(Claim{Token: 5, Pool: poolA})
	one[Claimed](s)
	s.step(Claim{Token: 6, Pool: poolA})
	one[ClaimRefused](s)
	none[CreatePod](s)

	s.step(PoolSeen{changed(bad, func(p *Pool) { p.Template, p.Refused = "t3", false })})
	if made := of[CreatePod](s.effects); len(made) != 2 {
		t.Errorf("made %+v", made)
	}
}

// The shell refuses as well: it may have seen the template before the core has.
func TestCreationThatFailedBecauseTheTemplateIsRefusedIsNotTriedAgainUntilItIsMended(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	name := one[CreatePod](s).Name
	s.step(CreateFailed{poolA, name})
	bad := changed(specA(1), notAllowed)
	s.step(PoolSeen{bad})
	s.pass(retryMost)
	none[CreatePod](s)
	s.step(PoolSeen{specA(1)})
	if again := one[CreatePod](s); again.Name != name {
		t.Errorf("made %+v, expected %s", again, name)
	}
}

func TestPoolWhoseTemplateIsRefusedIsDrainedLikeAnother(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), notAllowed)}, []Pod{with(warmPod("a-1"), old)})
	none[DeletePod](s)
	s.step(PoolSeen{changed(specA(1), func(p *Pool) { p.Refused, p.Deleting = true, true })})
	one[DeletePod](s)
	s.step(PodGone{key("a-1")})
	one[PoolDrained](s)
}

func TestScalingDownDoesNotCountOnPodsThatAreNotMadeYet(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(PoolSeen{specA(1)})
	if d := of[DeletePod](s.effects); len(d) != 1 || d[0].Pod != key("a-2") {
		t.Errorf("deleted %+v, expected the youngest only", d)
	}
}

func TestFailedCreationIsTriedAgainUnderItsNameAndMorePatiently(t *testing.T) {
	s := newSim(t)
	p := specA(3)
	p.MaxPods = 3
	s.recover([]Pool{p}, nil)
	var names []string
	for _, c := range of[CreatePod](s.effects) {
		names = append(names, c.Name)
	}
	for pause := retryFirst; pause <= 8*retryFirst; pause *= 2 {
		for _, name := range names { // side by side: that is one failure
			s.step(CreateFailed{poolA, name})
			none[CreatePod](s)
		}
		s.pass(pause - time.Millisecond)
		none[CreatePod](s)
		s.pass(time.Millisecond)
		var again []string
		for _, c := range of[CreatePod](s.effects) {
			again = append(again, c.Name)
		}
		if !slices.Equal(again, names) {
			t.Fatalf("tried again %v, expected %v", again, names)
		}
	}
}

func TestPodThatWasSeenWasMadeWhateverIsSaidOfItsCreation(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	name := one[CreatePod](s).Name
	s.step(PodSeen{with(warmPod(name), func(p *Pod) { p.Ready = false })})
	s.step(CreateFailed{poolA, name})
	s.pass(time.Minute)
	none[CreatePod](s)
	s.step(PoolSeen{specA(2)})
	if again := one[CreatePod](s).Name; again == name {
		t.Errorf("%s is made twice", again)
	}
	s.step(CreateFailed{PoolKey{"ns", "other"}, "x"})
}

func TestPoolBeingDeletedIsDrainedThroughItsFences(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	sb := s.claim() // one more is being made
	p := specA(2)
	p.Deleting = true
	s.step(PoolSeen{p})
	if d := one[DeletePod](s); d.Pod != key("a-2") {
		t.Errorf("deleted %+v", d)
	}
	one[SandboxReleased](s)
	s.step(PodGone{key("a-2")})
	s.ack("r", 1, 3)
	s.pass(window)
	one[DeletePod](s)
	s.step(PodGone{sb.Pod})
	none[PoolDrained](s) // a creation is still open
	s.step(CreateFailed{poolA, "a-1"})
	one[PoolDrained](s)
	s.step(PoolSeen{p})
	none[PoolDrained](s)
	s.step(PoolGone{Key: poolA})
	if _, known := s.core.Counts(poolA); known {
		t.Error("the pool is still known")
	}
	s.step(PoolSeen{specA(1)}) // another one of that name
	one[CreatePod](s)
}

func TestPodsOfAPoolThatWasNotSeenAreLeftAlone(t *testing.T) {
	s := newSim(t)
	s.recover(nil, nil)
	s.step(PodSeen{warmPod("a-1")})
	if len(s.effects) > 0 {
		t.Errorf("unexpected %+v", s.effects)
	}
	s.step(PodGone{key("a-1")})
	if len(s.core.pools) > 0 {
		t.Error("a pool without an object and without pods is kept")
	}
}

func TestPodsOfAPoolThatIsGoneAreDeleted(t *testing.T) {
	s := newSim(t)
	s.recover(nil, []Pod{warmPod("a-1"), warmPod("a-9")}, facts([]Pod{warmPod("a-9")})...)
	one[DeletePod](s)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonPoolDeleted {
		t.Errorf("release %+v", r)
	}
}
