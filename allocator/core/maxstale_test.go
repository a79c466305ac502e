package core

import (
	"reflect"
	"testing"
	"time"
)

// Routers whose max-stale is longer than that of the allocators, as after the value was lowered. Each
// test is about one place that waits for stale routes.

const (
	longStale  = 2 * maxStale
	longExpiry = longStale + longStale/100
)

// longFact is the session of such a router, as an earlier leader has journaled it.
func longFact() Fact {
	return Fact{Revision: Revision{Term: 1, Counter: 7}, Subject: &SessionFact{ID: "r", MaxStale: longStale}}
}

// joinLong connects such a router.
func (s *sim) joinLong(stream uint64) {
	s.t.Helper()
	s.step(SessionJoined{Session: "r", Stream: stream, MaxStale: longStale})
	one[SendSnapshot](s)
}

// between requires that something took as long as it must and hardly longer.
func (s *sim) between(after, want time.Duration) {
	s.t.Helper()
	if after < want || after > want+time.Second {
		s.t.Errorf("after %v, expected %v", after, want)
	}
}

// Invariant: I3
func TestFenceWaitsForRoutersOwnLongerMaxStale(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1, MaxStale: longStale})
	if f := one[Write](s).Facts; len(f) != 1 || f[0].MaxStale() != longStale || !sessionOf(f[0]).Longer {
		t.Errorf("written %+v", f)
	}
	none[SendSnapshot](s)
	s.slow = false
	s.written()
	s.writeAll()
	sb := s.claim()
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.release(sb.ID)
	s.between(s.deletedAfter(sb.Pod, never), longExpiry+window)
}

// It gets routes, and its acknowledgement and its Goodbye count like those of any other router.
// Invariant: I3
func TestRouterWithLongerMaxStaleIsServedAsAnyOther(t *testing.T) {
	for name, end := range map[string]func(*sim){
		"acknowledges": func(s *sim) { s.ack("r", 1, 3) },
		"leaves":       func(s *sim) { s.step(SessionGoodbye{Session: "r", Stream: 1}) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.joinLong(1)
			sb := s.claim()
			s.release(sb.ID)
			end(s)
			s.between(s.deletedAfter(sb.Pod, never), window)
		})
	}
}

// Invariant: I3
func TestNextLeaderWaitsForLongerMaxStale(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"), longFact())
	s.release("x")
	s.between(s.deletedAfter(key("a-1"), never), lease+longExpiry+window)
}

// assumedFact is the session of a router that has not said its max-stale.
func assumedFact() Fact {
	return Fact{Revision: Revision{Term: 1, Counter: 7}, Subject: &SessionFact{ID: "r", MaxStale: 2 * longStale, Assumed: true}}
}

// The journal does not have what this router says now. The router receives nothing before that is
// durable.
// Invariant: I3
func TestLongerMaxStaleIsDurableBeforeTheRouterReturns(t *testing.T) {
	for name, fact := range map[string]Fact{
		"than the session has":                {Revision: Revision{Term: 1, Counter: 7}, Subject: &SessionFact{ID: "r"}},
		"than the allocators, not as assumed": assumedFact(),
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"), fact)
			s.slow = true
			for stream := range uint64(2) { // it tries again at once
				s.step(SessionJoined{Session: "r", Stream: 1 + stream, MaxStale: longStale})
				if e := one[CloseStream](s); e != (CloseStream{Stream: 1 + stream}) {
					t.Errorf("%+v", e)
				}
				if stream == 0 {
					if f := one[Write](s).Facts; len(f) != 1 || f[0].MaxStale() != longStale || sessionOf(f[0]).Assumed || !sessionOf(f[0]).Longer {
						t.Errorf("written %+v", f)
					}
				}
				none[SendSnapshot](s)
			}
			s.slow = false
			s.written()
			s.joinLong(3)
			s.step(SessionLeft{Session: "r", Stream: 3})
			s.release("x")
			s.between(s.deletedAfter(key("a-1"), never), lease+longExpiry+window)
		})
	}
}

// The version that journaled the session may lead again after its end.
func TestAssumedMaxStaleAsksForNoNextFormat(t *testing.T) {
	for name, end := range map[string]func(*sim){
		"leaves":       func(s *sim) { s.step(SessionGoodbye{Session: "r"}) },
		"expires":      func(s *sim) { s.pass(2*longExpiry + time.Minute) },
		"is dead":      func(s *sim) { s.pass(declareAfter + lease); s.declare("r") },
		"is recovered": func(*sim) {},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.slow = true
			s.recover(nil, nil, assumedFact())
			end(s)
			for _, w := range of[Write](s.effects) {
				if f := w.Facts[0]; f.MaxStale() != 2*longStale || !sessionOf(f).Assumed || sessionOf(f).Longer {
					t.Errorf("written %+v", f)
				}
			}
			if n := len(of[Write](s.effects)); (n == 1) != (name != "is recovered") {
				t.Errorf("%d writes", n)
			}
		})
	}
}

// An earlier leader had the max-stale of the routers, and so wrote them in the first format. A version
// that overlooks what is written there must not lead any more.
// Invariant: I3, I4, P9
func TestLoweredMaxStaleIsJournaledInTheNextFormat(t *testing.T) {
	facts := []Fact{
		{Subject: &SessionFact{ID: "connected", From: "10.0.0.1", Gateway: hereGateway}},
		{Subject: &SessionFact{ID: "ended", Left: true}},
		{Subject: &SessionFact{ID: "banned", Left: true, Declared: &Declaration{By: "ops"}}},
		{Subject: &SessionFact{ID: EarlierSession("j1"), From: EarlierFrom, Earlier: true}},
	}
	for i := range facts {
		facts[i].Revision, sessionOf(facts[i]).MaxStale = Revision{Term: 1, Counter: uint64(i + 1)}, longStale
	}
	short, written := longFact(), longFact()
	sessionOf(short).ID, sessionOf(short).MaxStale = "short", maxStale
	sessionOf(written).ID, sessionOf(written).Longer = "written", true
	s := newSimAt(t, 2, start)
	s.slow = true
	s.recover(nil, nil, append(facts, short, written)...)
	again := one[Write](s).Facts
	for i, want := range facts {
		want.Revision, sessionOf(want).Longer = Revision{Term: 2, Counter: uint64(i + 1)}, true
		if i >= len(again) || !reflect.DeepEqual(again[i], want) {
			t.Errorf("written %+v, expected %+v", again, want)
		}
	}
	if len(again) != len(facts) {
		t.Errorf("written %+v", again)
	}
	s.slow = false
	s.written()
	s.writeAll()
	settled := map[string]Revision{}
	for range 40 { // until all of it is over
		s.pass(10 * time.Second)
		for _, e := range of[Settle](s.effects) {
			settled[string(e.Thing.(SessionID))] = e.Revision
		}
	}
	for _, f := range again[1:3] {
		if settled[sessionOf(f).ID] != f.Revision {
			t.Errorf("%s is settled at %v, written at %v", sessionOf(f).ID, settled[sessionOf(f).ID], f.Revision)
		}
	}
	next := newSimAt(t, 3, s.now)
	next.slow = true
	next.recover(nil, nil, again...)
	none[Write](next)
}

// Invariant: P9
func TestBanLastsForLongerMaxStale(t *testing.T) {
	s := newSim(t)
	s.recover(nil, nil)
	s.joinLong(1)
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.pass(declareAfter)
	s.slow = true
	s.declare("r")
	fact := one[Write](s).Facts[0]
	if fact.MaxStale() != longStale || !sessionOf(fact).Longer {
		t.Errorf("written %+v", fact)
	}
	s.slow = false
	s.written()
	next := newSimAt(t, 2, s.now)
	next.recover(nil, nil, fact)
	for _, s := range []*sim{s, next} {
		s.pass(longExpiry)
		s.step(SessionJoined{Session: "r", Stream: 9, MaxStale: longStale})
		if e := one[CloseStream](s); !e.Banned {
			t.Errorf("%+v", e)
		}
		s.pass(time.Second)
		s.joinLong(10)
	}
}

// Invariant: I4
func TestNextLeaderWaitsForLeftoverOfLongerMaxStale(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover(nil, nil, Fact{Revision: Revision{Term: 1, Counter: 7}, Subject: &SessionFact{ID: "r", Left: true, MaxStale: longStale}})
	s.pass(longExpiry - time.Millisecond)
	if !s.core.idle.MayBeOpen("r") {
		t.Error("it has nothing open any more")
	}
	s.pass(time.Millisecond)
	if s.core.idle.MayBeOpen("r") {
		t.Error("it may have something open")
	}
}

// Invariant: I4
func TestNewLeaderAllowsForActivityOfLongerMaxStale(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	sandboxOf(f).IdleTimeout, sandboxOf(f).ClaimedAt = time.Hour, start.Wall.Add(-5*time.Hour)
	record := *sandboxOf(f)
	const silent = 45 * time.Minute
	record.LastActive = start.Wall.Add(-silent)
	s.recoverState(State{
		Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })},
		Facts: []Fact{f, longFact()}, Objects: []Sandbox{record},
	})
	use, ok := s.core.idle.Use("x")
	if want := min(s.now.Boot, s.now.Boot-silent+recoveryMargin+2*longExpiry); !ok || use.At != want {
		t.Errorf("%v ago, expected %v", s.now.Boot-use.At, s.now.Boot-want)
	}
}

// Invariant: I7
func TestOrphanWaitsForTheLongestMaxStale(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, longFact())
	if after := s.deletedAfter(key("a-1"), never); after < lease+longExpiry+window {
		t.Errorf("deleted after %v", after)
	}
}

// Other routers of that journal may have the max-stale of the one that reports it, or of any router on
// record.
// Invariant: I3, P12
func TestQuarantineLastsForTheLongestMaxStale(t *testing.T) {
	const left = lease + longExpiry + window
	recorded := earlierFact()
	sessionOf(recorded).MaxStale = longStale
	for name, c := range map[string]struct {
		facts []Fact
		seen  time.Duration // the max-stale of the router that reports the journal; 0: none does
	}{
		"in the journal":              {[]Fact{recorded}, 0},
		"reported":                    {nil, longStale},
		"reported later":              {[]Fact{earlierFact()}, longStale},
		"of another router on record": {[]Fact{longFact()}, maxStale},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, c.facts...)
			if c.seen > 0 {
				s.step(EarlierSeen{Journal: "j1", MaxStale: c.seen})
				facts := one[Write](s).Facts
				if len(facts) != 1 || !sessionOf(facts[0]).Earlier || facts[0].MaxStale() != longStale || !sessionOf(facts[0]).Longer {
					t.Errorf("written %+v", facts)
				}
			}
			s.refusedFor(left)
		})
	}
}
