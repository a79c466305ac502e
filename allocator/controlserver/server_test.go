package controlserver

import (
	"context"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// A router whose stream ends without an error does not look for another leader.
func TestGoodbyeIsAcknowledgedOnceDurable(t *testing.T) {
	for name, c := range map[string]struct {
		then func(w *world, stream uint64)
		code codes.Code
		says string
	}{
		"it is durable":           {func(w *world, n uint64) { w.Deliver(7, core.CloseStream{Stream: n, Left: true}) }, codes.OK, ""},
		"the replica stops first": {func(w *world, _ uint64) { w.Stop() }, codes.FailedPrecondition, "this replica is stopping"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream, n := w.joined()
				require.NoError(t, stream.Send(goodbye()))
				require.NoError(t, stream.CloseSend())
				require.Equal(t, []core.Event{core.SessionGoodbye{Session: testRouter, Stream: n}}, w.leader.seen(), "the stream has ended already")
				c.then(w, n)
				if c.code == codes.OK {
					_, err := stream.Recv()
					require.ErrorIs(t, err, io.EOF)
				} else {
					fails(t, stream, c.code, c.says)
				}
			})
		})
	}
	t.Run("the lease may be lost", func(t *testing.T) {
		run(t, func(w *world) {
			stream, n := w.joined()
			w.leader.deposed.Store(true)
			require.NoError(t, stream.Send(goodbye()))
			require.NoError(t, stream.CloseSend())
			require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, w.leader.seen(), "it may come back")
			fails(t, stream, codes.FailedPrecondition, "is not certain to hold the lease")
		})
	})
	for name, closes := range map[string]bool{"the router closes nothing and is gone": false, "the router closes its side and is gone": true} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				ctx, cancel := context.WithCancel(w.t.Context())
				defer cancel()
				stream, err := w.client.Session(ctx)
				require.NoError(t, err)
				require.NoError(t, stream.Send(join(testRouter, 0)))
				require.Len(t, w.leader.seen(), 1)
				require.NoError(t, stream.Send(goodbye()))
				if closes {
					require.NoError(t, stream.CloseSend())
				}
				require.Len(t, w.leader.seen(), 1)
				cancel()
				require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: 1}}, w.leader.seen(), "its stream stays")
			})
		})
	}
}

func TestEveryJoinedStreamSubmitsItsEnd(t *testing.T) {
	for name, leave := range map[string]func(*world, router, context.CancelFunc){
		"half closed":  func(_ *world, r router, _ context.CancelFunc) { _ = r.CloseSend() },
		"cancelled":    func(_ *world, _ router, cancel context.CancelFunc) { cancel() },
		"joined twice": func(_ *world, r router, _ context.CancelFunc) { _ = r.Send(join(testRouter, 0)) },
		"stopped":      func(w *world, _ router, _ context.CancelFunc) { w.Stop() },
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				ctx, cancel := context.WithCancel(w.t.Context())
				defer cancel()
				stream, err := w.client.Session(ctx)
				require.NoError(t, err)
				require.NoError(t, stream.Send(join(testRouter, 0)))
				require.Equal(t, []core.Event{core.SessionJoined{Session: testRouter, Stream: 1, MaxStale: maxStale}}, w.leader.seen())
				leave(w, stream, cancel)
				require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: 1}}, w.leader.seen())
				require.Empty(t, w.streams)
				require.True(t, w.Deliver(7, core.SendRelease{Stream: 1, IDs: []string{"late"}})) // its stream has ended
			})
		})
	}
}

func TestRoutersCountsConnectionsAndPongAge(t *testing.T) {
	run(t, func(w *world) {
		connected, _ := w.Routers()
		require.Zero(t, connected)
		_, _ = w.joined()
		other := w.open()
		require.NoError(t, other.Send(join("router-of-another-envoy", 0)))
		require.Len(t, w.leader.seen(), 1)
		connected, before := w.Routers()
		require.Equal(t, 2, connected)
		_, age := w.Routers()
		require.Greater(t, age, before, "no router was given a pong since it joined")
		age = bootclock.Now()
		for n := range uint64(2) {
			w.Deliver(7, core.SendPong{Stream: n + 1, Nonce: 1})
		}
		synctest.Wait()
		_, later := w.Routers()
		require.Less(t, later, bootclock.Now()-age, "counted from the last pong")
		require.NoError(t, other.CloseSend())
		w.leader.seen()
		connected, _ = w.Routers()
		require.Equal(t, 1, connected)
	})
}

func TestOnlyTheSlowRouterIsCutOff(t *testing.T) {
	run(t, func(w *world) {
		slow, n := w.joined()
		other := w.open()
		require.NoError(t, other.Send(join("router-of-another-envoy", 0)))
		require.Len(t, w.leader.seen(), 1)
		received := make(chan int, 1)
		go func() {
			count := 0
			for {
				if _, err := other.Recv(); err != nil {
					received <- count
					return
				}
				count++
			}
		}()
		sent := 0
		for ; sent < 10*queueSize; sent++ { // far more than the queue and the stream's window hold
			require.True(t, w.Deliver(7, core.SendRelease{Stream: n, Sequence: uint64(sent), IDs: []string{strings.Repeat("x", 57)}}))
			w.Deliver(7, core.SendRelease{Stream: n + 1, Sequence: uint64(sent), IDs: []string{"x"}})
			synctest.Wait()
			if left := w.leader.seen(); len(left) > 0 {
				require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, left)
				break
			}
		}
		require.GreaterOrEqual(t, sent, queueSize)
		require.Less(t, sent, 3*queueSize, "what waits for a router is not bounded")
		fails(t, slow, codes.ResourceExhausted, "join again")
		w.Stop()
		require.Equal(t, sent+1, <-received)
	})
}

// The queue has room again when a message was sent. An acknowledgement of a later message
// would also cover the missing one.
func TestCutStreamGetsNoMoreMessages(t *testing.T) {
	s := newServer(t, zap.NewNop())
	st, other := s.add(false), s.add(false)
	push := func(st *stream, sequence uint64) {
		t.Helper()
		require.True(t, s.Deliver(7, core.SendRelease{Stream: st.id, Sequence: sequence, IDs: []string{"x"}}))
	}
	cut := func() bool {
		select {
		case <-st.cut:
			return true
		default:
			return false
		}
	}
	sequence := uint64(0)
	for range queueSize {
		sequence++
		push(st, sequence)
	}
	require.False(t, cut(), "cut off while there was room")
	push(st, sequence+1)
	require.True(t, cut(), "what does not fit into the queue is left out")
	require.Equal(t, codes.ResourceExhausted, status.Code(st.err))
	for range queueSize { // the writer goes on until it learns of that
		<-st.queue
	}
	push(st, sequence+2)
	require.Empty(t, st.queue, "queued after a gap")
	push(other, 1)
	require.Len(t, other.queue, 1)
}

func TestSecondJoinClosesOnlyTheOldStream(t *testing.T) {
	run(t, func(w *world) {
		first, n := w.joined()
		second, m := w.joined()
		require.NotEqual(t, n, m)
		w.Deliver(7, core.CloseStream{Stream: n}) // as the core does after a second join
		fails(t, first, codes.Aborted, "another stream")
		require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, w.leader.seen())
		w.Deliver(7, core.SendRelease{Stream: m, Sequence: 2, IDs: []string{"k3x9"}})
		got, err := second.Recv()
		require.NoError(t, err)
		require.Equal(t, []string{"k3x9"}, got.GetRelease().GetSandboxIds())
	})
}

func TestDeclaredDeadRouterGetsThatError(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		require.True(t, w.Deliver(7, core.CloseStream{Stream: n, Banned: true}))
		_, err := stream.Recv()
		require.True(t, controlv1.IsDeclaredDead(err), "%v", err)
		require.ErrorContains(t, err, "declared this router dead")
	})
	run(t, func(w *world) { // another reason to close a stream
		stream, n := w.joined()
		require.True(t, w.Deliver(7, core.CloseStream{Stream: n}))
		_, err := stream.Recv()
		require.Equal(t, codes.Aborted, status.Code(err))
		require.False(t, controlv1.IsDeclaredDead(err), "%v", err)
	})
}

// This test runs the real core: the second stream gets a snapshot, and the first ends.
func TestSecondJoinWithTheRealCore(t *testing.T) {
	run(t, func(w *world) {
		c, err := core.New(core.Config{Term: 7, MaxStale: time.Minute, ConnectWindow: time.Second, Lease: time.Second, NewID: func() string { return "x" }, NewSuffix: func() string { return "x" }}, core.Instant{})
		require.NoError(t, err)
		_, err = c.Recover(core.State{})
		require.NoError(t, err)
		var mu sync.Mutex
		w.leader.react = func(ev core.Event) {
			mu.Lock()
			defer mu.Unlock()
			for events := []core.Event{ev}; len(events) > 0; events = events[1:] {
				for _, e := range c.Step(core.Instant{Boot: time.Second}, events[0]) {
					if _, ok := e.(core.Write); ok {
						events = append(events, core.Written{}, core.WriterReady{})
					}
					w.Deliver(7, e)
				}
			}
		}
		first, _ := w.joined()
		m, err := first.Recv()
		require.NoError(t, err)
		require.True(t, m.GetSnapshot().GetLast())
		second, _ := w.joinedAfter()
		m, err = second.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 1, m.GetSequence())
		m, err = second.Recv()
		require.NoError(t, err)
		require.NotNil(t, m.GetKeys())
		fails(t, first, codes.Aborted, "another stream")
		require.NoError(t, second.Send(ping(3)))
		m, err = second.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 3, m.GetPong().GetNonce(), "the end of the old stream took the session with it")
	})
}

func TestStopEndsPresentAndLaterStreams(t *testing.T) {
	run(t, func(w *world) {
		stream, _ := w.joined()
		waiting := w.open()
		synctest.Wait()
		began := time.Now()
		w.Stop()
		fails(t, stream, codes.FailedPrecondition, "stopping")
		fails(t, waiting, codes.FailedPrecondition, "stopping")
		fails(t, w.open(), codes.FailedPrecondition, "stopping")
		require.Equal(t, began, time.Now())
	})
}

// The server still receives messages of a router that reads nothing, and can end its stream.
func TestBlockedSendHoldsUpNoOtherRouter(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		big := make([]core.Sandbox, 5*snapshotPart)
		for i := range big {
			big[i] = sandbox(strings.Repeat("x", 57))
		}
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1, Routes: big})
		synctest.Wait()
		require.NoError(t, stream.Send(ping(1)))
		require.Equal(t, []core.Event{core.SessionPing{Session: testRouter, Stream: n, Nonce: 1}}, w.leader.seen())
		w.Deliver(7, core.CloseStream{Stream: n})
		require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, w.leader.seen())
	})
}

func TestMessagesAndEndsOfStreamsAreCounted(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		require.NoError(t, stream.Send(ping(1)))
		require.NoError(t, stream.Send(&controlv1.RouterMessage{}))
		w.leader.seen()
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		synctest.Wait()
		w.Deliver(7, core.CloseStream{Stream: n})
		synctest.Wait()
		for at, count := range map[[2]string]float64{
			{metric.DirectionIn, "join"}: 1, {metric.DirectionIn, "ping"}: 1, {metric.DirectionIn, "unknown"}: 1, {metric.DirectionOut, "pong"}: 1,
		} {
			require.InDelta(t, count, testutil.ToFloat64(w.metrics.messages.WithLabelValues(at[0], at[1])), 0, at)
		}
		require.InDelta(t, 1, testutil.ToFloat64(w.metrics.ended.WithLabelValues("Aborted")), 0)
		require.Equal(t, 1, testutil.CollectAndCount(w.metrics.ended))
	})
}
