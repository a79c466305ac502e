package core

import (
	"testing"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// Invariant: I3
func TestRouterReceivesNothingBeforeItsSessionIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	first := s.claim()
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1})
	if f := one[Write](s).Facts; len(f) != 1 || sessionOf(f[0]).ID != "r" || sessionOf(f[0]).Left {
		t.Errorf("written %+v", f)
	}
	none[SendSnapshot](s)
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 1})
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 2})
	none[SendPong](s)
	s.step(Resolve{Session: "r", Stream: 1, ID: first.ID})
	none[SendResolved](s)
	s.step(Release{Scope: everyTeam, ID: first.ID, Reason: fact.ReasonKilled})
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

func TestRouterThatReceivedNothingIsNotAwaited(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1})
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.step(Release{Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled})
	s.written()
	none[SendSnapshot](s)
	s.slow = false
	s.written()
	// Its session is durable. The router may connect again and receive a snapshot.
	one[SandboxReleased](s)
	if after := s.deletedAfter(sb.Pod, never); after < maxStale {
		t.Errorf("deleted after %v", after)
	}
}

// The old session ends and the new one begins in the journal, in that order. A leader may end in
// between.
func TestLateLeaveOfAnOldStreamIsIgnored(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1})
	s.step(SessionGoodbye{Session: "r"})
	s.step(SessionJoined{Session: "r", Stream: 2})
	s.written() // that it came
	none[SendSnapshot](s)
	if f := one[Write](s).Facts; len(f) != 2 || !sessionOf(f[0]).Left || sessionOf(f[1]).Left {
		t.Errorf("written %+v", f)
	}
	s.written()
	if e := one[SendSnapshot](s); e.Stream != 2 {
		t.Errorf("snapshot %+v", e)
	}
	s.settles(1)
}

// settles lets time pass until the objects show what the end of a router means, and returns what
// is settled then.
func (s *sim) settles(most int) []Settle {
	s.t.Helper()
	all := of[Settle](s.pass(expiry)) // nothing that it may have left open counts any more
	all = append(all, of[Settle](s.pass(persistLag))...)
	if len(all) != most {
		s.t.Fatalf("settled: %+v, expected %d", all, most)
	}
	return all
}

func TestSessionWithNothingOpenIsSettledAtOnce(t *testing.T) {
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
		"dead": func(s *sim) {
			s.step(SessionLeft{Session: "r", Stream: 1})
			s.step(SessionDead{Session: "r"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover(nil, nil)
			s.join("r", 1)
			ends(s)
			none[Settle](s) // the objects do not show it yet
			if e := s.settles(1)[0]; e.Thing != SessionID("r") || e.Revision.Counter < 2 {
				t.Errorf("settled %+v", e)
			}
			if s.core.routers.members.Get("r") != nil {
				t.Error("it is still there")
			}
		})
	}
}

// The router ends when its stream is closed. If its end were not durable then, the next leader would
// wait for it.
func TestGoodbyeIsAcknowledgedWhenDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.join("r", 1)
	s.slow = true
	s.step(SessionGoodbye{Session: "r", Stream: 1})
	if left := one[Write](s).Facts; len(left) != 1 || !sessionOf(left[0]).Left {
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

// A router reports its neighbour dead and pings. The pong makes it remove the lock file of the
// neighbour. If the leader ended before the death is durable, no router could prove it to the next
// leader.
func TestReportedDeathIsConfirmedWhenDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.join("x", 2)
	s.slow = true
	s.step(SessionLeft{Session: "x", Stream: 2})
	s.step(SessionDead{Session: "x", By: "r"})
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 7})
	none[SendPong](s)
	s.written()
	if p := one[SendPong](s); p.Stream != 1 || p.Nonce != 7 {
		t.Errorf("pong %+v", p)
	}
}
