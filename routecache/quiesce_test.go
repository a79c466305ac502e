package routecache_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/routecache"
)

var quiesced = routecache.Answer{Status: routecache.Quiesced}

// Invariant: I4
func TestOnlyResumeReleaseAndReplaceEndAQuiesce(t *testing.T) {
	gone := routecache.Answer{Status: routecache.Gone}
	for name, c := range map[string]struct {
		happens func(*world)
		want    routecache.Answer
	}{
		"nothing":              {func(*world) {}, quiesced},
		"resume":               {func(w *world) { w.Resume("a") }, routable(routeA)},
		"release":              {func(w *world) { w.Release("a", routecache.End{}) }, gone},
		"answered as gone":     {func(w *world) { w.Resolve("a", gone) }, gone},
		"snapshot":             {func(w *world) { w.Replace(map[string]routecache.Route{"a": routeA}) }, routable(routeA)},
		"resume of another":    {func(w *world) { w.Resume("b") }, quiesced},
		"push":                 {func(w *world) { w.Put("a", routeB) }, quiesced},
		"answer":               {func(w *world) { w.Resolve("a", routable(routeB)) }, quiesced},
		"answered as unknown":  {func(w *world) { w.Resolve("a", routecache.Answer{}) }, quiesced},
		"answered as starting": {func(w *world) { w.Resolve("a", routecache.Answer{Status: routecache.Starting}) }, quiesced},
		"disconnection":        {func(w *world) { w.Disconnected() }, quiesced},
		"its route is evicted": {func(w *world) { w.Put("b", routeB) }, quiesced},
		"quiesced again":       {func(w *world) { w.Quiesce("a") }, quiesced},
		"time":                 {func(w *world) { w.pass(59 * time.Minute) }, quiesced},
		"a caller gave up waiting": {func(w *world) {
			ctx, cancel := context.WithCancel(w.t.Context())
			cancel()
			require.ErrorIs(w.t, w.Await(ctx, key("a"), routecache.Quiesced), context.Canceled)
		}, quiesced},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, routecache.Options{Size: 1})
			w.Put("a", routeA)
			require.True(t, w.Quiesce("a"))
			c.happens(w)
			a, err := w.Lookup(t.Context(), key("a"))
			require.NoError(t, err)
			require.Equal(t, c.want, a)
			for _, r := range []routecache.Route{routeA, routeB} {
				require.Equal(t, c.want == routable(r), w.Holds(key("a"), r))
			}
			require.Empty(t, w.asked)
		})
	}
}

func TestQuiescedNeedsFreshness(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Put("a", routeA)
	w.Quiesce("a")
	w.Expire()
	_, err := w.Lookup(t.Context(), key("a"))
	require.ErrorIs(t, err, routecache.ErrNotFresh)
}

func TestWaitingLookupLearnsOfAQuiesce(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.onAsk = func(id string) {
		w.Quiesce(id)
		w.Resolve(id, routable(routeA))
	}
	a, err := w.Lookup(t.Context(), key("a"))
	require.NoError(t, err)
	require.Equal(t, quiesced, a)
}

func TestAwaitReturnsWhenAQuiesceEnds(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(*world)
		wakes   bool
	}{
		"resume":            {func(w *world) { w.Resume("a") }, true},
		"release":           {func(w *world) { w.Release("a", routecache.End{}) }, true},
		"snapshot":          {func(w *world) { w.Replace(nil) }, true},
		"resume of another": {func(w *world) { w.Resume("b") }, false},
		"quiesced again":    {func(w *world) { w.Quiesce("a") }, false},
		"disconnection":     {func(w *world) { w.Disconnected() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, routecache.Options{})
				w.Put("a", routeA)
				w.Quiesce("a")
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				woken := make(chan error, 1)
				go func() { woken <- w.Await(ctx, key("a"), routecache.Quiesced) }()
				synctest.Wait()
				require.Empty(t, woken)
				c.happens(w)
				synctest.Wait()
				if !c.wakes {
					require.Empty(t, woken)
					late := errors.New("late")
					cancel(late)
					require.ErrorIs(t, <-woken, late)
					return
				}
				require.NoError(t, <-woken)
			})
		})
	}
}

func TestAwaitNoticesAnEarlierResume(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	w.Quiesce("a") // and no route
	w.Resume("a")
	require.NoError(t, w.Await(t.Context(), key("a"), routecache.Quiesced))
	w.Quiesce("a")
	require.NoError(t, w.Await(t.Context(), key("a"), routecache.Starting), "it is quiesced, and waits elsewhere")
}

func TestQuiescedSandboxesAreBounded(t *testing.T) {
	w := newWorld(t, routecache.Options{})
	for i := range 10_000 {
		require.True(t, w.Quiesce(fmt.Sprint(i)))
	}
	require.False(t, w.Quiesce("a"))
	require.True(t, w.Quiesce("7"), "it is already")
	w.Release("gone", routecache.End{})
	require.True(t, w.Quiesce("gone"), "it takes no room")
	require.Equal(t, 10_000, w.Stats().Quiesced)
	w.Resume("7")
	require.True(t, w.Quiesce("a"))
	w.Replace(nil)
	require.Zero(t, w.Stats().Quiesced)
}
