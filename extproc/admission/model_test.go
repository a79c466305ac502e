package admission

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/routecache"
)

// model is a router with a small cache. Messages arrive in any order, also between the steps of an admission.
type model struct {
	*router
	t        *rapid.T
	quiesced map[string]bool
	gone     map[string]bool
	over     map[string]bool // its release is acknowledged
	closed   map[string]bool // it has had no route since
	closes   map[string]int  // of each sandbox
	acked    map[string]int  // how many of its closes are acknowledged
	open     []opened        // in the order of their admission
	admitted int
}

// opened is a request that is admitted and not read.
type opened struct {
	id     string
	closes int // before it
	Admission
}

// cacheSize is less than there are sandboxes, so that routes are evicted.
const cacheSize = 2

var ids = []string{"a", "b", "c", "d"}

func (m *model) draw(n int, what string) int { return rapid.IntRange(0, n-1).Draw(m.t, what) }
func (m *model) id() string                  { return ids[m.draw(len(ids), "id")] }

// route returns one of two routes of a sandbox. A sandbox stays at its address.
func (m *model) route(id string) routecache.Route {
	return routecache.Route{Addr: netip.AddrFrom4([4]byte{10, 1, 0, id[0]}), DefaultPort: uint16(m.draw(2, "port"))}
}

// message puts one message of the allocator into effect.
func (m *model) message() {
	id := m.id()
	if m.gone[id] && len(m.gone) > cacheSize {
		return // the tombstone may be gone too, and the allocator sends no route after a release
	}
	switch m.draw(8, "message") {
	case 0:
		m.Put(id, m.route(id))
		delete(m.closed, id)
	case 1:
		status := routecache.Status(m.draw(5, "status"))
		if status == routecache.Quiesced {
			status = routecache.Asleep
		}
		if status == routecache.Routable {
			delete(m.closed, id)
		}
		m.Resolve(id, routecache.Answer{Status: status, Route: m.route(id)})
		if answer, err := m.Routes().Lookup(ended, key(id)); err == nil && answer.Status == routecache.Gone {
			m.gone[id] = true
			delete(m.quiesced, id)
		}
	case 2:
		m.Release(id, routecache.End{})
		m.gone[id] = true
		delete(m.quiesced, id)
	case 3:
		if m.Quiesce(id); !m.gone[id] {
			m.quiesced[id] = true
		}
	case 4:
		m.Resume(id)
		delete(m.quiesced, id)
	case 5:
		m.Replace(map[string]routecache.Route{id: m.route(id)})
		clear(m.quiesced)
		delete(m.closed, id)
	case 6:
		m.Uses().FinalReport(m.t.Context()) // a look
	case 7:
		m.Close(id)
		m.closed[id] = true
		m.closes[id]++
	}
	over := []string{}
	for id := range m.gone {
		over = append(over, id)
	}
	closes := maps.Clone(m.closes)
	m.Barrier(func() {
		m.acked = closes
		for _, id := range over {
			m.over[id] = true
		}
	})
}

// request has one request of Envoy decided, while messages arrive.
func (m *model) request() {
	id := m.id()
	answer, err := m.Routes().Lookup(ended, key(id))
	if err != nil || answer.Status != routecache.Routable {
		return
	}
	meanwhile := func() {
		for range m.draw(3, "messages") {
			m.message()
		}
	}
	meanwhile()
	var quiesced, gone, closed bool
	var closes int
	m.before = func() {
		meanwhile()
		quiesced, gone, closed, closes = m.quiesced[id], m.gone[id], m.closed[id], m.closes[id]
	}
	m.after = func() {
		meanwhile()
		if m.quiesced[id] && !quiesced && m.unread(id) < 1 {
			m.t.Fatalf("a look after the question about %s would miss the request that is being admitted", id)
		}
		if m.gone[id] && !gone && m.over[id] {
			m.t.Fatalf("the release of %s is acknowledged while a request of it is being admitted", id)
		}
		if m.acked[id] > closes {
			m.t.Fatalf("the close of %s is acknowledged while a request of it is being admitted", id)
		}
	}
	a, why, _ := m.Admit(key(id), answer.Route, 9000, false)
	m.before, m.after = func() {}, func() {}
	if why != Admitted {
		return
	}
	if quiesced || gone || closed {
		m.t.Fatalf("a request for %s is admitted; quiesced: %v, gone: %v, closed: %v", id, quiesced, gone, closed)
	}
	m.admitted++
	m.open = append(m.open, opened{id, closes, a})
}

func (m *model) read() {
	if len(m.open) > 0 {
		i := m.draw(len(m.open), "request")
		a := m.open[i]
		m.open = append(m.open[:i:i], m.open[i+1:]...)
		a.Read()
	}
}

func (m *model) check() {
	if m.Unread() != len(m.open) {
		m.t.Fatalf("%d answers are unread, and %d count as such", len(m.open), m.Unread())
	}
	for _, a := range m.open {
		if m.over[a.id] {
			m.t.Fatalf("the release of %s is acknowledged, and Envoy may still read an answer that names it", a.id)
		}
		if m.acked[a.id] > a.closes {
			m.t.Fatalf("the close of %s is acknowledged, and Envoy may still read an earlier answer that names it", a.id)
		}
	}
	for _, id := range ids {
		_, found := m.found(id)
		switch {
		case found && (m.quiesced[id] || m.gone[id] || m.closed[id]):
			m.t.Fatalf("a route of %s is found; quiesced: %v, gone: %v, closed: %v", id, m.quiesced[id], m.gone[id], m.closed[id])
		case found && !m.recorded(id):
			m.t.Fatalf("%s has a route and no record of its use", id)
		}
	}
}

// recorded reports whether a sandbox has a record of its use.
func (m *model) recorded(id string) bool { return m.unread(id) >= 0 }

// Invariant: I2, I4, P27
func TestAdmissionsAreSafeInAnyOrderOfMessages(t *testing.T) {
	admitted := 0
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			router: newRouter(t, cacheSize), t: t, quiesced: map[string]bool{}, gone: map[string]bool{}, over: map[string]bool{},
			closed: map[string]bool{}, closes: map[string]int{}, acked: map[string]int{},
		}
		t.Repeat(map[string]func(*rapid.T){
			"message": func(*rapid.T) { m.message() },
			"request": func(*rapid.T) { m.request() },
			"read":    func(*rapid.T) { m.read() },
			"time":    func(*rapid.T) { m.now += time.Second },
			"":        func(*rapid.T) { m.check() },
		})
		admitted += m.admitted
	})
	if admitted == 0 {
		t.Fatal("no request was admitted in any history")
	}
}
