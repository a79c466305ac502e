package member_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/member"
)

const (
	expiry = 60 * time.Second
	window = 5 * time.Second
	absent = 10 * time.Second
)

func ledger() *member.Ledger {
	return member.New(member.Config{Expiry: func(maxStale time.Duration, _ bool) time.Duration { return max(maxStale, expiry) }, ConnectWindow: window, ReturnWithin: absent})
}

func TestPingWaitsForRecordAndReportedDeaths(t *testing.T) {
	l := ledger()
	x, _ := l.Join("x", "", 0, fact.Gateway{}, false, 1, 0)
	r, isNew := l.Join("r", "", 0, fact.Gateway{}, false, 2, 0)
	require.True(t, isNew)
	require.Same(t, r, l.Ping(2, 7, 0))
	_, ok := l.Pong(r)
	require.False(t, ok, "its session is not durable")
	require.True(t, l.Recorded(r))
	require.EqualValues(t, 1, l.Disconnect(x))
	dead, reporter := l.Dead("x", "r", fact.Gateway{}, 0)
	require.Same(t, x, dead)
	_, ok = l.Pong(r)
	require.False(t, ok, "it may forget the proof of the death")
	require.Zero(t, l.End(x))
	l.DeathRecorded(reporter)
	nonce, ok := l.Pong(r)
	require.True(t, ok)
	require.EqualValues(t, 7, nonce)
	_, ok = l.Pong(r)
	require.False(t, ok, "it was answered")
}

func TestReturningRouterWithdrawsItsDeclaration(t *testing.T) {
	l := ledger()
	s := l.Add(member.Session{ID: "r", Durable: true})
	d, isNew := l.Declare(s, 1)
	require.True(t, isNew)
	handed := true
	d.Withdraw = func() bool { return !handed }
	_, isNew = l.Declare(s, 2)
	require.False(t, isNew)
	ok, banned, _ := l.MayJoin("r", fact.Gateway{}, false)
	require.False(t, ok || banned, "the declaration is being written")
	handed = false
	ok, _, withdrawn := l.MayJoin("r", fact.Gateway{}, false)
	require.True(t, ok)
	require.Equal(t, []uint64{1, 2}, withdrawn)
	_, isNew = l.Declare(s, 3)
	require.True(t, isNew)
}

func TestBannedRouterMustWaitForItsExpiry(t *testing.T) {
	l := ledger()
	l.Ban("r", fact.Revision{Term: 1, Counter: 2}, 3, expiry)
	ok, banned, _ := l.MayJoin("r", fact.Gateway{}, false)
	require.True(t, !ok && banned)
	require.Empty(t, l.Lift(expiry))
	require.Equal(t, []member.Ban{{Session: "r", Until: expiry, Fact: fact.Revision{Term: 1, Counter: 2}, Fences: 3}}, l.Lift(expiry+1))
	ok, _, _ = l.MayJoin("r", fact.Gateway{}, false)
	require.True(t, ok)
}

func TestEarlierSessionLastsForTheWindowToo(t *testing.T) {
	l := ledger()
	require.Zero(t, l.Quarantine(0))
	s := l.Add(member.Session{ID: "earlier", Durable: true, Earlier: true, LastPing: 3})
	require.Equal(t, expiry+window, l.Quarantine(3))
	require.Empty(t, l.Expired(3+expiry+window))
	require.Equal(t, []*member.Session{s}, l.Expired(4+expiry+window))
	require.True(t, l.HasEarlier() && l.LastEarlier(s))
	other := l.Add(member.Session{ID: "other", Durable: true, Earlier: true})
	require.False(t, l.LastEarlier(s))
	l.Declare(other, 1)
	require.True(t, l.LastEarlier(s), "the declaration may end the other at any time")
}

// model knows of each router what its session must be.
type model struct {
	*rapid.T
	ledger  *member.Ledger
	now     time.Duration
	stream  uint64
	routers map[string]*router
	records []func() // of facts that are not durable yet, in their order
	bans    map[string]time.Duration
}

type router struct {
	session        *member.Session
	stream         uint64
	durable, asked bool
	lastPing       time.Duration
	maxStale       time.Duration
	gateway        fact.Gateway
	assumed        bool // its max-stale: an earlier version has journaled the session
	learning       int
	expired        bool   // its end is not durable yet
	reportedBy     string // found dead while it was connected
	reportedAt     time.Duration
	deaths         int
	declaration    *declaration
}

func (r *router) expiresAt(lastPing time.Duration) time.Duration {
	return lastPing + max(expiry, r.maxStale)
}

// gatewayOf is the gateway of the router with this ID. One router is of an earlier version.
func gatewayOf(id string) (g fact.Gateway) {
	if id != "d" {
		g[0] = id[0]
	}
	return g
}

type declaration struct{ handed, withdrawn bool }

func (m *model) pick(fits func(*router) bool) (string, *router) {
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(m.routers)) {
		if fits(m.routers[id]) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		m.Skip()
	}
	id := rapid.SampledFrom(ids).Draw(m.T, "router")
	return id, m.routers[id]
}

func (m *model) end(id string, r *router) {
	require.Equal(m, r.stream, m.ledger.End(r.session))
	require.True(m, r.session.Ended())
	r.stream = 0
	delete(m.routers, id)
}

func connected(r *router) bool { return r.stream != 0 }
func every(*router) bool       { return true }

func (m *model) join() {
	id := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(m.T, "id") // IDs come again
	r := m.routers[id]
	ok, banned, _ := m.ledger.MayJoin(id, gatewayOf(id), false)
	_, mustWait := m.bans[id]
	require.Equal(m, mustWait, banned)
	inFlight := r != nil && (r.declaration != nil && r.declaration.handed || r.learning > 0 || r.expired)
	require.Equal(m, !mustWait && !inFlight, ok)
	if !ok {
		return
	}
	maxStale := rapid.SampledFrom([]time.Duration{1, 2 * expiry}).Draw(m.T, "max-stale")
	if r == nil {
		r = &router{maxStale: maxStale, gateway: gatewayOf(id)}
		m.routers[id] = r
	}
	if r.declaration != nil {
		require.True(m, r.declaration.withdrawn)
		r.declaration = nil
	}
	if r.session != nil {
		learned := m.ledger.Learn(r.session, maxStale, gatewayOf(id))
		if r.assumed {
			r.maxStale, r.assumed = 0, false
		}
		if require.Equal(m, maxStale > r.maxStale || gatewayOf(id) != r.gateway, learned); learned {
			r.maxStale, r.gateway = max(r.maxStale, maxStale), gatewayOf(id)
			r.learning++
			m.records = append(m.records, func() { r.learning--; m.ledger.Learned(r.session) })
			m.expire() // what was assumed may have been longer
			return
		}
	}
	if r.stream != 0 {
		require.Equal(m, r.stream, m.ledger.Disconnect(r.session))
	}
	m.stream++
	s, isNew := m.ledger.Join(id, "", maxStale, gatewayOf(id), false, m.stream, m.now)
	require.Equal(m, r.session == nil, isNew)
	if isNew {
		m.records = append(m.records, func() {
			r.durable = true
			require.Equal(m, r.stream != 0, m.ledger.Recorded(s))
		})
	}
	r.session, r.stream, r.asked, r.lastPing, r.reportedBy = s, m.stream, false, m.now, ""
}

// recover makes a session known that an earlier version has journaled.
func (m *model) recover() {
	id := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(m.T, "id")
	if _, banned := m.bans[id]; banned || m.routers[id] != nil {
		m.Skip()
	}
	r := &router{maxStale: 3 * expiry, assumed: true, durable: true, lastPing: m.now}
	r.session = m.ledger.Add(member.Session{ID: id, Durable: true, MaxStale: r.maxStale, Assumed: true, LastPing: m.now})
	m.routers[id] = r
}

func (m *model) declare() {
	id, r := m.pick(func(r *router) bool { return !connected(r) && m.now >= r.lastPing+absent })
	d, isNew := m.ledger.Declare(r.session, 1)
	require.Equal(m, r.declaration == nil, isNew)
	if !isNew {
		return
	}
	own := &declaration{}
	r.declaration = own
	d.Withdraw = func() bool { own.withdrawn = !own.handed; return own.withdrawn }
	m.records = append(m.records, func() {
		if own.withdrawn || r.session.Ended() {
			return
		}
		m.end(id, r)
		m.ledger.Ban(id, fact.Revision{}, 0, r.expiresAt(m.now))
		m.bans[id] = r.expiresAt(m.now)
	})
}

func (m *model) actions() map[string]func(*rapid.T) {
	with := func(f func()) func(*rapid.T) {
		return func(t *rapid.T) { m.T = t; f() }
	}
	return map[string]func(*rapid.T){
		"join":    with(m.join),
		"recover": with(m.recover),
		"declare": with(m.declare),
		"ping": with(func() {
			_, r := m.pick(connected)
			require.Same(m, r.session, m.ledger.Ping(r.stream, uint64(m.now), m.now))
			r.asked, r.lastPing = true, m.now
			if m.now > r.reportedAt+absent {
				r.reportedBy = ""
			}
		}),
		"late": with(func() { // from a stream that has ended
			require.Nil(m, m.ledger.Ping(m.stream+1, 1, m.now))
			require.Nil(m, m.ledger.Acknowledge(m.stream+1, 0))
		}),
		"disconnect": with(func() {
			_, r := m.pick(connected)
			require.Equal(m, r.stream, m.ledger.Disconnect(r.session))
			r.stream = 0
		}),
		"goodbye": with(func() {
			id, r := m.pick(every)
			stream := rapid.SampledFrom([]uint64{0, r.stream}).Draw(m.T, "stream")
			var gateway fact.Gateway
			if r.session != nil {
				gateway = r.session.Gateway
			}
			s, here := m.ledger.Goodbye(id, gateway, false, stream, m.now)
			require.Same(m, r.session, s)
			require.Equal(m, stream != 0, here)
			if here {
				r.stream = 0
			}
			m.end(id, r)
		}),
		"dead": with(func() {
			id, r := m.pick(every)
			by, reporter := m.pick(every)
			shown := rapid.SampledFrom([]fact.Gateway{gatewayOf(id), gatewayOf(id), {}, {9}}).Draw(m.T, "gateway")
			dead, who := m.ledger.Dead(id, by, shown, m.now)
			if believed := r.gateway == (fact.Gateway{}) || r.gateway == shown; id == by || !believed || connected(r) {
				require.Nil(m, dead)
				if id != by && believed {
					r.reportedBy, r.reportedAt = by, m.now
				}
				return
			}
			require.Same(m, r.session, dead)
			require.Same(m, reporter.session, who)
			reporter.deaths++
			m.end(id, r)
			m.records = append(m.records, func() { reporter.deaths--; m.ledger.DeathRecorded(who) })
		}),
		"send": with(func() {
			_, r := m.pick(func(r *router) bool { return connected(r) && r.durable })
			sent := r.session.Sequence
			require.Equal(m, sent+1, m.ledger.NextSequence(r.session))
			upTo := rapid.Uint64Range(0, sent+2).Draw(m.T, "sequence")
			require.Equal(m, upTo <= sent+1, m.ledger.Acknowledge(r.stream, upTo) != nil)
		}),
		"hand": with(func() { // the facts to the writer
			for _, r := range m.routers {
				if r.declaration != nil {
					r.declaration.handed = true
				}
			}
		}),
		"write": with(func() {
			if len(m.records) == 0 {
				m.Skip()
			}
			m.records[0]()
			m.records = m.records[1:]
		}),
		"time": with(m.time),
		"":     with(m.check),
	}
}

func (m *model) time() {
	m.now += time.Duration(rapid.IntRange(1, 130).Draw(m.T, "seconds")) * time.Second
	m.expire()
	for _, b := range m.ledger.Lift(m.now) {
		require.Greater(m, m.now, m.bans[b.Session])
		delete(m.bans, b.Session)
	}
}

func (m *model) expire() {
	for _, s := range m.ledger.Expired(m.now) {
		r := m.routers[s.ID]
		require.Greater(m, m.now, r.expiresAt(r.lastPing))
		require.False(m, r.expired || r.declaration != nil)
		r.expired = true
		require.Equal(m, r.stream, m.ledger.Disconnect(s))
		r.stream = 0
		m.records = append(m.records, func() {
			if !s.Ended() {
				m.end(s.ID, r)
			}
		})
	}
}

func (m *model) check() {
	require.NoError(m, m.ledger.Check())
	require.Len(m, m.ledger.All(), len(m.routers))
	reachable := m.ledger.Reachable()
	for id, r := range m.routers {
		s := m.ledger.Get(id)
		require.Same(m, r.session, s)
		require.Equal(m, fmt.Sprint(r.stream, r.durable, r.lastPing), fmt.Sprint(s.Stream, s.Durable, s.LastPing))
		require.True(m, m.now <= r.expiresAt(r.lastPing) || r.expired || r.declaration != nil, "its routes are stale")
		require.Equal(m, connected(r) && r.durable, slices.Contains(reachable, s))
		by, reported := m.ledger.Reported(s)
		require.True(m, reported == (r.reportedBy != "") && by == r.reportedBy)
		if reported && connected(r) && m.routers[by] != nil {
			require.True(m, m.ledger.Reports(m.routers[by].session))
		}
		if r.stream != 0 {
			require.Same(m, s, m.ledger.OfStream(r.stream))
		}
		_, ok := m.ledger.Pong(s)
		require.Equal(m, r.asked && connected(r) && r.durable && r.deaths == 0, ok)
		r.asked = r.asked && !ok
	}
	for id, until := range m.bans {
		b, ok := m.ledger.Banned(id)
		require.True(m, ok && b.Until == until)
	}
}

func TestLedgerAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{T: t, ledger: ledger(), routers: map[string]*router{}, bans: map[string]time.Duration{}}
		t.Repeat(m.actions())
	})
}
