package idle_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/api/activity"
)

const (
	window  = 5 * time.Second
	timeout = 8 * time.Second
	expiry  = 20 * time.Second
)

// model knows of each gateway what is open at its Envoy and when it last used which sandbox. One
// router after the other stands beside each Envoy. Routers say the truth, late or not at all.
type model struct {
	*rapid.T
	ledger    *idle.Ledger
	now       time.Duration
	next      int
	sandboxes map[string]*sandbox
	gateways  []*gateway
	released  int
}

type sandbox struct {
	idle.Sandbox
	used time.Duration
}

type gateway struct {
	name string
	open map[string]bool          // sandboxes with an open request
	used map[string]time.Duration // when each was last used, as its router remembers
	// router is empty if none is there. What the one before has left open counts until then.
	router    string
	until     time.Duration
	connected bool
	knows     map[string]bool // routes
	held      map[string]bool // sandboxes for which no request is admitted
	question  *idle.Ask
	nonce     uint64
}

func (g *gateway) counts(now time.Duration) bool { return g.router != "" || now < g.until }

func (m *model) gateway(want func(*gateway) bool) *gateway {
	var all []*gateway
	for _, g := range m.gateways {
		if want(g) {
			all = append(all, g)
		}
	}
	if len(all) == 0 {
		m.Skip()
	}
	return rapid.SampledFrom(all).Draw(m.T, "gateway")
}

func (m *model) id(from map[string]bool) string {
	ids := slices.Sorted(maps.Keys(from))
	ids = slices.DeleteFunc(ids, func(id string) bool { return m.sandboxes[id] == nil })
	if len(ids) == 0 {
		m.Skip()
	}
	return rapid.SampledFrom(ids).Draw(m.T, "sandbox")
}

func (m *model) add(*rapid.T) {
	m.next++
	s := &sandbox{used: m.now, Sandbox: idle.Sandbox{
		ID: fmt.Sprintf("s%03d", m.next), Timeout: timeout,
	}}
	m.sandboxes[s.ID] = s
	m.ledger.Add(s.Sandbox, m.now, activity.Claim, m.now)
	for _, g := range m.gateways {
		if g.connected {
			g.knows[s.ID] = true
		}
	}
}

func (m *model) join(*rapid.T) {
	m.connect(m.gateway(func(g *gateway) bool { return !g.connected }))
}

func (m *model) connect(g *gateway) {
	if g.router == "" {
		m.next++
		g.router, g.used = fmt.Sprintf("r%03d", m.next), map[string]time.Duration{}
	}
	m.judge(m.ledger.Joined(g.router, m.now))
	g.connected, g.knows, g.held, g.question = true, map[string]bool{}, map[string]bool{}, nil
	for id := range m.sandboxes {
		g.knows[id] = true
	}
}

func (m *model) leave(*rapid.T) {
	g := m.gateway(func(g *gateway) bool { return g.connected })
	g.connected, g.question = false, nil
	m.judge(m.ledger.Left(g.router, m.now))
}

// end ends a router. One that is connected may report before.
func (m *model) end(t *rapid.T) {
	g := m.gateway(func(g *gateway) bool { return g.router != "" })
	looked := g.connected && rapid.Bool().Draw(t, "looked")
	if looked {
		m.report(g)
	}
	id := g.router
	g.router, g.connected, g.question, g.until = "", false, nil, m.now+expiry
	open, v := m.ledger.End(id, looked, g.until, m.now)
	for id := range g.open {
		require.True(m, open || m.sandboxes[id] == nil, "%s is open", id)
	}
	m.judge(v)
}

func (m *model) use(t *rapid.T) {
	g := m.gateway(func(g *gateway) bool { return g.router != "" })
	id := m.id(g.knows)
	if g.held[id] {
		t.Skip()
	}
	m.sandboxes[id].used, g.used[id] = m.now, m.now
	if rapid.Bool().Draw(t, "stays open") {
		g.open[id] = true
	}
}

func (m *model) closes(*rapid.T) {
	g := m.gateway(func(g *gateway) bool { return len(g.open) > 0 })
	m.close(g, m.id(g.open))
}

func (m *model) close(g *gateway, id string) {
	delete(g.open, id)
	if s := m.sandboxes[id]; s != nil && g.counts(m.now) {
		s.used, g.used[id] = m.now, m.now
	}
}

// activities are what a router says.
func (m *model) activities(g *gateway) (list []idle.Activity) {
	for id := range m.sandboxes {
		at, used := g.used[id]
		a := idle.Activity{ID: id, Age: m.now - at, Kind: activity.Open}
		if g.open[id] {
			a.Age, a.Open = 0, 1
		}
		if used || g.open[id] {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, func(a, b idle.Activity) int { return strings.Compare(a.ID, b.ID) })
	return list
}

func (m *model) reports(*rapid.T) { m.report(m.gateway(func(g *gateway) bool { return g.connected })) }

func (m *model) report(g *gateway) {
	g.nonce++
	m.ledger.Ponged(g.router, g.nonce)
	m.ledger.Report(g.router, idle.Report{Activities: m.activities(g)}, m.now) // in two parts
	m.ledger.Report(g.router, idle.Report{Gateway: g.name, Nonce: g.nonce}, m.now)
}

func (m *model) blind(*rapid.T) {
	g := m.gateway(func(g *gateway) bool { return g.connected })
	m.ledger.Report(g.router, idle.Report{Activities: m.activities(g), Blind: "the look timed out"}, m.now)
}

func (m *model) passes(t *rapid.T) {
	m.tick(time.Duration(rapid.IntRange(1, 30).Draw(t, "passed")) * 100 * time.Millisecond)
}

func (m *model) tick(passed time.Duration) {
	m.now += passed
	for _, g := range m.gateways {
		if g.router == "" && m.now >= g.until {
			clear(g.open) // no router has had a session beside it for too long
		}
	}
	m.judge(m.ledger.Expire(m.now))
	_, ask, v := m.ledger.Ask(m.now, noProbe)
	if len(ask.Sandboxes) > 0 {
		for _, g := range m.gateways {
			if g.connected {
				g.question = &ask
				for _, id := range ask.Sandboxes {
					g.held[id] = true
				}
			}
		}
	}
	m.judge(v)
}

func (m *model) answers(*rapid.T) {
	m.answer(m.gateway(func(g *gateway) bool { return g.question != nil }))
}

func (m *model) answer(g *gateway) {
	round := g.question.Round
	g.question = nil
	blind := ""
	if rapid.IntRange(0, 5).Draw(m.T, "blind") == 5 {
		blind = "the look timed out"
	}
	m.judge(m.ledger.Answer(g.router, round, m.activities(g), blind, m.now))
}

// judge demands that nothing that is released was in use within its timeout, as far as a router
// could tell.
func (m *model) judge(v idle.Verdict) {
	for _, id := range v.Idle {
		s := m.sandboxes[id]
		require.LessOrEqual(m, s.used, m.now-timeout, "%s was used", s.ID)
		use, _ := m.ledger.Use(id)
		require.GreaterOrEqual(m, use.At, s.used)
		for _, g := range m.gateways {
			require.False(m, g.open[s.ID] && g.counts(m.now), "%s has an open request at %s", s.ID, g.name)
			delete(g.knows, s.ID)
		}
		m.ledger.Remove(s.ID)
		delete(m.sandboxes, s.ID)
		m.released++
	}
	for _, id := range v.Resume {
		for _, g := range m.gateways {
			if g.connected {
				require.True(m, g.held[id], "%s goes on and was not held", id)
				delete(g.held, id)
			}
		}
	}
}

// settle has everything end and all routers answer. Then every sandbox is released.
func (m *model) settle() {
	for _, g := range m.gateways {
		for id := range maps.Clone(g.open) {
			m.close(g, id)
		}
		if !g.connected {
			m.connect(g)
		}
	}
	for deadline := m.now + 3*time.Minute; len(m.sandboxes) > 0; m.tick(time.Second) {
		require.Less(m, m.now, deadline, "%d are not released", len(m.sandboxes))
		for _, g := range m.gateways {
			m.report(g)
			if g.question != nil {
				m.answer(g)
			}
		}
		require.NoError(m, m.ledger.Check())
	}
}

func TestModelReleasesOnlyWhatIsUnused(t *testing.T) {
	released := 0
	rapid.Check(t, func(t *rapid.T) {
		m := &model{T: t, ledger: idle.New(window, false), now: time.Second, sandboxes: map[string]*sandbox{}}
		for i := range 2 {
			m.gateways = append(m.gateways, &gateway{name: fmt.Sprintf("gateway %d", i), open: map[string]bool{}})
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": m.add, "join": m.join, "leave": m.leave, "end": m.end, "use": m.use, "close": m.closes,
			"report": m.reports, "report2": m.reports, "blind": m.blind, "tick": m.passes, "tick2": m.passes,
			"answer": m.answers, "answer2": m.answers,
			"": func(*rapid.T) { require.NoError(m, m.ledger.Check()) },
		})
		m.settle()
		released += m.released
	})
	t.Logf("%d were released", released)
}
