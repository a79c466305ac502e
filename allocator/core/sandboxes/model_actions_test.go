package sandboxes_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// What the caller of a Table does, and what happens to sandboxes.

func (m *model) actions() map[string]func(*rapid.T) {
	here := func() *sandbox { // its pod exists
		s := m.some(bound, starting, running, ending, released)
		if _, there := m.seen[s.Pod]; !there {
			m.Skip()
		}
		return s
	}
	return map[string]func(*rapid.T){
		"claim": m.act(m.claim), "decide": m.act(m.decide), "decide2": m.act(m.decide), "call": m.act(m.call), "call2": m.act(m.call),
		"write": m.act(m.write), "write2": m.act(m.write), "write3": m.act(m.write), "time": m.act(m.time), "fence": m.act(m.fence), "fence2": m.act(m.fence),
		"end": m.act(func() {
			s := m.some(bound, starting, running, ending, released, ended)
			how := rapid.SampledFrom([]sandboxes.How{sandboxes.Serving, sandboxes.Lost, sandboxes.Idle}).Draw(m.T, "how")
			if how == sandboxes.Idle && (!s.granted || s.phase != running && !s.ran) { // routers were not asked about it
				m.Skip()
			}
			m.end(s, how, fact.Because(fact.ReasonIdleTimeout))
			m.table.End(s.Sandbox, how, fact.Because(fact.ReasonIdleTimeout))
		}),
		"hook": m.act(func() {
			s, ok := m.some(starting, running, ending), m.chance(80, "succeeded")
			switch {
			case s.phase != starting || s.readying:
			case ok:
				s.readying = true
				m.facts = append(m.facts, expected{s.id, fact.Running, func() {
					if s.readying = false; s.phase == starting {
						s.phase = running
						m.expect("started %s", s.id)
					}
				}})
			default:
				m.end(s, sandboxes.Serving, fact.Because(fact.ReasonStartFailed))
			}
			m.table.HookDone(s.id, 0, ok, "")
		}),
		"pod": m.act(func() {
			seen := m.seen[here().Pod]
			switch rapid.SampledFrom([]string{"restart", "deleting", "finished", "moved"}).Draw(m.T, "change") {
			case "restart":
				seen.Restarts++
			case "deleting":
				seen.Deleting = true
			case "finished":
				seen.Finished = true
			default:
				seen.IP = netip.Addr{}
			}
			m.observe(seen)
		}),
		"stranger": m.act(func() { m.make(here().IP) }), // at the address of a sandbox
		"gone": m.act(func() {
			keys := slices.SortedFunc(maps.Keys(m.seen), fact.ComparePods)
			if len(keys) == 0 {
				m.Skip()
			}
			key := rapid.SampledFrom(keys).Draw(m.T, "pod")
			delete(m.seen, key)
			m.pods.PodGone(key)
		}),
		"object": m.act(m.object), "object2": m.act(m.object), "object3": m.act(m.object),
		"forget": m.act(func() {
			m.table.Forget(0, 0)
			for id, s := range m.all {
				if s.phase == ended && !s.shown.Less(s.emitted) && !s.holds {
					m.expect("forgotten %s", id)
					delete(m.all, id)
				}
			}
		}),
		"key": m.act(func() {
			s := m.some(ended)
			if !s.holds {
				m.Skip()
			}
			s.holds = false
			m.table.LetGo(s.Sandbox)
		}),
		"": m.act(func() {}),
	}
}

// object is an event of the object of a sandbox.
func (m *model) object() {
	s := m.some(bound, starting, running, ending, released, ended)
	if s.phase == bound || s.emitted == (fact.Revision{}) {
		m.Skip()
	}
	switch event := rapid.SampledFrom([]string{"written", "written", "written", "deleted", "gone", "replaced"}).Draw(m.T, "event"); {
	case event == "written":
		if s.dropped && s.deleting && s.key != "" && s.shown.Less(s.emitted) { // a late write has brought it back
			m.expect("forgotten %s", s.id)
		}
		s.shown = s.emitted
		m.table.ObjectWritten(s.id, s.emitted)
	case event == "deleted":
		if s.dropped {
			m.expect("forgotten %s", s.id)
		} else {
			s.deleting = true
			m.end(s, sandboxes.Serving, fact.Because(fact.ReasonObjectDeleted))
		}
		m.table.ObjectSeen(s.Pool, s.id, s.shown, true, false)
	case event == "gone":
		if s.phase == ended && !s.holds {
			s.dropped = true
		} else {
			s.shown, s.deleting = fact.Revision{}, false
			m.end(s, sandboxes.Serving, fact.Because(fact.ReasonObjectDeleted))
		}
		m.table.ObjectGone(s.id)
	case !s.dropped:
		s.shown = fact.Revision{}
		m.table.ObjectSeen(s.Pool, s.id, fact.Revision{}, false, false)
	}
}

// fence completes the fence of a released sandbox.
func (m *model) fence() {
	s := m.some(released)
	if s.fenced {
		m.Skip()
	}
	s.fenced = true
	_, complete := m.fences.Advance(s.id, m.step.Now.Boot)
	require.True(m, complete)
	m.pods.Fenced(s.id)
	if p := m.pods.Get(s.Pod); p != nil {
		m.pods.Finish(p, false)
	}
	m.table.TryEnd(s.id)
}

// write makes facts durable, and hands the next ones to the writer.
func (m *model) write() {
	for _, f := range m.outbox.Flush(m.step.Now.Boot) {
		sb, ok := f.Subject.(*fact.SandboxFact)
		if !ok {
			continue
		}
		i := slices.IndexFunc(m.facts, func(x expected) bool { return x.id == sb.ID })
		require.True(m, i >= 0, "the fact %+v", sb)
		x := m.facts[i]
		m.facts = slices.Delete(m.facts, i, i+1)
		require.Equal(m, x.phase, sb.Phase, "the fact %+v", sb)
		if sb.Phase == fact.Released {
			require.Equal(m, m.all[sb.ID].cause.Reason, sb.Reason)
		}
		x.then()
	}
	require.Empty(m, m.facts, "the facts that are not written")
	m.outbox.Written(m.step.Now.Boot)
	m.outbox.Ready()
}

// time passes, and the wall clock may have another step.
func (m *model) time() {
	passed := m.seconds()
	m.step.Now.Boot += passed
	m.step.Now.Wall = m.step.Now.Wall.Add(passed)
	if m.chance(30, "clock is set") {
		m.step.Now.Wall = m.step.Now.Wall.Add(time.Duration(rapid.IntRange(-100, 100).Draw(m.T, "step")) * time.Second)
	}
	for _, s := range m.all {
		var at time.Duration
		reason := ""
		earliest := func(end time.Duration, why string) {
			if end != 0 && (reason == "" || end < at) {
				at, reason = end, why
			}
		}
		if s.changes == 0 {
			earliest(s.endAt, fact.ReasonEndTime)
		}
		earliest(s.lifetime, fact.ReasonMaxLifetime)
		if s.phase == starting && !s.readying {
			earliest(s.by, fact.ReasonStartupTimeout)
		}
		if s.lives() && reason != "" && at <= m.step.Now.Boot {
			m.end(s, sandboxes.Serving, fact.Because(reason))
		}
	}
	m.table.ExpireEnds()
}

// claim has the fact of a claim written.
func (m *model) claim() {
	m.next++
	p := m.make(netip.AddrFrom4([4]byte{10, 0, byte(m.next >> 8), byte(m.next)}))
	m.pods.Take(p)
	m.next++
	s := &sandbox{id: fmt.Sprint("s", m.next), team: rapid.SampledFrom([]string{"x", "y"}).Draw(m.T, "team")}
	f := &fact.SandboxFact{Sandbox: fact.Sandbox{Pool: m.pool.Key, Pod: p.Key(), IP: p.Seen().IP, Phase: fact.Starting}}
	f.ID, f.Team, f.ClaimedAt = s.id, s.team, m.step.Now.Wall
	if m.chance(50, "key") {
		s.key, s.holds, f.IdempotencyKey = s.id, true, s.id
	}
	for _, end := range []struct {
		boot *time.Duration
		wall *time.Time
	}{{&s.endAt, &f.EndAt}, {&s.lifetime, &f.LifetimeEnd}, {&s.by, &f.StartBy}} {
		if m.chance(30, "ends") {
			after := m.seconds()
			*end.boot, *end.wall = m.step.Now.Boot+after, m.step.Now.Wall.Add(after)
		}
	}
	s.nextEnd, s.boundAt = s.endAt, m.step.Now
	if m.chance(50, "without hook") {
		f.Phase, f.StartedAt = fact.Running, f.ClaimedAt
	}
	m.outbox.Commit(m.step.Now.Boot, f, true, func(fact.Revision, time.Duration) { s.Sandbox = m.table.Bind(f) })
	m.facts = append(m.facts, expected{s.id, f.Phase, func() { m.all[s.id] = s }})
}

func (m *model) seconds() time.Duration {
	return time.Duration(rapid.IntRange(1, 20).Draw(m.T, "seconds")) * time.Second
}

// decide grants the claim of a bound sandbox, or rejects the sandbox.
func (m *model) decide() {
	s := m.some(bound)
	cause, _ := s.Unfit(m.pods.Get(s.Pod))
	if s.cause != nil {
		require.Equal(m, s.cause, s.Doomed())
		cause = *s.cause
	} else if cause == (fact.Cause{}) && m.chance(20, "incomplete") {
		cause = fact.Because(fact.ReasonBatchIncomplete)
	}
	m.expect("created %s", s.id)
	if s.phase = starting; s.Phase == fact.Running {
		s.phase = running
	}
	s.cause = nil
	if cause != (fact.Cause{}) {
		s.key, s.holds = "", false
		m.end(s, sandboxes.Rejected, cause)
		m.table.Reject(s.Sandbox, s.boundAt, cause)
		return
	}
	if m.table.Grant(s.Sandbox, s.boundAt); s.phase == running {
		m.expect("started %s", s.id)
		m.table.Run(s.Sandbox)
	}
	s.granted, s.emitted = true, s.Revision // claims write the object of one that starts
}

// call has a caller of some team call for a sandbox that may be unknown to it.
func (m *model) call() {
	m.next++
	token, id := uint64(m.next), "unknown"
	var s *sandbox
	if m.chance(90, "known") {
		s = m.some(bound, starting, running, ending, released, ended)
		id = s.id
	}
	scope := step.Scope{Team: rapid.SampledFrom([]string{"x", "y"}).Draw(m.T, "team"), All: m.chance(50, "all")}
	if s != nil && (s.phase == bound || !scope.All && s.team != scope.Team) {
		s = nil
	}
	answer := func(call string, status step.CallStatus) { m.expect("%s %d %v", call, token, status) }
	switch rapid.SampledFrom([]string{"release", "keep alive", "timeout"}).Draw(m.T, "call") {
	case "release":
		switch {
		case s == nil:
			answer("release", step.CallUnknown)
		case s.phase >= released:
			answer("release", step.CallGone)
		default:
			s.waiters = append(s.waiters, token)
			m.end(s, sandboxes.Serving, fact.Because(fact.ReasonKilled))
		}
		m.table.Release(token, scope, id, fact.ReasonKilled)
	case "keep alive":
		switch {
		case s == nil:
			answer("call", step.CallUnknown)
		case !s.lives():
			answer("call", step.CallGone)
		default:
			answer("call", step.CallOK)
		}
		m.table.KeepAlive(token, scope, id)
	default:
		lifetime, extend := m.seconds(), m.chance(50, "extend")
		switch {
		case s == nil:
			answer("call", step.CallUnknown)
		case !s.lives():
			answer("call", step.CallGone)
		default:
			m.setTimeout(s, m.step.Now.Boot+lifetime, extend, answer)
		}
		m.table.SetTimeout(token, scope, id, lifetime, extend, false)
	}
}
