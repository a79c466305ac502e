package allocator

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// journal of a test: what happened, in its order.
type order struct {
	mu   sync.Mutex
	list []string
}

func (o *order) add(what string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list = append(o.list, what)
}

func (o *order) all() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.list...)
}

// Invariant: P11
func TestLeaseIsGivenBackAfterTheTermEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var happened order
		api := newMemoryAPI()
		api.written = func(_, at string, object map[string]any) {
			if who, lease := holder(at, object); lease && who == "" {
				happened.add("given back")
			}
		}
		a := newReplica(t, api, func(o *Options) {
			o.OnSandboxReleased = func(ctx context.Context, _ string) {
				<-ctx.Done()
				time.Sleep(endWait / 2) // in the middle of something
				happened.add("ended")
			}
		})
		tm, stop, done := start(t, a)
		tm.publish(events.Released, starting("python", "k3x9"))
		synctest.Wait()
		stop()
		require.NoError(t, <-done)
		require.Equal(t, []string{"ended", "given back"}, happened.all())
	})
}

// The program that embeds us, or anything else in the term, may never return.
// Invariant: P11
func TestEndOfATermWaitsForABoundedTime(t *testing.T) {
	for name, c := range map[string]struct {
		hang func(*term, func())
		lost bool // the lease; else the replica is stopped
	}{
		"a callback, when it is stopped":     {hang: func(tm *term, _ func()) { tm.publish(events.Ready, starting("python", "k3x9")) }},
		"a callback, when the lease is lost": {hang: func(tm *term, _ func()) { tm.publish(events.Ready, starting("python", "k3x9")) }, lost: true},
		"a hook, when it is stopped": {hang: func(tm *term, hangs func()) {
			tm.hooks.call = func(context.Context, core.Sandbox) { hangs() }
			tm.hooks.add(starting("python", "k3x9"))
		}},
		"a hook, when the lease is lost": {hang: func(tm *term, hangs func()) {
			tm.hooks.call = func(context.Context, core.Sandbox) { hangs() }
			tm.hooks.add(starting("python", "k3x9"))
		}, lost: true},
		"the loop, when the lease is lost": {hang: func(tm *term, hangs func()) { tm.loop.in <- func(core.View) { hangs() } }, lost: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newMemoryAPI()
				given := make(chan struct{}, 10)
				api.written = func(_, at string, object map[string]any) {
					if who, lease := holder(at, object); lease && who == "" {
						given <- struct{}{}
					}
				}
				release := make(chan struct{})
				defer close(release)
				hanging := make(chan struct{})
				hangs := func() { close(hanging); <-release }
				a := newReplica(t, api, func(o *Options) { o.OnSandboxReady = func(context.Context, string) { hangs() } })
				tm, stop, done := start(t, a)
				c.hang(tm, hangs)
				<-hanging
				require.NoError(t, a.Healthy())
				if c.lost {
					api.mu.Lock()
					for at, object := range api.objects {
						if _, lease := holder(at, object); lease {
							object["spec"].(map[string]any)["holderIdentity"] = "another"
							object["spec"].(map[string]any)["renewTime"] = time.Now().Add(time.Hour).UTC().Format("2006-01-02T15:04:05.000000Z")
							metadata(object)["resourceVersion"] = "999999"
						}
					}
					api.mu.Unlock()
				} else {
					stop()
				}
				select {
				case err := <-done:
					require.ErrorIs(t, err, errEndTimeout)
					require.Equal(t, c.lost, errors.Is(err, ErrLeaseLost), "%v", err)
				case <-time.After(time.Hour):
					t.Fatal("it waits for ever")
				}
				require.Error(t, a.Healthy(), "it never leads again")
				require.Equal(t, c.lost, len(given) == 0, "a lease that is held is given back, and no other")
			})
		})
	}
}

// The pod is a real peer: it answers with another protocol, or with nothing, and keeps the
// connection.
// Invariant: P11
func TestHangingHookDoesNotDelayTheTermsEnd(t *testing.T) {
	for name, answer := range map[string]string{
		"another protocol": "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
		"half an answer":   "HTTP/1.1 200 OK\r\nA: b",
		"nothing":          "",
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			called, ended := make(chan struct{}), make(chan struct{})
			var serving sync.WaitGroup
			serving.Go(func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				_, _ = io.WriteString(conn, answer)
				close(called)
				<-ended
			})
			defer serving.Wait()
			defer close(ended)
			defer l.Close()
			at := l.Addr().(*net.TCPAddr).AddrPort()

			pool := stack.DemoPool(poolKey.Namespace, poolKey.Name, 0)
			pool.Spec.PostStart = &v1alpha1.PostStartHook{Port: int32(at.Port()), Path: "/", TimeoutSeconds: 3600}
			api := newMemoryAPI()
			api.put(t, "/apis/berth.sh/v1alpha1/namespaces/default/sandboxpools/python", pool)
			a := newReplica(t, api)
			tm, stop, done := start(t, a)
			tm.do(core.StartSandbox{Sandbox: core.Sandbox{Binding: core.Binding{ID: "k3x9"}, Pool: poolKey, IP: at.Addr()}})
			select {
			case <-called:
			case <-time.After(time.Minute):
				t.Fatal("the hook is not called")
			}
			stop()
			select {
			case err := <-done:
				require.NoError(t, err)
			case <-time.After(time.Minute):
				t.Fatal("the pod keeps the term from ending")
			}
		})
	}
}

// acting is a term whose effects are carried out, with nothing behind it.
func acting(t *testing.T, options ...func(*Options)) (*term, func()) {
	t.Helper()
	a, tm := leading(t)
	a.o.WallClock = time.Now
	for _, set := range options {
		set(&a.o)
	}
	tm.log = zap.NewNop()
	for _, w := range []**workers{&tm.creates, &tm.deletes, &tm.other, &tm.lines, &tm.found} {
		*w = newWorkers(tm.log)
	}
	tm.hooks = newPodCalls(tm.start, itself)
	ofConfigure := func(e core.Configure) core.Sandbox { return e.Sandbox }
	tm.inits, tm.restores = newPodCalls(tm.configure, ofConfigure), newPodCalls(tm.configure, ofConfigure)
	ofArchive := func(e core.WriteArchive) core.Sandbox { return e.Sandbox }
	tm.archives, tm.stops = newPodCalls(tm.writeArchive, ofArchive), newPodCalls(tm.writeStopped, ofArchive)
	tm.orders = newPodCalls(tm.order, func(o agentOrder) core.Sandbox { return o.sandbox })
	tm.keeps = newPodCalls(tm.order, func(o agentOrder) core.Sandbox { return o.sandbox })
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, w := range []*workers{tm.creates, tm.deletes, tm.other, tm.lines, tm.found} {
		all.Go(func() { w.run(ctx, 1) })
	}
	all.Go(func() { tm.hooks.run(ctx) })
	all.Go(func() { tm.inits.run(ctx) })
	all.Go(func() { tm.restores.run(ctx) })
	all.Go(func() { tm.callBack(ctx) })
	return tm, func() { cancel(); all.Wait() }
}

func TestCallbacksFollowTheEventsAndDelayNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var called order
		release := make(chan struct{})
		tm, stop := acting(t, func(o *Options) {
			o.OnSandboxReady = func(_ context.Context, id string) { called.add("ready " + id); <-release }
			o.OnSandboxReleased = func(_ context.Context, id string) { called.add("released " + id) }
		})
		defer stop()
		seen, logs := observer.New(zap.WarnLevel)
		tm.log = zap.New(seen)
		tm.do(core.SandboxCreated{Sandbox: starting("python", "a")})
		tm.do(core.SandboxReady{Sandbox: starting("python", "a")})
		synctest.Wait()
		for range events.Size + 3 { // the core goes on, and a stream gets its events
			tm.do(core.SandboxCreated{Sandbox: starting("python", "b")})
		}
		tm.do(core.SandboxReady{Sandbox: starting("python", "b")})
		tm.do(core.SandboxReleased{Sandbox: starting("python", "b")})
		next, _, _ := tm.events.After(events.Size, 100)
		require.Equal(t, events.Released, next[len(next)-1].Type)
		require.Equal(t, []string{"ready a"}, called.all())
		close(release)
		synctest.Wait()
		require.Equal(t, []string{"ready a", "ready b", "released b"}, called.all())
		require.Equal(t, 1, logs.Len(), "%v", logs.All())
		require.Equal(t, map[string]any{"events": uint64(5)}, logs.All()[0].ContextMap())
	})
}

// Its ID and its metadata could reach the next pod at that address.
func TestRunningHookOfAReleasedSandboxIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, stop := acting(t)
		defer stop()
		called := make(chan string, 10)
		tm.hooks.call = func(ctx context.Context, s core.Sandbox) {
			called <- s.ID
			<-ctx.Done()
			called <- s.ID + " ended"
		}
		tm.do(core.StartSandbox{Sandbox: starting("python", "k3x9")})
		tm.do(core.StartSandbox{Sandbox: starting("python", "other")})
		synctest.Wait()
		require.Len(t, called, 2)
		<-called
		<-called
		tm.do(core.SandboxReleased{Sandbox: starting("python", "k3x9")})
		synctest.Wait()
		require.Len(t, called, 1, "the pod is called on")
		require.Equal(t, "k3x9 ended", <-called)
	})
}

// The caller has gone after the claim was handed to the journal, and before it was durable.
func TestUncollectedClaimIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, stop := acting(t)
		defer stop()
		token, answer := tm.answers.expect()
		tm.do(core.Claimed{Token: token, Sandbox: starting("python", "taken")})
		require.Equal(t, "taken", (<-answer).(core.Claimed).Sandbox.ID)
		tm.answers.forget(token)
		synctest.Wait()
		require.Empty(t, tm.loop.in)
		tm.do(core.Claimed{Token: token, Sandbox: starting("python", "k3x9")})
		synctest.Wait()
		require.Len(t, tm.loop.in, 1, "it lives without an owner until its end")
		require.Equal(t, core.Release{Scope: core.Scope{All: true}, ID: "k3x9", Reason: fact.ReasonCanceled}, <-tm.loop.in)
	})
}

// A leader that stood still finds pods that the next one has claimed.
func TestDeposedLeaderReportsNoRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm, stop := acting(t)
		seen, logs := observer.New(zap.InfoLevel)
		tm.log = zap.New(seen)
		found := core.Repaired{Pod: podKey, What: "a pod is marked as used: it will be deleted"}
		tm.do(found)
		time.Sleep(time.Minute)
		require.Zero(t, logs.Len(), "%v", logs.All())
		require.Zero(t, testutil.ToFloat64(tm.a.metrics.repairs))
		tm.a.lock.renewed.Store(int64(bootclock.Now())) // it was the leader
		time.Sleep(time.Minute)
		require.Equal(t, 1, logs.Len(), "what a leader finds is reported")
		require.Equal(t, "found: a pod is marked as used: it will be deleted", logs.All()[0].Message)
		require.Equal(t, map[string]any{"pod": podKey.Name}, logs.All()[0].ContextMap())
		require.InDelta(t, 1, testutil.ToFloat64(tm.a.metrics.repairs), 0)

		tm.do(found)
		time.Sleep(time.Minute)
		stop() // the lease was lost
		require.Equal(t, 1, logs.Len())
	})
}
