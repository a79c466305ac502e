package core

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"
)

// ---- releases and fences

// Invariant: I9
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
	none[WriteObject](s)
	s.step(Release{Token: 3, ID: sb.ID, Reason: ReasonKilled})
	if len(s.core.outbox.pending) > 0 { // one fact is enough for two callers
		t.Errorf("waits: %+v", s.core.outbox.pending)
	}
	s.written()
	one[SendRelease](s)
	one[SandboxReleased](s)
	none[ReleaseAnswered](s)
	s.ack("r", 1, 3)
	if answers := of[ReleaseAnswered](s.effects); len(answers) != 2 || answers[0].Status != CallOK || answers[0].Outstanding != 0 {
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
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.pass(declareAfter)
	s.release(sb.ID)
	if a := one[ReleaseAnswered](s); a.Outstanding != 1 {
		t.Errorf("answer %+v", a)
	}
}

// A router whose stream has just ended is about to join again, and serves what it knows.
// Invariant: P10
func TestReleaseWaitsForARouterThatWasConnectedAMomentAgo(t *testing.T) {
	for name, leave := range map[string]func(s *sim, id string){
		"before the release": func(s *sim, id string) {
			s.step(SessionLeft{Session: "r", Stream: 1})
			s.pass(declareAfter - time.Millisecond)
			s.release(id)
		},
		"after the release": func(s *sim, id string) {
			s.release(id)
			s.step(SessionLeft{Session: "r", Stream: 1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			leave(s, s.claim().ID)
			none[ReleaseAnswered](s)
			s.step(SessionJoined{Session: "r", Stream: 2})
			none[ReleaseAnswered](s)
			s.ack("r", 2, 1)
			if a := one[ReleaseAnswered](s); a.Outstanding != 0 {
				t.Errorf("answer %+v", a)
			}
		})
	}
}

// The routers of the leader before join within moments. Those that do not are waited for
// only while they may have been heard a moment ago, by that leader at the end of its lease.
func TestReleaseWaitsForRoutersThatTheLastLeaderKnew(t *testing.T) {
	recovered := func(t *testing.T) *sim {
		s := newSimAt(t, 2, start)
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, Fact{Revision: Revision{1, 1}, Session: "r", From: "10.1.0.1"})
		return s
	}
	t.Run("it joins", func(t *testing.T) {
		s := recovered(t)
		s.release(s.claim().ID)
		none[ReleaseAnswered](s)
		s.join("r", 1)
		none[ReleaseAnswered](s)
		s.ack("r", 1, 1)
		if a := one[ReleaseAnswered](s); a.Outstanding != 0 {
			t.Errorf("answer %+v", a)
		}
	})
	t.Run("it does not join", func(t *testing.T) {
		s := recovered(t)
		s.pass(lease + declareAfter - time.Second)
		s.release(s.claim().ID)
		none[ReleaseAnswered](s)
		s.pass(time.Second)
		if a := one[ReleaseAnswered](s); a.Outstanding != 1 {
			t.Errorf("answer %+v", a)
		}
	})
	t.Run("it has been silent for long", func(t *testing.T) {
		s := recovered(t)
		s.pass(lease + declareAfter)
		s.release(s.claim().ID)
		if a := one[ReleaseAnswered](s); a.Outstanding != 1 {
			t.Errorf("answer %+v", a)
		}
	})
}

func TestReleaseSaysWhetherThereWasSuchASandbox(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Release{Token: 1, ID: "nobody"})
	if a := one[ReleaseAnswered](s); a.Status != CallUnknown {
		t.Errorf("unknown: %+v", a)
	}
	sb := s.claim()
	s.release(sb.ID)
	s.step(Release{Token: 3, ID: sb.ID})
	if a := one[ReleaseAnswered](s); a.Status != CallGone {
		t.Errorf("released: %+v", a)
	}
	s.step(PodGone{key("a-1")})
	s.step(Release{Token: 4, ID: sb.ID})
	if a := one[ReleaseAnswered](s); a.Status != CallGone {
		t.Errorf("ended: %+v", a)
	}
}

// Invariant: I3
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

// Invariant: I3
func TestRouterIsToldNothingBeforeItsSessionIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	first := s.claim()
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1})
	if f := one[Write](s).Facts; len(f) != 1 || f[0].Session != "r" || f[0].Left {
		t.Errorf("written %+v", f)
	}
	none[SendSnapshot](s)
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 1})
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 2})
	none[SendPong](s)
	s.step(Resolve{Session: "r", Stream: 1, ID: first.ID})
	none[SendResolved](s)
	s.step(Release{ID: first.ID, Reason: ReasonKilled})
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	none[SendRoute](s)
	s.written()
	if e := one[SendSnapshot](s); e.Sequence != 1 || len(e.Routes) != 1 || e.Routes[0].ID != first.ID { // its release is not durable yet
		t.Errorf("snapshot %+v", e)
	}
	if p := one[SendPong](s); p.Nonce != 2 {
		t.Errorf("pong %+v", p)
	}
	s.written() // the release and the claim
	if e := one[SendRelease](s); e.Sequence != 3 {
		t.Errorf("release %+v", e)
	}
	if e := one[SendRoute](s); e.Sequence != 2 {
		t.Errorf("route %+v", e)
	}
}

func TestRouterThatLeftBeforeItWasToldAnythingIsNotWaitedFor(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1})
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.step(Release{ID: sb.ID, Reason: ReasonKilled})
	s.written()
	none[SendSnapshot](s)
	s.slow = false
	s.written()
	// It is known, and might come back: from its snapshot on it has to be told.
	one[SandboxReleased](s)
	if after := s.deletedAfter(sb.Pod, never); after < maxStale {
		t.Errorf("deleted after %v", after)
	}
}

// Between the two a leader may end, and the next one would not know of it.
func TestRouterThatIsBackIsNotTakenForTheOneThatLeft(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1})
	s.step(SessionGoodbye{Session: "r"})
	s.step(SessionJoined{Session: "r", Stream: 2})
	s.written() // that it came
	none[SendSnapshot](s)
	if f := one[Write](s).Facts; len(f) != 2 || !f[0].Left || f[1].Left {
		t.Errorf("written %+v", f)
	}
	s.written()
	if e := one[SendSnapshot](s); e.Stream != 2 {
		t.Errorf("snapshot %+v", e)
	}
	s.settles(1)
}

// settles lets so much time pass that objects show what the end of a router means, and
// returns what is settled then.
func (s *sim) settles(most int) []Settle {
	s.t.Helper()
	all := of[Settle](s.pass(expiry)) // nothing that it may have left open counts any more
	all = append(all, of[Settle](s.pass(persistLag))...)
	if len(all) != most {
		s.t.Fatalf("settled: %+v, expected %d", all, most)
	}
	return all
}

func TestASessionThatHasToldAllIsSettledAtOnce(t *testing.T) {
	s := newSim(t)
	s.recover(nil, nil)
	s.joinAndReport("r", 1)
	s.step(SessionGoodbye{Session: "r", Stream: 1, Looked: true})
	one[Settle](s)
}

func TestSessionIsJournaledWhenItEnds(t *testing.T) {
	for name, ends := range map[string]func(*sim){
		"goodbye": func(s *sim) { s.step(SessionGoodbye{Session: "r"}) },
		"expired": func(s *sim) { s.pass(2 * maxStale) },
		"dead":    func(s *sim) { s.step(SessionDead{Session: "r"}) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover(nil, nil)
			s.join("r", 1)
			ends(s)
			none[Settle](s) // the objects do not show it yet
			if e := s.settles(1)[0]; e.Session != "r" || e.Revision.Counter < 2 {
				t.Errorf("settled %+v", e)
			}
			if s.core.members.Get("r") != nil {
				t.Error("it is still there")
			}
		})
	}
}

// Invariant: I3
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

// Invariant: I3
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

// The next leader would wait for a router that has ended and is sure that it was heard.
func TestGoodbyeIsAcknowledgedOnceItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.join("r", 1)
	s.slow = true
	s.step(SessionGoodbye{Session: "r", Stream: 1})
	if left := one[Write](s).Facts; len(left) != 1 || !left[0].Left {
		t.Errorf("written %+v", left)
	}
	none[CloseStream](s)
	s.step(SessionLeft{Session: "r", Stream: 1})
	none[CloseStream](s)
	s.written()
	if c := one[CloseStream](s); c != (CloseStream{Stream: 1, Left: true}) {
		t.Errorf("closed %+v", c)
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
	s.join("r", 9)
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

func TestRoutersAreToldHowLongARequestMayWaitForASandboxThatIsStarting(t *testing.T) {
	s := newSim(t)
	pool := specA(1)
	pool.PostStart, pool.Hold = true, 7*time.Second
	s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	id := one[StartSandbox](s).Sandbox.ID
	s.step(Resolve{Session: "r", Stream: 1, ID: id})
	if e := one[SendResolved](s); !e.Starting || e.Hold != 7*time.Second || e.Sandbox != nil {
		t.Errorf("told %+v", e)
	}
	s.step(Started{ID: id, OK: true})
	one[SendRoute](s) // without being asked again
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
			s.join("r2", 3)
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

func TestSandboxEndsWithARestartOfItsPodUnlessItsPoolKeepsIt(t *testing.T) {
	restarted := func(n int) Event {
		return PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Restarts = n })}
	}
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Restarts = 2 })}) // before anybody had it
	s.join("r", 1)
	sb := s.claim()
	if sb.Restarts != 2 {
		t.Errorf("claimed %+v", sb)
	}
	s.step(restarted(2))
	none[SandboxReleased](s)
	s.step(restarted(3))
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonRestart {
		t.Errorf("released %+v", r)
	}

	s = newSim(t)
	kept := specA(1)
	kept.KeepOnRestart = true
	s.recover([]Pool{kept}, []Pod{warmPod("a-1")})
	s.claim()
	s.step(restarted(1))
	none[SandboxReleased](s)

	// Meanwhile nobody led.
	f := on("a-1", "x")
	f.Sandbox.Restarts = 1
	for n, want := range map[int]int{1: 0, 2: 1} {
		s = newSimAt(t, 2, start)
		s.recover([]Pool{specA(1)}, []Pod{restarted(n).(PodSeen).Pod}, f)
		if got := len(of[SandboxReleased](s.effects)); got != want {
			t.Errorf("%d restarts: released %d times", n, got)
		}
	}
}

func TestClaimWhosePodRestartsMeanwhileGetsAnotherOne(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Restarts = 1 })})
	s.written()
	s.slow = false
	s.writeAll()
	if c := one[Claimed](s); c.Sandbox.Pod.Name != "a-2" {
		t.Errorf("claimed %+v", c)
	}
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonRestart {
		t.Errorf("released %+v", r)
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
	if a := one[ReleaseAnswered](s); a.Token != 5 || a.Status != CallOK {
		t.Errorf("answer %+v", a)
	}
	if r := one[WriteObject](s); r.Sandbox.Phase != Released {
		t.Errorf("recorded %+v", r)
	}
	s.pass(window)
	if r := one[WriteObject](s); r.Sandbox.Phase != Ended {
		t.Errorf("recorded %+v", r)
	}
}

func TestWhatIsReleasedInOneStepIsOneMessageForEachRouter(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	s.join("r", 1)
	s.join("r2", 2)
	first, second, third := s.claim(), s.claim(), s.claim()
	sequence := s.core.members.Get("r").Sequence
	s.slow = true
	s.step(Release{ID: third.ID, Reason: ReasonKilled}) // is being written while the others come
	s.step(Release{Token: 1, ID: first.ID, Reason: ReasonKilled})
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	s.step(Release{Token: 3, ID: second.ID, Reason: ReasonKilled})
	s.written()
	for _, e := range of[SendRelease](s.effects) {
		if !slices.Equal(e.IDs, []string{third.ID}) || e.Sequence != sequence+1 {
			t.Errorf("first write: %+v", e)
		}
	}
	s.written()
	none[Acknowledged](s)
	// The releases come last: a route of a sandbox never follows its release.
	for stream := uint64(1); stream <= 2; stream++ {
		var got []string
		for _, e := range s.effects {
			switch e := e.(type) {
			case SendRelease:
				if e.Stream == stream {
					got = append(got, fmt.Sprint(e.Sequence-sequence, e.IDs))
				}
			case SendRoute:
				if e.Stream == stream {
					got = append(got, fmt.Sprint(e.Sequence-sequence, " route"))
				}
			}
		}
		if want := []string{"2 route", fmt.Sprint(3, []string{first.ID, second.ID})}; !slices.Equal(got, want) {
			t.Errorf("stream %d: %v, want %v", stream, got, want)
		}
	}
}

func TestManyReleasesAreAcknowledgedAtOnceAndEachIsTimedFromItsWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	nobody := s.claim()
	s.step(Release{ID: nobody.ID, Reason: ReasonKilled})
	none[Acknowledged](s) // there is no router
	s.join("r", 1)
	s.join("r2", 2)
	sandboxes := []Sandbox{s.claim(), s.claim()}
	sequence := s.core.members.Get("r").Sequence
	s.slow = true
	s.step(Release{ID: "none", Reason: ReasonKilled})
	s.step(SessionJoined{Session: "later", Stream: 3}) // the write that the releases wait for
	s.step(Release{Token: 1, ID: sandboxes[0].ID, Reason: ReasonKilled})
	s.step(Release{Token: 2, ID: sandboxes[1].ID, Reason: ReasonKilled})
	s.written()
	durable := s.now.Boot
	s.now.Boot += time.Millisecond
	s.effects = s.core.Step(s.now, Written{At: durable})
	want := []string{sandboxes[0].ID, sandboxes[1].ID}
	for _, e := range of[SendRelease](s.effects) {
		if !slices.Equal(e.IDs, want) {
			t.Errorf("told %+v, want %v", e, want)
		}
	}
	s.now.Boot += time.Millisecond
	s.ack("r", 1, sequence+1)
	s.ack("later", 3, 2)
	none[Acknowledged](s)
	s.now.Boot += time.Millisecond
	s.ack("r2", 2, sequence+1)
	got := of[Acknowledged](s.effects)
	if len(got) != 2 || got[0] != (Acknowledged{want[0], 3 * time.Millisecond}) || got[1] != (Acknowledged{want[1], 3 * time.Millisecond}) {
		t.Errorf("acknowledged %+v", got)
	}
	if answers := of[ReleaseAnswered](s.effects); len(answers) != 2 {
		t.Errorf("answers %+v", answers)
	}
}

// Gone is final for a router, so it must not hear it before the release is durable: the
// next leader may not know of it.
func TestARouterThatAsksIsNotToldThatASandboxIsGoneBeforeThatIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	sb := one[StartSandbox](s).Sandbox
	s.slow = true
	s.step(Release{Token: 2, ID: sb.ID, Reason: ReasonKilled}) // handed to the writer
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if r := one[SendResolved](s); r.Gone || !r.Starting {
		t.Errorf("told %+v", r)
	}
	s.written()
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if r := one[SendResolved](s); !r.Gone {
		t.Errorf("told %+v", r)
	}
}
