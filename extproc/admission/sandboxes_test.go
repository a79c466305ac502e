package admission

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

var pod = routecache.Route{Addr: netip.MustParseAddr("10.1.2.3"), DefaultPort: 8080}

// router has Sandboxes whose parts record the calls that they get, in order.
type router struct {
	*Sandboxes
	events []string
	now    time.Duration
	open   map[look.Host]int
	// before and after are called around each Holds.
	before, after func()
}

func newRouter(t require.TestingT, size int) *router { return newLimitedRouter(t, size, rate.Limit{}) }

// newLimitedRouter has a limit of the rate of each sandbox.
func newLimitedRouter(t require.TestingT, size int, limit rate.Limit) *router {
	r := &router{now: time.Hour, open: map[look.Host]int{}, before: func() {}, after: func() {}}
	now := func() time.Duration { return r.now }
	s, err := New(Options{
		Routes: routecache.Options{Size: size, Now: now, Ask: func(string, bool) bool { return true }},
		Uses: lastactive.Options{
			Now: now, ConnectWindow: 5 * time.Second, Rate: limit,
			Look: func(context.Context) (look.Look, error) { return look.Look{Gateway: "this", Hosts: r.open}, nil },
		},
	})
	require.NoError(t, err)
	s.routes = recordedRoutes{s.routes.(*routecache.Cache), r}
	s.uses = recordedUses{s.uses.(*lastactive.Tracker), r}
	r.Sandboxes = s
	s.Connected()
	s.SetFreshUntil(1 << 62)
	return r
}

func (r *router) note(format string, args ...any) {
	r.events = append(r.events, fmt.Sprintf(format, args...))
}

// unread is how many answers of a sandbox are unread in its record of use; -1: it has no record.
func (r *router) unread(id string) int {
	a := r.Uses().(recordedUses).Answer([]string{id})
	switch {
	case len(a) == 0: // never used
		return 0
	case !a[0].Addr.IsValid():
		return -1
	}
	return a[0].Unread
}

// found returns the route of a sandbox as a request would find it.
func (r *router) found(id string) (routecache.Route, bool) {
	a, err := r.Routes().Lookup(ended, key(id))
	return a.Route, err == nil && a.Status == routecache.Routable
}

// ended is a context that has ended.
var ended = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("the caller does not wait"))
	return ctx
}()

type recordedRoutes struct {
	*routecache.Cache
	r *router
}

func (c recordedRoutes) Holds(id sandboxid.Key, route routecache.Route) bool {
	c.r.before()
	defer c.r.after()
	return c.Cache.Holds(id, route)
}

func (c recordedRoutes) Resolve(id string, a routecache.Answer) bool {
	c.r.note("%s is %s", id, a.Status)
	return c.Cache.Resolve(id, a)
}

func (c recordedRoutes) Replace(routes map[string]routecache.Route) {
	c.r.note("snapshot of %d", len(routes))
	c.Cache.Replace(routes)
}

type recordedUses struct {
	*lastactive.Tracker
	r *router
}

func (u recordedUses) Expect(id string, addr netip.Addr, minBytes uint64) {
	u.r.note("expect %s at %s with %d", id, addr, minBytes)
	u.Tracker.Expect(id, addr, minBytes)
}

func (u recordedUses) Forget(id string) {
	u.r.note("forget %s", id)
	u.Tracker.Forget(id)
}

func (u recordedUses) Retain(keep func(id string) bool) {
	u.r.note("retain")
	u.Tracker.Retain(keep)
}

// Invariant: I2, I4
func TestUseBeginsBeforeTheRouteIsChecked(t *testing.T) {
	r := newRouter(t, 10)
	r.Put("abc", pod)
	checked := 0
	r.before = func() {
		checked++
		require.Equal(t, 1, r.Unread(), "a release would fit between the check and the answer")
		require.Equal(t, 1, r.unread("abc"), "a leader that stops admissions and then asks must learn of this use")
	}
	a, why, _ := r.Admit(key("abc"), pod, 9000, false)
	require.Equal(t, Admitted, why)
	require.Equal(t, 1, checked)
	require.Equal(t, 1, r.Unread())
	require.Equal(t, 1, r.unread("abc"))
	a.Read()
	require.Zero(t, r.Unread())
	require.Zero(t, r.unread("abc"))
}

// Invariant: I2
func TestAdmissionOfAnotherRouteLeavesNothing(t *testing.T) {
	for name, change := range map[string]func(r *router){
		"released": func(r *router) { r.Release("abc", routecache.End{}) },
		"moved":    func(r *router) { r.Put("abc", routecache.Route{Addr: netip.MustParseAddr("10.1.2.4")}) },
		"other ports": func(r *router) {
			r.Put("abc", routecache.Route{Addr: pod.Addr, Ports: routecache.NewPorts([]uint16{1})})
		},
		"quiesced":     func(r *router) { require.True(t, r.Quiesce("abc")) },
		"stale":        func(r *router) { r.Expire() },
		"evicted":      func(r *router) { r.Put("def", pod) },
		"not there":    func(r *router) { r.Replace(nil) },
		"has no route": func(r *router) { r.Resolve("abc", routecache.Answer{Status: routecache.Unknown}) },
	} {
		for _, meanwhile := range []bool{false, true} {
			t.Run(fmt.Sprint(name, meanwhile), func(t *testing.T) {
				r := newRouter(t, 1)
				r.Put("abc", pod)
				if meanwhile {
					r.before = func() { change(r) }
				} else {
					change(r)
				}
				drained := false
				a, why, _ := r.Admit(key("abc"), pod, 9000, false)
				require.Equal(t, Again, why)
				require.Zero(t, a)
				require.Zero(t, r.Unread())
				require.LessOrEqual(t, r.unread("abc"), 0)
				r.Barrier(func() { drained = true })
				require.True(t, drained)
			})
		}
	}
}

// Another router may have opened connections to them.
// Invariant: I4
func TestRoutesAreExpectedBeforeTheyAreServed(t *testing.T) {
	r := newRouter(t, 10)
	r.Put("one", routecache.Route{Addr: pod.Addr, MinBytes: 7})
	r.Resolve("two", routecache.Answer{Status: routecache.Routable, Route: pod})
	r.Resolve("none", routecache.Answer{Status: routecache.Unknown})
	r.Replace(map[string]routecache.Route{"three": pod})
	require.Equal(t, []string{
		"expect one at 10.1.2.3 with 7", "one is routable",
		"expect two at 10.1.2.3 with 0", "two is routable",
		"none is unknown",
		"expect three at 10.1.2.3 with 0", "snapshot of 1", "retain",
	}, r.events)
}

func TestUseOfASandboxEndsAfterItsRoute(t *testing.T) {
	r := newRouter(t, 10)
	r.Put("one", pod)
	r.Put("two", pod)
	r.events = nil
	r.Release("one", routecache.End{})
	r.Resolve("two", routecache.Answer{Status: routecache.Gone})
	require.Equal(t, []string{"one is gone", "forget one", "two is gone", "forget two"}, r.events)
	r.Put("one", pod) // late
	require.Equal(t, -1, r.unread("one"), "nothing would drop this record")
	require.Zero(t, r.Uses().Len())
}

// Invariant: I2, I4
func TestEvictionOfARouteEndsNothingElse(t *testing.T) {
	r := newRouter(t, 2)
	r.Put("used", pod)
	a, why, _ := r.Admit(key("used"), pod, 9000, false)
	require.Equal(t, Admitted, why)
	r.Put("asked", pod)
	require.True(t, r.Quiesce("asked"))
	r.Release("gone", routecache.End{Reason: "Idle"})
	for i := range 1000 {
		r.Put(fmt.Sprint("other", i), pod)
	}
	require.Equal(t, 2, r.Routes().Stats().Routes)
	_, found := r.Routes().Find(key("used"))
	require.False(t, found, "it was not evicted")

	require.Equal(t, 1, r.unread("used"))
	drained := false
	r.Release("used", routecache.End{})
	r.Barrier(func() { drained = true })
	require.False(t, drained, "Envoy has not read the answer")
	a.Read()
	require.True(t, drained)

	r.Put("asked", pod) // the allocator answers a question
	answer, err := r.Routes().Lookup(t.Context(), key("asked"))
	require.NoError(t, err)
	require.Equal(t, routecache.Quiesced, answer.Status)
	r.Put("gone", pod)
	answer, err = r.Routes().Lookup(t.Context(), key("gone"))
	require.NoError(t, err)
	require.Equal(t, routecache.Answer{Status: routecache.Gone, End: routecache.End{Reason: "Idle"}}, answer)
}

// Envoy's list of open requests bounds the ports of a sandbox, whatever happens to its route.
// Invariant: I4
func TestEvictionGivesASandboxNoMorePorts(t *testing.T) {
	r := newRouter(t, 1)
	admitted := 0
	for port := range uint16(1000) {
		r.Put("abc", pod)
		a, why, _ := r.Admit(key("abc"), pod, port+1, false)
		if why == Admitted {
			admitted++
			a.Read()
		} else {
			require.Equal(t, TooManyPorts, why)
		}
		r.Put("another", pod)
	}
	require.Equal(t, 64, admitted)
}

// Invariant: P25
func TestOnlyAdmissionsCostOfTheLimit(t *testing.T) {
	const atOnce = 2000
	r := newLimitedRouter(t, 1, rate.PerSecond(0.001))
	r.open[look.Host{AddrPort: netip.AddrPortFrom(pod.Addr, 9000)}] = 0
	r.Uses().FinalReport(t.Context()) // Envoy lists the port
	for range atOnce {
		r.Put("another", pod) // evicts the route
		_, why, _ := r.Admit(key("abc"), pod, 9000, false)
		require.Equal(t, Again, why)
		r.Put("abc", pod)
		a, why, _ := r.Admit(key("abc"), pod, 9000, false)
		require.Equal(t, Admitted, why)
		a.Read()
	}
	r.before = func() { t.Error("a request that the limit refuses has begun") }
	_, why, pause := r.Admit(key("abc"), pod, 9000, false)
	require.Equal(t, TooFast, why)
	require.Greater(t, pause, 900*time.Second)
	require.Zero(t, r.Unread())
}

// Invariant: P8
func TestMemoryOfAHundredThousandIDsIsBounded(t *testing.T) {
	const ids, size = 100_000, 1000
	r := newRouter(t, size)
	r.routes, r.uses = r.routes.(recordedRoutes).Cache, r.uses.(recordedUses).Tracker // nothing is recorded
	lives := 0
	for i := range ids {
		id := fmt.Sprint("s", i)
		switch i % 3 {
		case 0:
			_, _ = r.Routes().Lookup(ended, key(id))
			r.Resolve(id, routecache.Answer{Status: routecache.Unknown})
		case 1:
			r.Put(id, pod)
			r.Release(id, routecache.End{})
			r.Put(id, pod) // late
		case 2:
			r.Put(id, pod)
			lives++
		}
	}
	stats := r.Routes().Stats()
	require.Equal(t, size, stats.Routes)
	require.Equal(t, size, stats.Tombstones)
	require.Zero(t, stats.Open)
	require.Equal(t, lives, r.Uses().Len(), "there is one record for each sandbox that lives, also without a route here")
	r.Uses().FinalReport(t.Context()) // looks, so that no record counts as in use
	r.Replace(map[string]routecache.Route{"s2": pod})
	require.Equal(t, 1, r.Uses().Len())
}

// A look after Quiesce sees every use that was admitted before.
// Invariant: I4
func TestQuiesceAndQuestionMissNoUse(t *testing.T) {
	r := newRouter(t, 10)
	r.Put("abc", pod)
	var asked []lastactive.Activity
	r.after = func() { // the route holds, and the answer is not sent yet
		require.True(t, r.Quiesce("abc"))
		asked = r.Uses().(recordedUses).Answer([]string{"abc"})
	}
	a, why, _ := r.Admit(key("abc"), pod, 9000, false)
	require.Equal(t, Admitted, why)
	require.Len(t, asked, 1)
	require.Zero(t, asked[0].Age)
	a.Read()
	_, why, _ = r.Admit(key("abc"), pod, 9000, false)
	require.Equal(t, Again, why)
	r.Resume("abc")
	r.after = func() {}
	_, why, _ = r.Admit(key("abc"), pod, 9000, false)
	require.Equal(t, Admitted, why)
}

func TestOptionsOfBothPartsAreChecked(t *testing.T) {
	_, err := New(Options{})
	require.ErrorContains(t, err, "routecache.Options")
	_, err = New(Options{Routes: routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return false }}})
	require.ErrorContains(t, err, "lastactive.Options")
}
