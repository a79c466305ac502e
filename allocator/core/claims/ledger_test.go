package claims_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/claims"
)

func tokens(callers []claims.Caller) (all []uint64) {
	for _, x := range callers {
		all = append(all, x.Token)
	}
	return all
}

func TestReturnedClaimKeepsItsPlace(t *testing.T) {
	l, line := claims.New[string](), claims.NewLine[string]()
	for i, name := range []string{"a", "b", "c"} {
		l.Add(line, claims.Caller{Token: uint64(i), Until: claims.All}, claims.Key{}, claims.Hash{}, name)
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

func TestKeyIsFreeAfterItsTime(t *testing.T) {
	l, line := claims.New[string](), claims.NewLine[string]()
	key := claims.Key{Team: "t", Key: "k"}
	l.Add(line, claims.Caller{Token: 1, Until: claims.All}, key, claims.Hash{}, "")
	cl := l.Of(key).Claim
	l.Join(cl, claims.Caller{Token: 2, Until: time.Second})
	cl.Bind()
	l.Grant(cl, "x")
	require.Equal(t, "x", l.Of(key).Sandbox)
	require.Equal(t, []uint64{2}, tokens(l.Answer("x", time.Second)))
	require.Equal(t, []uint64{1}, tokens(l.Answer("x", claims.All)))
	l.Keep(key, "x", time.Minute)
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
	ledger  *claims.Ledger[int]
	line    *claims.Line[int]
	now     time.Duration
	numbers int
	token   uint64
	callers map[uint64]place
	bound   []*claims.Claim[int]
	granted map[string]claims.Key
}

func (m *model) caller() claims.Caller {
	m.token++
	return claims.Caller{Token: m.token, Until: m.now + time.Duration(rapid.IntRange(1, 20).Draw(m.T, "wait"))}
}

func (m *model) claim() {
	key := claims.Key{Team: "t", Key: rapid.SampledFrom([]string{"", "k1", "k2"}).Draw(m.T, "key")}
	x := m.caller()
	switch k := m.ledger.Of(key); {
	case k == nil:
		m.numbers++
		m.ledger.Add(m.line, x, key, claims.Hash{}, m.numbers)
		m.callers[x.Token] = place{claim: m.numbers, until: x.Until}
	case k.Claim != nil:
		m.ledger.Join(k.Claim, x)
		m.callers[x.Token] = place{claim: k.Claim.Request, until: x.Until}
	case m.granted[k.Sandbox] != key:
		m.Fatalf("key %v stands for %s, of key %v", key, k.Sandbox, m.granted[k.Sandbox])
	default:
		m.ledger.Await(k.Sandbox, x)
		m.callers[x.Token] = place{sandbox: k.Sandbox, until: x.Until}
	}
}

// bind takes the first claim out of the line. It must be the one that was added first.
func (m *model) bind() {
	cl := m.line.First()
	if cl == nil {
		m.Skip()
	}
	cl.Bind()
	m.bound = append(m.bound, cl)
	if next := m.line.First(); next != nil && next.Request < cl.Request {
		m.Fatalf("claim %d comes before claim %d", cl.Request, next.Request)
	}
}

func (m *model) takeBound() *claims.Claim[int] {
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
}

func (m *model) grant() {
	cl := m.takeBound()
	id := fmt.Sprint("s", cl.Request)
	for _, k := range []string{"k1", "k2"} {
		key := claims.Key{Team: "t", Key: k}
		if h := m.ledger.Of(key); h != nil && h.Claim == cl {
			m.granted[id] = key
		}
	}
	m.ledger.Grant(cl, id)
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
func (m *model) gone(callers []claims.Caller, which func(place) bool) {
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
	m.gone(m.ledger.Expire(m.line, m.now), func(p place) bool {
		return p.claim != 0 && !bound[p.claim] && p.until <= m.now
	})
}

func (m *model) answer() {
	by := rapid.SampledFrom([]time.Duration{m.now, claims.All}).Draw(m.T, "by")
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
	for id, key := range m.granted {
		if !m.ledger.Keeps(id) && m.ledger.Of(key) != nil {
			m.ledger.Answer(id, claims.All)
			m.move(func(p place) bool { return p.sandbox == id }, func(p *place) { p.sandbox = "gone" })
			m.ledger.Keep(key, id, m.now)
		}
	}
	for token, p := range m.callers {
		if p.sandbox == "gone" {
			delete(m.callers, token)
		}
	}
	for _, id := range m.ledger.DropKeys(m.now - 20) {
		delete(m.granted, id)
	}
}

func (m *model) check() {
	if err := m.ledger.Check([]*claims.Line[int]{m.line}); err != nil {
		m.Fatal(err)
	}
	for token := uint64(1); token <= m.token; token++ {
		if _, waits := m.callers[token]; waits != m.ledger.Has(token) {
			m.Fatalf("caller %d waits: %v", token, m.ledger.Has(token))
		}
	}
}

func TestLedgerAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, ledger: claims.New[int](), line: claims.NewLine[int](), callers: map[uint64]place{}, granted: map[string]claims.Key{},
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
