package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// What a router that has ended may have left open at its Envoy.

// expiry is how long a router that was heard just now may serve its routes.
const expiry = maxStale + maxStale/100

// Requests that a router leaves open go on at its Envoy. They count as in use until another router
// has looked at that Envoy, at most until the routes of the router that ended must be stale.
// Invariant: I4
func TestLeftoverOfAnEndedRouterBlocksTheQuestion(t *testing.T) {
	goodbye := SessionGoodbye{Session: "r", Stream: 2, Looked: true}
	for name, c := range map[string]struct {
		end             func(s *sim, sb Sandbox)
		next            string        // the Envoy that q looks at two seconds after the end
		until, otherFor time.Duration // until when they count as in use, from the end
	}{
		"a Goodbye with something open": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(goodbye)
		}, "", expiry, 0},
		"the next router has looked": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(goodbye)
		}, "envoy of r", 2 * time.Second, 0},
		"at another Envoy": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(goodbye)
		}, "another", expiry, 0},
		"a Goodbye with nothing open": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.looks("r", 2, 0)
			s.step(goodbye)
		}, "", 0, 0},
		"a Goodbye without a look": {func(s *sim, _ Sandbox) {
			s.step(SessionGoodbye{Session: "r"})
		}, "", expiry, expiry},
		"a Goodbye that could not tell": {func(s *sim, _ Sandbox) {
			s.step(Report{Stream: 2, Blind: "the look timed out"})
			s.step(goodbye)
		}, "envoy of r", 2 * time.Second, 2 * time.Second},
		"a Goodbye without connection": {func(s *sim, _ Sandbox) {
			s.step(SessionLeft{Session: "r", Stream: 2})
			s.step(goodbye)
		}, "", expiry, expiry},
		"found dead": {func(s *sim, _ Sandbox) {
			s.step(SessionDead{Session: "r", By: "q"})
			s.step(SessionLeft{Session: "r", Stream: 2})
		}, "", expiry, expiry},
		"found dead, and looked after": {func(s *sim, _ Sandbox) {
			s.step(SessionDead{Session: "r", By: "q"})
			s.step(SessionLeft{Session: "r", Stream: 2})
		}, "envoy of r", 2 * time.Second, 2 * time.Second},
		"found dead beside an Envoy that was replaced": {func(s *sim, _ Sandbox) {
			s.step(SessionDead{Session: "r", By: "q"})
			s.step(SessionLeft{Session: "r", Stream: 2})
		}, "another process", expiry, expiry},
		"declared dead, with its Envoy": {func(s *sim, _ Sandbox) {
			s.step(SessionLeft{Session: "r", Stream: 2})
			s.pass(s.core.cfg.DeclareAfter)
			s.step(DeclareDead{Token: 1, Session: "r"})
		}, "", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 2, "q", "r")
			one, other := s.claim(), s.claim()
			s.pass(idleFor - 2*time.Second)
			for _, b := range []Sandbox{one, other} {
				s.looks("q", 1, 0, Activity{ID: b.ID})
			}
			s.ping("r", 2)
			c.end(s, one)
			began := s.now.Boot
			want := map[string]time.Duration{one.ID: c.until + idleFor, other.ID: c.otherFor + idleFor}
			nonce := uint64(10)
			for released := 0; released < 2; {
				nonce++
				s.step(SessionPing{Session: "q", Stream: 1, Nonce: nonce})
				if s.now.Boot == began+2*time.Second && c.next != "" {
					s.looksAt(c.next, 1, nonce)
				}
				s.pass(time.Second)
				for _, q := range of[SendQuiesce](s.effects) {
					s.says(q, 1)
					for _, r := range of[SandboxReleased](s.effects) {
						released++
						after := s.now.Boot - began
						if w := want[r.Sandbox.ID]; after < w || after > w+2*time.Second {
							t.Errorf("%s was released %v after the end, expected %v", r.Sandbox.ID, after, w)
						}
					}
				}
				if s.now.Boot-began > 3*maxStale+2*idleFor {
					t.Fatal("not all were released")
				}
			}
		})
	}
}

// A router that joins while it ends sends one report, which is complete and has its last look.
func TestLastLookCountsOnANewStream(t *testing.T) {
	s := idleSim(t, 1, "q", "r")
	sb := s.claim()
	s.step(SessionLeft{Session: "r", Stream: 2})
	s.joinAndReport("r", 3)
	s.step(SessionGoodbye{Session: "r", Stream: 3, Looked: true})
	if list := s.activities(only(sb.ID), 1); len(list[0].Awaits) > 0 {
		t.Errorf("shown as %+v", list)
	}
}

// A look that began before the leader knew of the end may show an earlier state.
// Invariant: I4
func TestOnlyLookAfterTheEndClearsLeftover(t *testing.T) {
	for name, c := range map[string]struct {
		nonce uint64
		asked bool
	}{"before": {5, false}, "not known": {99, false}, "after": {6, true}} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			sb := s.claim()
			s.step(SessionPing{Session: "q", Stream: 1, Nonce: 5})
			s.pass(idleFor - time.Second)
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true})
			s.pass(time.Millisecond)
			s.step(SessionPing{Session: "q", Stream: 1, Nonce: 6})
			s.looksAt("envoy of r", 1, c.nonce)
			s.pass(idleFor)
			if asked := len(of[SendQuiesce](s.effects)) > 0; asked != c.asked {
				t.Errorf("asked: %v", asked)
			}
		})
	}
}

// The router that has looked reports the request from then on.
func TestRequestOpenAtTheNextLookIsUse(t *testing.T) {
	s := idleSim(t, 1, "q", "r")
	sb := s.claim()
	s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
	s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true})
	s.pass(time.Second)
	s.step(SessionPing{Session: "q", Stream: 1, Nonce: 6})
	s.looksAt("envoy of r", 1, 6, Activity{ID: sb.ID, Open: 1, Kind: activity.Open})
	if list := s.activities(everySandbox, 1); list[0].Age != 0 || list[0].Kind != activity.Open || len(list[0].Awaits) > 0 {
		t.Errorf("shown as %+v", list)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}
