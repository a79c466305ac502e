package controlclient_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/extproc/controlclient"
)

func TestRouteAddressIsNeverIPv4Mapped(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.joined(route("one", "::ffff:10.0.0.2"))
		require.Equal(t, netip.MustParseAddr("10.0.0.2"), w.cache.Dump()[0].Route.Addr)
	})
}

// An allocator with a shorter max-stale refuses the router.
func TestRefusedRouterStaysUnreadyAndRetries(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		refused, said := 0, uint64(0)
		w.serve("a", func(p *peer) error {
			m, err := p.Recv()
			if refused++; err != nil || refused <= 3 {
				said = m.GetJoin().GetMaxStaleNanos()
				return status.Error(codes.FailedPrecondition, "--max-stale")
			}
			w.streams <- p
			return <-p.end
		})
		w.begin()
		p := <-w.streams
		require.EqualValues(t, maxStale, said)
		require.Greater(t, w.now(), 3*25*time.Millisecond, "it makes itself and the allocator busy")
		require.Less(t, w.now(), time.Second)
		require.False(t, w.client.Connected())
		require.False(t, w.cache.Fresh())
		nonce := p.ping()
		p.snapshot()
		p.pong(nonce)
		synctest.Wait()
		require.True(t, w.client.Connected())
		require.True(t, w.cache.Fresh())
		p.end <- nil
	})
}

func TestRedirectIsFollowedAtOnce(t *testing.T) {
	run(t, []string{"follower"}, func(w *world) {
		w.serve("follower", names("leader"))
		w.serve("leader", nil)
		p := w.joined(route("one", "10.0.0.1"))
		require.Equal(t, "leader", p.name)
		require.Zero(t, w.now(), "the redirect was not followed at once")
		require.Equal(t, "follower leader", w.dials())

		p.end <- nil // after that, the configured address again
		second, _, _ := w.accept()
		require.Equal(t, "leader", second.name)
		require.Equal(t, "follower leader", w.dials())
	})
}

func TestCircularRedirectsAreBounded(t *testing.T) {
	run(t, []string{"a", "b"}, func(w *world) {
		w.serve("a", names("b"))
		w.serve("b", names("a"))
		require.Equal(t, "a b a b b a b a", w.dials())
		time.Sleep(4 * time.Second)
		require.Less(t, strings.Count(w.dials(), " "), 200)
	})
}

func TestRedirectToItselfOrNoneIsIgnored(t *testing.T) {
	for _, leader := range []string{"a", ""} {
		run(t, []string{"a", "b"}, func(w *world) {
			w.serve("a", names(leader))
			require.Equal(t, "a b", w.dials())
			w.serve("b", nil)
			w.joined()
			require.Equal(t, "a b", w.dials())
		})
	}
}

func TestAllocatorsAreTriedInTurn(t *testing.T) {
	run(t, []string{"a", "b", "c"}, func(w *world) {
		w.begin()
		time.Sleep(10 * time.Second)
		require.True(t, strings.HasPrefix(strings.Repeat("a b c ", 100), w.dials()))
		w.serve("b", nil)
		require.Equal(t, "b", w.joined().name)
	})
}

func TestReconnectPausesGrowAndAreBounded(t *testing.T) {
	for name, c := range map[string]struct {
		handle     func(*peer) error // nil: nothing listens
		soon, half int
	}{
		"nothing listens":  {nil, 7, 120},
		"it does not lead": {names(""), 7, 120},
		"it refuses":       {func(*peer) error { return status.Error(codes.FailedPrecondition, "no") }, 5, 15},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				if c.handle != nil {
					w.serve("a", c.handle)
				}
				require.Equal(t, "a", w.dials())
				time.Sleep(time.Second)
				require.InDelta(t, c.soon, strings.Count(w.dials(), "a"), 3)
				time.Sleep(30 * time.Second)
				require.InEpsilon(t, c.half, strings.Count(w.dials(), "a"), 0.4)
			})
		})
	}
}

// This holds however long there was no leader, because new sandboxes are unreachable through this
// router until it joins, and a DELETE waits up to a second for it.
func TestNewLeaderIsJoinedWithinHalfASecond(t *testing.T) {
	for outage := 4 * time.Second; outage < 40*time.Second; outage += 5300 * time.Millisecond {
		run(t, []string{"killed", "other"}, func(w *world) {
			w.serve("other", func(p *peer) error {
				if w.now() < outage {
					return names("killed")(p)
				}
				return w.play(p)
			})
			w.joined()
			require.GreaterOrEqual(t, w.now(), outage)
			require.Less(t, w.now(), outage+500*time.Millisecond)
		})
	}
}

func TestUnresponsiveAddressIsGivenUp(t *testing.T) {
	run(t, []string{"hole", "b"}, func(w *world) {
		w.blackHole("hole")
		w.serve("b", nil)
		w.joined()
		require.LessOrEqual(t, w.now(), 1500*time.Millisecond)
	})
}

// On a busy machine a connection may take longer than the timeout.
func TestConnectTimeoutGrowsAfterATimeout(t *testing.T) {
	run(t, []string{"slow"}, func(w *world) {
		w.serve("slow", nil)
		w.slow(3500 * time.Millisecond)
		w.joined()
	})
}

// The name of a headless Service resolves to the addresses of its pods.
func TestEveryAddressOfANameIsTried(t *testing.T) {
	run(t, []string{"follower,leader"}, func(w *world) {
		w.serve("follower", names(""))
		w.serve("leader", nil)
		w.begin()
		time.Sleep(time.Minute)
		require.Contains(t, w.dials(), "leader")
	})
}

// Invariant: I9
func TestLowerTermEndsItsStream(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p, _, nonce := w.accept()
		p.term = 7
		p.snapshot(route("one", "10.0.0.1"))
		p.pong(nonce)
		require.EqualValues(t, 1, p.ack())
		require.EqualValues(t, 7, w.client.Term())
		p.end <- nil

		deposed, join, nonce := w.accept()
		require.EqualValues(t, 7, join.GetHighestTerm())
		deposed.term = 6
		require.NoError(t, deposed.Send(&controlv1.AllocatorMessage{Term: 6, Sequence: 1, Message: snapshot(true, route("two", "10.0.0.2")).GetMessage()}))
		<-deposed.Context().Done()
		require.Equal(t, []string{"one"}, w.ids(), "the snapshot of a deposed leader was applied")
		require.EqualValues(t, 7, w.client.Term())
		require.False(t, w.client.Connected())
		_ = nonce

		next, _, _ := w.accept()
		next.term = 8
		next.snapshot(route("three", "10.0.0.3"))
		require.EqualValues(t, 1, next.ack())
		require.Equal(t, []string{"three"}, w.ids())
		// This also holds in the middle of a stream.
		require.NoError(t, next.Send(&controlv1.AllocatorMessage{Term: 7, Sequence: 2, Message: push(route("four", "10.0.0.4")).GetMessage()}))
		<-next.Context().Done()
		require.Equal(t, []string{"three"}, w.ids())
	})
}

// Invariant: P12
func TestNewJournalReplacesAllAndOldOneIsRefused(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		accept := func(journal string, term, position uint64) (*peer, *controlv1.Join, uint64) {
			p, join, nonce := w.accept()
			p.journal, p.term, p.position = journal, term, position
			return p, join, nonce
		}
		p, join, nonce := accept("j1", 7, 100)
		require.Empty(t, join.GetJournal())
		require.False(t, join.GetServing())
		p.snapshot(route("one", "10.0.0.1"))
		require.EqualValues(t, 1, p.ack())
		p.position = 105
		p.pong(nonce)
		p.position = 103 // an earlier end of the journal makes it no shorter
		p.send(2, push(route("one", "10.0.0.1")))
		require.EqualValues(t, 2, p.ack())
		p.end <- nil

		// A leader of a lower term, in a new journal.
		p, join, _ = accept("j2", 2, 1)
		require.Equal(t, "j1", join.GetJournal())
		require.EqualValues(t, 7, join.GetHighestTerm())
		require.EqualValues(t, 105, join.GetPosition())
		require.True(t, join.GetServing())
		p.send(0, snapshot(false, route("two", "10.0.0.2")))
		require.Equal(t, []string{"one"}, w.ids(), "half a snapshot was applied")
		p.send(1, snapshot(true, route("three", "10.0.0.3")))
		require.EqualValues(t, 1, p.ack())
		require.Equal(t, []string{"three", "two"}, w.ids())
		require.EqualValues(t, 2, w.client.Term())
		// A message of the journal that was left is refused on the same stream, at any term.
		p.journal, p.term = "j1", 9
		p.send(2, push(route("four", "10.0.0.4")))
		<-p.Context().Done()

		p, join, _ = accept("j1", 9, 200)
		require.Equal(t, "j2", join.GetJournal())
		require.Equal(t, []string{"j1"}, join.GetLeftJournals())
		require.EqualValues(t, 2, join.GetHighestTerm())
		p.send(1, snapshot(true, route("four", "10.0.0.4")))
		<-p.Context().Done()
		require.Equal(t, []string{"three", "two"}, w.ids(), "the journal that was left came back")
	})
}

func TestJoinNamesTheJournalsLeftBefore(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		const maxLeft = 16
		var left []string // all of them
		for n := range maxLeft + 3 {
			p, join, _ := w.accept()
			require.Equal(t, left[max(0, len(left)-maxLeft):], join.GetLeftJournals())
			p.journal, p.term = fmt.Sprintf("j%d", n), 1
			p.snapshot()
			require.EqualValues(t, 1, p.ack())
			p.end <- nil
			if n > 0 {
				left = append(left, fmt.Sprintf("j%d", n-1))
			}
		}
		require.Len(t, left, maxLeft+2)
	})
}

// The allocator has not waited for this router's routes to be forgotten.
// Invariant: P9
func TestDeclaredDeadRouterServesNothingAndEnds(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		require.Eventually(t, w.cache.Fresh, time.Minute, time.Millisecond)
		p.end <- status.Error(codes.Unavailable, "the connection breaks") // so the router does not know what follows
		p, _, _ = w.accept()
		require.True(t, w.cache.Fresh())
		p.end <- controlv1.DeclaredDead()
		err := <-w.ended
		w.ended <- nil // Run has ended already, so run must not wait for it
		require.ErrorIs(t, err, controlclient.ErrDeclaredDead)
		require.ErrorContains(t, err, "declared dead")
		require.False(t, w.cache.Fresh())
	})
}

// A proxy in between, or another kind of server, may answer like this.
// Invariant: P9
func TestRouterRetriesAfterAnyOtherRefusal(t *testing.T) {
	other, err := status.New(codes.NotFound, "declared dead").WithDetails(&errdetails.ErrorInfo{Domain: "example.com", Reason: controlv1.ReasonDeclaredDead})
	require.NoError(t, err)
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.joined(route("one", "10.0.0.1")).end <- nil
		for _, err := range []error{
			status.Error(codes.NotFound, "declared dead"), other.Err(),
			status.Error(codes.Unimplemented, "unknown service berth.control.v1.Control"), status.Error(codes.FailedPrecondition, "declared dead"),
			status.Error(codes.PermissionDenied, "no"), status.Error(codes.Unauthenticated, "who?"),
		} {
			p, _, _ := w.accept()
			p.end <- err
			synctest.Wait()
			require.Empty(t, w.ended, "%v ends it for good", err)
			require.True(t, w.cache.Fresh(), "%v", err)
			require.Equal(t, []string{"one"}, w.ids())
		}
		w.joined(route("two", "10.0.0.2"))
		require.Equal(t, []string{"two"}, w.ids())
	})
}
