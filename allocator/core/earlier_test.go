package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
)

// ---- a journal that was begun anew

func earlierFact() Fact {
	return Fact{Revision: Revision{Term: 1, Counter: 0}, Subject: &SessionFact{ID: EarlierSession("j1"), From: EarlierFrom, Earlier: true}}
}

// allEarlier is for how long a new leader waits for the routers of an earlier journal.
const allEarlier = lease + maxStale + maxStale/100 + window

// refusedFor requires that a claim is refused for so long as it takes.
func (s *sim) refusedFor(left time.Duration) {
	s.t.Helper()
	s.step(Claim{Token: 50, Pool: poolA, Wait: time.Second})
	if r := one[ClaimRefused](s); r.Why != Quarantined || r.Wait != left {
		s.t.Fatalf("refused %+v, expected %v", r, left)
	}
}

// replaced requires that the idle pods go, and that the next one is handed out.
func (s *sim) replaced(old ...string) {
	s.t.Helper()
	deleted := map[PodKey]bool{}
	for _, d := range of[DeletePod](s.effects) {
		deleted[d.Pod] = true
	}
	for _, name := range old {
		if !deleted[key(name)] {
			s.t.Errorf("%s may have been another sandbox's, and was not deleted: %+v", name, s.effects)
		}
		s.step(PodGone{key(name)})
	}
	s.step(PodSeen{with(warmPod("a-9"), func(p *Pod) { p.IP = warmPod(old[0]).IP })})
	if sb := s.claim(); sb.Pod.Name != "a-9" {
		s.t.Errorf("handed out %+v", sb)
	}
}

// Invariant: I3, P12
func TestNoPodIsHandedOutDuringQuarantine(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-4"), warmPod("a-5")}, on("a-1", "x"), earlierFact())
	none[DeletePod](s)
	s.refusedFor(allEarlier)
	s.join("r", 1) // what is on record is served
	if routes := one[SendSnapshot](s).Routes; len(routes) != 1 || routes[0].ID != "x" {
		t.Errorf("routes %+v", routes)
	}
	// A pod that comes meanwhile may have the address of a sandbox that is on no record.
	s.step(PodSeen{warmPod("a-3")})
	s.pass(allEarlier)
	none[DeletePod](s)
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Millisecond})
	none[Claimed](s)
}

// Invariant: P12
func TestQuarantinedPodsAreDeletedAndReplaced(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-2")}, earlierFact())
	s.step(PodSeen{warmPod("a-3")})
	s.pass(allEarlier + time.Millisecond)
	s.replaced("a-1", "a-2", "a-3")
}

// The fact of its end and those of the pods are in one order: a leader that comes in
// between finds the session, or that no pod of that time may be handed out.
// Invariant: P12
func TestNextLeaderWaitsForEarlierRoutersAgain(t *testing.T) {
	s := newSimAt(t, 2, start)
	pods := []Pod{warmPod("a-1"), warmPod("a-2")}
	s.recover([]Pool{specA(5)}, pods, earlierFact())
	s.pass(allEarlier / 2)
	next := newSimAt(t, 3, s.now)
	next.recover([]Pool{specA(5)}, pods, earlierFact())
	next.refusedFor(allEarlier)

	s.slow = true
	s.pass(allEarlier)
	var facts []Fact
	for _, w := range of[Write](s.effects) {
		facts = append(facts, w.Facts...)
	}
	if len(facts) != 3 || retirementOf(facts[0]).Pod == (PodKey{}) || retirementOf(facts[1]).Pod == (PodKey{}) || !sessionOf(facts[2]).Left {
		t.Fatalf("written %+v", facts)
	}
	for n := range len(facts) + 1 {
		next := newSimAt(t, 3, s.now)
		left := append([]Fact{earlierFact()}, facts[:n]...)
		if n == len(facts) {
			left = facts // of one thing the last fact counts
		}
		next.recover([]Pool{specA(5)}, pods, left...)
		next.step(Claim{Token: 1, Pool: poolA})
		none[Claimed](next)
	}
}

func TestDeclarationEndsTheWaitForEarlierRouters(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-2")}, earlierFact())
	s.step(DeclareDead{Token: 7, Session: EarlierSession("j1"), By: "ops"})
	if d := one[DeadDeclared](s); d.Status != DeclareHeard {
		t.Fatalf("%+v: an earlier leader may have answered them a moment ago", d)
	}
	s.pass(lease + declareAfter)
	s.step(DeclareDead{Token: 8, Session: EarlierSession("j1"), By: "ops", Reason: "all gateways were restarted"})
	if d := one[DeadDeclared](s); d.Status != DeclareOK {
		t.Fatalf("%+v", d)
	}
	s.replaced("a-1", "a-2")

	// The leader that follows believes it, too.
	next := newSimAt(t, 3, s.now)
	next.recover([]Pool{specA(1)}, []Pod{warmPod("a-5")}, Fact{Subject: &SessionFact{ID: EarlierSession("j1"), Left: true, Declared: &Declaration{By: "ops"}}})
	next.claim()
}

// The retires of a declaration are written before it, and what comes while it is on its
// way is not handed out by this leader.
func TestDeclarationOfEarlierRoutersRetiresEveryPod(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")}, earlierFact())
	s.step(PodSeen{warmPod("a-2")})
	s.pass(lease + declareAfter)
	s.slow = true
	s.step(DeclareDead{Token: 8, Session: EarlierSession("j1"), By: "ops"})
	facts := one[Write](s).Facts
	if len(facts) != 3 || retirementOf(facts[0]).Pod.Name != "a-1" || retirementOf(facts[1]).Pod.Name != "a-2" || sessionOf(facts[2]).Declared == nil {
		t.Fatalf("written %+v", facts)
	}
	s.step(PodSeen{warmPod("a-6")})
	s.slow = false
	s.written()
	s.writeAll()
	s.replaced("a-1", "a-2", "a-6")
}

// Invariant: P12
func TestRouterOfAnotherJournalStartsQuarantine(t *testing.T) {
	s := newSimAt(t, 1, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.join("r1", 1)
	sb := s.claim()
	s.release(sb.ID)
	s.ack("r1", 1, 3)
	s.pass(time.Minute)
	if n := s.core.pools.Find(poolA).Count(pods.Warm); n != 2 {
		t.Fatalf("%d warm", n)
	}
	s.step(EarlierSeen{Journal: "j0"})
	written := false
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			written = written || sessionOf(f).ID == EarlierSession("j0") && sessionOf(f).Earlier
		}
	}
	if !written {
		t.Errorf("the next leader would not know: %+v", s.effects)
	}
	left := s.core.View().Quarantine()
	s.refusedFor(left)
	s.step(EarlierSeen{Journal: "j0"})
	s.refusedFor(left) // it is known
	s.step(SessionJoined{Session: "r4", Stream: 4})
	s.refusedFor(left)
	s.pass(left + time.Millisecond)
	s.replaced("a-2", "a-3")
}

// Sessions of two earlier journals end together: the idle pods are discarded before the last
// of them ends, whichever way each ends.
func TestPodsRetireBeforeLastEarlierSessionEnds(t *testing.T) {
	declare := func(s *sim, journal string) []Effect {
		return s.step(DeclareDead{Token: 8, Session: EarlierSession(journal), By: "ops"})
	}
	for name, end := range map[string]func(*sim) []Effect{
		"both are declared dead":                  func(s *sim) []Effect { return append(declare(s, "j1"), declare(s, "j0")...) },
		"one expires, the other is declared dead": func(s *sim) []Effect { return append(declare(s, "j0"), s.pass(allEarlier/2)...) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-2")}, earlierFact())
			s.pass(allEarlier / 4)
			s.step(EarlierSeen{Journal: "j0"})
			s.pass(allEarlier/4 + time.Millisecond)
			s.slow = true
			discarded, left := map[string]bool{}, map[string]bool{}
			for effects := end(s); len(of[Write](effects)) > 0; effects = s.written() {
				for _, f := range one[Write](&sim{t: t, effects: effects}).Facts {
					if retirementOf(f).Pod != (PodKey{}) {
						discarded[retirementOf(f).Pod.Name] = true
					}
					if sessionOf(f).Left {
						left[sessionOf(f).ID] = true
					}
					if len(left) == 2 && len(discarded) != 2 {
						t.Errorf("both sessions have ended, and only %v are discarded", discarded)
					}
				}
			}
			if len(left) != 2 {
				t.Errorf("only %v have ended", left)
			}
		})
	}
}

// The write of a claim cannot be called off any more when the word of another journal comes.
func TestClaimInFlightAtQuarantineGetsNothing(t *testing.T) {
	s := newSimAt(t, 1, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	sb := s.given()
	s.step(EarlierSeen{Journal: "j0"})
	none[Claimed](s)
	s.slow = false
	s.written()
	s.writeAll()
	none[Claimed](s)
	none[SendRoute](s)
	s.record(s.effects)
	if found, ok := s.core.View().Sandbox(sb.ID); !ok || found.Phase != Released || found.Reason != fact.ReasonAddressShared {
		t.Errorf("%+v", found)
	}
	s.pass(wait)
	if r := one[ClaimRefused](s); r.Token != 1 {
		t.Errorf("%+v", r)
	}
	none[DeletePod](s) // the address stays taken until earlier routers have gone stale
	s.pass(allEarlier)
	s.pass(window)
	one[DeletePod](s)
}

func TestFenceWaitsForEarlierRouters(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"), earlierFact())
	s.release("x")
	s.pass(allEarlier - time.Millisecond)
	none[DeletePod](s)
	f := s.fence()
	if len(f.Waiting) != 1 || f.Waiting[0].ID != EarlierSession("j1") || f.Waiting[0].From != EarlierFrom {
		t.Errorf("%+v", f)
	}
	s.pass(2 * time.Millisecond)
	s.pass(window)
	one[DeletePod](s)
}
