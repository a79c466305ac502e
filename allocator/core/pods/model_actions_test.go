package pods_test

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// What the caller of a Table does, and what happens to pods.

func (m *model) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"make": m.act(m.make), "make2": m.act(m.make), "observe": m.act(m.observeSome), "observe2": m.act(m.observeSome),
		"take": m.act(m.take), "take2": m.act(m.take), "advance": m.advance, "advance2": m.advance, "time": m.act(m.time), "fence": m.act(m.fence), "write": m.act(m.write), "write2": m.act(m.write),
		"return": m.act(func() { m.giveBack(m.some(pods.Claiming)) }),
		"hand":   m.act(func() { m.some(pods.Claiming).handed = true }),
		"gone": m.act(func() {
			p := m.some(pods.All...)
			if p.state == pods.Recycling {
				m.expect("RecycleEnded %s", step.NotFit)
			}
			m.gone(p)
			m.table.PodGone(p.Key.Whole())
		}),
		"node": m.act(func() {
			name := rapid.SampledFrom([]string{"n1", "n2"}).Draw(m.T, "node")
			usable := m.chance(70, "usable")
			if n := m.node(name); n.usable != usable {
				n.usable, n.lostAt = usable, 0
				if !usable {
					n.lostAt = m.step.Now.Boot
				}
				for _, p := range m.pods {
					if p.Node == name {
						p.away = !usable
					}
				}
			}
			m.table.NodeSeen(name, usable, !usable && m.chance(50, "cordoned"))
		}),
		"pool": m.act(func() {
			key := fact.PoolKey{Namespace: "ns", Name: rapid.SampledFrom([]string{"a", "b"}).Draw(m.T, "pool")}
			m.pools[key] = step.Pool{
				Key: key, Template: rapid.SampledFrom([]string{"t1", "t1", "t2"}).Draw(m.T, "template"),
				Metadata: rapid.SampledFrom([]string{"m1", "m1", "m2"}).Draw(m.T, "metadata"),
			}
			m.table.Observe(m.pools[key])
		}),
		"stale route": m.act(func() { // of a sandbox on record whose pod is gone
			id := m.id("s")
			m.addRoutes(id, fact.PodKey{UID: "gone-" + id}, m.address())
		}),
		"retire": m.act(func() {
			p := m.some(pods.Pending, pods.Warm)
			m.retire(p)
			m.table.Retire(m.table.Get(p.Key))
		}),
		"orphans": m.act(func() {
			for _, p := range m.pods {
				if p.orphan {
					p.orphan = false
					m.retire(p)
				}
			}
			m.table.RetireOrphans()
		}),
		"earlier journal": m.act(m.quarantine),
		"":                m.act(func() {}),
	}
}

func (m *model) observeSome() {
	p := m.some(pods.All...)
	seen := p.Pod
	if p.Recycling && m.chance(60, "proven") {
		seen.Recycling, seen.Ready = false, true
	} else if m.chance(80, "changed") {
		m.change(&seen)
	}
	m.observe(p, seen)
}

// take takes the pod whose turn it is. No request of another sandbox can have reached it, and it had no sandbox.
func (m *model) take() {
	g := m.table.Find(fact.PoolKey{Namespace: "ns", Name: rapid.SampledFrom([]string{"a", "b"}).Draw(m.T, "pool")})
	if g == nil || g.Next() == nil {
		m.Skip()
	}
	p := m.pods[g.Next().Key()]
	if p.sandbox != "" || p.Used || m.withheld(p) != 0 || m.intents[p.Key] != pending {
		m.Fatalf("%+v is handed out", p)
	}
	p.state, p.handed, p.takenAt = pods.Claiming, false, p.IP
	m.table.Take(g.Next())
}

func (m *model) giveBack(p *pod) {
	p.state = pods.Pending
	m.table.Return(m.table.Get(p.Key))
}

// advance moves a pod that is in use towards the end of its life, by some of the steps.
func (m *model) advance(t *rapid.T) {
	m.T = t
	p := m.some(pods.Claiming, pods.Bound, pods.Claimed, pods.Released, pods.Recycling)
	for range rapid.IntRange(1, 5).Draw(t, "steps") {
		m.act(func() { m.advanceOnce(p) })(t)
	}
}

func (m *model) advanceOnce(p *pod) {
	t := m.table.Get(p.Key)
	switch p.state {
	case pods.Claiming:
		p.sandbox, p.state, p.moved = m.id("s"), pods.Bound, p.IP != p.takenAt
		m.addRoutes(p.sandbox, p.Key, p.takenAt)
		m.table.Bind(t, p.sandbox)
	case pods.Bound:
		p.state = pods.Claimed
		m.table.Grant(t)
	case pods.Claimed:
		p.state = pods.Released
		m.expect("LabelPod %s %q true", p.name(), p.sandbox)
		m.table.Release(t)
	case pods.Released:
		if _, routed := m.routes[p.sandbox]; routed {
			m.fenceOf(p.sandbox)
			return
		}
		again := p.Recyclable && m.withheld(p) == 0 && !m.outdated(p)
		require.Equal(m, again, t.CanRecycle())
		switch {
		case again && m.chance(80, "again"):
			p.state, p.waitsSince = pods.Recycling, m.step.Now.Boot
			m.expect("RecyclePod %s", p.name())
			m.table.Finish(t, true)
			return
		case !p.Deleting:
			p.deletion = true
			m.expect("DeletePod %s", p.name())
		}
		p.state = pods.Going
		m.table.Finish(t, false)
	case pods.Recycling:
		if m.pods[p.Key] != p {
			return
		}
		next := &pod{Pod: p.Pod, pool: p.pool, reachedBy: map[string]bool{}}
		next.Key.Life++
		next.Recycling, next.Ready = true, false
		m.observe(next, next.Pod)
	}
}

// fence completes a fence of a sandbox that no pod serves any more.
func (m *model) fence() {
	all := slices.DeleteFunc(slices.Sorted(maps.Keys(m.routes)), func(id string) bool {
		p := m.pods[m.routes[id].pod]
		return p != nil && p.state < pods.Released
	})
	if len(all) == 0 {
		m.Skip()
	}
	m.fenceOf(rapid.SampledFrom(all).Draw(m.T, "sandbox"))
}

func (m *model) fenceOf(sandbox string) {
	delete(m.routes, sandbox)
	m.fenced = append(m.fenced, sandbox)
	m.table.Fenced(sandbox)
}

// quarantine begins or ends the session of an earlier journal.
func (m *model) quarantine() {
	groups := []*pods.Group{m.table.Group(fact.PoolKey{Namespace: "ns", Name: "a"}), m.table.Group(fact.PoolKey{Namespace: "ns", Name: "b"})}
	if !m.earlier {
		if m.chance(80, "none") {
			m.Skip()
		}
		m.earlier = true
		for _, g := range groups {
			m.table.Quarantine(g)
		}
		return
	}
	for _, p := range m.pods {
		if p.idle() && p.quarantined && len(p.reachedBy) == 0 {
			m.retire(p)
		}
	}
	for _, g := range groups {
		m.table.RetireQuarantined(g)
	}
	m.earlier = false
}

// write makes intents durable, or hands the next ones to the writer.
func (m *model) write() {
	for key, i := range m.intents {
		if i == written {
			m.intents[key] = durable
		}
	}
	m.outbox.Written(m.step.Now.Boot)
	m.outbox.Ready()
	var want, got []fact.PodKey
	for key, i := range m.intents {
		if i == pending {
			m.intents[key], want = written, append(want, key)
		}
	}
	for _, f := range m.outbox.Flush(m.step.Now.Boot) {
		got = append(got, f.Subject.(*fact.RetirementFact).Pod)
	}
	require.ElementsMatch(m, want, got, "the intents that are written")
}

func (m *model) time() {
	m.step.Now.Boot += rapid.SampledFrom([]time.Duration{time.Second, pods.StableAfter, pods.BindingLag, pods.BindingLag, pods.ProofWithin}).Draw(m.T, "passed")
	now := m.step.Now.Boot
	for _, n := range m.nodes {
		if n.lostAt != 0 && now-n.lostAt >= pods.BindingLag {
			n.lostAt = 0
		}
	}
	for _, p := range m.pods {
		switch {
		case p.waitsSince == 0 || now-p.waitsSince < pods.ProofWithin:
			continue
		case p.state == pods.Recycling:
			p.state, p.deletion = pods.Going, true
			m.expect("RecycleEnded %s", step.NotProven)
			m.expect("DeletePod %s", p.name())
		case p.Recycling:
			m.notProven(p)
		}
		p.waitsSince = 0
	}
	m.table.Tick()
}

// address is a new one, or one that pods or routes have.
func (m *model) address() netip.Addr {
	var used []netip.Addr
	for _, p := range m.sorted() {
		if p.IP.IsValid() {
			used = append(used, p.IP)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(m.routes)) {
		used = append(used, m.routes[id].to...)
	}
	if len(used) == 0 || m.chance(70, "new address") {
		m.next++
		return netip.AddrFrom4([4]byte{10, 0, byte(m.next >> 8), byte(m.next)})
	}
	return rapid.SampledFrom(used).Draw(m.T, "address")
}

// make has a pod observed for the first time, that is healthy or changed in two ways.
func (m *model) make() {
	name := m.id("pod")
	key := fact.PodKey{Namespace: "ns", Name: name, UID: "uid-" + name, Life: rapid.SampledFrom([]int{1, 1, 0}).Draw(m.T, "life")}
	pool := rapid.SampledFrom([]fact.PoolKey{{Namespace: "ns", Name: "a"}, {Namespace: "ns", Name: "b"}}).Draw(m.T, "pool")
	p := &pod{pool: pool, reachedBy: map[string]bool{}, Pod: step.Pod{
		Key: key, Pool: pool.Name, Node: rapid.SampledFrom([]string{"n1", "n2"}).Draw(m.T, "node"), IP: m.address(), Template: m.pools[pool].Template,
		Metadata: m.pools[pool].Metadata, Ready: true, Recyclable: key.Life > 0,
	}}
	if p.Recycling = p.Recyclable && m.chance(30, "recycling"); p.Recycling {
		p.Ready = false
	}
	if m.chance(50, "asked for") {
		p.askedAt = m.step.Now.Boot - rapid.SampledFrom([]time.Duration{0, time.Second, 10 * time.Second}).Draw(m.T, "asked")
	}
	switch rapid.IntRange(0, 5).Draw(m.T, "origin") {
	case 0: // on record, with a sandbox
		p.sandbox, p.state = m.id("s"), rapid.SampledFrom([]pods.State{pods.Claimed, pods.Released}).Draw(m.T, "state")
		m.addRoutes(p.sandbox, key, p.IP)
	case 1: // on record, to be deleted
		m.table.RecoverRetirement(key, m.outbox.Next())
		m.intents[key], p.state = durable, pods.Going
	case 2, 3:
		m.change(&p.Pod)
		m.change(&p.Pod)
	}
	m.observe(p, p.Pod)
}

// change changes an observation, as far as that is possible in the life of a pod.
func (m *model) change(seen *step.Pod) {
	switch rapid.IntRange(0, 11).Draw(m.T, "change") {
	case 0, 1:
		seen.Ready = !seen.Ready
	case 2, 3:
		seen.IP = m.address()
	case 4:
		seen.IP = netip.Addr{}
	case 5:
		seen.Deleting = true
	case 6:
		seen.Finished = true
	case 7:
		seen.Used = !seen.Used
	case 8:
		seen.Mislabelled = !seen.Mislabelled
	case 9:
		seen.Pool = ""
	case 10:
		seen.Metadata = "other"
	case 11:
		seen.Reason = rapid.SampledFrom([]string{"", step.PodCrashLoop}).Draw(m.T, "reason")
	}
}
