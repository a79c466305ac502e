package taint_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/taint"
)

var one, two = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")

func at(ip netip.Addr) taint.Observation { return taint.Observation{IP: ip} }

func unretired(string) bool { return false }

func TestIdlePodAtRoutedAddressIsTainted(t *testing.T) {
	l := taint.New[string]()
	own, other, late := &taint.Pod[string]{Key: "own"}, &taint.Pod[string]{Key: "other"}, &taint.Pod[string]{Key: "late"}
	l.Seen(own, at(one))
	l.Seen(other, at(one))
	require.True(t, own.Contested() && other.Contested())
	tainted, others := l.AddRoutes("x", "own", []netip.Addr{one})
	require.Equal(t, []*taint.Pod[string]{other}, tainted)
	require.Equal(t, []*taint.Pod[string]{other}, others)
	became, others := l.Seen(late, at(one))
	require.True(t, became && late.Tainted() && late.AddressTainted())
	require.Equal(t, []*taint.Pod[string]{own, other}, others)
	require.False(t, own.Tainted())
	require.Equal(t, []*taint.Pod[string]{other, late}, l.Fenced("x", unretired))
	require.True(t, late.Tainted() && !late.AddressTainted())
}

func TestSandboxIsBlockedUntilTaintedPodsRetire(t *testing.T) {
	l := taint.New[string]()
	l.AddRoutes("x", "own", []netip.Addr{one})
	moved, stays := &taint.Pod[string]{Key: "moved"}, &taint.Pod[string]{Key: "stays"}
	l.Seen(moved, at(one))
	l.Seen(moved, at(two))
	l.Seen(stays, at(one))
	require.True(t, l.Routed("x"))
	l.Fenced("x", unretired)
	require.True(t, !l.Routed("x") && l.Blocked("x"))
	require.Empty(t, l.Retired(moved))
	_, done := l.Gone(stays)
	require.Equal(t, []string{"x"}, done)
	require.False(t, l.Blocked("x"))
}

func TestEndingPodDoesNotContestAnAddress(t *testing.T) {
	l := taint.New[string]()
	old, next := &taint.Pod[string]{Key: "old"}, &taint.Pod[string]{Key: "next"}
	l.Seen(old, taint.Observation{IP: one, Ending: true})
	l.Seen(next, at(one))
	require.True(t, old.Contested() && !next.Contested())
}

// model knows which pods each sandbox may have reached.
type model struct {
	*rapid.T
	ledger  *taint.Ledger[string]
	n       int
	pods    map[string]*pod
	routes  map[string]route           // that are not fenced
	reached map[string]map[string]bool // by sandbox, also of those that are fenced
}

type pod struct {
	*taint.Pod[string]
	ip            netip.Addr
	used, retired bool
}

type route struct {
	pod string
	ip  netip.Addr
}

func (m *model) pick(fits func(*pod) bool) *pod {
	var keys []string
	for _, key := range slices.Sorted(maps.Keys(m.pods)) {
		if fits(m.pods[key]) {
			keys = append(keys, key)
		}
	}
	if len(keys) == 0 {
		m.Skip()
	}
	return m.pods[rapid.SampledFrom(keys).Draw(m.T, "pod")]
}

// reach notes which idle pods are at addresses to which other sandboxes have a route.
func (m *model) reach() {
	for sandbox, r := range m.routes {
		for key, p := range m.pods {
			if p.ip == r.ip && !p.used && key != r.pod {
				m.reached[sandbox][key] = true
			}
		}
	}
}

func (m *model) seen(p *pod) {
	p.ip = rapid.SampledFrom([]netip.Addr{{}, one, two}).Draw(m.T, "address")
	before := p.Tainted()
	tainted, others := m.ledger.Seen(p.Pod, taint.Observation{IP: p.ip, Used: p.used})
	m.reach()
	require.Equal(m, p.Tainted() && !before, tainted)
	for _, o := range m.pods {
		if o != p && o.ip == p.ip && p.ip.IsValid() {
			require.Contains(m, others, o.Pod)
			require.True(m, p.Contested() && o.Contested())
		}
	}
}

func (m *model) actions() map[string]func(*rapid.T) {
	with := func(f func()) func(*rapid.T) {
		return func(t *rapid.T) { m.T = t; f() }
	}
	exists := func(*pod) bool { return true }
	return map[string]func(*rapid.T){
		"new": with(func() {
			m.n++
			p := &pod{Pod: &taint.Pod[string]{Key: fmt.Sprint("p", m.n)}}
			m.pods[p.Key] = p
			m.seen(p)
		}),
		"seen": with(func() { m.seen(m.pick(exists)) }),
		"gone": with(func() {
			p := m.pick(exists)
			delete(m.pods, p.Key)
			m.ledger.Gone(p.Pod)
		}),
		"retire": with(func() {
			p := m.pick(exists)
			p.retired = true
			m.ledger.Retired(p.Pod)
		}),
		"claim": with(func() {
			p := m.pick(func(p *pod) bool { return p.ip.IsValid() && !p.used && !p.retired })
			m.n++
			sandbox := fmt.Sprint("s", m.n)
			p.used = true
			m.routes[sandbox], m.reached[sandbox] = route{p.Key, p.ip}, map[string]bool{}
			m.ledger.AddRoutes(sandbox, p.Key, []netip.Addr{p.ip})
			m.reach()
		}),
		"fence": with(func() {
			if len(m.routes) == 0 {
				m.Skip()
			}
			sandbox := rapid.SampledFrom(slices.Sorted(maps.Keys(m.routes))).Draw(m.T, "sandbox")
			delete(m.routes, sandbox)
			m.ledger.Fenced(sandbox, func(key string) bool { return m.pods[key].retired })
		}),
		"": with(m.check),
	}
}

func (m *model) check() {
	var all []*taint.Pod[string]
	for key, p := range m.pods {
		all = append(all, p.Pod)
		reached := false
		for _, pods := range m.reached {
			reached = reached || pods[key]
		}
		require.Equal(m, reached, p.Tainted(), key)
	}
	require.NoError(m, m.ledger.Check(all))
	for sandbox, pods := range m.reached {
		_, routed := m.routes[sandbox]
		require.Equal(m, routed, m.ledger.Routed(sandbox))
		for key := range pods {
			if p := m.pods[key]; p != nil && !p.retired {
				require.True(m, routed || m.ledger.Blocked(sandbox), "%s has reached %s", sandbox, key)
			}
		}
		// Every sandbox is done in the end.
		if m.ledger.Blocked(sandbox) {
			require.True(m, slices.ContainsFunc(all, func(p *taint.Pod[string]) bool { return p.Tainted() && !m.pods[p.Key].retired }))
		}
	}
}

func TestLedgerAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, ledger: taint.New[string](), pods: map[string]*pod{}, routes: map[string]route{},
			reached: map[string]map[string]bool{},
		}
		t.Repeat(m.actions())
	})
}
