package routecache_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/routecache"
)

var asleep = routecache.Answer{Status: routecache.Asleep, Route: routeA, Wakeable: true}

// wake wakes id in the background and returns, within a synctest bubble, once that waits.
func (w *world) wake(id string) <-chan result {
	done := make(chan result, 1)
	go func() {
		a, err := w.Wake(w.t.Context(), key(id))
		done <- result{a, err}
	}()
	synctest.Wait()
	return done
}

func TestWakesOfAnIDShareOneQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{NegativeTTL: time.Second})
		w.Resolve("a", asleep)
		w.knows("a", asleep)
		var waiting []<-chan result
		for range 100 {
			waiting = append(waiting, w.wake("a"))
		}
		waiting = append(waiting, w.lookup(t.Context(), "b"))
		require.Equal(t, []string{"wake a", "b"}, w.questions())
		w.knows("a", asleep)
		w.Resolve("a", asleep)
		w.Resolve("b", asleep)
		for _, done := range waiting {
			require.Equal(t, result{answer: asleep}, <-done)
		}
		require.Equal(t, result{answer: asleep}, <-w.wake("a"), "a late one is one of them")
		require.Equal(t, []string{"wake a", "b"}, w.questions())
		w.pass(time.Second)
		w.wake("a")
		require.Equal(t, []string{"wake a", "b", "wake a"}, w.questions(), "they wait again")
		w.Put("a", routeA)
		require.Equal(t, result{answer: routable(routeA)}, <-w.wake("a"))
	})
}

// The question that is open may not have told the allocator that a request waits.
func TestWakeAsksAfterALookupFoundASleeper(t *testing.T) {
	for name, c := range map[string]struct {
		answer routecache.Answer
		asks   bool
	}{
		"asleep": {asleep, true}, "running": {routable(routeA), false}, "gone": {routecache.Answer{Status: routecache.Gone}, false},
		"starting": {routecache.Answer{Status: routecache.Starting}, false}, "unknown": {routecache.Answer{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, routecache.Options{})
				looked, first, second := w.lookup(t.Context(), "a"), w.wake("a"), w.wake("a")
				require.Equal(t, []string{"a"}, w.questions())
				w.Resolve("a", c.answer)
				require.Equal(t, result{answer: c.answer}, <-looked)
				answer := c.answer
				if c.asks {
					synctest.Wait()
					require.Equal(t, []string{"a", "wake a"}, w.questions())
					answer = routable(routeB)
					w.Put("a", routeB)
				}
				require.Equal(t, result{answer: answer}, <-first)
				require.Equal(t, result{answer: answer}, <-second)
				require.Equal(t, c.asks, len(w.questions()) == 2)
			})
		})
	}
}

func TestAwaitReturnsWhenASleeperIsAwake(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(*world)
		wakes   bool
	}{
		"it runs":               {func(w *world) { w.Put("a", routeA) }, true},
		"it is gone":            {func(w *world) { w.Release("a", routecache.End{}) }, true},
		"it is quiesced":        {func(w *world) { w.Quiesce("a") }, true},
		"it is closed":          {func(w *world) { w.Close("a") }, true},
		"a snapshot":            {func(w *world) { w.Replace(nil) }, true},
		"too many are waking":   {func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Asleep, Busy: true}) }, true},
		"it is waking":          {func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Starting}) }, false},
		"another one runs":      {func(w *world) { w.Put("b", routeB) }, false},
		"the stream has broken": {func(w *world) { w.Disconnected() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, routecache.Options{})
				w.Resolve("a", asleep)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				woken := make(chan error, 1)
				go func() { woken <- w.Await(ctx, key("a"), routecache.Asleep) }()
				synctest.Wait()
				require.Empty(t, woken)
				c.happens(w)
				synctest.Wait()
				require.Len(t, woken, map[bool]int{true: 1}[c.wakes])
			})
		})
	}
}

// Invariant: P27
func TestCloseTakesTheRouteUntilTheNextPush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		w.Put("a", routeA)
		w.Close("a")
		require.False(t, w.Holds(key("a"), routeA))
		w.asks("a")
		w.Put("a", routeA)
		w.knows("a", routable(routeA))

		w.Close("a")
		done := w.lookup(t.Context(), "a")
		w.Close("a")
		synctest.Wait()
		require.Empty(t, done, "the answer is yet to come")
		w.Resolve("a", asleep)
		require.Equal(t, result{answer: asleep}, <-done)
		require.False(t, w.Holds(key("a"), routeA), "the route of a sleeper is no route")
		_, found := w.Find(key("a"))
		require.False(t, found)
		require.False(t, w.Known(key("a")), "a request may have to wait")
		w.Close("never heard of")
	})
}
