package controlclient_test

import (
	"context"
	"fmt"
	"io"
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
	"github.com/berth-sandbox/berth/routecache"
)

// Invariant: I1
func TestSnapshotReplacesAllRoutesAtOnce(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.cache.Put("old", routecache.Route{})
		p, join, _ := w.accept()
		require.Equal(t, routerID, join.GetInstanceId())
		require.True(t, join.GetLooks())
		require.Zero(t, join.GetHighestTerm())
		require.False(t, w.client.Connected())
		p.send(0, snapshot(false, route("one", "10.0.0.1")))
		require.Equal(t, []string{"old"}, w.ids(), "half a snapshot was applied")
		require.False(t, w.client.Connected())
		require.Equal(t, []string{"put old"}, w.cache.events())
		p.send(1, snapshot(true, route("two", "10.0.0.2")))
		require.EqualValues(t, 1, p.ack())
		require.Equal(t, []string{"one", "two"}, w.ids())
		require.True(t, w.client.Connected())
		require.Equal(t, []string{"replace with 2", "not retained old"}, w.cache.events(), "the activity of a sandbox that went unseen was kept")

		p.send(2, push(route("three", "10.0.0.3")))
		require.EqualValues(t, 2, p.ack())
		require.Equal(t, []string{"one", "three", "two"}, w.ids())
	})
}

func TestRouteAddressIsNeverIPv4Mapped(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.joined(route("one", "::ffff:10.0.0.2"))
		require.Equal(t, netip.MustParseAddr("10.0.0.2"), w.cache.Dump()[0].Route.Addr)
	})
}

func TestAcknowledgementIsCumulativeAndFollowsTheEffect(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"), route("two", "10.0.0.2"))
		w.cache.events()
		p.send(2, release("one", "two"))
		p.send(3, push(route("three", "10.0.0.3")))
		p.send(4, release("three"))
		var acked uint64
		for acked < 4 {
			ack := p.ack()
			require.GreaterOrEqual(t, ack, acked, "an acknowledgement was taken back") // the same one may come twice
			acked = ack
			if acked >= 2 { // what is acknowledged is in effect already
				a, err := w.cache.Lookup(w.t.Context(), "one")
				require.NoError(t, err)
				require.Equal(t, routecache.Gone, a.Status)
			}
		}
		require.Equal(t, []string{"release one", "forget one", "release two", "forget two", "put three", "release three", "forget three"}, w.cache.events())
	})
}

func TestAcknowledgementWaitsForTheEffect(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		unhold := w.cache.holdReleases()
		p.send(2, release("one"))
		for range 3 { // pings go on meanwhile
			m, err := p.Recv()
			require.NoError(t, err)
			require.NotNil(t, m.GetPing(), "acknowledged before the effect: %v", m)
		}
		unhold()
		require.EqualValues(t, 2, p.ack())
	})
}

// Envoy may have received an answer before the release without having read it.
// Invariant: I2, I3
func TestAcknowledgementWaitsUntilEnvoyHasReadAnswers(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		w.cache.events()
		w.admissions.give()
		p.send(2, release("one"))
		p.send(3, push(route("two", "10.0.0.2")))
		for range 3 {
			m, err := p.Recv()
			require.NoError(t, err)
			require.NotNil(t, m.GetPing(), "acknowledged before the answer was read: %v", m)
		}
		require.Equal(t, []string{"release one", "forget one", "put two"}, w.cache.events(), "what comes is in effect at once")
		w.admissions.read()
		p.acks(3)
	})
}

func TestDeadRoutersAreReportedUntilAPong(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		early := p.ping() // without a pong yet
		w.dead.die("router-of-before")
		require.Equal(t, []string{"router-of-before"}, p.next().GetDead().GetInstanceIds())
		first := p.ping()
		second := p.ping() // it is not reported again on this stream
		p.pong(early)
		synctest.Wait()
		require.Len(t, w.dead.Dead(), 1, "that ping came before it was named")
		p.pong(first)
		synctest.Wait()
		require.Empty(t, w.dead.Dead())
		p.pong(second)

		w.dead.die("another")
		require.Equal(t, []string{"another"}, p.next().GetDead().GetInstanceIds())
		p.end <- nil
		w.begin()
		p = <-w.streams
		require.NotNil(t, p.next().GetJoin())
		require.Equal(t, []string{"another"}, p.next().GetDead().GetInstanceIds(), "no pong has confirmed it")
	})
}

func TestDeadRoutersAreReportedInBatches(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		for i := range 1500 {
			w.dead.die(fmt.Sprintf("router-%020d", i))
		}
		for _, want := range []int{1000, 500} {
			require.Len(t, p.next().GetDead().GetInstanceIds(), want)
			p.pong(p.ping())
			synctest.Wait()
		}
		require.Empty(t, w.dead.Dead())
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

// Invariant: I3
func TestNoGoodbyeWhileAnAnswerIsUnread(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		w.admissions.give()
		w.stop()
		for {
			m, err := p.Recv()
			if err != nil {
				break
			}
			require.NotNil(t, m.GetPing(), "%v", m)
		}
		p.end <- nil
	})
}

func TestFreshnessCountsFromSendTimeOfPing(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p, _, nonce := w.accept()
		sent := w.now()
		p.snapshot(route("one", "10.0.0.1"))
		require.EqualValues(t, 1, p.ack())
		require.False(t, w.cache.Fresh(), "a snapshot alone makes fresh")
		time.Sleep(3*time.Second - time.Millisecond) // a slow answer
		p.pong(nonce)
		synctest.Wait()
		require.True(t, w.cache.Fresh())
		p.end <- status.Error(codes.Unavailable, "gone")
		w.grpc[0].Stop() // and stays away
		time.Sleep(sent + maxStale - w.now() - 1)
		require.True(t, w.cache.Fresh())
		time.Sleep(time.Nanosecond)
		require.False(t, w.cache.Fresh(), "freshness was counted from the answer and not from the ping")
	})
}

func TestPongWithoutPingGivesNoFreshness(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p, _, nonce := w.accept()
		p.snapshot()
		p.pong(nonce + 1000)
		synctest.Wait()
		require.False(t, w.cache.Fresh())
		p.pong(nonce)
		synctest.Wait()
		require.True(t, w.cache.Fresh())
	})
}

func TestPongOfEarlierStreamGivesNoFreshness(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p, _, nonce := w.accept()
		p.snapshot()
		nonce = max(nonce, p.ping()) // of the first stream, sent after 1 s
		p.end <- nil
		second, _, secondNonce := w.accept()
		require.Less(t, secondNonce, nonce)
		second.snapshot()
		second.pong(nonce)
		synctest.Wait()
		require.False(t, w.cache.Fresh())
	})
}

func TestOnlyTheNewestAnsweredPingCounts(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p, _, first := w.accept()
		p.snapshot()
		second := p.ping()
		sent := w.now()
		p.pong(second)
		p.pong(first) // an older pong does not shorten freshness
		synctest.Wait()
		p.end <- nil
		w.grpc[0].Stop()
		time.Sleep(sent + maxStale - w.now() - 1)
		require.True(t, w.cache.Fresh())
		time.Sleep(time.Nanosecond)
		require.False(t, w.cache.Fresh())
	})
}

func TestUnansweredPingsDropTheStream(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		began := w.now()
		<-p.Context().Done()
		require.InDelta(t, 5, (w.now() - began).Seconds(), 1.1)
		require.Greater(t, w.now()-began, 5*pingInterval-1)
		w.joined() // it is back
	})
}

// The router must notice an allocator that does not read.
func TestUnwritableStreamIsDropped(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		began := w.now()
		var asked int
		for w.client.Ask(strings.Repeat("x", 57)) && asked < 100_000 {
			asked++
			if asked%100 == 0 {
				synctest.Wait()
			}
		}
		require.Less(t, asked, 100_000, "questions are not bounded")
		require.Equal(t, began, w.now())
		<-p.Context().Done()
		require.LessOrEqual(t, w.now()-began, 7*pingInterval)
		w.joined()
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
		synctest.Wait()
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
		require.Equal(t, []string{"j1"}, join.GetLeft())
		require.EqualValues(t, 2, join.GetHighestTerm())
		p.send(1, snapshot(true, route("four", "10.0.0.4")))
		<-p.Context().Done()
		require.Equal(t, []string{"three", "two"}, w.ids(), "the journal that was left came back")

		// Leaders of a version without journal IDs are accepted.
		p, join, _ = accept("", 3, 0)
		require.EqualValues(t, 2, join.GetHighestTerm())
		p.snapshot(route("five", "10.0.0.5"))
		require.EqualValues(t, 1, p.ack())
		p.end <- nil
		_, join, _ = w.accept()
		require.Equal(t, "j2", join.GetJournal())
		require.EqualValues(t, 3, join.GetHighestTerm())
		require.Equal(t, []string{"j1"}, join.GetLeft())
	})
}

func TestJoinNamesTheJournalsLeftBefore(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		const leftMost = 16
		var left []string // all of them
		for n := range leftMost + 3 {
			p, join, _ := w.accept()
			require.Equal(t, left[max(0, len(left)-leftMost):], join.GetLeft())
			p.journal, p.term = fmt.Sprintf("j%d", n), 1
			p.snapshot()
			require.EqualValues(t, 1, p.ack())
			p.end <- nil
			if n > 0 {
				left = append(left, fmt.Sprintf("j%d", n-1))
			}
		}
		require.Len(t, left, leftMost+2)
	})
}

// Invariant: I8
func TestReconnectKeepsRoutesUntilNextSnapshot(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		p.end <- status.Error(codes.ResourceExhausted, "too slow")
		second, _, _ := w.accept()
		a, err := w.cache.Lookup(w.t.Context(), "one")
		require.NoError(t, err)
		require.Equal(t, routecache.Routable, a.Status)
		_, err = w.cache.Lookup(w.t.Context(), "two")
		require.ErrorIs(t, err, routecache.ErrDisconnected)
		second.snapshot(route("two", "10.0.0.2"))
		require.EqualValues(t, 1, second.ack(), "the position starts anew with the stream")
		require.Equal(t, []string{"two"}, w.ids())
	})
}

func TestQuestionsAreAnsweredByTheAllocator(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		require.False(t, w.client.Ask("early"), "asked without a session")
		w.serve("a", nil)
		p := w.joined()
		for id, c := range map[string]struct {
			resolved *controlv1.Resolved
			want     routecache.Status
		}{
			"route":    {&controlv1.Resolved{Answer: &controlv1.Resolved_Route{Route: route("route", "10.0.0.1")}}, routecache.Routable},
			"gone":     {&controlv1.Resolved{Answer: &controlv1.Resolved_Gone{Gone: &controlv1.Gone{}}}, routecache.Gone},
			"unknown":  {&controlv1.Resolved{Answer: &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}}}, routecache.Unknown},
			"starting": {&controlv1.Resolved{Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: 2000}}}, routecache.Starting},
			"newkind":  {&controlv1.Resolved{}, routecache.Unknown},
		} {
			found := make(chan routecache.Answer, 1)
			go func() {
				a, err := w.cache.Lookup(context.Background(), id)
				if err == nil {
					found <- a
				}
			}()
			require.Equal(t, id, p.next().GetResolve().GetSandboxId())
			c.resolved.SandboxId = id
			p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: c.resolved}})
			got := <-found
			require.Equal(t, c.want, got.Status, id)
			require.Equal(t, c.want == routecache.Starting, got.Hold == 2*time.Second, id)
		}
	})
}

func TestQuestionFailsWithItsStream(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		failed := make(chan error, 1)
		go func() {
			_, err := w.cache.Lookup(context.Background(), "one")
			failed <- err
		}()
		require.Equal(t, "one", p.next().GetResolve().GetSandboxId())
		p.end <- nil
		require.ErrorIs(t, <-failed, routecache.ErrDisconnected)
		require.False(t, w.client.Connected())
		require.False(t, w.client.Ask("two"))
	})
}

func TestGoodbyeIsTheLastMessage(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		began := w.now()
		w.stop()
		require.NotNil(t, p.next().GetGoodbye())
		p.send(2, release("one")) // it arrives too late for an acknowledgement
		_, err := p.Recv()
		require.ErrorIs(t, err, io.EOF, "something followed Goodbye")
		require.Empty(t, w.ended, "the allocator had not heard Goodbye yet")
		p.end <- nil
		require.NoError(t, <-w.ended)
		w.ended <- nil
		require.Equal(t, began, w.now())
		require.False(t, w.client.Connected())
	})
}

// A router that ends while no replica leads must not delay releases by max-stale.
func TestGoodbyeIsSentToTheNextLeader(t *testing.T) {
	for name, between := range map[string]func(w *world){
		"nothing answers": func(*world) { time.Sleep(3 * time.Second) },
		"black holes":     func(w *world) { w.blackHole("a"); time.Sleep(3 * time.Second) },
		"a follower does": func(w *world) { w.serve("b", names("")); time.Sleep(3 * time.Second) },
		"an old leader does": func(w *world) {
			w.serve("b", func(*peer) error { return status.Error(codes.FailedPrecondition, "this replica is stopping") })
			time.Sleep(3 * time.Second)
		},
	} {
		for when, early := range map[string]bool{"lost before": true, "lost by Goodbye": false} {
			t.Run(name+", "+when, func(t *testing.T) {
				run(t, []string{"a", "b"}, func(w *world) {
					w.serve("a", nil)
					p := w.joined(route("one", "10.0.0.1"))
					lose := func() {
						w.refuse("a")
						p.end <- status.Error(codes.Unavailable, "gone")
					}
					if early {
						lose()
						time.Sleep(time.Second)
						w.stop()
					} else {
						w.stop()
						require.NotNil(t, p.next().GetGoodbye())
						lose()
					}
					between(w)
					require.Empty(t, w.ended, "no leader has received Goodbye")
					w.serve("a", nil)
					began := w.now()
					p, join, _ := w.accept()
					require.Equal(t, routerID, join.GetInstanceId())
					require.NotNil(t, p.next().GetGoodbye())
					_, err := p.Recv()
					require.ErrorIs(t, err, io.EOF)
					p.end <- nil
					require.NoError(t, <-w.ended)
					w.ended <- nil
					require.LessOrEqual(t, w.now()-began, 2*time.Second)
				})
			})
		}
	}
}

// Otherwise a leader of another journal would hand out no pod until this router has expired.
func TestStoppingRouterJoinsAsNotServing(t *testing.T) {
	for name, leaves := range map[string]bool{"it goes on": false, "it leaves": true} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p := w.joined(route("one", "10.0.0.1"))
				w.refuse("a")
				p.end <- status.Error(codes.Unavailable, "gone")
				if leaves {
					w.stop()
				}
				time.Sleep(time.Second)
				w.serve("a", nil)
				p, join, _ := w.accept()
				require.Equal(t, !leaves, join.GetServing())
				if leaves {
					require.NotNil(t, p.next().GetGoodbye())
					p.end <- nil
					require.NoError(t, <-w.ended)
					w.ended <- nil
				}
			})
		})
	}
}

func TestRouterEndsInTimeWithoutGoodbye(t *testing.T) {
	for name, c := range map[string]struct {
		leave func(w *world)
		// waits: until the end of its time.
		waits bool
	}{
		"no leader":             {func(*world) {}, true},
		"a leader that hangs":   {func(w *world) { w.serve("a", nil) }, true},
		"an answer is not read": {func(w *world) { w.admissions.give() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p := w.joined()
				w.refuse("a")
				p.end <- status.Error(codes.Unavailable, "gone")
				synctest.Wait()
				c.leave(w)
				began := w.now()
				w.stop()
				time.AfterFunc(10*time.Second, w.giveUp)
				require.NoError(t, <-w.ended)
				w.ended <- nil
				if c.waits {
					require.Equal(t, 10*time.Second, w.now()-began)
				} else {
					require.Less(t, w.now()-began, 3*time.Second)
				}
			})
		})
	}
	t.Run("no allocator knows it", func(t *testing.T) {
		run(t, []string{"a", "b"}, func(w *world) {
			w.serve("a", names(""))
			w.begin()
			time.Sleep(10 * time.Second)
			began := w.now()
			w.stop()
			require.NoError(t, <-w.ended)
			w.ended <- nil
			require.LessOrEqual(t, w.now()-began, time.Second)
		})
	})
}

func TestEarlyGoodbyeFollowsJoin(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.stop()
		w.serve("a", nil)
		w.begin()
		time.Sleep(time.Minute)
		require.NoError(t, <-w.ended)
		w.ended <- nil
		for range len(w.streams) {
			p := <-w.streams
			m, err := p.Recv()
			if err == nil {
				require.NotNil(t, m.GetJoin())
			}
		}
	})
}

func TestStopDoesNotWaitForASilentAllocator(t *testing.T) {
	for name, prepare := range map[string]func(*world){
		"connecting": func(w *world) { w.blackHole("a") },
		"pausing":    func(*world) {},
		"joining":    func(w *world) { w.serve("a", nil); w.accept() },
		"joined":     func(w *world) { w.serve("a", nil); w.joined() },
		"not reading": func(w *world) {
			w.serve("a", nil)
			w.joined()
			for w.client.Ask(strings.Repeat("x", 57)) {
				synctest.Wait()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				prepare(w)
				w.begin()
				synctest.Wait()
				began := w.now()
				w.stop()
				time.AfterFunc(time.Second, w.giveUp)
				require.NoError(t, <-w.ended)
				w.ended <- nil
				require.LessOrEqual(t, w.now()-began, time.Second)
			})
		})
	}
}

func TestInvalidMessagesEndOnlyTheStream(t *testing.T) {
	bad := func(r *controlv1.Route) []*controlv1.AllocatorMessage {
		return []*controlv1.AllocatorMessage{push(r), snapshot(true, r), {Message: &controlv1.AllocatorMessage_Resolved{
			Resolved: &controlv1.Resolved{SandboxId: "bad", Answer: &controlv1.Resolved_Route{Route: r}},
		}}}
	}
	messages := map[string][]*controlv1.AllocatorMessage{
		"no route":      bad(nil),
		"no address":    bad(route("bad", "")),
		"a host name":   bad(route("bad", "pod.example.com")),
		"with a port":   bad(route("bad", "10.0.0.1:80")),
		"port too high": bad(&controlv1.Route{SandboxId: "bad", PodIp: "10.0.0.1", DefaultPort: 65536}),
		"port wrapping": bad(&controlv1.Route{SandboxId: "bad", PodIp: "10.0.0.1", DefaultPort: 65536 + 80}),

		"no port among ports":       bad(&controlv1.Route{SandboxId: "bad", PodIp: "10.0.0.1", Ports: []uint32{0, 80}}),
		"port too high among ports": bad(&controlv1.Route{SandboxId: "bad", PodIp: "10.0.0.1", Ports: []uint32{80, 65536}}),
		"port wrapping among ports": bad(&controlv1.Route{SandboxId: "bad", PodIp: "10.0.0.1", Ports: []uint32{80, 65536 + 22}}),
	}
	for name, all := range messages {
		for _, m := range all {
			t.Run(name, func(t *testing.T) {
				run(t, []string{"a"}, func(w *world) {
					w.serve("a", nil)
					p := w.joined(route("one", "10.0.0.1"))
					m.Term, m.Sequence = 1, 0
					if m.GetResolved() == nil {
						m.Sequence = 2
					}
					require.NoError(t, p.Send(m))
					<-p.Context().Done()
					require.Equal(t, []string{"one"}, w.ids())
					w.joined(route("two", "10.0.0.2")) // and it goes on
				})
			})
		}
	}
}

func TestFirstMessageMustBeASnapshot(t *testing.T) {
	for name, m := range map[string]*controlv1.AllocatorMessage{
		"route":   push(route("bad", "10.0.0.1")),
		"release": release("one"),
		"pong":    {Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: 1}}},
		"nothing": {},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p, _, _ := w.accept()
				p.send(0, m)
				<-p.Context().Done()
				require.Empty(t, w.ids())
				require.False(t, w.cache.Fresh())
			})
		})
	}
}

func TestMissingMessageEndsTheStreamUnacknowledged(t *testing.T) {
	for _, sequence := range []uint64{1, 3, 4} {
		run(t, []string{"a"}, func(w *world) {
			w.serve("a", nil)
			p := w.joined(route("one", "10.0.0.1"))
			p.send(sequence, release("one"))
			for {
				m, err := p.Recv()
				if err != nil {
					break
				}
				require.Nil(t, m.GetAck(), "message %d was acknowledged after message 1", sequence)
			}
			w.joined()
		})
	}
}

func TestUnknownMessageKindsAreIgnored(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		p.send(0, &controlv1.AllocatorMessage{})
		p.send(2, push(route("two", "10.0.0.2")))
		require.EqualValues(t, 2, p.ack())
	})
}

func TestRouteWithoutDefaultPortIsAccepted(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.joined(&controlv1.Route{SandboxId: "one", PodIp: "10.0.0.1"})
		require.Equal(t, []string{"one"}, w.ids())
	})
}

// Routes of snapshots, pushes and answers all carry their ports.
func TestPortsOfARouteReachTheCache(t *testing.T) {
	with := func(id string, ports ...uint32) *controlv1.Route {
		r := route(id, "10.0.0.1")
		r.Ports = ports
		return r
	}
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(with("in-snapshot", 80, 65535), with("narrowed"), with("opened", 80))
		p.send(2, push(with("pushed", 8080, 443))) // in any order
		p.send(3, push(with("narrowed", 1)))
		p.send(4, push(with("opened")))
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{
			Resolved: &controlv1.Resolved{SandboxId: "asked", Answer: &controlv1.Resolved_Route{Route: with("asked", 22)}},
		}})
		synctest.Wait()
		got := map[string]string{}
		for _, e := range w.cache.Dump() {
			got[e.ID] = e.Route.Ports.String()
		}
		require.Equal(t, map[string]string{
			"in-snapshot": "80, 65535", "pushed": "443, 8080", "narrowed": "1", "opened": "all", "asked": "22",
		}, got)
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

func TestMissingOptionsAreNamed(t *testing.T) {
	_, err := controlclient.New(controlclient.Options{Allocators: []string{"a:1", ""}})
	for _, name := range []string{"Allocators", "RouterID", "Cache", "Activity", "Probe", "Dial", "Now", "Log", "MaxStale"} {
		require.ErrorContains(t, err, "Options."+name)
	}
}
