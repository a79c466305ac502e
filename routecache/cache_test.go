package routecache_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/routecache"
)

var (
	routeA = routecache.Route{Addr: netip.MustParseAddr("10.1.0.1"), DefaultPort: 8080}
	routeB = routecache.Route{Addr: netip.MustParseAddr("10.1.0.2"), DefaultPort: 9090}
)

func routable(r routecache.Route) routecache.Answer {
	return routecache.Answer{Status: routecache.Routable, Route: r}
}

// world is a cache, its clock and the allocator that it asks.
type world struct {
	*routecache.Cache
	t *testing.T

	mu    sync.Mutex
	now   time.Duration
	asked []string
	deaf  bool            // questions cannot be sent
	onAsk func(id string) // called for each question that is sent
}

func newWorld(t *testing.T, o routecache.Options) *world {
	w := &world{t: t}
	o.Now = func() time.Duration { w.mu.Lock(); defer w.mu.Unlock(); return w.now }
	o.Ask = func(id string, wake bool) bool {
		w.mu.Lock()
		if w.deaf {
			w.mu.Unlock()
			return false
		}
		if wake {
			w.asked = append(w.asked, "wake "+id)
		} else {
			w.asked = append(w.asked, id)
		}
		f := w.onAsk
		w.mu.Unlock()
		if f != nil {
			f(id)
		}
		return true
	}
	var err error
	w.Cache, err = routecache.New(o)
	require.NoError(t, err)
	w.SetFreshUntil(time.Hour)
	return w
}

func (w *world) pass(d time.Duration) { w.mu.Lock(); defer w.mu.Unlock(); w.now += d }

func (w *world) setDeaf(deaf bool) { w.mu.Lock(); defer w.mu.Unlock(); w.deaf = deaf }

func (w *world) questions() []string { w.mu.Lock(); defer w.mu.Unlock(); return w.asked }

// lookupNow looks id up and fails if the lookup waits.
func (w *world) lookupNow(id string) (routecache.Answer, error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	return w.Lookup(ctx, key(id))
}

// knows asserts the answer of the cache about id, without a question.
func (w *world) knows(id string, want routecache.Answer) {
	w.t.Helper()
	before := len(w.questions())
	got, err := w.lookupNow(id)
	require.NoError(w.t, err)
	require.Equal(w.t, want, got)
	require.Len(w.t, w.questions(), before, "the allocator was asked about %s", id)
}

// asks asserts that the cache holds nothing about id.
func (w *world) asks(id string) {
	w.t.Helper()
	w.setDeaf(true)
	defer w.setDeaf(false)
	_, err := w.lookupNow(id)
	require.ErrorIs(w.t, err, routecache.ErrDisconnected, "something is held about %s", id)
}

// result is the result of a Lookup in the background.
type result struct {
	answer routecache.Answer
	err    error
}

// lookup looks id up in the background and returns, within a synctest bubble,
// once it waits.
func (w *world) lookup(ctx context.Context, id string) <-chan result {
	done := make(chan result, 1)
	go func() {
		a, err := w.Lookup(ctx, key(id))
		done <- result{a, err}
	}()
	synctest.Wait()
	return done
}

// Invariant: I2
func TestReleaseIsNeverResurrectedByLateLookup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		var lookups []<-chan result
		for range 10 {
			lookups = append(lookups, w.lookup(t.Context(), "a"))
		}
		// The release comes after the answer has woken them and before one of them runs.
		w.Resolve("a", routable(routeA))
		w.Release("a", routecache.End{})
		for _, done := range lookups {
			require.Equal(t, result{answer: routecache.Answer{Status: routecache.Gone}}, <-done)
		}
	})
}

func TestReleaseIsFinal(t *testing.T) {
	gone := routecache.Answer{Status: routecache.Gone}
	for name, later := range map[string]func(*world){
		"nothing":            func(*world) {},
		"push":               func(w *world) { w.Put("a", routeA) },
		"answer with route":  func(w *world) { w.Resolve("a", routable(routeA)) },
		"answer unknown":     func(w *world) { w.Resolve("a", routecache.Answer{}) },
		"snapshot with it":   func(w *world) { w.Replace(map[string]routecache.Route{"a": routeA}) },
		"snapshot without":   func(w *world) { w.Replace(nil) },
		"reconnect":          func(w *world) { w.Disconnected() },
		"freshness lost":     func(w *world) { w.pass(24 * time.Hour) },
		"release once more":  func(w *world) { w.Release("a", routecache.End{}) },
		"answer gone":        func(w *world) { w.Resolve("a", gone) },
		"push, then unknown": func(w *world) { w.Put("a", routeB); w.Resolve("a", routecache.Answer{}) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, routecache.Options{})
			w.Put("a", routeA)
			w.Release("a", routecache.End{})
			later(w)
			w.knows("a", gone)
			require.False(t, w.Holds(key("a"), routeA))
			require.False(t, w.Holds(key("a"), routeB))
			require.Empty(t, w.Dump())
		})
	}
}

func TestGoneAnswerIsFinal(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Resolve("a", routecache.Answer{Status: routecache.Gone})
	w.Put("a", routeA)
	w.knows("a", routecache.Answer{Status: routecache.Gone})
}

func TestDroppedTombstoneNeverRestoresTheRoute(t *testing.T) {
	w := newWorld(t, routecache.Options{Size: 1})
	w.Put("a", routeA)
	w.Release("a", routecache.End{})
	w.Release("b", routecache.End{}) // takes the only place
	w.asks("a")
}

func TestNegativeEntry(t *testing.T) {
	const ttl = 3 * time.Second
	setup := func(t *testing.T) *world {
		w := newWorld(t, routecache.Options{NegativeTTL: ttl})
		w.Resolve("a", routecache.Answer{})
		w.knows("a", routecache.Answer{Status: routecache.Unknown})
		return w
	}
	t.Run("IsClearedByAPush", func(t *testing.T) {
		w := setup(t)
		w.Put("a", routeA)
		w.knows("a", routable(routeA))
	})
	t.Run("IsClearedByASnapshot", func(t *testing.T) {
		w := setup(t)
		w.Replace(nil)
		w.asks("a")
	})
	t.Run("BecomesGoneByARelease", func(t *testing.T) {
		w := setup(t)
		w.Release("a", routecache.End{})
		w.knows("a", routecache.Answer{Status: routecache.Gone})
	})
	t.Run("EndsAfterItsTime", func(t *testing.T) {
		w := setup(t)
		w.pass(ttl - 1)
		w.knows("a", routecache.Answer{Status: routecache.Unknown})
		w.pass(1)
		w.asks("a")
	})
	t.Run("IsNotProlongedByBeingUsed", func(t *testing.T) {
		w := setup(t)
		for range 2 {
			w.pass(ttl / 3)
			w.knows("a", routecache.Answer{Status: routecache.Unknown})
		}
		w.pass(ttl / 3)
		w.asks("a")
	})
}

func TestUnknownNeverHidesTheNewerPush(t *testing.T) {
	t.Run("ForALookupThatComesLater", func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		w.Resolve("a", routecache.Answer{})
		w.Put("a", routeA)
		w.knows("a", routable(routeA))
	})
	t.Run("ForALookupThatWaits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, routecache.Options{})
			done := w.lookup(t.Context(), "a")
			w.Resolve("a", routecache.Answer{}) // wakes it; the push comes before it runs
			w.Put("a", routeA)
			require.Equal(t, result{answer: routable(routeA)}, <-done)
		})
	})
}

// Invariant: I3
func TestOnlyTombstonesAreServedWhenStale(t *testing.T) {
	w := newWorld(t, routecache.Options{NegativeTTL: 100 * time.Hour})
	w.Put("route", routeA)
	w.Resolve("unknown", routecache.Answer{})
	w.Release("gone", routecache.End{})
	require.True(t, w.Fresh())

	w.pass(time.Hour - 1) // the last moment of it
	w.knows("route", routable(routeA))
	require.True(t, w.Holds(key("route"), routeA))

	w.pass(1)
	require.False(t, w.Fresh())
	_, found := w.Find(key("route"))
	require.True(t, found, "Find does not read the clock")
	require.False(t, w.Holds(key("route"), routeA))
	_, found = w.Find(key("route"))
	require.False(t, found, "Holds has found the cache stale")
	for _, id := range []string{"route", "unknown", "neverheardof"} {
		_, err := w.lookupNow(id)
		require.ErrorIs(t, err, routecache.ErrNotFresh, id)
	}
	require.Empty(t, w.questions(), "an answer that may not be served was asked for")
	w.knows("gone", routecache.Answer{Status: routecache.Gone})

	w.SetFreshUntil(2 * time.Hour)
	w.knows("route", routable(routeA))
	w.knows("unknown", routecache.Answer{})

	w.SetFreshUntil(w.now + time.Hour)
	_, found = w.Find(key("route"))
	require.True(t, found)
	w.Expire()
	_, found = w.Find(key("route"))
	require.False(t, found, "the allocator waits no more")
}

func TestNewCacheIsNotFresh(t *testing.T) {
	c, err := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return true }})
	require.NoError(t, err)
	require.False(t, c.Fresh())
	_, err = c.Lookup(t.Context(), key("a"))
	require.ErrorIs(t, err, routecache.ErrNotFresh)
}

func TestFreshnessIsNeverShortened(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.SetFreshUntil(time.Minute) // a late answer to an older ping
	w.pass(30 * time.Minute)
	require.True(t, w.Fresh())
}

func TestNoRouteIsServedAfterExpire(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Put("k3x9", routecache.Route{})
	_, err := w.Lookup(t.Context(), key("k3x9"))
	require.NoError(t, err)
	w.Expire()
	require.False(t, w.Fresh())
	require.False(t, w.Holds(key("k3x9"), routecache.Route{}), "a request that was held is admitted")
	_, err = w.Lookup(t.Context(), key("k3x9"))
	require.ErrorIs(t, err, routecache.ErrNotFresh)
}

func TestRouteAnsweredAfterFreshnessIsNotServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		done := w.lookup(t.Context(), "a")
		w.pass(time.Hour)
		w.Resolve("a", routable(routeA))
		require.Equal(t, result{err: routecache.ErrNotFresh}, <-done)
	})
}

func TestReplaceDropsEverythingElse(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Put("moved", routeA)
	w.Put("left", routeA)
	w.Resolve("unknown", routecache.Answer{})
	w.Replace(map[string]routecache.Route{"moved": routeB, "new": routeA})
	w.knows("moved", routable(routeB))
	w.knows("new", routable(routeA))
	w.asks("left") // unknown, not gone
	w.asks("unknown")
	require.False(t, w.Holds(key("left"), routeA))
	require.False(t, w.Holds(key("moved"), routeA))
}

func TestReplaceDropsARouteBeforeALookupReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		done := w.lookup(t.Context(), "a")
		w.Resolve("a", routable(routeA)) // wakes it; the snapshot comes before it runs
		w.Replace(nil)
		synctest.Wait()
		require.Empty(t, done, "a route that the snapshot dropped was returned")
		require.Equal(t, []string{"a", "a"}, w.questions())
		w.Resolve("a", routecache.Answer{})
		require.Equal(t, result{}, <-done)
	})
}

func TestLeastRecentlyUsedRouteIsEvicted(t *testing.T) {
	w := newWorld(t, routecache.Options{Size: 3})
	for _, id := range []string{"a", "b", "c"} {
		w.Put(id, routeA)
	}
	w.knows("a", routable(routeA)) // used, so that b is the oldest
	w.Holds(key("b"), routeA)      // not a use
	w.Put("d", routeA)
	w.asks("b")
	require.Equal(t, []routecache.Entry{{ID: "c", Route: routeA}, {ID: "a", Route: routeA}, {ID: "d", Route: routeA}}, w.Dump())
	require.EqualValues(t, 1, w.Stats().Evictions)
}

func TestMemoryIsBounded(t *testing.T) {
	const size = 10
	w := newWorld(t, routecache.Options{Size: size, NegativeTTL: time.Hour})
	snapshot := map[string]routecache.Route{}
	for i := range 5 * size {
		w.Put(fmt.Sprint("route", i), routeA)
		w.Release(fmt.Sprint("gone", i), routecache.End{})
		w.Resolve(fmt.Sprint("unknown", i), routecache.Answer{})
		snapshot[fmt.Sprint("snapshot", i)] = routeA
	}
	require.Equal(t, routecache.Stats{Routes: size, Tombstones: size, Evictions: 4 * size}, w.Stats())
	w.asks("unknown0")
	w.knows(fmt.Sprint("unknown", 5*size-1), routecache.Answer{})
	w.Replace(snapshot)
	require.Equal(t, size, w.Stats().Routes)
}

// Lookups on many threads against a stream that pushes and releases: one that
// begins after Release has returned never finds the route.
func TestReleaseHoldsForConcurrentLookups(t *testing.T) {
	const sandboxes, readers = 200, 4
	w := newWorld(t, routecache.Options{Size: sandboxes})
	w.onAsk = func(id string) { w.Resolve(id, routable(routeA)) }
	var released [sandboxes]atomic.Bool
	var stop atomic.Bool
	var reading sync.WaitGroup
	for r := range readers {
		reading.Go(func() {
			for i := r; !stop.Load(); i++ {
				n := i % sandboxes
				before := released[n].Load()
				a, err := w.lookupNow(fmt.Sprint(n))
				if err != nil || before && a.Status != routecache.Gone {
					t.Errorf("sandbox %d, released before the lookup: %v, got %v %v", n, before, a.Status, err)
					return
				}
			}
		})
	}
	for n := range sandboxes {
		id := fmt.Sprint(n)
		w.Put(id, routeA)
		w.Release(id, routecache.End{})
		released[n].Store(true)
		w.Put(id, routeB)
		w.Resolve(id, routable(routeB))
	}
	stop.Store(true)
	reading.Wait()
}

func TestInvalidOptionsAreNamed(t *testing.T) {
	_, err := routecache.New(routecache.Options{})
	require.ErrorContains(t, err, "Options.Now and Ask")
	_, err = routecache.New(routecache.Options{
		Size: -1, Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return false },
	})
	require.ErrorContains(t, err, "Options.Size")
}

func TestStatusHasAName(t *testing.T) {
	require.Equal(t, "unknown routable gone Status(7)",
		fmt.Sprint(routecache.Unknown, routecache.Routable, routecache.Gone, routecache.Status(7)))
}

func TestAwaitReturnsWhenTheStatusChanges(t *testing.T) {
	starting := routecache.Answer{Status: routecache.Starting, Hold: time.Minute}
	for name, c := range map[string]struct {
		happens func(*world)
		wakes   bool
	}{
		"it runs":               {func(w *world) { w.Put("a", routeA) }, true},
		"it was asked for":      {func(w *world) { w.Resolve("a", routable(routeA)) }, true},
		"it is gone":            {func(w *world) { w.Release("a", routecache.End{}) }, true},
		"it is unknown":         {func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Unknown}) }, true},
		"it is quiesced":        {func(w *world) { w.Quiesce("a") }, true},
		"a snapshot":            {func(w *world) { w.Replace(nil) }, true},
		"it is asleep":          {func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Asleep}) }, true},
		"it is closed":          {func(w *world) { w.Close("a") }, true},
		"it is still starting":  {func(w *world) { w.Resolve("a", starting) }, false},
		"another one runs":      {func(w *world) { w.Put("b", routeB) }, false},
		"the stream has broken": {func(w *world) { w.Disconnected() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, routecache.Options{})
				w.Resolve("a", starting)
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				woken := make(chan error, 2)
				for range 2 {
					go func() { woken <- w.Await(ctx, key("a"), routecache.Starting) }()
				}
				synctest.Wait()
				require.Empty(t, woken)
				c.happens(w)
				synctest.Wait()
				if !c.wakes {
					require.Empty(t, woken)
					gaveUp := errors.New("gave up")
					cancel(gaveUp)
					require.ErrorIs(t, <-woken, gaveUp)
					require.ErrorIs(t, <-woken, gaveUp)
					return
				}
				require.NoError(t, <-woken)
				require.NoError(t, <-woken)
			})
		})
	}
}

func TestAwaitNoticesEarlierChanges(t *testing.T) {
	for name, happens := range map[string]func(*world){
		"it runs":       func(w *world) { w.Put("a", routeA) },
		"it is gone":    func(w *world) { w.Release("a", routecache.End{}) },
		"it is unknown": func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Unknown}) },
		"it is asleep":  func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Asleep}) },
		"it is closed":  func(w *world) { w.Close("a") },
		"a snapshot":    func(w *world) { w.Replace(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, routecache.Options{})
			w.Resolve("a", routecache.Answer{Status: routecache.Starting})
			happens(w)
			require.NoError(t, w.Await(t.Context(), key("a"), routecache.Starting))
		})
	}
}

func TestStartingAnswerSaysHowLongToWait(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	starting := routecache.Answer{Status: routecache.Starting, Hold: 7 * time.Second}
	w.Resolve("a", starting)
	a, err := w.Lookup(t.Context(), key("a"))
	require.NoError(t, err)
	require.Equal(t, starting, a)
}

func TestHitDoesNotAllocate(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Put("a", routeA)
	w.Release("gone", routecache.End{})
	w.Resolve("unknown", routecache.Answer{})
	for id, want := range map[string]routecache.Status{"a": routecache.Routable, "gone": routecache.Gone, "unknown": routecache.Unknown} {
		require.Zero(t, testing.AllocsPerRun(1000, func() {
			if a, err := w.Lookup(t.Context(), key(id)); err != nil || a.Status != want {
				t.Fatal(a, err)
			}
		}), id)
	}
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if !w.Holds(key("a"), routeA) {
			t.Fatal("not held")
		}
	}))
	require.Empty(t, w.asked)
}
