package routecache_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/routecache"
)

func TestLookupsOfAnIDShareOneQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		var a, b []<-chan result
		for range 20 {
			a = append(a, w.lookup(t.Context(), "a"))
			b = append(b, w.lookup(t.Context(), "b"))
		}
		require.Equal(t, []string{"a", "b"}, w.questions())
		w.Resolve("a", routable(routeA))
		for _, done := range a {
			require.Equal(t, result{answer: routable(routeA)}, <-done)
		}
		synctest.Wait()
		for _, done := range b {
			require.Empty(t, done, "the answer about one ID answered another")
		}
		w.Resolve("b", routecache.Answer{})
		for _, done := range b {
			require.Equal(t, result{}, <-done)
		}
		s := w.Stats()
		require.Equal(t, routecache.Stats{Misses: 40, Questions: 2, Routes: 1}, s)
	})
}

func TestCanceledLookupDoesNotFailTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		first, cancel := context.WithCancelCause(t.Context())
		asker := w.lookup(first, "a") // it asked for all
		other := w.lookup(t.Context(), "a")
		gone := errors.New("the client has gone")
		cancel(gone)
		require.Equal(t, result{err: gone}, <-asker)
		late := w.lookup(t.Context(), "a")
		require.Equal(t, []string{"a"}, w.questions(), "the question was dropped with its asker")
		w.Resolve("a", routable(routeA))
		require.Equal(t, result{answer: routable(routeA)}, <-other)
		require.Equal(t, result{answer: routable(routeA)}, <-late)
	})
}

func TestPushAnswersTheOpenQuestion(t *testing.T) {
	for name, c := range map[string]struct {
		push func(*world)
		want routecache.Answer
	}{
		"route":    {func(w *world) { w.Put("a", routeA) }, routable(routeA)},
		"release":  {func(w *world) { w.Release("a", routecache.End{}) }, routecache.Answer{Status: routecache.Gone}},
		"snapshot": {func(w *world) { w.Replace(map[string]routecache.Route{"a": routeA}) }, routable(routeA)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, routecache.Options{})
				done := w.lookup(t.Context(), "a")
				c.push(w)
				require.Equal(t, result{answer: c.want}, <-done)
				require.Zero(t, w.Stats().Open)
			})
		})
	}
}

func TestAwaitJoinedNeedsAStreamAndFreshness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		woken := make(chan error, 2)
		wait := func(ctx context.Context) {
			go func() { woken <- w.AwaitJoined(ctx) }()
			synctest.Wait()
		}
		wait(t.Context())
		require.Empty(t, woken, "there is no stream")
		w.Expire()
		w.Connected()
		synctest.Wait()
		require.Empty(t, woken, "the cache is stale")
		wait(t.Context())
		w.SetFreshUntil(2 * time.Hour)
		require.NoError(t, <-woken)
		require.NoError(t, <-woken)
		require.NoError(t, w.AwaitJoined(t.Context()))

		w.Disconnected()
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("the client has gone")
		wait(ctx)
		require.Empty(t, woken)
		cancel(gone)
		require.ErrorIs(t, <-woken, gone)
		w.pass(3 * time.Hour)
		w.Connected()
		wait(t.Context())
		require.Empty(t, woken, "the cache has become stale")
		w.SetFreshUntil(4 * time.Hour)
		require.NoError(t, <-woken)
	})
}

func TestOpenQuestionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{MaxQuestions: 2})
		a, b := w.lookup(t.Context(), "a"), w.lookup(t.Context(), "b")
		_, err := w.Lookup(t.Context(), key("c"))
		require.ErrorIs(t, err, routecache.ErrTooManyQuestions)
		again := w.lookup(t.Context(), "a") // shares a question, so it needs no room

		w.Resolve("b", routecache.Answer{})
		<-b
		c := w.lookup(t.Context(), "c")
		require.Equal(t, []string{"a", "b", "c"}, w.questions())
		w.Disconnected()
		for _, done := range []<-chan result{a, again, c} {
			require.ErrorIs(t, (<-done).err, routecache.ErrDisconnected)
		}
		require.Zero(t, w.Stats().Open)
	})
}

func TestLookupFailsAtOnceWithoutAStream(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Put("b", routeB)
	w.setDeaf(true)
	_, err := w.lookupNow("a")
	require.ErrorIs(t, err, routecache.ErrDisconnected)
	require.Zero(t, w.Stats().Open)
	w.knows("b", routable(routeB)) // known routes are still served
}

// A question that was not sent must fail its own callers, but not a later question about the same
// ID that was opened after a reconnect.
func TestFailedQuestionDoesNotFailItsSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *routecache.Cache
		var second <-chan result
		asked := 0
		o := routecache.Options{Now: func() time.Duration { return 0 }}
		o.Ask = func(string, bool) bool {
			if asked++; asked > 1 {
				return true
			}
			c.Disconnected() // the stream breaks at this moment, and a new one begins
			done := make(chan result, 1)
			second = done
			go func() {
				a, err := c.Lookup(t.Context(), key("a"))
				done <- result{a, err}
			}()
			synctest.Wait()
			return false
		}
		var err error
		c, err = routecache.New(o)
		require.NoError(t, err)
		c.SetFreshUntil(time.Hour)
		_, err = c.Lookup(t.Context(), key("a"))
		require.ErrorIs(t, err, routecache.ErrDisconnected)
		require.Empty(t, second)
		c.Resolve("a", routable(routeA))
		require.Equal(t, result{answer: routable(routeA)}, <-second)
	})
}

func TestReplaceKeepsQuestionsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, routecache.Options{})
		done := w.lookup(t.Context(), "a")
		w.Replace(map[string]routecache.Route{"b": routeB})
		synctest.Wait()
		require.Empty(t, done)
		w.Resolve("a", routable(routeA))
		require.Equal(t, result{answer: routable(routeA)}, <-done)
	})
}

func TestLookupAnsweredByASynchronousAllocator(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.onAsk = func(id string) { w.Resolve(id, routable(routeA)) } // Ask must hold no lock
	a, err := w.lookupNow("a")
	require.NoError(t, err)
	require.Equal(t, routable(routeA), a)
}
