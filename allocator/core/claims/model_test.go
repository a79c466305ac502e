package claims_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/fence"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// The bounds of the model.
const (
	keep         = 20 * time.Second
	maxWaiting   = 4 // callers of the pool
	maxSandboxes = 6 // of a team
)

// model is the caller of a Table with one pool, and judges its answers. The tables of pods, sandboxes and pools have
// models of their own: what they show is taken as it is.
type model struct {
	*rapid.T
	step      *step.Current
	outbox    *fact.Outbox
	pods      *pods.Table
	sandboxes *sandboxes.Table
	fences    *fence.Ledger
	pools     *pools.Table
	table     *claims.Table
	spec      step.Pool
	next      int
	seen      map[fact.PodKey]step.Pod // the pods that exist

	pressure, closing bool
	quarantine        time.Duration
	underWay          bool // a Write is
	room              int  // how many callers may wait after a claim; 0: the action is another one

	callers map[uint64]*caller // that have no answer yet
	all     []*claim           // that hold something, in the order in which they came
	ids     map[string]*sandbox
	granted int
}

type caller struct {
	*claim
	until time.Duration
}

// internal is the key of a claim without a key that a replica has forwarded.
const internal = fact.InternalKeys + "k"

type state int

const (
	waiting state = iota
	bound         // its facts were not handed to a Write
	handed
	durable // its agents are being configured
	granted
	over
)

type claim struct {
	number         int
	team, key      string
	hash           byte
	count, atLeast int
	batch, values  bool
	state          state
	got            []string // the sandboxes of the latest attempt, or those that were granted
	failures       int
	succeeded      bool // a caller of a batch has an answer, or enough of it has started
}

// sandbox is what is known of a sandbox from its fact.
type sandbox struct {
	*claim
	fact.Sandbox
	agent, written, answered, unfit, rejected bool
	freeAt                                    time.Duration // when its key holds no longer; 0: it is not released
}

// is reports whether the claim has got the sandbox, and is in a state.
func (s *sandbox) is(state state) bool { return s.state == state && slices.Contains(s.got, s.ID) }

type values struct{}

func (values) String() string { return "" }

func (m *model) chance(percent int, label string) bool {
	return rapid.IntRange(1, 100).Draw(m.T, label) <= percent
}

func (m *model) pool() *pools.Pool { return m.pools.Find(m.spec.Key) }

// live are the sandboxes of a claim that start or run.
func (m *model) live(cl *claim) (live []string, starting, releasing bool) {
	for _, id := range cl.got {
		switch sb := m.sandboxes.Get(id); {
		case sb == nil || sb.Over():
		case sb.Phase == fact.Releasing:
			releasing = true
		default:
			live = append(live, id)
			starting = starting || sb.Phase == fact.Starting
		}
	}
	return live, starting, releasing
}

// used are the sandboxes that a team has or asks for.
func (m *model) used(team string) (used int) {
	for _, cl := range m.all {
		switch {
		case cl.team != team || cl.state == over:
		case cl.state < granted:
			used += cl.count
		default:
			for _, id := range cl.got {
				if sb := m.sandboxes.Get(id); sb != nil && !sb.Over() {
					used++
				}
			}
		}
	}
	return used
}

func (m *model) waiting() (n int) {
	for _, x := range m.callers {
		if x.state == waiting {
			n++
		}
	}
	return n
}

// calls is how many callers a claim has.
func (m *model) calls(cl *claim) (n int) {
	for _, x := range m.callers {
		if x.claim == cl {
			n++
		}
	}
	return n
}

// of returns the claim that a key stands for; nil: it is free.
func (m *model) of(team, key string) *claim {
	if key == "" {
		return nil
	}
	for _, cl := range m.all {
		if cl.team == team && cl.key == key && cl.state != over {
			return cl
		}
	}
	return nil
}

// act wraps an action. Its effects are judged, and what has to follow from it.
func (m *model) act(f func()) func(*rapid.T) {
	return func(t *rapid.T) {
		m.T = t
		f()
		m.heed()
		for groups := m.pods.Touched(); len(groups) > 0; groups = m.pods.Touched() {
			for _, g := range groups {
				m.table.Serve(m.pool())
				m.sandboxes.EndOf(g)
				g.Untouch()
				m.heed()
			}
		}
		fresh := m.binds()
		m.effects()
		m.compare(fresh)
	}
}

// heed takes what the rooms have listed, as Core does.
func (m *model) heed() {
	for {
		if n := m.pods.Next(); n != nil {
			switch n := n.(type) {
			case pods.Disturbed:
				if cl := m.table.HasPod(n.Pod.Key()); cl != nil {
					m.table.PodChanged(cl, n.Pod)
				} else if sb := m.sandboxes.Of(n.Pod.Key()); sb != nil {
					m.sandboxes.PodChanged(sb, n.Pod)
				}
			case pods.Unblocked:
				m.sandboxes.TryEnd(n.Sandbox)
			}
			continue
		}
		switch n := m.sandboxes.Next().(type) {
		case nil:
			if !m.table.AnswerDecided() {
				return
			}
		case sandboxes.Started:
			m.table.Started(n.Sandbox)
		case sandboxes.Released:
			if m.ids[n.Sandbox.ID].freeAt = m.step.Now.Boot; m.ids[n.Sandbox.ID].key != internal {
				m.ids[n.Sandbox.ID].freeAt += keep
			}
			m.table.Released(n.Sandbox)
			m.fences.Begin(n.Sandbox.ID, nil, m.step.Now.Boot)
		}
	}
}

// binds notes which claims have lost their pods. It returns those that have got some.
func (m *model) binds() (fresh []*claim) {
	facts := map[*claim][]*fact.SandboxFact{}
	for _, pending := range m.table.Bound() {
		f := pending.Subject().(*fact.SandboxFact)
		i := slices.IndexFunc(m.all, func(cl *claim) bool { return fmt.Sprint(cl.number) == f.User })
		require.True(m, i >= 0 && m.all[i].state <= handed, "a claim for %s", f.ID)
		if cl := m.all[i]; !slices.Contains(facts[cl], f) { // it is listed for each pod of its claim
			facts[cl] = append(facts[cl], f)
		}
	}
	for _, cl := range m.all {
		if of := facts[cl]; cl.state <= bound && (cl.state == bound || len(of) > 0) && (len(of) == 0 || m.ids[of[0].ID] == nil) {
			m.rebind(cl, of)
			if len(of) > 0 {
				fresh = append(fresh, cl)
			}
		}
	}
	for _, cl := range m.all {
		if cl.state <= bound && m.calls(cl) == 0 {
			cl.state = over
		}
	}
	return fresh
}

// rebind notes that a claim got other pods than it had, or none.
func (m *model) rebind(cl *claim, of []*fact.SandboxFact) {
	lost := cl.state == waiting || m.calls(cl) == 0
	for _, id := range cl.got {
		p := m.pods.Get(m.ids[id].Pod)
		lost = lost || p == nil || p.Withheld() != 0 || !p.Idle()
	}
	require.True(m, lost, "%+v has lost its pods, and all of them are warm", cl)
	if cl.state, cl.got = waiting, nil; len(of) == 0 {
		return
	}
	cl.state = bound
	require.True(m, len(of) >= cl.atLeast && len(of) <= cl.count, "%+v gets %d pods", cl, len(of))
	for _, f := range of {
		require.Nil(m, m.ids[f.ID], "the ID %s was used", f.ID)
		require.Equal(m, cl.team, f.Team)
		require.Equal(m, cl.batch, f.Batch != "")
		require.Equal(m, of[0].Batch, f.Batch)
		for id, o := range m.ids {
			require.True(m, o.Pod != f.Pod || !o.written, "%s and %s have pod %s", id, f.ID, f.Pod.UID)
		}
		m.ids[f.ID] = &sandbox{claim: cl, Sandbox: f.Sandbox, agent: f.Agent.Port != 0}
		cl.got = append(cl.got, f.ID)
	}
}

// fit returns the sandboxes of an attempt that can be granted now.
func (m *model) fit(cl *claim) (fit []string) {
	for _, id := range cl.got {
		if s := m.ids[id]; !s.unfit && !m.spoiled(s) {
			fit = append(fit, id)
		}
	}
	return fit
}

// spoiled reports whether a pod can no longer serve the sandbox that it was taken for.
func (m *model) spoiled(s *sandbox) bool {
	seen, there := m.seen[s.Pod]
	p := m.pods.Get(s.Pod)
	return !there || seen.Deleting || seen.Finished || seen.IP != s.IP || p.Withheld()&(pods.Contested|pods.Quarantined|pods.Tainted) != 0
}

// decide notes whether a claim is granted, when the action that decides it is taken.
func (m *model) decide(cl *claim) {
	fit := m.fit(cl)
	agents := slices.ContainsFunc(cl.got, func(id string) bool { return m.ids[id].agent })
	for _, id := range cl.got {
		m.ids[id].rejected = len(fit) < cl.atLeast || !slices.Contains(fit, id)
	}
	if len(fit) >= cl.atLeast {
		cl.state, cl.got = granted, fit
		m.granted++
		return
	}
	if cl.state, cl.got = waiting, nil; agents {
		cl.failures++
	}
}

// effects judges the answers of an action.
func (m *model) effects() {
	now := m.step.Now.Boot
	take := func(token uint64) *caller {
		x := m.callers[token]
		require.NotNil(m, x, "caller %d has its answer, or has gone", token)
		delete(m.callers, token)
		return x
	}
	for _, e := range m.step.Take() {
		switch e := e.(type) {
		case step.Claimed:
			x := take(e.Token)
			require.True(m, x.state == granted && !x.batch && x.got[0] == e.Sandbox.ID, "%+v is answered with %s", x.claim, e.Sandbox.ID)
			_, starting, _ := m.live(x.claim)
			require.True(m, !starting || x.until <= now || m.closing, "%+v is answered before its sandbox runs", x.claim)
		case step.BatchClaimed:
			x := take(e.Token)
			ids := slices.Clone(e.Ended)
			for _, sb := range e.Sandboxes {
				ids = append(ids, sb.ID)
			}
			require.True(m, x.state == granted && x.batch, "%+v is answered with %v", x.claim, ids)
			live, starting, _ := m.live(x.claim)
			require.ElementsMatch(m, x.got, ids)
			require.GreaterOrEqual(m, len(e.Sandboxes), len(live)) // some end in the same step if the pool is deleted
			require.True(m, x.succeeded || len(e.Sandboxes) >= x.atLeast, "%+v gets %d sandboxes", x.claim, len(e.Sandboxes))
			require.True(m, !starting || x.until <= now || m.closing, "%+v is answered before its sandboxes run", x.claim)
			x.succeeded = true
		case step.ClaimRefused:
			x := take(e.Token)
			m.refused(x, e)
		}
	}
	for _, cl := range m.all { // those whose last caller was refused
		if cl.state == waiting && m.calls(cl) == 0 {
			cl.state = over
		}
	}
}

// refused judges a refusal.
func (m *model) refused(x *caller, e step.ClaimRefused) {
	now := m.step.Now.Boot
	live, _, _ := m.live(x.claim)
	pool := m.pool()
	require.True(m, x.state != handed && x.state != durable || e.Why == step.Overloaded, "%+v is refused (%d) while it is written", x.claim, e.Why)
	switch e.Why {
	case step.NoPool:
		require.True(m, pool.Deleting)
	case step.PoolEmpty:
		require.LessOrEqual(m, x.until, now)
	case step.TooMany:
		require.Greater(m, x.atLeast, pool.MaxPods)
		require.NotZero(m, pool.MaxPods)
	case step.KeyReused:
		require.NotEqual(m, x.hash, m.of(x.team, x.key).hash)
	case step.KeyEnded:
		require.True(m, x.state == granted && len(live) == 0 && x.key != "", "%+v", x.claim)
	case step.Overloaded:
		require.True(m, m.pressure || m.calls(x.claim) >= maxWaiting)
	case step.StartFailed:
		require.True(m, x.state == granted && len(live) < x.atLeast && !x.succeeded, "%+v with %d sandboxes", x.claim, len(live))
	case step.Ending:
		require.True(m, m.closing)
	case step.Quarantined:
		require.Greater(m, m.quarantine, x.until-now)
	case step.LineFull:
		require.GreaterOrEqual(m, m.waiting(), maxWaiting-1)
	case step.OverLimit:
		require.Equal(m, teams.MaxSandboxes, e.Excess.Limit)
		require.GreaterOrEqual(m, e.Excess.Used, m.used(x.team)-x.count)
		require.Greater(m, e.Excess.Used+x.count, maxSandboxes)
	case step.NotConfigured:
		require.True(m, x.values || x.failures == claims.MaxFailures || x.failures > 0 && x.until <= now, "%+v", x.claim)
	case step.NotAccepted:
		require.NotEmpty(m, pool.Refused)
	}
}

// compare compares the table with the model, and judges which callers still wait, and which claims have got pods.
func (m *model) compare(fresh []*claim) {
	require.NoError(m, errors.Join(m.table.Check(), m.sandboxes.Check(), m.pods.Check()))
	for _, team := range []string{"x", "y"} {
		require.LessOrEqual(m, m.used(team), maxSandboxes, "the sandboxes of team %s", team)
	}
	if m.room > 0 { // a claim that returns may come into a full line
		require.LessOrEqual(m, m.waiting(), m.room)
		m.room = 0
	}
	require.Equal(m, m.waiting(), m.table.Waiting(m.spec.Key))
	for _, cl := range m.all {
		live, starting, releasing := m.live(cl)
		cl.succeeded = cl.succeeded || cl.state == granted && len(live) >= cl.atLeast && !starting && !releasing
		for _, other := range fresh { // one that asks for several may have got its pods earlier
			require.False(m, cl.state == waiting && other.count == 1 && cl.team == other.team && cl.number < other.number, "%+v comes before %+v", other, cl)
		}
	}
	for token, x := range m.callers {
		live, starting, releasing := m.live(x.claim)
		switch require.True(m, m.table.Has(token), "%+v waits", x.claim); x.state {
		case waiting:
			require.False(m, m.closing || m.pool().Deleting, "%+v waits", x.claim)
		case granted:
			require.True(m, starting || releasing, "%+v is not answered, %d sandboxes live", x.claim, len(live))
		}
	}
	configuring := slices.Sorted(m.table.Configuring())
	var want []string
	for id, s := range m.ids {
		if s.is(durable) {
			s.unfit = s.unfit || m.spoiled(s) || m.pool().Deleting
			if s.agent && !s.answered {
				want = append(want, id)
			}
		}
	}
	require.ElementsMatch(m, want, configuring, "the agents that have not answered")
	for id, s := range m.ids {
		sb := m.sandboxes.Get(id)
		switch {
		case s.rejected:
			require.True(m, sb == nil || !sb.Lives() && sb.IdempotencyKey == "", "%s is rejected, and in phase %d", id, sb.Phase)
		case s.is(granted):
			require.True(m, sb != nil, "%s is granted", id)
		}
	}
	m.free()
	m.all = slices.DeleteFunc(m.all, func(cl *claim) bool { return cl.state == over && m.calls(cl) == 0 })
}

func TestTableAgreesWithItsModel(t *testing.T) {
	granted := 0
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, step: &step.Current{Now: step.Instant{Boot: time.Hour, Wall: time.Unix(1e9, 0)}}, outbox: fact.NewOutbox(1, 0),
			fences: fence.New(0), seen: map[fact.PodKey]step.Pod{}, callers: map[uint64]*caller{}, ids: map[string]*sandbox{},
			spec: step.Pool{Key: fact.PoolKey{Namespace: "ns", Name: "a"}, PostStart: rapid.Bool().Draw(t, "hook")},
		}
		ledger := claims.NewLedger()
		m.pods = pods.New(m.step, m.outbox, func() bool { return m.quarantine > 0 })
		m.sandboxes = sandboxes.New(m.step, m.outbox, m.pods, m.fences, idle.New(time.Second, false), ledger.Keeps)
		m.pools = pools.New(m.step, m.pods, func() string { return "" })
		m.table = claims.New(m.step, claims.Config{
			MaxWaiting: maxWaiting, NewID: func() string { m.next++; return fmt.Sprint("s", m.next) },
			Quarantine: func(time.Duration) time.Duration { return m.quarantine },
		}, m.outbox, ledger, m.pods, m.sandboxes, m.pools)
		m.table.Limit(teams.Settings{Default: teams.Limits{MaxSandboxes: maxSandboxes}})
		m.pods.NodeSeen("n", true, false)
		m.pools.Observe(m.spec)
		for range 3 {
			t.Repeat(m.actions())
		}
		m.T = t
		m.finish()
		granted += m.granted
	})
	t.Logf("%d claims were granted", granted)
}
