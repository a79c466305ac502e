package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// When a new leader assumes that sandboxes were used.

// The object may lag behind, by clocks that differ and by writes that wait.
// Invariant: I4
func TestNewLeaderAllowsForUnwrittenActivity(t *testing.T) {
	recovered := func(t *testing.T, claimed, active time.Duration) *sim {
		s := newSimAt(t, 2, start)
		f := on("a-1", "x")
		sandboxOf(f).IdleTimeout, sandboxOf(f).ClaimedAt = time.Hour, start.Wall.Add(-claimed)
		record := *sandboxOf(f)
		if active > 0 {
			record.LastActive = start.Wall.Add(-active)
		}
		s.recoverState(State{Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, Facts: []Fact{f, {Subject: &SessionFact{ID: "r"}}}, Objects: []Sandbox{record}})
		return s
	}
	const margin = recoveryMargin + 2*expiry
	for name, c := range map[string]struct{ claimed, active, asked time.Duration }{
		"claimed a moment ago":          {time.Second, 0, time.Hour},
		"active a moment ago":           {5 * time.Hour, time.Minute, time.Hour},
		"silent for longer than margin": {5 * time.Hour, 45 * time.Minute, time.Hour - 45*time.Minute + margin},
		"never active":                  {50 * time.Minute, 0, 10*time.Minute + margin},
		"by a clock that was ahead":     {time.Minute, -10 * time.Minute, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			s := recovered(t, c.claimed, c.active)
			s.joinAndReport("r", 1)
			s.now.Boot += c.asked - 2*time.Second
			s.ping("r", 1)
			s.pass(time.Second)
			none[SendQuiesce](s)
			s.pass(time.Second)
			s.asks(1)
		})
	}
}

// The leader before may have granted the claim and sent the route, and the object does not show it yet.
// Invariant: I4
func TestNewLeaderWaitsForRoutersOfAGrantWithoutObject(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	sandboxOf(f).IdleTimeout, sandboxOf(f).ClaimedAt, sandboxOf(f).Agent = idleFor, start.Wall, Agent{Port: 49983}
	f.Subject.(*SandboxFact).Ungranted = 1
	s.recoverState(State{
		Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(agentPod("a-1"), func(p *Pod) { p.Used = true })},
		Facts: []Fact{f, {Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}}},
	})
	s.step(Configured{ID: "x", OK: true})
	s.pass(idleFor) // r is not connected, and may have requests open
	none[SandboxReleased](s)
	s.pass(lease + expiry - idleFor)
	none[SandboxReleased](s)
}

// One ten minutes behind and the other ten minutes ahead are twenty minutes apart. A short
// idle timeout adds nothing to the margin.
func TestNewLeaderAllowsForTwentyMinutesOfClockSkew(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	sandboxOf(f).IdleTimeout, sandboxOf(f).ClaimedAt = idleFor, start.Wall.Add(-20*time.Minute)
	s.recover([]Pool{idlePool(0)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, f)
	s.joinAndReport("r", 1)
	for range 2 { // it was claimed a moment ago
		s.pass(idleFor/2 - time.Millisecond)
		none[SendQuiesce](s)
		s.ping("r", 1)
	}
	s.pass(2 * time.Millisecond)
	s.asks(1)
}

// afterLeader is the next leader: it has the facts, and the object of the only sandbox.
func afterLeader(t *testing.T, at Instant, record Sandbox, stale time.Duration, facts ...Fact) *sim {
	t.Helper()
	s := newSimAt(t, 2, at)
	s.cfg.MaxStale = stale
	s.restart()
	s.recoverState(State{
		Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })},
		Facts: append([]Fact{{Revision: record.Revision, Subject: &SandboxFact{Sandbox: record}}, {Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "q"}}}, facts...), Objects: []Sandbox{record},
	})
	s.joinAndReport("q", 1)
	return s
}

// A router that is not connected is found dead. Every sandbox counts as in use until then. The
// leader knows that from memory. The next leader knows it from the object, and from the journal
// while the object is not written.
// Invariant: I4
func TestNextLeaderKnowsTheEndOfARouter(t *testing.T) {
	const idle = 24 * time.Hour
	for name, after := range map[string]time.Duration{"at once": 0, "much later": time.Hour} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = idle })}, []Pod{warmPod("a-1")})
			s.joinAndReport("q", 1)
			s.joinAndReport("r", 2)
			record := s.claim()
			s.step(ObjectWritten{ID: record.ID, Revision: record.Revision})
			left := map[string]Fact{}
			pass := func(d time.Duration, sessions ...string) {
				for ; d > 0; d -= maxStale / 2 {
					for _, session := range sessions {
						s.ping(session, map[string]uint64{"q": 1, "r": 2}[session])
					}
					s.pass(maxStale / 2)
					effects := s.effects
					for _, r := range of[WriteObject](effects) {
						record = r.Sandbox
						s.step(ObjectWritten{ID: record.ID, Revision: record.Revision})
					}
					s.effects = effects
					for _, settled := range of[Settle](s.effects) {
						if id, ok := settled.Thing.(SessionID); ok {
							delete(left, string(id))
						}
					}
				}
			}
			pass(20*time.Hour, "q", "r")
			s.step(SessionLeft{Session: "r", Stream: 2})
			s.step(SessionDead{Session: "r", By: "q"})
			died := s.now.Boot
			left["r"] = Fact{Revision: Revision{Term: 1, Counter: 99}, Subject: &SessionFact{ID: "r", Left: true}}
			for _, settled := range of[Settle](s.effects) {
				if id, ok := settled.Thing.(SessionID); ok {
					delete(left, string(id))
				}
			}
			s.step(SessionPing{Session: "q", Stream: 1, Nonce: 7})
			s.looksAt("envoy of r", 1, 7)
			pass(after, "q")
			var facts []Fact
			for _, f := range left {
				facts = append(facts, f)
			}
			next := afterLeader(t, s.now, record, maxStale, facts...)
			for next.now.Boot < died+idle-time.Minute {
				next.ping("q", 1)
				next.pass(maxStale / 2)
				none[SendQuiesce](next)
			}
			for range 3 * 60 {
				next.ping("q", 1)
				next.pass(maxStale / 2)
				if len(of[SendQuiesce](next.effects)) > 0 {
					return
				}
			}
			t.Error("it is not asked about")
		})
	}
}

// The clocks of two leaders are 20 minutes apart. r says Goodbye with x open. p uses x, is cut off
// when the leftover of r ends, serves x for max-stale, and expires.
func TestNewLeaderAllowsForRequestsLeftOpen(t *testing.T) {
	const idle, stale = 20 * time.Minute, 15 * time.Minute // the default of max-stale
	s := newSim(t)
	s.cfg.MaxStale = stale
	s.restart()
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = idle })}, []Pod{warmPod("a-1")})
	s.joinAndReport("p", 1)
	s.joinAndReport("r", 2)
	s.joinAndReport("q", 3)
	record := s.claim()
	s.step(ObjectWritten{ID: record.ID, Revision: record.Revision})
	step := func(s *sim, d time.Duration, do func()) {
		for ; d > 0; d -= time.Second {
			do()
			for _, r := range of[WriteObject](s.pass(time.Second)) {
				record = r.Sandbox
				s.step(ObjectWritten{ID: record.ID, Revision: record.Revision})
			}
			none[SandboxReleased](s)
		}
	}
	uses := func() {
		s.ping("q", 3)
		s.ping("p", 1)
		s.looks("p", 1, 0, Activity{ID: record.ID, Open: 1})
	}
	step(s, 90*time.Second, func() { uses(); s.ping("r", 2) })
	s.looks("r", 2, 0, Activity{ID: record.ID, Open: 1})
	s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true})
	step(s, stale, uses)
	s.step(SessionLeft{Session: "p", Stream: 1})
	used := s.now.Boot + stale - time.Second // it serves what it knows for so long
	step(s, stale+stale/100+2*time.Second, func() { s.ping("q", 3) })
	at := s.now
	at.Wall = at.Wall.Add(20 * time.Minute)
	next := afterLeader(t, at, record, stale)
	for {
		next.ping("q", 1)
		next.pass(time.Second)
		for _, q := range of[SendQuiesce](next.effects) {
			next.says(q, 1)
			one[SandboxReleased](next)
			if unused := next.now.Boot - used; unused < idle {
				t.Errorf("released for being idle after %v of %v", unused, idle)
			}
			return
		}
	}
}

// The journal is newer than the object and has no activity.
func TestNewLeaderReadsActivityFromTheObject(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	sandboxOf(f).IdleTimeout, sandboxOf(f).ClaimedAt = time.Hour, start.Wall.Add(-5*time.Hour)
	record := *sandboxOf(f)
	record.Revision, record.LastActive = Revision{Term: 1, Counter: 4}, start.Wall.Add(-45*time.Minute)
	s.recoverState(State{Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, Facts: []Fact{f}, Objects: []Sandbox{record}})
	const margin = recoveryMargin + 2*expiry
	list := s.activities(everySandbox, 1)
	if len(list) != 1 || list[0].Kind != activity.Record || list[0].Age != 45*time.Minute-margin || list[0].In != 15*time.Minute+margin {
		t.Errorf("shown as %+v", list)
	}
}

func TestNewLeaderAsksRoutersOfEarlierTerms(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	sandboxOf(f).IdleTimeout = idleFor
	s.recover([]Pool{idlePool(0)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })},
		f, Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "q"}}, Fact{Revision: Revision{Term: 1, Counter: 2}, Subject: &SessionFact{ID: "r"}})
	s.joinAndReport("q", 1)
	s.pass(recoveryMargin / 1000)
	s.now.Boot += 30 * time.Second
	s.ping("q", 1)
	s.pass(time.Millisecond)
	none[SendQuiesce](s) // r has not come back, and may serve it
	s.joinAndReport("r", 2, Activity{ID: "x", Age: time.Second})
	none[SendQuiesce](s)
	s.pass(idleFor - time.Second)
	s.asks(1, 2)
}
