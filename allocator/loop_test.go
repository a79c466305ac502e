package allocator

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/guard"
)

var (
	poolKey = core.PoolKey{Namespace: "default", Name: "python"}
	podKey  = core.PodKey{Namespace: "default", Name: "python-1", UID: "u1"}
)

// pod is a warm pod, as it was seen at this resource version.
func pod(version string) core.Pod {
	return core.Pod{Key: podKey, Pool: poolKey.Name, Node: "n1", Version: version, IP: netip.MustParseAddr("10.0.0.1"), Ready: true}
}

func newTestLoop(t *testing.T, do func(core.Effect)) *loop {
	n := 0
	c, err := core.New(core.Config{
		Term: 1, MaxStale: time.Minute, ConnectWindow: time.Second, Lease: time.Second, NewID: func() string { return "k3x9" },
		NewSuffix: func() string { n++; return fmt.Sprint(n) },
	}, now(time.Now))
	require.NoError(t, err)
	_, err = c.Recover(core.State{Nodes: []string{"n1"}})
	require.NoError(t, err)
	if do == nil {
		do = func(core.Effect) {}
	}
	return newLoop(c, guard.New(time.Second), time.Now, do)
}

// running runs the loop until the test has ended.
func (l *loop) running(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	go l.run(ctx)
	stop = func() { cancel(); <-l.done }
	t.Cleanup(stop)
	return stop
}

func known(t *testing.T, l *loop) (keys []core.PodKey) {
	t.Helper()
	require.NoError(t, lookError(t.Context(), l, func(c core.View) { keys = c.PodKeys() }))
	return keys
}

func TestStaleObservationIsDropped(t *testing.T) {
	for name, c := range map[string]struct {
		version string
		taken   bool
	}{
		"newer":             {"11", true},
		"the same again":    {"10", true},
		"older":             {"9", false}, // a comparison of texts would take it for newer
		"much older":        {"1", false},
		"not comparable":    {"x", true},
		"beyond 64 bits":    {"123456789012345678901234567890", true},
		"older by a length": {"2", false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newTestLoop(t, nil)
			l.step(core.PoolSeen{Pool: core.Pool{Key: poolKey, Warm: 1}})
			l.step(core.PodSeen{Pod: pod("10")})
			counts, _ := l.core.View().Counts(poolKey)
			require.Equal(t, 1, counts.Warm)
			going := pod(c.version)
			going.Deleting = true
			l.step(core.PodSeen{Pod: going})
			counts, _ = l.core.View().Counts(poolKey)
			require.Equal(t, c.taken, counts.Warm == 0)
		})
	}
}

func TestDroppedObservationDoesNotSetTheVersion(t *testing.T) {
	l := newTestLoop(t, nil)
	l.step(core.PodSeen{Pod: pod("10")})
	l.step(core.PodSeen{Pod: pod("5")})
	l.step(core.PodSeen{Pod: pod("7")})
	require.Equal(t, map[core.PodKey]string{podKey: "10"}, l.versions)
}

func TestVersionsOfGonePodsAreDropped(t *testing.T) {
	l := newTestLoop(t, nil)
	for i := range 100 {
		p := pod(fmt.Sprint(i))
		p.Key.UID = fmt.Sprint(i)
		l.step(core.PodSeen{Pod: p})
		l.step(core.PodGone{Key: p.Key})
	}
	require.Empty(t, l.versions)
}

func TestLateObservationDoesNotRevivePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTestLoop(t, nil)
		l.step(core.PodSeen{Pod: pod("10")})
		l.step(core.PodGone{Key: podKey})
		for i := range 5 { // pods that come and go later do not push it out at once
			p := pod("20")
			p.Key.UID = fmt.Sprint(i)
			l.step(core.PodSeen{Pod: p})
			l.step(core.PodGone{Key: p.Key})
		}
		l.step(core.PodSeen{Pod: pod("11")})
		require.Empty(t, l.core.View().PodKeys())
	})
}

func TestGonePodsAreForgottenEventually(t *testing.T) {
	l := newTestLoop(t, nil)
	l.step(core.PodGone{Key: podKey})
	for range 2 {
		l.goneSince -= goneRetention + time.Second
		l.step(core.PodGone{Key: core.PodKey{Name: "another"}})
	}
	require.False(t, l.isGone(podKey))
}

func TestObservationsOlderThanTheFirstListAreDropped(t *testing.T) {
	l := newTestLoop(t, nil)
	l.listed = "10"
	l.knows(core.State{Pools: []core.Pool{{Key: poolKey, Version: "9"}}})
	l.step(core.PodSeen{Pod: pod("8")}) // deleted before the list was made
	require.Empty(t, l.core.View().PodKeys())
	l.step(core.PoolSeen{Pool: core.Pool{Key: poolKey, Version: "8"}})
	_, known := l.core.View().Counts(poolKey)
	require.False(t, known)
	l.poolsListed = "9"
	other := core.PoolKey{Namespace: "default", Name: "gone before the list"}
	l.step(core.PoolSeen{Pool: core.Pool{Key: other, Version: "7"}})
	_, known = l.core.View().Counts(other)
	require.False(t, known)
	l.step(core.PoolSeen{Pool: core.Pool{Key: poolKey, Version: "11"}})
	l.step(core.PoolGone{Key: poolKey, Version: "10"}) // of the one before
	_, known = l.core.View().Counts(poolKey)
	require.True(t, known)
	l.step(core.PodSeen{Pod: pod("11")})
	require.Len(t, l.core.View().PodKeys(), 1)
}

func TestEffectsRunInOrderBeforeTheNextEvent(t *testing.T) {
	var done []string
	l := newTestLoop(t, func(e core.Effect) { done = append(done, fmt.Sprintf("%T", e)) })
	stop := l.running(t)
	l.Submit(core.PoolSeen{Pool: core.Pool{Key: poolKey, Warm: 1}})
	l.Submit(core.SessionJoined{Session: "s", Stream: 1})
	l.Submit(core.Written{})
	l.Submit(core.SessionPing{Session: "s", Stream: 1, Nonce: 1})
	require.Empty(t, known(t, l)) // all of them were taken before this
	stop()
	require.Equal(t, []string{"step.CreatePod", "step.Write", "step.SendSnapshot", "step.SendPong"}, done)
}

// A bare loop has nothing but its ticks to notice a deadline by.
func TestTicksReachTheCoreWithoutEvents(t *testing.T) {
	closed := make(chan core.Effect, 1)
	l := newTestLoop(t, func(e core.Effect) {
		if _, ok := e.(core.CloseStream); ok {
			closed <- e
		}
	})
	c, err := core.New(core.Config{
		Term: 1, MaxStale: time.Nanosecond, ConnectWindow: time.Second, Lease: time.Second, NewID: func() string { return "" }, NewSuffix: func() string { return "" },
	}, now(time.Now))
	require.NoError(t, err)
	l.core = c
	l.running(t)
	l.Submit(core.SessionJoined{Session: "s", Stream: 1}) // and is never heard of again
	select {
	case e := <-closed:
		require.Equal(t, core.CloseStream{Stream: 1}, e)
	case <-time.After(10 * time.Second):
		t.Fatal("time does not pass")
	}
}

func TestSubmitWaitsWhileTheQueueIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTestLoop(t, nil)
		for range eventQueue {
			l.Submit(core.Tick{})
		}
		submitted := make(chan bool, 1)
		go func() { submitted <- l.put(core.PodSeen{Pod: pod("1")}) }()
		synctest.Wait()
		require.Empty(t, submitted, "the queue is not bounded")
		ctx, cancel := context.WithCancel(t.Context())
		go l.run(ctx)
		require.True(t, <-submitted)
		require.Equal(t, []core.PodKey{podKey}, known(t, l), "an event that waited was lost")
		cancel()
		<-l.done
	})
}

func TestCallersReturnWhenTheLoopEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTestLoop(t, nil)
		for range eventQueue {
			l.Submit(core.Tick{})
		}
		put, looked := make(chan bool, 1), make(chan error, 1)
		go func() { put <- l.put(core.Tick{}) }()
		go func() { looked <- lookError(context.Background(), l, func(core.View) {}) }()
		synctest.Wait()
		close(l.done) // as run does; nothing is taken any more
		require.False(t, <-put)
		require.ErrorIs(t, <-looked, errStepDown)
	})
}

func TestEventsAfterTheEndAreDropped(t *testing.T) {
	l := newTestLoop(t, nil)
	l.running(t)()
	for range 2 * eventQueue {
		l.Submit(core.Tick{}) // must not block
	}
	require.ErrorIs(t, lookError(t.Context(), l, func(core.View) { t.Error("looked") }), errStepDown)
}

func TestLookEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTestLoop(t, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, lookError(ctx, l, func(core.View) {}), context.DeadlineExceeded, "the loop does not run")
		for len(l.in) < eventQueue {
			l.Submit(core.Tick{})
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, lookError(ctx, l, func(core.View) {}), context.DeadlineExceeded, "the queue is full")
	})
}

func TestAnswerGoesToItsCallerOnly(t *testing.T) {
	a := newAnswers()
	first, firstAnswer := a.expect()
	second, secondAnswer := a.expect()
	require.NotEqual(t, first, second)
	require.True(t, a.deliver(second, core.ClaimRefused{Token: second}))
	require.Empty(t, firstAnswer)
	require.Equal(t, core.ClaimRefused{Token: second}, <-secondAnswer)
	require.Nil(t, a.forget(second))
	require.False(t, a.deliver(second, core.Claimed{}), "an answer was taken for a caller that has gone")

	require.True(t, a.deliver(first, core.Claimed{Token: first}))
	require.Equal(t, core.Claimed{Token: first}, a.forget(first), "an answer that came in the last moment was lost")
	require.Nil(t, a.forget(first))
	require.Empty(t, a.waiting)
}

// A leader that stood still hears its routers before it takes them for gone. One that is
// always late goes on nevertheless.
func TestLateTickWaitsForQueuedMessages(t *testing.T) {
	const second = time.Second
	for name, c := range map[string]struct {
		every, gap time.Duration // between ticks, and once
		most       time.Duration // until one counts after the gap
		least      time.Duration
	}{
		"it stood still":  {tickEvery, 8 * second, catchUp + tickEvery, catchUp},
		"it was not late": {tickEvery, maxTickDelay, 0, 0},
		"it is slow":      {600 * time.Millisecond, 600 * time.Millisecond, catchUp + 600*time.Millisecond, catchUp},
	} {
		t.Run(name, func(t *testing.T) {
			at := 100 * second
			l := ticks{last: at}
			for range 10 {
				at += c.gap
				late := at
				for ; !l.count(at); at += c.every {
					if at-late > c.most {
						t.Fatalf("no tick counts for %v", at-late)
					}
				}
				if at-late < c.least {
					t.Fatalf("a tick counts %v after one that was late", at-late)
				}
				for range 5 {
					if at += c.every; c.every < maxTickDelay && !l.count(at) {
						t.Fatal("a tick that is not late does not count")
					}
				}
			}
		})
	}
}

func lookError(ctx context.Context, l *loop, f func(core.View)) error {
	_, _, err := look(ctx, l, func(c core.View) (struct{}, struct{}) {
		f(c)
		return struct{}{}, struct{}{}
	})
	return err
}
