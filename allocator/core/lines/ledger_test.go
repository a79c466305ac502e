package lines_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/lines"
)

func tokens(callers []lines.Caller) (all []uint64) {
	for _, x := range callers {
		all = append(all, x.Token)
	}
	return all
}

func TestReturnedClaimKeepsItsPlace(t *testing.T) {
	l, line := lines.New[string](), lines.NewLine[string]()
	for i, name := range []string{"a", "b", "c"} {
		l.Add(line, lines.Caller{Token: uint64(i), Until: lines.All}, lines.Key{}, lines.Hash{}, 1, name)
	}
	a := line.First()
	a.Bind()
	b := line.First()
	b.Bind()
	require.Equal(t, "c", line.First().Request)
	b.Return()
	a.Return()
	for _, want := range []string{"a", "b", "c"} {
		cl := line.First()
		require.Equal(t, want, cl.Request)
		cl.Bind()
	}
	require.Zero(t, line.Callers())
}

func TestTeamsTakeTurnsInALine(t *testing.T) {
	l, line := lines.New[int](), lines.NewLine[int]()
	add := func(team string, n int) {
		for range n {
			token := uint64(line.Callers() + 1)
			l.Add(line, lines.Caller{Token: token, Until: lines.All}, lines.Key{Team: team}, lines.Hash{}, 1, int(token))
		}
	}
	add("noisy", 4)
	add("quiet", 2)
	add("late", 1)
	require.Equal(t, 4, line.Crowding("late").Request, "the newest claim of the team with the most")
	require.Nil(t, line.Crowding("noisy"))
	var order []int
	for cl := line.First(); cl != nil; cl = line.First() {
		order = append(order, cl.Request)
		cl.Bind()
	}
	require.Equal(t, []int{1, 5, 7, 2, 6, 3, 4}, order)
}

func TestKeyIsFreeAfterItsTime(t *testing.T) {
	l, line := lines.New[string](), lines.NewLine[string]()
	key := lines.Key{Team: "t", Key: "k"}
	l.Add(line, lines.Caller{Token: 1, Until: lines.All}, key, lines.Hash{}, 1, "")
	cl := l.Of(key).Claim
	l.AddCaller(cl, lines.Caller{Token: 2, Until: time.Second})
	cl.Bind()
	l.Grant(cl, "x", 1)
	require.Equal(t, "x", l.Of(key).Grant)
	require.Equal(t, []uint64{2}, tokens(l.Answer("x", time.Second)))
	require.Equal(t, []uint64{1}, tokens(l.Answer("x", lines.All)))
	l.Keep(key, "x", "x", time.Minute)
	require.True(t, l.Keeps("x"))
	require.Empty(t, l.DropKeys(time.Minute-1))
	require.Equal(t, []string{"x"}, l.DropKeys(time.Minute))
	require.Nil(t, l.Of(key))
	require.False(t, l.Keeps("x"))
}

// place is where the model expects a caller: at a claim, by its number, or at a sandbox.
type place struct {
	claim   int
	sandbox string
	until   time.Duration
}

type model struct {
	*rapid.T
	ledger  *lines.Ledger[int]
	line    *lines.Line[int]
	now     time.Duration
	numbers int
	token   uint64
	callers map[uint64]place
	bound   []*lines.Claim[int]
	granted map[string]lines.Key
	team    map[int]string // of each claim
	// passed is how many turns each team has had since another one waits. A returned claim gives a
	// turn back.
	passed map[[2]string]int
	// released and freed are the sandboxes that were released, and whose keys do not hold longer.
	released, freed map[string]bool
}

func (m *model) caller() lines.Caller {
	m.token++
	return lines.Caller{Token: m.token, Until: m.now + time.Duration(rapid.IntRange(1, 20).Draw(m.T, "wait"))}
}

func (m *model) claim() {
	key := lines.Key{
		Team: rapid.SampledFrom([]string{"t", "u", "v"}).Draw(m.T, "team"), Key: rapid.SampledFrom([]string{"", "", "k1", "k2"}).Draw(m.T, "key"),
	}
	x := m.caller()
	switch k := m.ledger.Of(key); {
	case k == nil:
		m.numbers++
		m.team[m.numbers] = key.Team
		m.ledger.Add(m.line, x, key, lines.Hash{}, rapid.IntRange(1, 3).Draw(m.T, "pods"), m.numbers)
		m.callers[x.Token] = place{claim: m.numbers, until: x.Until}
	case k.Claim != nil:
		m.ledger.AddCaller(k.Claim, x)
		m.callers[x.Token] = place{claim: k.Claim.Request, until: x.Until}
	case m.granted[k.Grant] != key:
		m.Fatalf("key %v stands for %s, of key %v", key, k.Grant, m.granted[k.Grant])
	default:
		m.ledger.Await(k.Grant, x)
		m.callers[x.Token] = place{sandbox: k.Grant, until: x.Until}
	}
}

// bind takes the first claim out of the line. It must be the oldest of its team, and no other team
// must have waited for two turns of this one.
func (m *model) bind() {
	cl := m.line.First()
	if cl == nil {
		m.Skip()
	}
	cl.Bind()
	m.bound = append(m.bound, cl)
	team := m.team[cl.Request]
	bound := map[int]bool{}
	for _, b := range m.bound {
		bound[b.Request] = true
	}
	for _, p := range m.callers {
		if m.team[p.claim] == team && p.claim < cl.Request && !bound[p.claim] {
			m.Fatalf("claim %d of team %s comes before claim %d", cl.Request, team, p.claim)
		}
	}
	for _, other := range []string{"t", "u", "v"} {
		m.passed[[2]string{team, other}] = 0
		if other == team || m.line.CallersOf(other) == 0 {
			continue
		}
		if m.passed[[2]string{other, team}]++; m.passed[[2]string{other, team}] > 1 {
			m.Fatalf("team %s has waited for two turns of team %s", other, team)
		}
	}
}

// idle forgets the turns that others had while a team waited that does not wait any more.
func (m *model) idle() {
	for pair := range m.passed {
		if m.line.CallersOf(pair[0]) == 0 {
			delete(m.passed, pair)
		}
	}
}

func (m *model) takeBound() *lines.Claim[int] {
	if len(m.bound) == 0 {
		m.Skip()
	}
	i := rapid.IntRange(0, len(m.bound)-1).Draw(m.T, "bound")
	cl := m.bound[i]
	m.bound = slices.Delete(m.bound, i, i+1)
	return cl
}

// returned: the owner of the ledger returns no claim without callers.
func (m *model) returned() {
	cl := m.takeBound()
	if cl.Callers() == 0 {
		m.ledger.Drop(cl)
		return
	}
	cl.Return()
	for _, other := range []string{"t", "u", "v"} {
		m.passed[[2]string{other, m.team[cl.Request]}]--
	}
}

func (m *model) grant() {
	cl := m.takeBound()
	id := fmt.Sprint("s", cl.Request)
	for _, k := range []string{"k1", "k2"} {
		key := lines.Key{Team: m.team[cl.Request], Key: k}
		if h := m.ledger.Of(key); h != nil && h.Claim == cl {
			m.granted[id] = key
		}
	}
	m.ledger.Grant(cl, id, 2) // sandboxes <id>a and <id>b
	m.move(func(p place) bool { return p.claim == cl.Request }, func(p *place) { p.claim, p.sandbox = 0, id })
}

func (m *model) move(which func(place) bool, to func(*place)) {
	for token, p := range m.callers {
		if which(p) {
			to(&p)
			m.callers[token] = p
		}
	}
}

// gone: exactly the callers for which which returns true were returned.
func (m *model) gone(callers []lines.Caller, which func(place) bool) {
	for _, x := range callers {
		if p, ok := m.callers[x.Token]; !ok || !which(p) {
			m.Fatalf("caller %d was returned, it is at %+v: %v", x.Token, p, ok)
		}
		delete(m.callers, x.Token)
	}
	for token, p := range m.callers {
		if which(p) {
			m.Fatalf("caller %d at %+v was not returned", token, p)
		}
	}
}

func (m *model) expire() {
	m.now += time.Duration(rapid.IntRange(0, 10).Draw(m.T, "passes"))
	bound := map[int]bool{}
	for _, cl := range m.bound {
		bound[cl.Request] = true
	}
	over := map[int]bool{} // the claims that wait, later those without a caller
	for _, p := range m.callers {
		if p.claim != 0 && !bound[p.claim] {
			over[p.claim] = true
		}
	}
	late, dropped := m.ledger.Expire(m.line, m.now)
	m.gone(late, func(p place) bool { return p.claim != 0 && !bound[p.claim] && p.until <= m.now })
	for _, p := range m.callers {
		delete(over, p.claim)
	}
	for _, cl := range dropped {
		require.True(m, over[cl.Request], "claim %d was dropped once, and has no caller", cl.Request)
		delete(over, cl.Request)
	}
	require.Empty(m, over, "the claims without a caller")
}

func (m *model) answer() {
	by := rapid.SampledFrom([]time.Duration{m.now, lines.All}).Draw(m.T, "by")
	for _, id := range m.ledger.Awaited() {
		m.gone(m.ledger.Answer(id, by), func(p place) bool { return p.sandbox == id && p.until <= by })
	}
}

func (m *model) abandon() {
	if m.token == 0 {
		m.Skip()
	}
	token := rapid.Uint64Range(1, m.token).Draw(m.T, "token")
	at, waits := m.callers[token]
	delete(m.callers, token)
	last := waits
	for _, p := range m.callers {
		last = last && (p.claim != at.claim || p.sandbox != at.sandbox)
	}
	cl, sandbox := m.ledger.Abandon(token)
	if cl != nil && cl.Request != at.claim || sandbox != "" && sandbox != at.sandbox || (cl != nil || sandbox != "") != last {
		m.Fatalf("caller %d left %+v, returned are %+v and %q", token, at, cl, sandbox)
	}
	if cl != nil && cl.Waits() {
		m.ledger.Drop(cl)
	}
}

func (m *model) release() {
	for _, id := range slices.Sorted(maps.Keys(m.granted)) {
		key := m.granted[id]
		switch sandbox := id + rapid.SampledFrom([]string{"a", "b"}).Draw(m.T, "sandbox"); {
		case m.released[sandbox]:
			continue
		default:
			m.released[sandbox] = true
			m.ledger.Keep(key, id, sandbox, m.now)
		}
		if m.released[id+"a"] && m.released[id+"b"] {
			m.ledger.Answer(id, lines.All)
			m.move(func(p place) bool { return p.sandbox == id }, func(p *place) { p.sandbox = "gone" })
		}
	}
	for token, p := range m.callers {
		if p.sandbox == "gone" {
			delete(m.callers, token)
		}
	}
	for _, sandbox := range m.ledger.DropKeys(m.now - 20) {
		m.freed[sandbox] = true
		if id := sandbox[:len(sandbox)-1]; m.freed[id+"a"] && m.freed[id+"b"] {
			if k := m.ledger.Of(m.granted[id]); k != nil {
				m.Fatalf("key %v of %s is not free: %+v", m.granted[id], id, k)
			}
			delete(m.granted, id)
		}
	}
	for id, key := range m.granted {
		if k := m.ledger.Of(key); k == nil || k.Grant != id {
			m.Fatalf("key %v of %s does not hold: %+v", key, id, k)
		}
	}
}

func (m *model) check() {
	lines := []*lines.Line[int]{m.line}
	if err := errors.Join(m.ledger.Check(lines), m.ledger.CheckAsked(lines, m.bound)); err != nil {
		m.Fatal(err)
	}
	m.idle()
	for token := uint64(1); token <= m.token; token++ {
		if _, waits := m.callers[token]; waits != m.ledger.Has(token) {
			m.Fatalf("caller %d waits: %v", token, m.ledger.Has(token))
		}
	}
}

func TestLedgerAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, ledger: lines.New[int](), line: lines.NewLine[int](), callers: map[uint64]place{}, granted: map[string]lines.Key{},
			team: map[int]string{}, passed: map[[2]string]int{}, released: map[string]bool{}, freed: map[string]bool{},
		}
		actions := map[string]func(*rapid.T){"": func(*rapid.T) { m.check() }}
		for name, f := range map[string]func(){
			"claim": m.claim, "bind": m.bind, "return": m.returned, "grant": m.grant,
			"expire": m.expire, "answer": m.answer, "abandon": m.abandon, "release": m.release,
		} {
			actions[name] = func(t *rapid.T) { m.T = t; f() }
		}
		t.Repeat(actions)
	})
}
