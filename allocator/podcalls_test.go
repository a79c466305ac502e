package allocator

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
)

func starting(pool, id string) core.Sandbox {
	return core.Sandbox{Pool: core.PoolKey{Name: pool}, Binding: core.Binding{ID: id}}
}

func itself(s core.Sandbox) core.Sandbox { return s }

// runHooks calls what is added until the test ends; called gets the IDs, and the
// calls end when their context does, or when answer is closed.
func runHooks(t *testing.T) (h *podCalls[core.Sandbox], called chan string, answer chan struct{}, stop func()) {
	called, answer = make(chan string, 10*maxCallsPerPool), make(chan struct{})
	h = newPodCalls(func(ctx context.Context, s core.Sandbox) {
		called <- s.ID
		select {
		case <-ctx.Done():
			called <- s.ID + " ended"
		case <-answer:
		}
	}, itself)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { h.run(ctx); close(ended) }()
	return h, called, answer, func() { cancel(); <-ended }
}

func TestHangingHooksDoNotBlockOtherPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, called, answer, stop := runHooks(t)
		for i := range maxCallsPerPool + 10 {
			h.add(starting("slow", fmt.Sprintf("s%d", i)))
		}
		synctest.Wait()
		require.Len(t, called, maxCallsPerPool)
		require.Equal(t, 10, h.waiting())
		for len(called) > 0 {
			<-called
		}
		h.add(starting("other", "o"))
		require.Equal(t, "o", <-called)
		close(answer)
		synctest.Wait()
		require.Len(t, called, 10)
		require.Zero(t, h.waiting())
		require.Empty(t, h.lines, "what was called is kept")
		require.Empty(t, h.cancel)
		stop()
	})
}

func TestHooksQueuedBeforeTheStartAreCalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		called := make(chan string, 1)
		h := newPodCalls(func(_ context.Context, s core.Sandbox) { called <- s.ID }, itself)
		h.add(starting("p", "a"))
		synctest.Wait()
		require.Empty(t, called)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { h.run(ctx); close(ended) }()
		require.Equal(t, "a", <-called)
		cancel()
		<-ended
		h.add(starting("p", "after the end"))
		synctest.Wait()
		require.Empty(t, called)
	})
}

func TestReleaseCancelsTheSandboxsHook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, called, _, stop := runHooks(t)
		for i := range maxCallsPerPool + 2 {
			h.add(starting("p", fmt.Sprintf("s%d", i)))
		}
		synctest.Wait()
		for len(called) > 0 {
			<-called
		}
		waiting := fmt.Sprintf("s%d", maxCallsPerPool)
		h.drop(starting("p", waiting)) // it has not been called yet
		require.Equal(t, 1, h.waiting())
		h.drop(starting("p", "s0"))
		require.Equal(t, "s0 ended", <-called)
		require.Equal(t, fmt.Sprintf("s%d", maxCallsPerPool+1), <-called, "the one behind it takes its place")
		h.drop(starting("p", "s0")) // and again
		h.drop(starting("q", "never seen"))
		stop()
		for len(called) > 0 {
			require.NotEqual(t, waiting, <-called)
		}
	})
}

// An agent is asked until it answers, and a hook may run for its whole timeout.
func TestReleasedSandboxEndsTheCallsToItsPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		a.o.WallClock = time.Now
		tm.lines = newWorkers(zap.NewNop())
		defer tm.lines.queue.ShutDown()
		ended := make(chan string, 6)
		tm.hooks = newPodCalls(func(ctx context.Context, _ core.Sandbox) { <-ctx.Done(); ended <- "hook" }, itself)
		ofConfigure := func(e core.Configure) core.Sandbox { return e.Sandbox }
		tm.inits = newPodCalls(func(ctx context.Context, _ core.Configure) { <-ctx.Done(); ended <- "configuration" }, ofConfigure)
		tm.restores = newPodCalls(func(ctx context.Context, _ core.Configure) { <-ctx.Done(); ended <- "restore" }, ofConfigure)
		ofArchive := func(e core.WriteArchive) core.Sandbox { return e.Sandbox }
		tm.archives = newPodCalls(func(ctx context.Context, _ core.WriteArchive) { <-ctx.Done(); ended <- "archive" }, ofArchive)
		tm.stops = newPodCalls(func(ctx context.Context, _ core.WriteArchive) { <-ctx.Done(); ended <- "stop" }, ofArchive)
		tm.orders = newPodCalls(func(ctx context.Context, _ agentOrder) { <-ctx.Done(); ended <- "order" },
			func(o agentOrder) core.Sandbox { return o.sandbox })
		tm.keeps = tm.orders
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { tm.hooks.run(ctx) })
		running.Go(func() { tm.inits.run(ctx) })
		running.Go(func() { tm.restores.run(ctx) })
		running.Go(func() { tm.archives.run(ctx) })
		running.Go(func() { tm.stops.run(ctx) })
		running.Go(func() { tm.orders.run(ctx) })
		defer running.Wait()
		defer cancel()
		s := starting("p", "a")
		tm.do(core.StartSandbox{Sandbox: s})
		tm.do(core.Configure{Sandbox: s, Ask: true})
		tm.do(core.Configure{Sandbox: s, Values: &agents.Values{Restore: &agents.Restore{}}})
		tm.do(core.Freeze{Sandbox: s})
		tm.do(core.WriteArchive{Token: 1, Sandbox: s})
		tm.do(core.WriteArchive{Sandbox: s})
		synctest.Wait()
		require.Empty(t, ended)
		tm.do(core.SandboxReleased{Sandbox: s})
		synctest.Wait()
		require.Len(t, ended, 6)
		require.ElementsMatch(t, []string{"hook", "configuration", "restore", "order", "archive", "stop"},
			[]string{<-ended, <-ended, <-ended, <-ended, <-ended, <-ended})
	})
}

func TestCallsThatTakeLongHaveLinesOfTheirOwn(t *testing.T) {
	_, tm := leading(t)
	ofConfigure, ofArchive := func(e core.Configure) core.Sandbox { return e.Sandbox }, func(e core.WriteArchive) core.Sandbox { return e.Sandbox }
	tm.inits, tm.restores = newPodCalls(tm.configure, ofConfigure), newPodCalls(tm.configure, ofConfigure)
	tm.archives, tm.stops = newPodCalls(tm.writeArchive, ofArchive), newPodCalls(tm.writeStopped, ofArchive)
	tm.orders = newPodCalls(tm.order, func(o agentOrder) core.Sandbox { return o.sandbox })
	tm.keeps = tm.orders
	requireWaiting := func(inits, restores, archives, stops int) {
		t.Helper()
		require.Equal(t, []int{inits, restores, archives, stops},
			[]int{tm.inits.waiting(), tm.restores.waiting(), tm.archives.waiting(), tm.stops.waiting()})
	}
	s := starting("p", "a")
	tm.do(core.Configure{Sandbox: s})
	requireWaiting(1, 0, 0, 0)
	s.Archive = "x"
	tm.do(core.Configure{Sandbox: s, Ask: true})
	requireWaiting(2, 0, 0, 0)
	tm.do(core.Configure{Sandbox: s})
	requireWaiting(2, 1, 0, 0)
	tm.do(core.WriteArchive{Sandbox: s, Token: 1, Values: &snapshotCall{}})
	requireWaiting(2, 1, 1, 0)
	tm.do(core.WriteArchive{Sandbox: s})
	tm.do(core.WriteArchive{Sandbox: s})
	requireWaiting(2, 1, 1, 1)
	tm.do(core.Thaw{Sandbox: s})
	requireWaiting(2, 1, 1, 0)
}

// An order that replaces another one begins before that has ended.
func TestEndOfAReplacedCallKeepsTheNextCancellable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan string, 2)
		release := make(chan struct{})
		calls := 0
		h := newPodCalls(func(ctx context.Context, _ core.Sandbox) {
			calls++
			n := calls
			<-ctx.Done()
			if n == 1 {
				<-release
			}
			ended <- fmt.Sprint(n)
		}, itself)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { h.run(ctx) })
		defer running.Wait()
		defer cancel()
		s := starting("p", "a")
		h.add(s)
		synctest.Wait()
		h.drop(s)
		h.add(s)
		synctest.Wait()
		close(release)
		require.Equal(t, "1", <-ended)
		synctest.Wait()
		h.drop(s)
		synctest.Wait()
		require.Len(t, ended, 1, "the second call was not cancelled")
	})
}
