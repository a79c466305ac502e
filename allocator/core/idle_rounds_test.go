package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
)

// When a round begins, what ends it, and what follows from it.

// A leader that stood still may expire routers that live and have requests open. They join again,
// and block the question until their sessions are durable and they have reported.
func TestRouterNotYetDurableBlocksTheQuestion(t *testing.T) {
	for name, c := range map[string]func(s *sim){
		"it waits": func(*sim) {},
		"it is cut off": func(s *sim) {
			s.step(SessionLeft{Session: "r", Stream: 2})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "r")
			sb := s.claim()
			s.now.Boot += maxStale + maxStale/100 + time.Millisecond
			s.step(Tick{})
			if len(s.core.routers.members.All()) > 0 {
				t.Fatal("it has not expired")
			}
			s.pass(idleFor - fact.StalledAfter/2)
			s.slow = true
			s.step(SessionJoined{Session: "r", Stream: 2})
			none[SendSnapshot](s)
			c(s)
			for range 9 { // after that the journal stands still, which is another reason
				s.pass(fact.StalledAfter / 10)
				none[SendQuiesce](s)
				if got, _ := s.core.View().Sandbox(sb.ID); got.Phase != Running {
					t.Fatalf("it is on its way to being released: %+v", got)
				}
			}
			if name != "it waits" {
				return
			}
			s.written()
			s.step(Report{Stream: 2, Activities: []Activity{{ID: sb.ID, Age: time.Second}}, Gateway: "e"})
			s.pass(idleFor - time.Second)
			s.asks(2)
		})
	}
}

// The router may have expired before, with requests open.
// Invariant: I4
func TestJoinEndsTheRoundBeforeItIsDurable(t *testing.T) {
	s := idleSim(t, 1, "q")
	for range 4 { // more than max-stale after the recovery
		s.ping("q", 1)
		s.pass(maxStale / 2)
	}
	s.ping("q", 1)
	s.claim()
	s.pass(idleFor)
	q := s.asks(1)
	s.slow = true
	s.step(SessionJoined{Session: "new", Stream: 9})
	s.says(q, 1)
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			if sandboxOf(f) != nil {
				t.Errorf("released without its word: %+v", sandboxOf(f))
			}
		}
	}
	s.effects = append(s.effects, s.written()...)
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			if sandboxOf(f) != nil {
				t.Errorf("released without its word: %v %v", sandboxOf(f).Phase, sandboxOf(f).Reason)
			}
		}
	}
}

// Invariant: I4
func TestSessionThatComesOrGoesEndsTheRound(t *testing.T) {
	for name, c := range map[string]struct {
		do      func(s *sim)
		resumed []uint64
	}{
		"a new router":     {func(s *sim) { s.step(SessionJoined{Session: "new", Stream: 9}) }, []uint64{1, 2}},
		"one leaves":       {func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}) }, []uint64{1}},
		"one comes back":   {func(s *sim) { s.step(SessionJoined{Session: "r", Stream: 9}) }, []uint64{1}},
		"one says Goodbye": {func(s *sim) { s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true}) }, []uint64{1}},
	} {
		for _, answered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, having answered: %v", name, answered), func(t *testing.T) {
				s := idleSim(t, 1, "q", "r")
				s.claim()
				s.pass(idleFor)
				q := s.asks(1, 2)
				if answered {
					s.says(q, 2)
				}
				c.do(s)
				s.resumed(c.resumed...)
				s.says(q, 1)
				none[SandboxReleased](s)
			})
		}
	}
}

// A router that joins after the verdict was not asked.
func TestNoRouterGetsTheRouteAfterTheVerdict(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor)
	q := s.asks(1)
	s.slow = true
	s.says(q, 1)
	if f := s.given(); f.Phase != Released || f.Reason != fact.ReasonIdleTimeout {
		t.Fatalf("written: %+v", f)
	}
	s.step(SessionJoined{Session: "r", Stream: 2})
	if snapshot := one[SendSnapshot](s); len(snapshot.Routes) > 0 {
		t.Errorf("sent: %+v", snapshot)
	}
	s.step(Resolve{Session: "r", Stream: 2, ID: sb.ID})
	if r := one[SendResolved](s); r.Sandbox != nil || r.Gone || !r.Starting || r.Hold != reapHold {
		t.Errorf("answered: %+v", r)
	}
	s.written()
	one[SandboxReleased](s)
}

func TestNoRoundWhileTheJournalStandsStill(t *testing.T) {
	s := idleSim(t, 2, "r")
	s.claim()
	s.slow = true
	s.pass(idleFor - 2*time.Second)
	s.step(Claim{Token: 7, Pool: poolA, Wait: wait})
	s.given()
	s.pass(3 * time.Second)
	none[SendQuiesce](s)
	s.written()
	s.pass(time.Millisecond)
	s.asks(1)
}

func TestRoundAsksAboutBoundedNumber(t *testing.T) {
	s := newSim(t)
	const all = idle.MaxRound + 10
	var facts []Fact
	var pods []Pod
	for i := range all {
		f := on("a-1", fmt.Sprintf("id%04d", i))
		name := fmt.Sprintf("a-%d", i)
		sandboxOf(f).Pod, sandboxOf(f).IdleTimeout = key(name), idleFor
		sandboxOf(f).IP = address(i)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
	}
	s.recover([]Pool{idlePool(0)}, pods, append(facts, Fact{Subject: &SessionFact{ID: "r"}})...)
	s.joinAndReport("r", 1)
	s.pass(time.Millisecond)
	q := s.asks(1)
	s.says(q, 1)
	released := len(of[SandboxReleased](s.effects))
	s.pass(time.Millisecond)
	if rest := s.asks(1); len(q.Questions) != idle.MaxRound || len(rest.Questions) != all-idle.MaxRound || released != idle.MaxRound {
		t.Errorf("asked about %d and %d, released %d", len(q.Questions), len(rest.Questions), released)
	}
}

func TestDryRunReportsAndReleasesNothing(t *testing.T) {
	s := newSim(t)
	s.cfg.DryRun = true
	s.restart()
	s.recover([]Pool{idlePool(1)}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	s.pass(idleFor)
	s.says(s.asks(1), 1)
	s.resumed(1)
	if w := one[WouldReap](s); w.Sandbox.ID != sb.ID || w.Idle != idleFor {
		t.Errorf("%+v", w)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}

// Two looks of 100 ms in four seconds are five percent.
func TestSlowLooksMakeRoundsLessFrequent(t *testing.T) {
	s := idleSim(t, 2, "r")
	first := s.claim()
	s.pass(time.Second)
	s.claim()
	s.step(Report{Stream: 1, Gateway: "e", Took: 100 * time.Millisecond})
	s.pass(idleFor - time.Second)
	q := s.asks(1)
	s.says(q, 1)
	if r := one[SandboxReleased](s); r.Sandbox.ID != first.ID {
		t.Errorf("released %+v", r)
	}
	for range 39 {
		s.pass(100 * time.Millisecond)
		none[SendQuiesce](s)
	}
	s.pass(100 * time.Millisecond)
	s.asks(1)
}

// The end of a router stops the round. A sandbox of the round that was released meanwhile is not
// resumed: a resume that reaches a router before the release admits requests.
func TestReleasedSandboxIsNotResumed(t *testing.T) {
	s := idleSim(t, 1, "r1", "r2")
	s.step(SessionLeft{Session: "r2", Stream: 2})
	x := s.claim() // r2 cannot have its route, so r2 does not block the question
	s.pass(idleFor)
	s.asks(1)
	s.step(Release{Scope: everyTeam, ID: x.ID, Reason: fact.ReasonKilled})
	one[SendRelease](s)
	s.step(DeclareDead{Token: 6, Session: "r2", By: "o", Reason: "gone"})
	one[SessionDeclaredDead](s)
	none[SendResume](s)
}
