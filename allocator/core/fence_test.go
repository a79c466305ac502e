package core

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// Invariant: I9
func TestReleaseIsSentOnlyWhenDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.slow = true
	s.step(Release{Scope: everyTeam, Token: 2, ID: sb.ID, Reason: fact.ReasonKilled})
	if f := s.given(); f.Phase != Released || f.Reason != fact.ReasonKilled || !f.ReleasedAt.Equal(s.now.Wall) {
		t.Errorf("written %+v", f)
	}
	none[SendRelease](s)
	none[ReleaseAnswered](s)
	none[WriteObject](s)
	s.step(Release{Scope: everyTeam, Token: 3, ID: sb.ID, Reason: fact.ReasonKilled})
	if s.core.outbox.Len() > 0 { // one fact is enough for two callers
		t.Errorf("waits: %+v", s.core.outbox.Len())
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

func TestReleaseIsAnsweredAfterAckWaitAtMost(t *testing.T) {
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

func TestReleaseAnswerSkipsDisconnectedRouters(t *testing.T) {
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

// A router whose stream has just ended is about to join again, and serves its routes meanwhile.
// Invariant: P10
func TestReleaseWaitsForRecentlyConnectedRouter(t *testing.T) {
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

// The routers of the last leader join within moments. A router that does not join is waited for only
// while that leader may have heard it a moment ago, at the end of its lease.
func TestReleaseWaitsForRoutersOfTheLastLeader(t *testing.T) {
	recovered := func(t *testing.T) *sim {
		s := newSimAt(t, 2, start)
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r", From: "10.1.0.1"}})
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

func TestReleaseAnswersUnknownAndReleasedSandboxes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Release{Scope: everyTeam, Token: 1, ID: "unknown"})
	if a := one[ReleaseAnswered](s); a.Status != CallUnknown {
		t.Errorf("unknown: %+v", a)
	}
	sb := s.claim()
	s.release(sb.ID)
	s.step(Release{Scope: everyTeam, Token: 3, ID: sb.ID})
	if a := one[ReleaseAnswered](s); a.Status != CallGone {
		t.Errorf("released: %+v", a)
	}
	s.step(PodGone{key("a-1")})
	s.step(Release{Scope: everyTeam, Token: 4, ID: sb.ID})
	if a := one[ReleaseAnswered](s); a.Status != CallGone {
		t.Errorf("ended: %+v", a)
	}
}

// Invariant: I3
func TestReleasedPodStaysUntilEveryRouterAcknowledged(t *testing.T) {
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
func TestSilentRouterHoldsTheFenceUntilStale(t *testing.T) {
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

func TestDisconnectedRouterIsAwaitedByNewFences(t *testing.T) {
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

// The deposed leader may answer pings for a lease. A router that has joined the new leader in
// between, and has received nothing from it, may go back to the deposed one.
func TestJoinNeverShortensTheWaitForRouter(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")}, on("a-1", "x"), Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}})
	s.step(SessionJoined{Session: "r", Stream: 1})
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.release("x")
	if after := s.deletedAfter(key("a-1"), never); after < lease+maxStale+window {
		t.Errorf("deleted %v after the term began; the router may have been made fresh by the deposed leader until %v, and needs the window, %v", after, lease+maxStale, window)
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

func TestSnapshotAfterRejoinAcknowledgesTheRelease(t *testing.T) {
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

func TestReleaseIsAnsweredWhenThePodVanishes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.slow = true
	s.step(Release{Scope: everyTeam, Token: 5, ID: sb.ID, Reason: fact.ReasonKilled})
	s.step(PodGone{sb.Pod})
	s.written()
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonKilled {
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

func TestReleasesOfOneStepAreOneMessage(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	s.join("r", 1)
	s.join("r2", 2)
	first, second, third := s.claim(), s.claim(), s.claim()
	sequence := s.core.routers.members.Get("r").Sequence
	s.slow = true
	s.step(Release{Scope: everyTeam, ID: third.ID, Reason: fact.ReasonKilled}) // is being written while the others come
	s.step(Release{Scope: everyTeam, Token: 1, ID: first.ID, Reason: fact.ReasonKilled})
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	s.step(Release{Scope: everyTeam, Token: 3, ID: second.ID, Reason: fact.ReasonKilled})
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

func TestEachReleaseIsTimedFromItsOwnWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	unseen := s.claim()
	s.step(Release{Scope: everyTeam, ID: unseen.ID, Reason: fact.ReasonKilled})
	none[Acknowledged](s) // there is no router
	s.join("r", 1)
	s.join("r2", 2)
	sandboxes := []Sandbox{s.claim(), s.claim()}
	sequence := s.core.routers.members.Get("r").Sequence
	s.slow = true
	s.step(Release{Scope: everyTeam, ID: "none", Reason: fact.ReasonKilled})
	s.step(SessionJoined{Session: "later", Stream: 3}) // the write that the releases wait for
	s.step(Release{Scope: everyTeam, Token: 1, ID: sandboxes[0].ID, Reason: fact.ReasonKilled})
	s.step(Release{Scope: everyTeam, Token: 2, ID: sandboxes[1].ID, Reason: fact.ReasonKilled})
	s.written()
	durable := s.now.Boot
	s.now.Boot += time.Millisecond
	s.effects = s.stepCore(Written{At: durable})
	want := []string{sandboxes[0].ID, sandboxes[1].ID}
	for _, e := range of[SendRelease](s.effects) {
		if !slices.Equal(e.IDs, want) {
			t.Errorf("sent %+v, want %v", e, want)
		}
	}
	s.now.Boot += time.Millisecond
	s.ack("r", 1, sequence+1)
	s.ack("later", 3, 2)
	none[Acknowledged](s)
	s.now.Boot += time.Millisecond
	s.ack("r2", 2, sequence+1)
	got := of[Acknowledged](s.effects)
	if len(got) != 2 || got[0] != (Acknowledged{ID: want[0], Took: 3 * time.Millisecond}) || got[1] != (Acknowledged{ID: want[1], Took: 3 * time.Millisecond}) {
		t.Errorf("acknowledged %+v", got)
	}
	if answers := of[ReleaseAnswered](s.effects); len(answers) != 2 {
		t.Errorf("answers %+v", answers)
	}
}

// A leader that was deposed does not know what its routers have heard since. Only the journal tells it apart from one
// that leads.
// Invariant: I3
func TestExpiryEndsTheWaitOnlyWhenDurable(t *testing.T) {
	for name, connected := range map[string]bool{"a router that is away": false, "a router that is silent": true} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			sb := s.claim()
			s.release(sb.ID)
			if !connected {
				s.step(SessionLeft{Session: "r", Stream: 1})
			}
			s.slow = true
			s.pass(maxStale + maxStale/100 + time.Millisecond)
			if f := one[Write](s).Facts; len(f) != 1 || !sessionOf(f[0]).Left {
				t.Errorf("written %+v", f)
			}
			if closed := len(of[CloseStream](s.effects)) == 1; closed != connected {
				t.Errorf("stream closed: %v", closed)
			}
			s.step(SessionPing{Session: "r", Stream: 1, Nonce: 1})
			none[SendPong](s)
			s.step(SessionJoined{Session: "r", Stream: 2}) // it tries again
			if e := one[CloseStream](s); e != (CloseStream{Stream: 2}) {
				t.Errorf("%+v", e)
			}
			for range 3 {
				s.pass(window)
				none[DeletePod](s)
				none[Write](s)
			}
			s.slow = false
			s.written()
			s.between(s.deletedAfter(key("a-1"), never), window)
			s.join("r", 3)
		})
	}
}

func TestLoadShowsTheOldestFenceAndWaitingFacts(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	first, second := s.claim(), s.claim()
	if got := s.core.View().Load(); got != (Load{Live: 2}) {
		t.Errorf("%+v", got)
	}
	s.release(first.ID)
	s.pass(time.Minute)
	s.slow = true
	s.step(Release{Scope: everyTeam, ID: second.ID, Reason: fact.ReasonKilled})
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	s.step(SessionJoined{Session: "q", Stream: 2})
	if got := s.core.View().Load(); got != (Load{Live: 1, Fences: 1, OldestFence: time.Minute, Facts: 1}) {
		t.Errorf("%+v", got)
	}
}
