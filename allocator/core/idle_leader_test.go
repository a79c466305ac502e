package core

import (
	"testing"
	"time"
)

// What a new leader takes sandboxes to have been used by.

// What the object says may be older than what was so, by clocks that differ and writes
// that wait.
func TestANewLeaderGivesTimeForWhatItCannotKnow(t *testing.T) {
	recovered := func(t *testing.T, claimed, active time.Duration) *sim {
		s := newSimAt(t, 2, start)
		f := on("a-1", "x")
		f.Sandbox.IdleTimeout, f.Sandbox.ClaimedAt = time.Hour, start.Wall.Add(-claimed)
		record := *f.Sandbox
		if active > 0 {
			record.LastActive = start.Wall.Add(-active)
		}
		s.recoverState(State{Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, Facts: []Fact{f, {Session: "r"}}, Records: []Sandbox{record}})
		return s
	}
	const margin = recoveryMargin + time.Hour/4 + 2*(maxStale+maxStale/100)
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

// One ten minutes behind and the other ten minutes ahead are twenty minutes apart. A short
// idle timeout adds nothing to the margin.
func TestTheClocksOfTwoLeadersMayEachBeTenMinutesOff(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	f.Sandbox.IdleTimeout, f.Sandbox.ClaimedAt = idleFor, start.Wall.Add(-20*time.Minute)
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

// A router reports a use when it has moved by a quarter of the idle timeout. When it is
// found dead, everything was active until then; the next leader cannot read that
// anywhere.
func TestANewLeaderAllowsForARouterThatEndedInAnEarlierTerm(t *testing.T) {
	const idle = 4 * time.Hour
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = idle })}, []Pod{warmPod("a-1")})
	s.joinAndReport("q", 1)
	s.joinAndReport("r", 2)
	record := s.claim()
	pass := func(s *sim, d time.Duration, streams map[string]uint64) {
		for ; d > 0; d -= maxStale / 2 {
			for session, stream := range streams {
				s.ping(session, stream)
			}
			s.pass(min(d, maxStale/2))
			for _, r := range of[Record](s.effects) {
				record = r.Sandbox
			}
			none[SendQuiesce](s)
		}
	}
	both := map[string]uint64{"q": 1, "r": 2}
	pass(s, 2*time.Minute, both)
	s.step(Report{Session: "r", Stream: 2, Activities: []Activity{{ID: record.ID}}})
	pass(s, idle/4-time.Second, both) // in use all the time through r
	if record.LastActive.IsZero() {
		t.Fatal("its activity was not written")
	}
	s.step(SessionDead{Session: "r", By: "q"})
	died := s.now.Boot
	pass(s, time.Minute, map[string]uint64{"q": 1})

	next := newSimAt(t, 2, s.now)
	f := Fact{Revision: record.Revision, Sandbox: &record}
	next.recoverState(State{
		Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })},
		Facts: []Fact{f, {Revision: Revision{1, 1}, Session: "q"}}, Records: []Sandbox{record},
	})
	next.joinAndReport("q", 1)
	pass(next, died+idle-next.now.Boot-time.Second, map[string]uint64{"q": 1})
}

// Clocks are twenty minutes apart, as documented; r says Goodbye with x in use; p goes on
// using x, is cut off as late as the note of the Goodbye ends, serves for max-stale, and
// expires. All that the object says is from before the Goodbye.
func TestANewLeaderAllowsForAHandoverThatItHasNotHeardOf(t *testing.T) {
	const idle, stale = 20 * time.Minute, 15 * time.Minute // the default of max-stale
	s := newSim(t)
	s.cfg.MaxStale = stale
	s.restart()
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = idle })}, []Pod{warmPod("a-1")})
	s.joinAndReport("p", 1)
	s.joinAndReport("r", 2)
	s.joinAndReport("q", 3)
	record := s.claim()
	step := func(s *sim, d time.Duration, do func()) {
		for ; d > 0; d -= time.Second {
			do()
			for _, r := range of[Record](s.effects) {
				record = r.Sandbox
			}
			s.pass(time.Second)
			for _, r := range of[Record](s.effects) {
				record = r.Sandbox
			}
			none[SandboxReleased](s)
		}
	}
	uses := func() {
		s.ping("q", 3)
		s.ping("p", 1)
		s.step(Report{Session: "p", Stream: 1, Activities: []Activity{{ID: record.ID, Open: 1}}})
	}
	step(s, 90*time.Second, func() { uses(); s.ping("r", 2) })
	s.step(Report{Session: "r", Stream: 2, Activities: []Activity{{ID: record.ID, Open: 1}}, Handover: true})
	s.step(SessionGoodbye{Session: "r"})
	step(s, stale, uses)
	s.step(SessionLeft{Session: "p", Stream: 1})
	used := s.now.Boot + stale - time.Second // it serves what it knows for so long
	step(s, stale+stale/100+2*time.Second, func() { s.ping("q", 3) })
	at := s.now
	at.Wall = at.Wall.Add(20 * time.Minute)
	next := newSimAt(t, 2, at)
	next.cfg.MaxStale = stale
	next.restart()
	f := Fact{Revision: record.Revision, Sandbox: &record}
	next.recoverState(State{
		Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })},
		Facts: []Fact{f, {Revision: Revision{1, 1}, Session: "q"}}, Records: []Sandbox{record},
	})
	next.joinAndReport("q", 1)
	for {
		next.ping("q", 1)
		next.pass(time.Second)
		for _, q := range of[SendQuiesce](next.effects) {
			next.says("q", q, 1, 0)
			one[SandboxReleased](next)
			if unused := next.now.Boot - used; unused < idle {
				t.Errorf("released for being idle after %v of %v", unused, idle)
			}
			return
		}
	}
}

// What counts as in use for a while anyway is shown to be in use.
func TestAHandoverDoesNotKeepTheObjectFromBeingWritten(t *testing.T) {
	const stale = 15 * time.Minute // the default of max-stale
	s := newSim(t)
	s.cfg.MaxStale = stale
	s.restart()
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = time.Hour })}, []Pod{warmPod("a-1")})
	s.joinAndReport("q", 1)
	s.joinAndReport("r", 2)
	record := s.claim()
	s.step(Report{Session: "r", Stream: 2, Activities: []Activity{{ID: record.ID, Open: 1}}, Handover: true})
	s.step(SessionGoodbye{Session: "r"})
	for range stale / time.Second {
		s.ping("q", 1)
		s.step(Report{Session: "q", Stream: 1, Activities: []Activity{{ID: record.ID, Open: 1}}})
		s.pass(time.Second)
		for _, r := range of[Record](s.effects) {
			record = r.Sandbox
		}
	}
	if lag := s.now.Wall.Sub(record.LastActive); lag < 0 || lag > showEvery+2*time.Second {
		t.Errorf("it is in use, and its object says that it was %v ago", lag)
	}
}

// The journal does not say when a sandbox was active, and is newer than the object.
func TestANewLeaderTakesTheActivityFromTheObjectAndTheRestFromTheJournal(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	f.Sandbox.IdleTimeout, f.Sandbox.ClaimedAt = time.Hour, start.Wall.Add(-5*time.Hour)
	record := *f.Sandbox
	record.Revision, record.LastActive = Revision{1, 4}, start.Wall.Add(-45*time.Minute)
	s.recoverState(State{Pools: []Pool{idlePool(0)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, Facts: []Fact{f}, Records: []Sandbox{record}})
	const margin = recoveryMargin + time.Hour/4 + 2*(maxStale+maxStale/100)
	list, _ := s.core.Activities(func(string) bool { return true }, 1)
	if len(list) != 1 || list[0].Source != OnRecord || list[0].Age != 45*time.Minute-margin || list[0].In != 15*time.Minute+margin {
		t.Errorf("shown as %+v", list)
	}
}

func TestANewLeaderAsksEveryRouterOfTheTermBefore(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	f.Sandbox.IdleTimeout = idleFor
	s.recover([]Pool{idlePool(0)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })},
		f, Fact{Revision: Revision{1, 1}, Session: "q"}, Fact{Revision: Revision{1, 2}, Session: "r"})
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
