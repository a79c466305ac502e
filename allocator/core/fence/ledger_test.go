package fence_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fence"
)

const window = 5 * time.Second

func TestFenceWaitsForEveryRouterThenTheWindow(t *testing.T) {
	l := fence.New(window)
	l.Begin("x", []string{"r1", "r2"}, 0)
	l.Sent("r1", 2, []string{"x"})
	l.Sent("r2", 7, []string{"x"})
	require.Empty(t, l.Acknowledge("r1", 1))
	require.Equal(t, []string{"x"}, l.Acknowledge("r1", 3))
	cleared, complete := l.Advance("x", time.Second)
	require.False(t, cleared || complete)
	require.Equal(t, map[string]uint64{"r2": 7}, maps.Collect(l.Waiting("x")))
	require.Equal(t, []string{"x"}, l.Remove("r2"))
	cleared, complete = l.Advance("x", 2*time.Second)
	require.True(t, cleared)
	require.False(t, complete)
	require.Equal(t, 4*time.Second, l.WindowLeft("x", 3*time.Second))
	cleared, complete = l.Advance("x", 7*time.Second)
	require.False(t, cleared)
	require.True(t, complete)
	require.True(t, l.Complete("x"))
	require.Zero(t, l.Len())
}

func TestSnapshotStandsForReleasesBeforeIt(t *testing.T) {
	l := fence.New(window)
	l.Begin("x", []string{"r"}, 0)
	l.Sent("r", 2, []string{"x"})
	l.Disconnected("r")
	require.Empty(t, l.Acknowledge("r", 2), "an acknowledgement of a stream that has ended")
	l.SentSnapshot("r", 1)
	l.Begin("y", []string{"r"}, 0)
	require.Equal(t, []string{"y"}, l.Unsent("r"))
	l.Sent("r", 2, []string{"y"})
	l.AllSent()
	require.False(t, l.HasUnsent())
	require.Equal(t, []string{"x"}, l.Acknowledge("r", 1))
	require.Equal(t, []string{"y"}, l.Acknowledge("r", 2))
}

func TestReopenedFenceCompletesOnce(t *testing.T) {
	l := fence.New(window)
	l.Begin("x", nil, 0)
	_, complete := l.Advance("x", 0)
	require.False(t, complete)
	_, complete = l.Advance("x", window)
	require.True(t, complete)
	_, complete = l.Advance("x", window)
	require.False(t, complete)
	l.Reopen("x")
	l.Reopen("x")
	require.Equal(t, 1, l.Len())
	cleared, complete := l.Advance("x", window)
	require.False(t, cleared, "it was cleared before")
	require.True(t, complete)
}

// model knows of each router which sandboxes it may still route to.
type model struct {
	*rapid.T
	ledger  *fence.Ledger
	now     time.Duration
	next    int
	routers map[string]*router
	clearAt map[string]time.Duration // by sandbox: when the last router lost its route
}

type router struct {
	knows     map[string]bool // sandboxes that were released and that it may route to
	awaited   bool            // it was added to the fences that were under way
	connected bool
	sequence  uint64
	sent      []message
}

type message struct {
	sequence  uint64
	sandboxes []string
}

func (m *model) router(connected bool) (string, *router) {
	var ids []string
	for id, r := range m.routers {
		if r.connected == connected {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		m.Skip()
	}
	slices.Sort(ids)
	id := rapid.SampledFrom(ids).Draw(m.T, "router")
	return id, m.routers[id]
}

// routable reports whether a router may route to a sandbox.
func (m *model) routable(id string, awaited bool) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(m.routers)), func(r *router) bool {
		return r.knows[id] && (awaited || !r.awaited)
	})
}

// lost notes which sandboxes no router can route to any more.
func (m *model) lost() {
	for id, at := range m.clearAt {
		switch {
		case at < 0 && !m.routable(id, true):
			m.clearAt[id] = m.now
		case at >= 0 && m.routable(id, false):
			m.Fatalf("%s came back", id)
		}
	}
}

func (m *model) advance(ids []string) {
	m.lost()
	for _, id := range ids {
		m.ledger.Advance(id, m.now)
	}
}

func (m *model) actions() map[string]func(*rapid.T) {
	with := func(f func()) func(*rapid.T) {
		return func(t *rapid.T) { m.T = t; f() }
	}
	return map[string]func(*rapid.T){
		"join": with(func() {
			id := rapid.SampledFrom([]string{"r1", "r2", "r3"}).Draw(m.T, "id") // IDs come again
			if m.routers[id] == nil {
				m.routers[id] = &router{knows: map[string]bool{}}
			}
		}),
		"await": with(func() { // routers that serve all routes, and whose session begins now
			m.next++
			r := &router{knows: map[string]bool{}, awaited: true}
			id := fmt.Sprint("earlier", m.next)
			m.routers[id] = r
			for s := range m.ledger.UnderWay() {
				r.knows[s] = true
			}
			m.ledger.Await(id)
		}),
		"connect": with(func() {
			id, r := m.router(false)
			if r.awaited {
				m.Skip()
			}
			r.connected, r.sequence = true, 1
			r.sent = []message{{1, slices.Sorted(maps.Keys(r.knows))}}
			m.ledger.SentSnapshot(id, 1)
		}),
		"disconnect": with(func() {
			id, r := m.router(true)
			r.connected, r.sent = false, nil
			m.ledger.Disconnected(id)
		}),
		"release": with(func() {
			m.next++
			id := fmt.Sprint("s", m.next)
			m.clearAt[id] = -1
			ids := slices.Sorted(maps.Keys(m.routers))
			for _, r := range m.routers {
				r.knows[id] = true
			}
			m.ledger.Begin(id, ids, m.now)
			for _, to := range ids {
				if r := m.routers[to]; r.connected {
					require.Equal(m, []string{id}, m.ledger.Unsent(to))
					r.sequence++
					r.sent = append(r.sent, message{r.sequence, []string{id}})
					m.ledger.Sent(to, r.sequence, []string{id})
					require.Empty(m, m.ledger.Unsent(to))
				}
			}
			m.ledger.AllSent()
			m.advance([]string{id})
		}),
		"acknowledge": with(func() {
			id, r := m.router(true)
			if len(r.sent) == 0 {
				m.Skip()
			}
			n := rapid.IntRange(1, len(r.sent)).Draw(m.T, "messages")
			for _, msg := range r.sent[:n] {
				for _, s := range msg.sandboxes {
					delete(r.knows, s)
				}
			}
			upTo := r.sent[n-1].sequence
			r.sent = r.sent[n:]
			m.advance(m.ledger.Acknowledge(id, upTo))
		}),
		"end": with(func() {
			id, _ := m.router(rapid.Bool().Draw(m.T, "connected"))
			delete(m.routers, id)
			m.advance(m.ledger.Remove(id))
		}),
		"time": with(func() {
			m.now += time.Duration(rapid.IntRange(1, 6).Draw(m.T, "seconds")) * time.Second
			m.advance(slices.Collect(m.ledger.UnderWay()))
		}),
		"": with(m.check),
	}
}

func (m *model) check() {
	require.NoError(m, m.ledger.Check())
	for id, at := range m.clearAt {
		if m.ledger.Complete(id) && (at < 0 || m.now < at+window || m.routable(id, true)) {
			m.Fatalf("%s is complete at %v; the last router lost its route at %v", id, m.now, at)
		}
		for r, known := range m.routers {
			if _, waits := maps.Collect(m.ledger.Waiting(id))[r]; waits != known.knows[id] {
				m.Fatalf("the fence of %s waits for %s: %v, which knows the route: %v", id, r, waits, known.knows[id])
			}
		}
		require.Equal(m, m.routable(id, true), m.ledger.CountWaiting(id) > 0)
	}
	// Every fence completes in the end, once time has passed.
	for id := range m.ledger.UnderWay() {
		if at := m.clearAt[id]; at >= 0 && m.now > at+window+6*time.Second && !m.routable(id, true) {
			m.Fatalf("%s was cleared at %v and is not complete at %v", id, at, m.now)
		}
	}
}

func TestLedgerAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{T: t, ledger: fence.New(window), routers: map[string]*router{}, clearAt: map[string]time.Duration{}}
		t.Repeat(m.actions())
	})
}

func TestDroppedFenceWaitsForNothing(t *testing.T) {
	l := fence.New(5 * time.Second)
	l.Begin("a", []string{"r"}, 0)
	l.Begin("b", []string{"r"}, 0)
	l.Sent("r", 1, []string{"a", "b"})
	l.Drop("a")
	l.Drop("a")
	if ids := l.Acknowledge("r", 1); len(ids) != 1 || ids[0] != "b" {
		t.Errorf("acknowledged: %v", ids)
	}
	if _, _, ok := l.Began("a"); ok || l.Len() != 1 {
		t.Errorf("a began: %v, %d fences", ok, l.Len())
	}
	l.Begin("a", nil, 0) // it may have another one
	if err := l.Check(); err != nil {
		t.Error(err)
	}
}
