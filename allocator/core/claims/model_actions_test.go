package claims_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// What callers, agents and the writer do, and what happens to pods.

func (m *model) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"ask": m.act(m.ask), "ask2": m.act(m.ask), "ask3": m.act(m.ask), "make": m.act(m.make), "make2": m.act(m.make), "make3": m.act(m.make),
		"flush": m.act(m.flush), "flush2": m.act(m.flush), "written": m.act(m.written), "written2": m.act(m.written),
		"configured": m.act(func() { m.configured(m.chance(70, "configured")) }),
		"hook":       m.act(func() { m.hook(m.chance(80, "succeeded")) }),
		"pod":        m.act(m.change),
		"gone": m.act(func() {
			key := m.pod()
			delete(m.seen, key)
			m.pods.PodGone(key)
		}),
		"abandon": m.act(func() {
			if len(m.callers) == 0 {
				m.Skip()
			}
			token := rapid.SampledFrom(slices.Sorted(maps.Keys(m.callers))).Draw(m.T, "token")
			delete(m.callers, token)
			m.table.Abandoned(token)
		}),
		"release": m.act(func() {
			id := m.some(func(s *sandbox) bool { return s.is(granted) })
			m.sandboxes.Release(0, step.Scope{All: true}, id, fact.ReasonKilled)
		}),
		"fence": m.act(m.fence),
		"time":  m.act(func() { m.pass(time.Duration(rapid.IntRange(1, 10).Draw(m.T, "seconds")) * time.Second) }),
		"pool": m.act(func() {
			m.spec.MaxPods, m.spec.Paused = rapid.IntRange(0, 4).Draw(m.T, "max pods"), m.chance(20, "paused")
			m.spec.Deleting, m.spec.Refused = m.chance(3, "deleting"), ""
			if m.chance(10, "refused") {
				m.spec.Refused = "refused"
			}
			m.pools.Observe(m.spec)
		}),
		"state": m.act(func() {
			m.pressure = m.chance(10, "pressure")
			m.table.Pressure(m.pressure)
			if m.quarantine = 0; m.chance(10, "quarantine") {
				m.quarantine = 5 * time.Second
			}
		}),
		"": m.act(func() {}),
	}
}

// some returns a sandbox on record or bound.
func (m *model) some(which func(*sandbox) bool) string {
	var ids []string
	for id, s := range m.ids {
		if which(s) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		m.Skip()
	}
	slices.Sort(ids)
	return rapid.SampledFrom(ids).Draw(m.T, "sandbox")
}

// pod returns a pod that exists.
func (m *model) pod() fact.PodKey {
	if len(m.seen) == 0 {
		m.Skip()
	}
	return rapid.SampledFrom(slices.SortedFunc(maps.Keys(m.seen), fact.ComparePods)).Draw(m.T, "pod")
}

// observe hands an observation of a pod to the table of pods.
func (m *model) observe(seen step.Pod) {
	m.seen[seen.Key] = seen
	from := pods.Origin{Pool: m.spec.Key}
	if sb := m.sandboxes.Of(seen.Key); sb != nil {
		from.Sandbox, from.Released = sb.ID, sb.Over()
	}
	m.pods.Seen(seen, from)
}

// make has a pod become warm.
func (m *model) make() {
	m.next++
	seen := step.Pod{
		Key: fact.PodKey{Namespace: "ns", UID: fmt.Sprint("u", m.next)}, Pool: m.spec.Key.Name, Node: "n", Ready: true,
		IP: netip.AddrFrom4([4]byte{10, 0, byte(m.next >> 8), byte(m.next)}),
	}
	if m.chance(30, "agent") {
		seen.AgentPort = 1
	}
	m.observe(seen)
}

// change changes a pod.
func (m *model) change() {
	seen := m.seen[m.pod()]
	switch rapid.SampledFrom([]string{"ready", "ready", "deleting", "finished", "moved"}).Draw(m.T, "change") {
	case "ready":
		seen.Ready = !seen.Ready
	case "deleting":
		seen.Deleting = true
	case "finished":
		seen.Finished = true
	default:
		seen.IP = netip.Addr{}
	}
	m.observe(seen)
}

// ask makes a claim, or repeats one with its key.
func (m *model) ask() {
	m.next++
	m.room = max(maxWaiting, m.waiting())
	cl := &claim{
		number: m.next, team: rapid.SampledFrom([]string{"x", "y"}).Draw(m.T, "team"),
		key: rapid.SampledFrom([]string{"", "", "k", "l", internal}).Draw(m.T, "key"), count: 1, atLeast: 1,
	}
	if cl.key == "k" && m.chance(10, "other body") {
		cl.hash = 1
	}
	ask := claims.Ask{Token: uint64(m.next), Pool: m.spec.Key, Wait: time.Duration(rapid.IntRange(0, 15).Draw(m.T, "wait")) * time.Second}
	if cl.key == "l" || cl.key == "" && m.chance(30, "batch") {
		cl.batch = true
		ask.Count = rapid.IntRange(1, 4).Draw(m.T, "count")
		ask.AtLeast = rapid.IntRange(0, ask.Count).Draw(m.T, "at least")
		cl.count, cl.atLeast = ask.Count, ask.AtLeast
		if cl.atLeast == 0 {
			cl.atLeast = cl.count
		}
		if m.spec.MaxPods > 0 {
			cl.count = max(cl.atLeast, min(cl.count, m.spec.MaxPods))
		}
	}
	ask.Binding = fact.Binding{Team: cl.team, User: fmt.Sprint(cl.number), IdempotencyKey: cl.key, RequestHash: [32]byte{cl.hash}}
	if m.chance(10, "values") {
		cl.values, ask.Values = true, values{}
	}
	earlier := m.of(cl.team, cl.key)
	if earlier != nil && earlier.hash == cl.hash {
		cl = earlier
	} else {
		m.all = append(m.all, cl)
	}
	m.callers[ask.Token] = &caller{cl, m.step.Now.Boot + ask.Wait}
	m.table.Claim(ask)
}

// flush hands the pending facts to a Write.
func (m *model) flush() {
	if m.underWay {
		m.Skip()
	}
	taken := map[*claim]int{}
	for _, f := range m.outbox.Flush(m.step.Now.Boot) {
		m.underWay = true
		if sb, ok := f.Subject.(*fact.SandboxFact); ok {
			if s := m.ids[sb.ID]; s.is(bound) || s.is(handed) {
				s.state, s.written = handed, true
				taken[s.claim]++
			}
		}
	}
	for cl, n := range taken {
		require.Equal(m, len(cl.got), n, "the facts of %+v are in one Write", cl)
	}
}

// written makes the facts of a Write durable.
func (m *model) written() {
	if !m.underWay {
		m.Skip()
	}
	m.underWay = false
	for _, cl := range m.all {
		if cl.state != handed {
			continue
		}
		if cl.state = durable; !slices.ContainsFunc(cl.got, func(id string) bool { return m.ids[id].agent }) {
			m.decide(cl)
		}
	}
	m.outbox.Written(m.step.Now.Boot)
	m.outbox.Ready()
}

// configured has an agent answer.
func (m *model) configured(ok bool) {
	id := m.some(func(s *sandbox) bool { return s.is(durable) && s.agent && !s.answered })
	s := m.ids[id]
	s.answered, s.unfit = true, s.unfit || !ok
	if !slices.ContainsFunc(s.got, func(id string) bool { return m.ids[id].agent && !m.ids[id].answered }) {
		m.decide(s.claim)
	}
	m.table.Configured(id, ok, "", false)
}

// hook has the hook of a sandbox answer.
func (m *model) hook(ok bool) {
	id := m.some(func(s *sandbox) bool { return s.is(granted) && m.sandboxes.Get(s.ID).Phase == fact.Starting })
	m.sandboxes.HookDone(id, 0, ok, "")
}

// fence completes the fence of a released sandbox, and deletes its pod.
func (m *model) fence() {
	id := m.some(func(s *sandbox) bool { return s.freeAt != 0 && !m.fences.Complete(s.ID) })
	_, complete := m.fences.Advance(id, m.step.Now.Boot)
	require.True(m, complete)
	m.pods.Fenced(id)
	key := m.ids[id].Pod
	if p := m.pods.Get(key); p != nil {
		m.pods.Finish(p, false)
		delete(m.seen, key)
		m.pods.PodGone(key)
	}
	m.sandboxes.TryEnd(id)
}

// pass lets time pass.
func (m *model) pass(d time.Duration) {
	m.step.Now.Boot += d
	m.step.Now.Wall = m.step.Now.Wall.Add(d)
	m.table.TickPool(m.pool())
	m.table.Tick(keep)
	m.free()
}

// free ends the claims whose keys hold no longer.
func (m *model) free() {
	now := m.step.Now.Boot
	for _, cl := range m.all {
		if cl.state == granted && !slices.ContainsFunc(cl.got, func(id string) bool { return m.ids[id].freeAt == 0 || m.ids[id].freeAt > now }) {
			cl.state = over
		}
	}
}

// finish answers all that is under way, and ends the waits: every caller has its answer then.
func (m *model) finish() {
	m.act(func() {
		m.closing = true
		m.table.Close()
	})(m.T)
	for rounds := 0; len(m.callers) > 0 || !m.outbox.Empty(); rounds++ {
		require.Less(m, rounds, 4*claims.MaxFailures, "the callers without an answer: %v", m.callers)
		m.act(func() { m.pass(time.Minute) })(m.T)
		if m.underWay {
			m.act(m.written)(m.T)
		}
		m.act(m.flush)(m.T)
		for {
			i := slices.IndexFunc(m.all, func(cl *claim) bool { return cl.state == durable })
			if i < 0 {
				break
			}
			m.act(func() { m.configured(true) })(m.T)
		}
	}
}
