package routecache_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/routecache"
)

// model implements the documented behaviour of the cache without limits and concurrency.
type model struct {
	now, fresh time.Duration
	routes     map[string]routecache.Route
	negative   map[string]negative
	gone       map[string]bool
	ends       map[string]routecache.End // of those that are gone
	quiesced   map[string]bool
	waiting    map[string][]waiting // for the answer about an ID
	waking     map[string]bool      // the open question about an ID is to wake it
	deaf       bool
}

// waiting is a Lookup that waits, or a Wake.
type waiting struct {
	done <-chan result
	wake bool
}

type negative struct {
	answer routecache.Answer
	until  time.Duration
	woken  bool
}

const modelTTL = 2 * time.Second

// peek returns the answer of a Lookup that needs no question, or of a Wake.
func (m *model) peek(id string, wake bool) (a routecache.Answer, known bool, err error) {
	if m.gone[id] {
		return routecache.Answer{Status: routecache.Gone, End: m.ends[id]}, true, nil
	}
	if m.now >= m.fresh {
		return a, false, routecache.ErrNotFresh
	}
	if m.quiesced[id] {
		return routecache.Answer{Status: routecache.Quiesced}, true, nil
	}
	if r, ok := m.routes[id]; ok {
		return routable(r), true, nil
	}
	if n, ok := m.negative[id]; ok && m.now < n.until && (!wake || n.woken || n.answer.Status != routecache.Asleep) {
		return n.answer, true, nil
	}
	return a, false, nil
}

// set sets the state of id.
func (m *model) set(id string, a routecache.Answer) {
	switch {
	case m.gone[id]:
	case a.Status == routecache.Routable:
		delete(m.negative, id)
		m.routes[id] = a.Route
	case a.Status == routecache.Gone:
		delete(m.negative, id)
		delete(m.routes, id)
		delete(m.quiesced, id)
		m.gone[id], m.ends[id] = true, a.End
	default:
		delete(m.routes, id)
		m.negative[id] = negative{a, m.now + modelTTL, m.waking[id]}
	}
}

// After every step of any sequence of stream messages, passing time, waiting lookups and canceled
// calls, the cache answers like the model. Each lookup gets the state at the time it runs.
// Invariant: I2, I4
func TestCacheBehavesAsTheModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		// rapid shrinks a failure that panics in the goroutine it called.
		var failure any
		synctest.Test(t, func(t *testing.T) {
			defer func() { failure = recover() }()
			runModel(rt, t)
		})
		if failure != nil {
			panic(failure)
		}
	})
}

func runModel(rt *rapid.T, t *testing.T) {
	m := &model{
		routes: map[string]routecache.Route{}, negative: map[string]negative{},
		gone: map[string]bool{}, ends: map[string]routecache.End{}, quiesced: map[string]bool{}, waiting: map[string][]waiting{}, waking: map[string]bool{},
	}
	var asked []string
	c, err := routecache.New(routecache.Options{
		NegativeTTL: modelTTL,
		Now:         func() time.Duration { return m.now },
		Ask: func(id string, wake bool) bool {
			if m.deaf {
				return false
			}
			if wake {
				id = "wake " + id
			}
			asked = append(asked, id)
			return true
		},
	})
	require.NoError(rt, err)
	ctx, cancel := context.WithCancel(t.Context())
	left := 0 // lookups that wait
	defer func() { cancel(); synctest.Wait() }()

	ids := rapid.SampledFrom([]string{"a", "b", "c"})
	routes := rapid.Custom(func(rt *rapid.T) routecache.Route {
		return routecache.Route{Addr: netip.AddrFrom4([4]byte{10, 0, 0, rapid.Byte().Draw(rt, "octet")}), DefaultPort: 80, Ports: routecache.NewPorts(rapid.SampledFrom([][]uint16{nil, {80}, {80, 443}}).Draw(rt, "ports"))}
	})
	// arrives applies one message about one ID. Waiting lookups of that ID get the new state. A Wake that waited for the
	// answer to a Lookup asks for itself if the sandbox is asleep.
	arrives := func(id string, a routecache.Answer) {
		m.set(id, a)
		waiting := m.waiting[id]
		delete(m.waiting, id)
		delete(m.waking, id)
		synctest.Wait()
		for _, w := range waiting {
			want, known, err := m.peek(id, w.wake)
			switch {
			case !known && err == nil && m.deaf:
				err = routecache.ErrDisconnected
			case !known && err == nil:
				require.Equal(rt, routecache.Asleep, a.Status)
				require.Empty(rt, w.done)
				require.Equal(rt, "wake "+id, asked[len(asked)-1])
				m.waiting[id] = append(m.waiting[id], w)
				m.waking[id] = true
				continue
			}
			require.Equal(rt, result{want, err}, <-w.done)
			left--
		}
	}
	// asks looks an ID up, or wakes it.
	asks := func(rt *rapid.T, wake bool) {
		id := ids.Draw(rt, "id")
		want, known, wantErr := m.peek(id, wake)
		open := len(m.waiting[id]) > 0
		before := len(asked)
		done := make(chan result, 1)
		ask, question := c.Lookup, id
		if wake {
			ask, question = c.Wake, "wake "+id
		}
		go func() {
			a, err := ask(ctx, key(id))
			done <- result{a, err}
		}()
		synctest.Wait()
		switch {
		case known || wantErr != nil:
			require.Equal(rt, result{want, wantErr}, <-done)
			require.Len(rt, asked, before)
		case open:
			require.Empty(rt, done)
			require.Len(rt, asked, before, "a second question about one ID")
			m.waiting[id] = append(m.waiting[id], waiting{done, wake})
			left++
		case m.deaf:
			require.ErrorIs(rt, (<-done).err, routecache.ErrDisconnected)
		default:
			require.Empty(rt, done)
			require.Equal(rt, []string{question}, asked[before:])
			m.waiting[id] = append(m.waiting[id], waiting{done, wake})
			m.waking[id] = wake
			left++
		}
	}
	actions := map[string]func(*rapid.T){
		"put": func(rt *rapid.T) {
			id, r := ids.Draw(rt, "id"), routes.Draw(rt, "route")
			c.Put(id, r)
			arrives(id, routable(r))
		},
		"resolve": func(rt *rapid.T) {
			id := ids.Draw(rt, "id")
			a := routecache.Answer{Status: rapid.SampledFrom([]routecache.Status{routecache.Unknown, routecache.Routable, routecache.Gone, routecache.Starting, routecache.Asleep}).Draw(rt, "status")}
			switch a.Status {
			case routecache.Routable:
				a.Route = routes.Draw(rt, "route")
			case routecache.Asleep:
				a.Route, a.Busy = routes.Draw(rt, "route"), rapid.Bool().Draw(rt, "busy")
			default:
			}
			c.Resolve(id, a)
			arrives(id, a)
		},
		"release": func(rt *rapid.T) {
			id := ids.Draw(rt, "id")
			end := rapid.SampledFrom([]routecache.End{{}, {Reason: "Idle", AtUnix: 1}, {Reason: "Killed", AtUnix: 2}}).Draw(rt, "end")
			c.Release(id, end)
			arrives(id, routecache.Answer{Status: routecache.Gone, End: end})
		},
		"close": func(rt *rapid.T) {
			id := ids.Draw(rt, "id")
			c.Close(id)
			delete(m.routes, id)
			delete(m.negative, id)
		},
		"replace": func(rt *rapid.T) {
			snapshot := rapid.MapOf(ids, routes).Draw(rt, "snapshot")
			c.Replace(snapshot)
			m.routes, m.negative = map[string]routecache.Route{}, map[string]negative{}
			clear(m.quiesced)
			for id, r := range snapshot {
				arrives(id, routable(r))
			}
		},
		"quiesce": func(rt *rapid.T) {
			id := ids.Draw(rt, "id")
			require.True(rt, c.Quiesce(id))
			m.quiesced[id] = !m.gone[id]
		},
		"resume": func(rt *rapid.T) {
			id := ids.Draw(rt, "id")
			c.Resume(id)
			delete(m.quiesced, id)
		},
		"disconnected": func(rt *rapid.T) {
			c.Disconnected()
			for id, waiting := range m.waiting {
				for _, w := range waiting {
					require.ErrorIs(rt, (<-w.done).err, routecache.ErrDisconnected)
					left--
				}
				delete(m.waiting, id)
				delete(m.waking, id)
			}
		},
		"fresh": func(rt *rapid.T) {
			until := m.now + time.Duration(rapid.Int64Range(-5, 10).Draw(rt, "seconds"))*time.Second
			c.SetFreshUntil(until)
			m.fresh = max(m.fresh, until)
		},
		"pass":   func(rt *rapid.T) { m.now += time.Duration(rapid.Int64Range(0, 4).Draw(rt, "seconds")) * time.Second },
		"deaf":   func(rt *rapid.T) { m.deaf = rapid.Bool().Draw(rt, "deaf") },
		"clear":  func(*rapid.T) { asked = nil },
		"lookup": func(rt *rapid.T) { asks(rt, false) },
		"wake":   func(rt *rapid.T) { asks(rt, true) },
		"": func(rt *rapid.T) {
			held := map[string]routecache.Route{}
			for _, e := range c.Dump() {
				held[e.ID] = e.Route
			}
			require.Equal(rt, m.routes, held)
			require.Equal(rt, m.now < m.fresh, c.Fresh())
			for _, id := range []string{"a", "b", "c"} {
				r, ok := m.routes[id]
				require.Equal(rt, ok && m.now < m.fresh && !m.quiesced[id], c.Holds(key(id), r))
			}
			s := c.Stats()
			require.Equal(rt, len(m.gone), s.Tombstones)
			require.Equal(rt, len(m.waiting), s.Open)
		},
	}
	rt.Repeat(actions)

	cancel()
	for _, waiting := range m.waiting {
		for _, w := range waiting {
			if r := <-w.done; !errors.Is(r.err, context.Canceled) {
				rt.Fatalf("a caller that gave up got %v", r)
			}
			left--
		}
	}
	require.Zero(rt, left)
}
