package sandboxes_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/fence"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// model is the caller of a Table: what claims, fences and the writers are in Core. It knows what has happened, and from
// that what the package comment promises.
type model struct {
	*rapid.T
	step   *step.Current
	outbox *fact.Outbox
	pods   *pods.Table
	fences *fence.Ledger
	table  *sandboxes.Table
	pool   step.Pool
	next   int
	seen   map[fact.PodKey]step.Pod // the pods that exist
	all    map[string]*sandbox      // those that have a record, and those that are bound
	facts  []expected               // the facts that are on their way into the journal
	want   []string                 // the answers, effects and notices of the action
	ended  int
}

// expected is a fact, and what follows from it.
type expected struct {
	id    string
	phase fact.Phase
	then  func()
}

type phase int

const (
	bound phase = iota
	starting
	running
	ending
	released
	ended
)

type sandbox struct {
	*sandboxes.Sandbox
	id, team, key         string
	phase                 phase
	how                   sandboxes.How
	cause                 *fact.Cause // the first
	ran, readying         bool
	granted, fenced       bool
	endAt, lifetime, by   time.Duration // boot clock; 0: none
	nextEnd               time.Duration // with the changes that are on their way
	boundAt               step.Instant
	changes, restarts     int
	waiters               []uint64
	emitted, shown        fact.Revision
	holds                 bool // the key holds
	deleting, dropped     bool
	created, ready, freed int // how often each was said
}

func (s *sandbox) lives() bool { return s.phase == starting || s.phase == running }

func (s *sandbox) routable() bool {
	return s.phase == running || s.phase == ending && s.ran && s.how == sandboxes.Serving
}

func (m *model) expect(format string, args ...any) {
	m.want = append(m.want, fmt.Sprintf(format, args...))
}

func (m *model) chance(percent int, label string) bool {
	return rapid.IntRange(1, 100).Draw(m.T, label) <= percent
}

// some returns a sandbox in one of these phases.
func (m *model) some(phases ...phase) *sandbox {
	var ids []string
	for id, s := range m.all {
		if slices.Contains(phases, s.phase) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		m.Skip()
	}
	slices.Sort(ids)
	return m.all[rapid.SampledFrom(ids).Draw(m.T, "sandbox")]
}

// observe hands an observation of a pod to the table of pods.
func (m *model) observe(seen step.Pod) *pods.Pod {
	m.seen[seen.Key] = seen
	p, _ := m.pods.Seen(seen, pods.Origin{Pool: m.pool.Key})
	return p
}

func (m *model) make(ip netip.Addr) *pods.Pod {
	m.next++
	return m.observe(step.Pod{
		Key: fact.PodKey{Namespace: "ns", UID: fmt.Sprint("u", m.next)}, Pool: m.pool.Key.Name, Node: "n", IP: ip, Ready: true,
	})
}

// end notes that a sandbox ends. The first cause counts. A later end can only take the route away.
func (m *model) end(s *sandbox, how sandboxes.How, cause fact.Cause) {
	switch {
	case s.phase == bound:
		s.cause = cmp.Or(s.cause, &cause)
	case s.phase < released:
		s.how = max(s.how, how)
		if s.lives() {
			s.ran, s.cause, s.phase = s.phase == running, &cause, ending
			m.facts = append(m.facts, expected{s.id, fact.Released, func() {
				s.phase = released
				m.expect("released %s", s.id)
			}})
		}
	}
}

// changed notes that the pod of a sandbox has changed.
func (m *model) changed(s *sandbox) {
	seen, there := m.seen[s.Pod]
	contested := false
	for key, o := range m.seen {
		contested = contested || key != s.Pod && o.IP == seen.IP && !o.Deleting && !o.Finished
	}
	switch {
	case !there || seen.Deleting:
		m.end(s, sandboxes.Lost, fact.Because(fact.ReasonPodDeleted))
	case seen.Finished:
		m.end(s, sandboxes.Lost, fact.Because(fact.ReasonFailed))
	case seen.IP != s.IP:
		m.end(s, sandboxes.Lost, fact.Because(fact.ReasonPodMoved))
	case contested:
		m.end(s, sandboxes.Lost, fact.Because(fact.ReasonAddressShared))
	case seen.Restarts > s.restarts && m.pool.KeepOnRestart:
		s.restarts = seen.Restarts
	case seen.Restarts > s.restarts:
		m.end(s, sandboxes.Serving, fact.Because(fact.ReasonUnexpectedRestart))
	}
}

// setTimeout notes a new end. It counts when it is durable.
func (m *model) setTimeout(s *sandbox, end time.Duration, extend bool, answer func(string, step.CallStatus)) {
	if extend && (s.nextEnd == 0 || s.nextEnd > end) {
		if end = s.nextEnd; s.changes == 0 {
			answer("call", step.CallOK)
			return
		}
	}
	s.changes++
	s.nextEnd = end
	is := fact.Starting
	if s.phase == running || s.readying {
		is = fact.Running
	}
	m.facts = append(m.facts, expected{s.id, is, func() {
		s.changes--
		s.endAt = end
		if s.lives() {
			answer("call", step.CallOK)
		} else {
			answer("call", step.CallGone)
		}
	}})
}

// act wraps an action. What it leads to is compared with what the model expects.
func (m *model) act(f func()) func(*rapid.T) {
	return func(t *rapid.T) {
		m.T, m.want = t, nil
		f()
		got := m.heed()
		for id, s := range m.all {
			if _, there := m.seen[s.Pod]; s.phase == released && !there && s.fenced && !m.pods.Blocked(id) {
				s.phase = ended
				m.ended++
			}
		}
		got = append(got, m.effects()...)
		for id, s := range m.all {
			if s.deleting && s.phase == ended && !s.dropped && !s.shown.Less(s.emitted) && s.key != "" && !s.holds {
				s.dropped = true
				m.expect("forgotten %s", id)
			}
		}
		require.ElementsMatch(m, m.want, got)
		m.compare()
	}
}

// heed takes what the rooms have listed, as Core does.
func (m *model) heed() (got []string) {
	for {
		if n := m.pods.Next(); n != nil {
			switch n := n.(type) {
			case pods.Disturbed:
				if sb := m.table.Of(n.Pod.Key()); sb != nil {
					m.changed(m.all[sb.ID])
					m.table.PodChanged(sb, n.Pod)
				}
			case pods.Unblocked:
				m.table.TryEnd(n.Sandbox)
			}
			continue
		}
		switch n := m.table.Next().(type) {
		case nil:
			return got
		case sandboxes.Started:
			got = append(got, "started "+n.Sandbox.ID)
			m.all[n.Sandbox.ID].ready++
		case sandboxes.Released:
			s := m.all[n.Sandbox.ID]
			require.Equal(m, released, s.phase, "the release of %s is durable", s.id)
			require.Equal(m, s.waiters, n.Sandbox.TakeWaiters(), "the callers that wait for the release")
			s.waiters = nil
			m.fences.Begin(s.id, nil, m.step.Now.Boot)
		}
	}
}

func (m *model) effects() (got []string) {
	note := func(format string, args ...any) { got = append(got, fmt.Sprintf(format, args...)) }
	for _, e := range m.step.Take() {
		switch e := e.(type) {
		case step.SandboxCreated:
			note("created %s", e.Sandbox.ID)
			m.all[e.Sandbox.ID].created++
		case step.SandboxReleased:
			note("released %s", e.Sandbox.ID)
			m.all[e.Sandbox.ID].freed++
		case step.ReleaseAnswered:
			note("release %d %v", e.Token, e.Status)
		case step.SandboxCallAnswered:
			note("call %d %v", e.Token, e.Status)
		case step.DeleteObject:
			note("forgotten %s", e.ID)
		case step.WriteObject:
			s := m.all[e.Sandbox.ID]
			require.True(m, s.granted || s.phase >= released, "the object of %+v is written before its claim is granted", s)
			require.False(m, s.dropped, "the object of %+v is written again", s)
			s.emitted = e.Sandbox.Revision
		}
	}
	return got
}

// compare compares the table with the model.
func (m *model) compare() {
	require.NoError(m, m.table.Check())
	phases := map[phase]fact.Phase{starting: fact.Starting, running: fact.Running, ending: fact.Releasing, released: fact.Released, ended: fact.Ended}
	onRecord, routable := 0, []string{}
	for id, s := range m.all {
		require.True(m, s.created <= 1 && s.ready <= 1 && s.freed <= 1, "%+v", s)
		if s.phase == bound {
			require.True(m, s.Bound())
			require.Nil(m, m.table.Get(id), "no caller knows %s", id)
			continue
		}
		onRecord++
		require.Same(m, s.Sandbox, m.table.Get(id))
		require.Equal(m, phases[s.phase], s.Phase, "%+v", s)
		require.Equal(m, s.key, s.IdempotencyKey)
		require.Equal(m, s.waiters, s.Waiting())
		if s.granted || s.phase >= released {
			require.False(m, s.emitted.Less(s.Revision), "the object of %+v shows less than its record", s)
		}
		if s.phase >= released {
			require.Equal(m, s.cause.Reason, s.Reason)
		}
		if s.routable() {
			routable = append(routable, id)
		}
	}
	require.Equal(m, onRecord, m.table.Len())
	got := []string{}
	for _, sb := range m.table.Routable() {
		got = append(got, sb.ID)
	}
	require.ElementsMatch(m, routable, got, "the sandboxes whose routes routers may receive")
}

func TestTableAgreesWithItsModel(t *testing.T) {
	gone := 0
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, step: &step.Current{Now: step.Instant{Boot: time.Hour, Wall: time.Unix(1e9, 0)}}, outbox: fact.NewOutbox(1, 0),
			fences: fence.New(0), seen: map[fact.PodKey]step.Pod{}, all: map[string]*sandbox{},
			pool: step.Pool{Key: fact.PoolKey{Namespace: "ns", Name: "a"}, KeepOnRestart: rapid.Bool().Draw(t, "keep on restart")},
		}
		m.pods = pods.New(m.step, m.outbox, func() bool { return false })
		holds := func(id string) bool { return m.all[id].holds }
		m.table = sandboxes.New(m.step, m.outbox, m.pods, m.fences, idle.New(time.Second, false), holds)
		m.pods.NodeSeen("n", true, false)
		m.pods.Observe(m.pool)
		for range 4 {
			t.Repeat(m.actions())
		}
		gone += m.ended
	})
	t.Logf("%d sandboxes have ended", gone)
}
