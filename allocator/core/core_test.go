package core

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"
)

// sim is a core with a clock, and names that count up.
type sim struct {
	t         *testing.T
	core      *Core
	now       Instant
	effects   []Effect // of the last step
	ids, pods int
	cfg       Config
}

var (
	poolA = PoolKey{"ns", "a"}
	start = Instant{Boot: time.Hour, Wall: time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)}
)

func newSim(t *testing.T) *sim { return newSimAt(t, 1, start) }

func newSimAt(t *testing.T, term uint64, now Instant) *sim {
	s := &sim{t: t, now: now}
	s.cfg = Config{
		Term: term, MaxStale: maxStale, Window: window,
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
	return s.effects
}

func (s *sim) recover(pools []Pool, pods []Pod, records ...Sandbox) []Effect {
	s.t.Helper()
	s.effects = s.core.Recover(pools, pods, records)
	checkTables(s.t, s.core)
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
	return Pod{Key: key(name), Pool: "a", IP: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Template: "t1", Version: "1", Ready: true, Free: true}
}

func with(p Pod, change func(*Pod)) Pod {
	change(&p)
	return p
}

func claimedPod(name, id string) Pod {
	return with(warmPod(name), func(p *Pod) { p.Free, p.Binding, p.Version = false, &Binding{ID: id}, "2" })
}

func releasedPod(name, id string) Pod {
	return with(claimedPod(name, id), func(p *Pod) { p.Released, p.ReleaseReason, p.Version = true, ReasonKilled, "3" })
}

func specA(warm int) Pool { return Pool{Key: poolA, Warm: warm, Template: "t1", DefaultPort: 80} }

// claim takes a sandbox and makes it durable.
func (s *sim) claim() Sandbox {
	s.t.Helper()
	s.step(Claim{Token: 1, Pool: poolA})
	b := one[BindPod](s)
	s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID, Bound: true})
	c := one[Claimed](s)
	s.step(Recorded{ID: c.Sandbox.ID, Revision: c.Sandbox.Revision})
	return c.Sandbox
}

// release ends a sandbox, durably and on record.
func (s *sim) release(id string) []Effect {
	s.t.Helper()
	s.step(Release{Token: 2, ID: id, Reason: ReasonKilled})
	one[MarkReleased](s)
	released := s.step(ReleaseDone{ID: id})
	s.record(released)
	return released
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
// pod was deleted without condition.
func (s *sim) deletedAfter(pod PodKey, most time.Duration) time.Duration {
	s.t.Helper()
	began := s.now.Boot
	for s.now.Boot-began < most {
		for _, d := range of[DeletePod](s.pass(100 * time.Millisecond)) {
			if d.Pod == pod && d.IfVersion == "" {
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

func TestClaimIsAnsweredOnlyOnceItsWriteIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.step(Claim{Token: 7, Pool: poolA, Binding: Binding{Metadata: map[string]string{"k": "v"}}})
	b := one[BindPod](s)
	none[Claimed](s)
	none[SendRoute](s)
	s.step(PodSeen{claimedPod("a-1", b.Binding.ID)}) // the watch is faster than the answer
	none[Claimed](s)
	s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID, Bound: true})
	c := one[Claimed](s)
	if c.Token != 7 || c.Sandbox.ID != b.Binding.ID || c.Sandbox.Metadata["k"] != "v" || c.Sandbox.IP != warmPod("a-1").IP || c.Sandbox.DefaultPort != 80 {
		t.Errorf("answer %+v", c)
	}
	if r := one[SendRoute](s); r.Sandbox.ID != b.Binding.ID || r.Sequence != 2 {
		t.Errorf("route %+v", r)
	}
	one[Record](s)
}

func TestPodsAreHandedOutOldestFirstAndOnce(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	var got []string
	for token := range uint64(3) {
		for _, b := range of[BindPod](s.step(Claim{Token: token, Pool: poolA})) {
			got = append(got, b.Pod.Name)
		}
	}
	if !slices.Equal(got, []string{"a-1", "a-2"}) {
		t.Errorf("handed out %v", got)
	}
	if r := one[ClaimRefused](s); r.Token != 2 || r.NoPool || r.Counts.Claimed != 2 {
		t.Errorf("refused %+v", r)
	}
}

func TestClaimOfAPoolThatIsNotThereIsRefused(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Deleting = true })}, []Pod{warmPod("a-1")})
	for _, p := range []PoolKey{poolA, {"ns", "other"}} {
		s.step(Claim{Token: 1, Pool: p})
		if !one[ClaimRefused](s).NoPool {
			t.Errorf("%v: %+v", p, s.effects)
		}
	}
}

func changed(p Pool, change func(*Pool)) Pool {
	change(&p)
	return p
}

func TestClaimMovesToAnotherPodUnderANewIDWhenItsPodIsNotFree(t *testing.T) {
	for name, cause := range map[string]func(s *sim, b BindPod){
		"refused": func(s *sim, b BindPod) {
			s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Free = false })})
			s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID})
		},
		"gone": func(s *sim, b BindPod) { s.step(PodGone{b.Pod}) },
		"taken by a deposed leader": func(s *sim, _ BindPod) {
			s.step(PodSeen{claimedPod("a-1", "theirs")})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
			s.step(Claim{Token: 1, Pool: poolA})
			first := one[BindPod](s)
			cause(s, first)
			second := one[BindPod](s)
			if second.Pod != key("a-2") || second.Binding.ID == first.Binding.ID {
				t.Errorf("second try %+v after %+v", second, first)
			}
			s.step(BindDone{Pod: first.Pod, ID: first.Binding.ID, Bound: true}) // late: not this claim's any more
			none[Claimed](s)
			s.step(BindDone{Pod: second.Pod, ID: second.Binding.ID, Bound: true})
			if c := one[Claimed](s); c.Token != 1 || c.Sandbox.ID != second.Binding.ID {
				t.Errorf("answer %+v", c)
			}
		})
	}
}

func TestPodsOfOneNameAreToldApartByUID(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA})
	b := one[BindPod](s)
	namesake := PodKey{"ns", "a-1", "uid-of-an-earlier-one"}
	s.step(PodGone{namesake})
	s.step(DeleteFailed{namesake})
	s.step(BindDone{Pod: namesake, ID: b.Binding.ID, Bound: true})
	if len(s.effects) > 0 {
		t.Fatalf("unexpected %+v", s.effects)
	}
	s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID, Bound: true})
	one[Claimed](s)
	s.step(PodGone{namesake})
	none[SandboxReleased](s)
}

func TestClaimIsRefusedWhenNoPodIsLeftToMoveTo(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA})
	s.step(PodGone{key("a-1")})
	one[ClaimRefused](s)
}

func TestAbandonedClaimIsReleasedOnceItsWriteIsKnown(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(Claim{Token: 1, Pool: poolA})
	b := one[BindPod](s)
	s.step(ClaimAbandoned{Token: 1})
	s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID, Bound: true})
	none[Claimed](s)
	if m := one[MarkReleased](s); m.Reason != ReasonAbandoned || m.ID != b.Binding.ID {
		t.Errorf("release %+v", m)
	}

	s.step(Claim{Token: 2, Pool: poolA})
	b = one[BindPod](s)
	s.step(ClaimAbandoned{Token: 2})
	s.step(PodGone{b.Pod})
	none[BindPod](s)
	none[ClaimRefused](s)
}

func TestClaimWrittenToAPodThatIsGoingIsAnsweredAndReleased(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA})
	b := one[BindPod](s)
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })})
	s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID, Bound: true})
	one[Claimed](s)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonPodDeleted {
		t.Errorf("released %+v", r)
	}
}

// ---- releases and fences

func TestReleaseIsToldOnlyOnceItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(Release{Token: 2, ID: sb.ID, Reason: ReasonKilled})
	one[MarkReleased](s)
	none[SendRelease](s)
	none[ReleaseAnswered](s)
	s.step(Release{Token: 3, ID: sb.ID, Reason: ReasonKilled})
	none[MarkReleased](s) // one write is enough for two callers
	s.step(ReleaseDone{ID: sb.ID})
	one[SendRelease](s)
	one[SandboxReleased](s)
	none[ReleaseAnswered](s)
	s.ack("r", 1, 3)
	if answers := of[ReleaseAnswered](s.effects); len(answers) != 2 || answers[0].Status != ReleaseOK || answers[0].Outstanding != 0 {
		t.Errorf("answers %+v", answers)
	}
	s.step(ReleaseDone{ID: sb.ID})
	none[SandboxReleased](s)
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

func TestReleasedPodIsNotDeletedBeforeItsReleaseIsRecorded(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.step(Release{Token: 2, ID: sb.ID, Reason: ReasonKilled})
	s.step(ReleaseDone{ID: sb.ID})
	r := one[Record](s)
	if s.deletedAfter(sb.Pod, never) < never {
		t.Fatal("deleted without a record")
	}
	s.step(Recorded{ID: sb.ID, Revision: sb.Revision}) // an older one
	none[DeletePod](s)
	s.step(Recorded{ID: sb.ID, Revision: r.Sandbox.Revision})
	one[DeletePod](s)
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
	s.step(Claim{Token: 1, Pool: poolA}) // not durable yet
	s.release(released.ID)
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
	s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{EndAt: s.now.Wall.Add(time.Minute)}})
	b := one[BindPod](s)
	s.step(BindDone{Pod: b.Pod, ID: b.Binding.ID, Bound: true})
	s.pass(59 * time.Second)
	none[MarkReleased](s)
	s.pass(time.Second)
	if m := one[MarkReleased](s); m.Reason != ReasonTimeout {
		t.Errorf("release %+v", m)
	}
}

func TestWhatCannotBeUndoneReleasesWithoutAWrite(t *testing.T) {
	for reason, ev := range map[string]Event{
		ReasonPodDeleted: PodSeen{with(claimedPod("a-1", "term1-id1"), func(p *Pod) { p.Deleting = true })},
		ReasonPodFailed:  PodSeen{with(claimedPod("a-1", "term1-id1"), func(p *Pod) { p.Finished = true })},
		ReasonPodGone:    PodGone{key("a-1")},
		// The mark of a deposed leader, or our own before its answer.
		ReasonKilled: PodSeen{releasedPod("a-1", "term1-id1")},
	} {
		t.Run(reason, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			s.claim()
			s.step(ev)
			if r := one[SandboxReleased](s); r.Sandbox.Reason != reason {
				t.Errorf("released %+v", r)
			}
			one[SendRelease](s)
			none[MarkReleased](s)
			none[DeletePod](s)
			s.step(ev)
			none[SandboxReleased](s)
		})
	}
}

func TestReleaseUnderWayIsAnsweredWhenThePodVanishes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.step(Release{Token: 5, ID: sb.ID, Reason: ReasonKilled})
	s.step(PodGone{sb.Pod})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonKilled {
		t.Errorf("released %+v", r)
	}
	if a := one[ReleaseAnswered](s); a.Token != 5 || a.Status != ReleaseOK {
		t.Errorf("answer %+v", a)
	}
	if r := of[Record](s.effects); r[len(r)-1].Sandbox.Phase != Ended {
		t.Errorf("records %+v", r)
	}
}

func TestNobodyIsToldAnAddressThatItsPodHasLeft(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(PodSeen{with(claimedPod("a-1", sb.ID), func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") })})
	if m := one[MarkReleased](s); m.Reason != ReasonPodMoved {
		t.Errorf("release %+v", m)
	}
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if one[SendResolved](s).Sandbox != nil {
		t.Error("the old address was given out")
	}
	s.step(SessionJoined{Session: "r2", Stream: 2})
	if routes := one[SendSnapshot](s).Routes; len(routes) > 0 {
		t.Errorf("snapshot with %+v", routes)
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
	inB := with(claimedPod("b-9", "in-b"), func(p *Pod) { p.Pool = "b" })
	noAddress := with(claimedPod("a-8", "no-address"), func(p *Pod) { p.IP = netip.Addr{} })
	s.recover([]Pool{opens(specA(5), 80, 80), b}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4"), inB, noAddress})
	s.join("r1", 1)
	running, releasing, released := s.claim(), s.claim(), s.claim()
	ported(t, running, 80, 80)
	s.release(released.ID)
	s.step(Release{ID: releasing.ID, Reason: ReasonKilled})
	s.step(Claim{Token: 7, Pool: poolA})
	underWay := one[BindPod](s)
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
	s.step(BindDone{Pod: underWay.Pod, ID: underWay.Binding.ID, Bound: true})
	ported(t, one[Claimed](s).Sandbox, 8080, 22, 8080)
	s.step(PodSeen{claimedPod("a-8", "no-address")})
	for _, r := range of[SendRoute](s.effects) {
		ported(t, r.Sandbox, 8080, 22, 8080)
	}
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
	s.recover([]Pool{opens(specA(0), 443, 443, 8080)}, []Pod{claimedPod("a-1", "x")},
		Sandbox{Binding: Binding{ID: "x"}, Pool: poolA, Pod: key("a-1"), IP: warmPod("a-1").IP, Revision: Revision{1, 1}})
	s.step(SessionJoined{Session: "r", Stream: 1})
	ported(t, one[SendSnapshot](s).Routes[0], 443, 443, 8080)
}

func TestPoolThatIsSeenAfterItsSandboxGivesItItsPorts(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover(nil, nil)
	s.join("r", 1)
	s.step(PodSeen{claimedPod("a-1", "x")}) // by a leader that was deposed, from a pool that was made since the pools were read
	one[SendRoute](s)
	s.step(PoolSeen{opens(specA(0), 443, 443)})
	if r := one[SendRoute](s); r.Stream != 1 || r.Sequence != 3 {
		t.Errorf("route %+v", r)
	}
	ported(t, one[SendRoute](s).Sandbox, 443, 443)
	sb, _ := s.core.Sandbox("x")
	ported(t, sb, 443, 443)
	// While the pool goes, what it said last stands.
	s.step(PoolGone{poolA})
	none[SendRoute](s)
	s.step(Resolve{Session: "r", Stream: 1, ID: "x"})
	ported(t, *one[SendResolved](s).Sandbox, 443, 443)
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
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Deleting = true })}, []Pod{claimedPod("a-1", "x")})
	none[PoolDrained](s)
	if m := one[MarkReleased](s); m.ID != "x" || m.Reason != ReasonPoolDeleted {
		t.Errorf("release %+v", m)
	}
}

// What a leader finds on the pod and in the record, and what it makes of it.
func TestRecoveryFindsEverySandboxInItsState(t *testing.T) {
	record := func(phase Phase) []Sandbox {
		return []Sandbox{{Binding: Binding{ID: "x"}, Pool: poolA, Pod: key("a-1"), IP: warmPod("a-1").IP, Phase: phase, Revision: Revision{1, 5}}}
	}
	deleting := func(p *Pod) { p.Deleting = true }
	finished := func(p *Pod) { p.Finished = true }
	for _, tt := range []struct {
		name    string
		pods    []Pod
		records []Sandbox
		want    Phase
		reason  string // of the release that recovery finds out about
		record  bool   // a new state is to be recorded
	}{
		{"claimed, not recorded", []Pod{claimedPod("a-1", "x")}, nil, Running, "", true},
		{"claimed, recorded", []Pod{claimedPod("a-1", "x")}, record(Running), Running, "", false},
		{"claimed, recorded in part", []Pod{claimedPod("a-1", "x")}, []Sandbox{{Binding: Binding{ID: "x"}, Pool: poolA, Pod: key("a-1"), IP: warmPod("a-1").IP}}, Running, "", true},
		{"released, not recorded", []Pod{releasedPod("a-1", "x")}, nil, Released, ReasonKilled, true},
		{"released, recorded as running", []Pod{releasedPod("a-1", "x")}, record(Running), Released, ReasonKilled, true},
		{"released, recorded", []Pod{releasedPod("a-1", "x")}, record(Released), Released, "", true},
		{"recorded as released, mark not seen", []Pod{claimedPod("a-1", "x")}, record(Released), Released, "", true},
		{"recorded as ended, pod still there", []Pod{claimedPod("a-1", "x")}, record(Ended), Released, "", true},
		{"being deleted", []Pod{with(claimedPod("a-1", "x"), deleting)}, record(Running), Released, ReasonPodDeleted, true},
		{"finished", []Pod{with(claimedPod("a-1", "x"), finished)}, nil, Released, ReasonPodFailed, true},
		{"finished, mark removed", []Pod{with(warmPod("a-1"), finished)}, record(Running), Released, ReasonPodFailed, true},
		{"gone, recorded as running", nil, record(Running), Ended, ReasonPodGone, true},
		{"gone, recorded as released", nil, record(Released), Ended, "", true},
		{"gone, recorded as ended", nil, record(Ended), Ended, "", false},
		{"mark removed by somebody", []Pod{warmPod("a-1")}, record(Running), Running, "", false},
		{"mark of a released one removed", []Pod{warmPod("a-1")}, record(Released), Released, "", true},
		{"mark replaced by somebody", []Pod{claimedPod("a-1", "forged")}, record(Running), Running, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.recover([]Pool{specA(0)}, tt.pods, tt.records...)
			sb, ok := s.core.Sandbox("x")
			if !ok || sb.Phase != tt.want {
				t.Fatalf("found %+v %v, expected phase %d", sb, ok, tt.want)
			}
			none[DeletePod](s) // not before the fence
			none[BindPod](s)
			released := of[SandboxReleased](s.effects)
			if got := len(released) == 1; got != (tt.reason != "") || got && released[0].Sandbox.Reason != tt.reason {
				t.Errorf("released %+v, expected %q", released, tt.reason)
			}
			if got := len(of[Record](s.effects)) > 0; got != tt.record {
				t.Errorf("recorded: %v, expected %v", got, tt.record)
			}
			s.step(Claim{Token: 1, Pool: poolA})
			one[ClaimRefused](s) // whatever it is, it is not warm
			if _, forged := s.core.Sandbox("forged"); forged {
				t.Error("a second sandbox on the pod")
			}
		})
	}
}

func TestSandboxOfAnEarlierTermIsFencedAgainstRoutersThatWereNotHeardOf(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{claimedPod("a-1", "x")})
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

func TestLateClaimOfADeposedLeaderIsAdopted(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.step(PodSeen{claimedPod("a-1", "late")})
	if r := one[SendRoute](s); r.Sandbox.ID != "late" {
		t.Errorf("route %+v", r)
	}
	one[Record](s)
	none[Claimed](s)
}

func TestLateClaimOnAPodThatWasToBeDeletedIsAdopted(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(PoolSeen{specA(0)})
	if d := one[DeletePod](s); d.IfVersion != "1" {
		t.Errorf("an idle pod is deleted without condition: %+v", d)
	}
	s.step(PodSeen{claimedPod("a-1", "late")})
	s.step(DeleteFailed{key("a-1")})
	none[DeletePod](s)
	if sb, ok := s.core.Sandbox("late"); !ok || sb.Phase != Running {
		t.Errorf("found %+v", sb)
	}
}

func TestOneIDOnTwoPodsStaysWithTheFirst(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	sb := s.claim()
	s.step(PodSeen{claimedPod("a-2", sb.ID)})
	if got, _ := s.core.Sandbox(sb.ID); got.Pod != key("a-1") {
		t.Errorf("it is on %+v", got)
	}
	s.step(Claim{Token: 2, Pool: poolA})
	one[ClaimRefused](s)
}

func TestUsedPodIsNeverHandedOutAgainByAnObservationThatIsOld(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	gone := s.step(PodGone{sb.Pod})
	s.record(gone)
	s.step(PodSeen{warmPod("a-1")}) // the watch lags behind what an audit found out
	s.step(Claim{Token: 2, Pool: poolA})
	none[BindPod](s)
	// It is not left over either: the fence was complete, or goes on.
	s.record(s.step(PodSeen{warmPod("a-1")}))
	s.core.holds[sb.Pod].recorded = s.core.holds[sb.Pod].Revision
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
	s.record(s.step(PodSeen{claimedPod("a-1", sb.ID)}))
	if d := one[DeletePod](s); d.Pod != sb.Pod {
		t.Errorf("deleted %+v", d)
	}
}

func TestAdoptedSandboxWithoutAnAddressIsRoutedOnceItHasOne(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{with(claimedPod("a-1", "x"), func(p *Pod) { p.IP = netip.Addr{} })})
	s.join("r", 1)
	s.step(PodSeen{claimedPod("a-1", "x")})
	if r := one[SendRoute](s); r.Sandbox.IP != warmPod("a-1").IP {
		t.Errorf("route %+v", r)
	}
	none[MarkReleased](s)
}

func TestRecordsOfEndedSandboxesAreBounded(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded, s.cfg.KeepEndedFor = 1, time.Hour
	s.restart()
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	first, second, third := s.claim(), s.claim(), s.claim()
	ended := s.step(PodGone{first.Pod})
	s.record(s.step(PodGone{second.Pod}))
	s.pass(window)
	s.pass(time.Second)
	none[ForgetRecord](s) // its last state is not written: that would bring it back
	s.record(ended)
	s.pass(time.Second)
	if f := one[ForgetRecord](s); f.ID != first.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.record(s.step(PodGone{third.Pod}))
	s.pass(time.Second)
	if f := one[ForgetRecord](s); f.ID != second.ID {
		t.Errorf("forgotten %+v", f)
	}
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
	s.pass(window)
	one[ForgetRecord](s)
}

// ---- pools

func TestPoolIsFilledToWhatItAsksFor(t *testing.T) {
	for _, tt := range []struct {
		name         string
		warm, most   int
		pods         []Pod
		made, undone int
	}{
		{"empty", 3, 0, nil, 3, 0},
		{"bounded", 3, 2, nil, 2, 0},
		{"bounded by claimed pods", 3, 3, []Pod{claimedPod("a-1", "x"), warmPod("a-2")}, 1, 0},
		{"bound lowered", 3, 2, []Pod{claimedPod("a-1", "x"), warmPod("a-2"), warmPod("a-3")}, 0, 1},
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
			s.recover([]Pool{p}, tt.pods)
			if made, undone := len(of[CreatePod](s.effects)), len(of[DeletePod](s.effects)); made != tt.made || undone != tt.undone {
				t.Errorf("%d made and %d deleted, expected %d and %d: %+v", made, undone, tt.made, tt.undone, s.effects)
			}
		})
	}
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
		{"bound lowered", 3, 2, []Pod{claimedPod("a-1", "x"), with(warmPod("a-2"), old), with(warmPod("a-3"), old)}, []string{"a-2"}},
		{"claimed and released ones are untouched", 1, 0, []Pod{claimedPod("a-1", "x"), with(claimedPod("a-2", "y"), old), releasedPod("a-3", "z")}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSim(t)
			p := changed(specA(tt.warm), notAllowed)
			p.MaxPods = tt.most
			s.recover([]Pool{p}, tt.pods)
			none[CreatePod](s)
			none[MarkReleased](s)
			var deleted []string
			for _, d := range of[DeletePod](s.effects) {
				if deleted = append(deleted, d.Pod.Name); d.IfVersion == "" {
					t.Errorf("%s is deleted without condition", d.Pod.Name)
				}
			}
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
	one[BindPod](s)
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

func TestDeletionThatFailedIsRepeatedOnlyOnANewObservation(t *testing.T) {
	idle := with(warmPod("a-1"), func(p *Pod) { p.Version = "5" })
	for name, events := range map[string][]Event{
		"observation first": {PodSeen{with(idle, func(p *Pod) { p.Version = "6" })}, DeleteFailed{key("a-1")}},
		"failure first":     {DeleteFailed{key("a-1")}, PodSeen{with(idle, func(p *Pod) { p.Version = "6" })}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{idle})
			s.step(PoolSeen{specA(0)})
			one[DeletePod](s)
			s.step(events[0])
			none[DeletePod](s)
			s.step(PodSeen{s.core.pods[key("a-1")].seen})
			none[DeletePod](s)
			s.step(events[1])
			if d := one[DeletePod](s); d.IfVersion != "6" {
				t.Errorf("deleted %+v", d)
			}
			s.step(PodSeen{with(idle, func(p *Pod) { p.Version = "7" })})
			none[DeletePod](s) // one at a time
		})
	}
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
	one[MarkReleased](s)
	s.step(PodGone{key("a-2")})
	s.record(s.step(ReleaseDone{ID: sb.ID}))
	s.ack("r", 1, 3)
	s.pass(window)
	one[DeletePod](s)
	s.step(PodGone{sb.Pod})
	none[PoolDrained](s) // a creation is still open
	s.step(CreateFailed{poolA, "a-1"})
	one[PoolDrained](s)
	s.step(PoolSeen{p})
	none[PoolDrained](s)
	s.step(PoolGone{poolA})
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
	s.recover(nil, []Pod{warmPod("a-1"), claimedPod("a-2", "x")})
	one[DeletePod](s)
	if m := one[MarkReleased](s); m.Reason != ReasonPoolDeleted {
		t.Errorf("release %+v", m)
	}
}
