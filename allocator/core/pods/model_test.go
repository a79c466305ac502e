package pods_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// model is the caller of a Table. It knows what has happened, and from that what the package comment promises.
type model struct {
	*rapid.T
	step    *step.Current
	outbox  *fact.Outbox
	table   *pods.Table
	earlier bool // routers of an earlier journal may serve routes
	next    int
	nodes   map[string]*node
	pools   map[fact.PoolKey]step.Pool
	pods    map[fact.PodKey]*pod // the lives that exist
	routes  map[string]route     // by sandbox; those that are not fenced
	fenced  []string             // sandboxes whose routes were fenced
	intents map[fact.PodKey]intent
	want    []string // the effects and notices of the action
	seen    []*pod   // observed in the action
	warm    int      // how often a pod became warm
}

type node struct {
	usable bool
	lostAt time.Duration // 0: not within BindingLag
}

// pod is one life of a pod.
type pod struct {
	step.Pod
	pool        fact.PoolKey
	state       pods.State
	sandbox     string
	away        bool            // the node was lost after the creation of the pod was asked for
	reachedBy   map[string]bool // sandboxes whose stale routes led to it before it had a sandbox
	quarantined bool
	orphan      bool
	handed      bool // the facts of its claim were handed to a Write
	deletion    bool // DeletePod was emitted
	awaited     bool // its life began with a restart that was not proven
	askedAt     time.Duration
	warmAt      time.Duration
	waitsSince  time.Duration // for RecyclePod to take effect, or for the proof; 0: for neither
	synced      string
	takenAt     netip.Addr // which the record of its sandbox names
	moved       bool       // it was elsewhere when it got its sandbox, and was not observed since
}

type route struct {
	pod fact.PodKey
	to  []netip.Addr
}

type intent int

const (
	pending intent = iota
	written
	durable
)

func (p *pod) idle() bool   { return p.state <= pods.Warm }
func (p *pod) ending() bool { return p.Deleting || p.Finished }
func (p *pod) name() string { return p.Key.ID() }

func (m *model) expect(format string, args ...any) {
	m.want = append(m.want, fmt.Sprintf(format, args...))
}

func (m *model) id(prefix string) string { m.next++; return fmt.Sprint(prefix, m.next) }

func (m *model) chance(percent int, label string) bool {
	return rapid.IntRange(1, 100).Draw(m.T, label) <= percent
}

// some returns a pod in one of these states.
func (m *model) some(states ...pods.State) *pod {
	var all []*pod
	for _, p := range m.sorted() {
		if slices.Contains(states, p.state) {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		m.Skip()
	}
	return rapid.SampledFrom(all).Draw(m.T, "pod")
}

func (m *model) sorted() []*pod {
	return slices.SortedFunc(maps.Values(m.pods), func(a, b *pod) int { return fact.ComparePods(a.Key, b.Key) })
}

func (m *model) node(name string) *node {
	if m.nodes[name] == nil {
		m.nodes[name] = &node{}
	}
	return m.nodes[name]
}

func (m *model) routed(ip netip.Addr) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(m.routes)), func(r route) bool { return slices.Contains(r.to, ip) })
}

func (m *model) outdated(p *pod) bool {
	return m.pools[p.pool].Template != "" && p.Template != m.pools[p.pool].Template
}

func (m *model) stranded(p *pod) bool {
	return p.state == pods.Pending && (p.away || len(p.reachedBy) > 0)
}

// withheld has the reasons of the package comment.
func (m *model) withheld(p *pod) (why pods.Withheld) {
	contested := slices.ContainsFunc(m.sorted(), func(o *pod) bool { return o != p && p.IP.IsValid() && o.IP == p.IP && !o.ending() })
	for reason, holds := range map[pods.Withheld]bool{
		pods.Unready: !p.Ready || !p.IP.IsValid(), pods.Ending: p.ending(), pods.NodeBad: !m.node(p.Node).usable, pods.Contested: contested,
		pods.Tainted: len(p.reachedBy) > 0, pods.Quarantined: p.quarantined, pods.NotProven: p.Recycling,
	} {
		if holds {
			why |= reason
		}
	}
	return why
}

// observe hands an observation to the table, and notes what it says of this life and of another one of the pod.
func (m *model) observe(p *pod, seen step.Pod) {
	old := m.pods[p.Key]
	for _, o := range m.sorted() {
		if o.Key.Whole() == seen.Key.Whole() && o.Key != seen.Key {
			m.gone(o)
		}
	}
	_, retired := m.intents[seen.Key]
	if old != nil || seen.Pool != "" || retired || p.sandbox != "" {
		if n := m.node(seen.Node); old == nil || old.Node != seen.Node {
			p.away = !n.usable && p.askedAt != 0 && p.askedAt < n.lostAt
		}
		now := m.step.Now.Boot
		switch {
		case p.state == pods.Recycling && seen.Deleting:
			p.state, p.waitsSince = pods.Going, 0
			m.expect("RecycleEnded %s", step.NotFit)
		case seen.Recycling && !p.awaited:
			p.awaited, p.waitsSince = true, now
		case p.Recycling && !seen.Recycling:
			p.waitsSince = 0
			m.expect("RecycleEnded %s", step.Recycled)
		}
		p.Pod, p.moved = seen, false
		m.pods[p.Key], m.seen = p, append(m.seen, p)
		m.reach()
		if seen.Mislabelled && !seen.Deleting {
			m.expect("LabelPod %s %q %v", p.name(), p.sandbox, p.sandbox != "" && p.state >= pods.Released)
		}
		if seen.Recycling && seen.Reason != "" && !seen.Deleting {
			m.notProven(p)
		}
	}
	from := pods.Origin{Pool: p.pool, AskedAt: p.askedAt, Sandbox: p.sandbox, Released: p.state == pods.Released}
	if seen.Pool == "" && p.sandbox == "" {
		from.Pool.Name = ""
	}
	if old == nil && m.pods[p.Key] == p {
		p.pool = from.Pool
	}
	m.table.Seen(seen, from)
}

// gone notes that a life has ended.
func (m *model) gone(p *pod) {
	if p.idle() {
		m.expect("Failed %s %v", p.name(), m.early(p))
	}
	delete(m.pods, p.Key)
	m.expect("gone %s", p.name())
}

// early reports whether the end of an idle pod counts for the back-off of its pool.
func (m *model) early(p *pod) bool {
	return !m.outdated(p) && !m.stranded(p) && (p.warmAt == 0 || p.Finished && m.step.Now.Boot-p.warmAt < pods.StableAfter)
}

// notProven retires a life that began with a restart. One that keeps a tainted address stays.
func (m *model) notProven(p *pod) {
	if p.idle() && len(p.reachedBy) == 0 {
		m.expect("Failed %s false", p.name())
		m.expect("RecycleEnded %s", step.NotProven)
		m.retire(p)
	}
}

func (m *model) retire(p *pod) {
	p.state = pods.Going
	if !p.Deleting {
		m.intents[p.Key] = pending
	}
}

func (m *model) addRoutes(sandbox string, pod fact.PodKey, to ...netip.Addr) {
	m.routes[sandbox] = route{pod, to}
	m.table.AddRoutes(sandbox, pod, to)
}

// reach notes which pods stale routes may reach now.
func (m *model) reach() {
	for _, p := range m.pods {
		for id, r := range m.routes {
			if slices.Contains(r.to, p.IP) && (p.sandbox == "" || p.moved) && p.Key != r.pod {
				p.reachedBy[id] = true
			}
		}
		granted := p.sandbox != "" && p.state > pods.Bound
		p.quarantined = p.quarantined || m.earlier && p.IP.IsValid() && !granted
	}
}

// settle finds what becomes of the pods after an action, and which intents to delete pods are carried out.
func (m *model) settle() {
	m.reach()
	for _, p := range m.sorted() {
		if !p.idle() {
			p.synced = ""
			continue
		}
		why := m.withheld(p)
		switch tainted := len(p.reachedBy) > 0; {
		case why&pods.Ending != 0:
			m.expect("Failed %s %v", p.name(), m.early(p))
			m.retire(p)
		case why&pods.Contested != 0, tainted && !m.routed(p.IP), p.Pool == "" && !tainted:
			m.retire(p)
		case p.Used && p.askedAt != 0 && p.warmAt == 0 && !m.stranded(p):
			m.expect("Failed %s %v", p.name(), m.early(p))
			m.retire(p)
		case p.Used:
			p.state, p.orphan = pods.Going, true
			m.expect("Repaired %s", p.name())
		case why != 0:
			p.state = pods.Pending
		default:
			if p.warmAt == 0 {
				m.expect("Started %s", p.name())
				p.warmAt = m.step.Now.Boot
			}
			p.state = pods.Warm
			m.warm++
		}
		want := m.pools[p.pool].Metadata
		switch {
		case !p.idle() || want == "" || m.outdated(p):
		case p.Metadata == want:
			p.synced = ""
		case p.synced != want:
			p.synced = want
			m.expect("SyncPod %s", p.name())
		}
	}
	for key, i := range m.intents {
		switch p := m.pods[key]; {
		case i != durable:
		case p == nil:
			delete(m.intents, key)
			m.expect("Settle %s", key.ID())
		case !p.Deleting && !p.deletion:
			p.deletion = true
			m.expect("DeletePod %s", p.name())
		}
	}
}

// act wraps an action. Everything that it leads to is compared with what the model expects.
func (m *model) act(f func()) func(*rapid.T) {
	return func(t *rapid.T) {
		m.T, m.want, m.seen = t, nil, nil
		before, blocked := map[fact.PodKey]pods.Withheld{}, map[string]bool{}
		for key, p := range m.pods {
			if p.state > pods.Warm && p.state < pods.Released {
				before[key] = m.withheld(p)
			}
		}
		for _, id := range m.fenced {
			blocked[id] = m.table.Blocked(id)
		}
		f()
		m.reach()
		got, disturbed := m.heed(before)
		m.settle()
		for id, was := range blocked {
			if was && !m.table.Blocked(id) {
				m.expect("Unblocked %s", id)
			}
		}
		require.ElementsMatch(m, m.want, got)
		for key, why := range before {
			p := m.pods[key]
			if p != nil && !p.idle() && p.state < pods.Released && (why != m.withheld(p) || slices.Contains(m.seen, p)) {
				require.True(m, disturbed[key], "%s has changed, and is in use", p.name())
			}
		}
		m.compare()
	}
}

// heed takes the notices and effects of an action. Claims give back pods that are withheld, until their facts are
// handed to the writer.
func (m *model) heed(used map[fact.PodKey]pods.Withheld) (got []string, disturbed map[fact.PodKey]bool) {
	disturbed = map[fact.PodKey]bool{}
	note := func(format string, args ...any) { got = append(got, fmt.Sprintf(format, args...)) }
	for n := m.table.Next(); n != nil; n = m.table.Next() {
		switch n := n.(type) {
		case pods.Disturbed:
			p := m.pods[n.Pod.Key()]
			disturbed[n.Pod.Key()] = true
			switch _, inUse := used[n.Pod.Key()]; {
			case n.Pod.Gone():
				note("gone %s", n.Pod.Key().ID())
			case !inUse && (p.idle() || p.state >= pods.Released):
				m.Fatalf("%+v is in no use", p)
			case p.state == pods.Claiming && !p.handed && (m.withheld(p) != 0 || p.Used):
				m.giveBack(p)
			}
		case pods.Failed:
			note("Failed %s %v", n.Pod.Key().ID(), n.Early)
		case pods.Warmed:
			note("Started %s", n.Pod.Key().ID())
		case pods.Unblocked:
			note("Unblocked %s", n.Sandbox)
		}
	}
	for _, e := range m.step.Take() {
		switch e := e.(type) {
		case step.DeletePod:
			note("DeletePod %s", e.Pod.ID())
		case step.RecyclePod:
			note("RecyclePod %s", e.Pod.ID())
		case step.RecycleEnded:
			note("RecycleEnded %s", e.Outcome)
		case step.LabelPod:
			note("LabelPod %s %q %v", e.Pod.ID(), e.ID, e.Released)
		case step.SyncPod:
			note("SyncPod %s", e.Pod.ID())
		case step.Settle:
			note("Settle %s", e.Thing.(fact.PodKey).ID())
		case step.Repaired:
			note("Repaired %s", e.Pod.ID())
		}
	}
	return got, disturbed
}

// compare compares the tables with the model.
func (m *model) compare() {
	require.NoError(m, m.table.Check())
	require.Equal(m, len(m.pods), m.table.Len())
	require.Equal(m, len(m.intents), m.table.CountRetirements())
	counts := map[fact.PoolKey]map[pods.Class]int{}
	for key, p := range m.pods {
		t := m.table.Get(key)
		require.Equal(m, p.state, t.State(), "state of %+v", p)
		require.Equal(m, m.withheld(p), t.Withheld(), "what withholds %+v", p)
		require.Equal(m, p.sandbox, t.Sandbox())
		if counts[p.pool] == nil {
			counts[p.pool] = map[pods.Class]int{}
		}
		counts[p.pool][pods.Class{State: p.state, Outdated: m.outdated(p), Stranded: m.stranded(p)}]++
	}
	for pool, want := range counts {
		require.Equal(m, want, maps.Collect(m.table.Find(pool).Classes()), "counts of %v", pool)
	}
	for _, id := range m.fenced { // it stays on record while a pod exists that its requests may have reached
		must, may := false, false
		for key, p := range m.pods {
			i, intended := m.intents[key]
			retired := intended && i == durable
			must = must || p.reachedBy[id] && !retired
			may = may || len(p.reachedBy) > 0 && (!retired || p.Deleting)
		}
		if blocked := m.table.Blocked(id); must && !blocked || blocked && !may {
			m.Fatalf("%s is blocked: %v; must be: %v, may be: %v", id, blocked, must, may)
		}
	}
}

func TestTableAgreesWithItsModel(t *testing.T) {
	warm := 0
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, step: &step.Current{Now: step.Instant{Boot: time.Hour, Wall: time.Unix(1e9, 0)}}, outbox: fact.NewOutbox(1, 0),
			nodes: map[string]*node{}, pools: map[fact.PoolKey]step.Pool{}, pods: map[fact.PodKey]*pod{}, routes: map[string]route{},
			intents: map[fact.PodKey]intent{},
		}
		m.table = pods.New(m.step, m.outbox, func() bool { return m.earlier })
		m.node("n1").usable = true
		m.table.NodeSeen("n1", true, false)
		for range 4 { // a pod has its next life after ten of the actions
			t.Repeat(m.actions())
		}
		warm += m.warm
	})
	t.Logf("%d pods were warm", warm)
}
