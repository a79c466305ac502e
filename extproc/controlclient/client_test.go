package controlclient_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

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
		require.Equal(t, routerID, join.GetRouterId())
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
		require.Equal(t, []string{"replace with 2"}, w.cache.events())

		p.send(2, push(route("three", "10.0.0.3")))
		require.EqualValues(t, 2, p.ack())
		require.Equal(t, []string{"one", "three", "two"}, w.ids())
	})
}

func TestAcknowledgementIsCumulativeAndFollowsTheEffect(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"), route("two", "10.0.0.2"))
		w.cache.events()
		ended := release("one", "two")
		ended.GetRelease().Ends = []*controlv1.End{{Reason: "Idle", AtUnix: 7}} // fewer than sandboxes
		p.send(2, ended)
		p.send(3, push(route("three", "10.0.0.3")))
		p.send(4, release("three"))
		var acked uint64
		for acked < 4 {
			ack := p.ack()
			require.GreaterOrEqual(t, ack, acked, "an acknowledgement was taken back") // the same one may come twice
			acked = ack
			if acked >= 2 { // what is acknowledged is in effect already
				a, err := w.cache.Lookup(w.t.Context(), sandboxid.MustKey("one"))
				require.NoError(t, err)
				require.Equal(t, routecache.Answer{Status: routecache.Gone, End: routecache.End{Reason: "Idle", AtUnix: 7}}, a)
			}
		}
		require.Equal(t, []string{"release one", "release two", "put three", "release three"}, w.cache.events())
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
		require.Equal(t, []string{"release one", "put two"}, w.cache.events(), "what comes is in effect at once")
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
		require.Equal(t, []string{"router-of-before"}, p.next().GetDead().GetRouterIds())
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
		require.Equal(t, []string{"another"}, p.next().GetDead().GetRouterIds())
		p.end <- nil
		w.begin()
		p = <-w.streams
		require.NotNil(t, p.next().GetJoin())
		require.Equal(t, []string{"another"}, p.next().GetDead().GetRouterIds(), "no pong has confirmed it")
	})
}

// The leader has kept the report in its memory only, because that router is still connected to it.
// Invariant: I3
func TestProofOfADeathIsKeptWhileTheLeaderSaysSo(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p, join, _ := w.accept()
		p.snapshot()
		require.EqualValues(t, 1, p.ack())
		w.dead.die("router-of-before")
		dead := p.next().GetDead()
		hash := sha256.Sum256(dead.GetGatewaySecret())
		require.Equal(t, join.GetGatewayHash(), hash[:])
		nonce := p.ping()
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: nonce, KeepProofs: true}}})
		synctest.Wait()
		require.Len(t, w.dead.Dead(), 1)
		p.pong(p.ping())
		synctest.Wait()
		require.Empty(t, w.dead.Dead())
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
			require.Len(t, p.next().GetDead().GetRouterIds(), want)
			p.pong(p.ping())
			synctest.Wait()
		}
		require.Empty(t, w.dead.Dead())
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
		require.True(t, w.client.Connected())
		p.pong(nonce)
		synctest.Wait()
		require.True(t, w.cache.Fresh())
		require.Equal(t, []time.Duration{w.now() - sent}, w.pongs)
		p.end <- status.Error(codes.Unavailable, "gone")
		w.grpc[0].Stop() // and stays away
		synctest.Wait()
		require.False(t, w.client.Connected())
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
		for w.client.Ask(strings.Repeat("x", 57), false) && asked < 100_000 {
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

// Invariant: I8
func TestReconnectKeepsRoutesUntilNextSnapshot(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		p.end <- status.Error(codes.ResourceExhausted, "too slow")
		second, _, _ := w.accept()
		a, err := w.cache.Lookup(w.t.Context(), sandboxid.MustKey("one"))
		require.NoError(t, err)
		require.Equal(t, routecache.Routable, a.Status)
		_, err = w.cache.Lookup(w.t.Context(), sandboxid.MustKey("two"))
		require.ErrorIs(t, err, routecache.ErrDisconnected)
		second.snapshot(route("two", "10.0.0.2"))
		require.EqualValues(t, 1, second.ack(), "the position starts anew with the stream")
		require.Equal(t, []string{"two"}, w.ids())
	})
}

func TestQuestionsAreAnsweredByTheAllocator(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		require.False(t, w.client.Ask("early", false), "asked without a session")
		w.serve("a", nil)
		p := w.joined()
		for id, c := range map[string]struct {
			resolved *controlv1.Resolved
			want     routecache.Status
		}{
			"route":    {&controlv1.Resolved{Answer: &controlv1.Resolved_Route{Route: route("route", "10.0.0.1")}}, routecache.Routable},
			"gone":     {&controlv1.Resolved{Answer: &controlv1.Resolved_Gone{Gone: &controlv1.Gone{End: &controlv1.End{Reason: "Idle", AtUnix: 7}}}}, routecache.Gone},
			"unknown":  {&controlv1.Resolved{Answer: &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}}}, routecache.Unknown},
			"starting": {&controlv1.Resolved{Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: 2000}}}, routecache.Starting},
			"newkind":  {&controlv1.Resolved{}, routecache.Unknown},
		} {
			found := make(chan routecache.Answer, 1)
			go func() {
				a, err := w.cache.Lookup(context.Background(), sandboxid.MustKey(id))
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
			require.Equal(t, c.want == routecache.Gone, got.End == routecache.End{Reason: "Idle", AtUnix: 7}, id)
		}
	})
}

func TestQuestionFailsWithItsStream(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		failed := make(chan error, 1)
		go func() {
			_, err := w.cache.Lookup(context.Background(), sandboxid.MustKey("one"))
			failed <- err
		}()
		require.Equal(t, "one", p.next().GetResolve().GetSandboxId())
		p.end <- nil
		require.ErrorIs(t, <-failed, routecache.ErrDisconnected)
		require.False(t, w.client.Connected())
		require.False(t, w.client.Ask("two", false))
	})
}

// What waits for a leader is woken when the next one can be asked, and not before.
func TestWaitersAreWokenWhenTheLeaderCanBeAsked(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		asked := make(chan bool, 1)
		wait := func() {
			go func() {
				if w.cache.AwaitJoined(context.Background()) == nil {
					asked <- w.client.Ask("one", false)
				}
			}()
			synctest.Wait()
			require.Empty(t, asked)
		}
		wait()
		w.serve("a", nil)
		p, _, nonce := w.accept()
		p.snapshot()
		require.EqualValues(t, 1, p.ack())
		synctest.Wait()
		require.Empty(t, asked, "no ping was answered yet")
		p.pong(nonce)
		require.True(t, <-asked)

		w.refuse("a")
		p.end <- nil
		synctest.Wait()
		wait()
		w.serve("a", nil)
		p, _, _ = w.accept()
		synctest.Wait()
		require.Empty(t, asked, "there is no snapshot yet")
		p.snapshot()
		require.True(t, <-asked, "the routes are fresh still")
	})
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
	messages["a hash of a key that is too short"] = []*controlv1.AllocatorMessage{keys(true, "a", "short")}
	for name, all := range messages {
		for _, m := range all {
			t.Run(name, func(t *testing.T) {
				run(t, []string{"a"}, func(w *world) {
					w.serve("a", nil)
					p := w.joined(route("one", "10.0.0.1"))
					m.Term, m.Sequence = 1, 0
					if m.GetResolved() == nil && m.GetKeys() == nil {
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

// Routes of snapshots, pushes and answers all carry their ports and their pool.
func TestPortsOfARouteReachTheCache(t *testing.T) {
	with := func(id string, ports ...uint32) *controlv1.Route {
		r := route(id, "10.0.0.1")
		r.Ports, r.Pool = ports, "python"
		return r
	}
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(with("insnapshot", 80, 65535), with("narrowed"), with("opened", 80))
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
			require.Equal(t, "python", e.Route.Pool)
		}
		require.Equal(t, map[string]string{
			"insnapshot": "80, 65535", "pushed": "443, 8080", "narrowed": "1", "opened": "all", "asked": "22",
		}, got)
	})
}

func TestMissingOptionsAreNamed(t *testing.T) {
	_, err := controlclient.New(controlclient.Options{Allocators: []string{"a:1", ""}})
	for _, name := range []string{"Allocators", "RouterID", "Sandboxes", "Uses", "Probe", "Dial", "Now", "Log", "MaxStale"} {
		require.ErrorContains(t, err, "Options."+name)
	}
}

func TestTermsOfARouteReachTheCache(t *testing.T) {
	secret := bytes.Repeat([]byte{7}, 32)
	for name, c := range map[string]struct {
		route *controlv1.Route
		want  *routecache.Terms
	}{
		"none":   {&controlv1.Route{}, nil},
		"masked": {&controlv1.Route{MaskHost: "localhost"}, &routecache.Terms{MaskHost: "localhost"}},
		"TLS": {
			&controlv1.Route{HttpsPorts: []uint32{443}}, &routecache.Terms{HTTPSPorts: routecache.NewPorts([]uint16{443})},
		},
		"token": {
			&controlv1.Route{Access: controlv1.Access_ACCESS_TOKEN, AccessSecret: secret},
			&routecache.Terms{Access: routecache.Token, Secret: [32]byte(secret)},
		},
		"team, without a key of the cluster": {
			&controlv1.Route{Access: controlv1.Access_ACCESS_TEAM, Team: "a"}, &routecache.Terms{Access: routecache.Team, Team: "a"},
		},
		"of a later version": {
			&controlv1.Route{Access: 9, AccessSecret: secret}, &routecache.Terms{Access: routecache.Closed, Secret: [32]byte(secret)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				r := route("one", "10.0.0.1")
				proto.Merge(r, c.route)
				w.joined(r)
				synctest.Wait()
				require.Equal(t, c.want, w.cache.Dump()[0].Route.Terms)
			})
		})
	}
	for name, wrong := range map[string]*controlv1.Route{
		"secret": {SandboxId: "two", PodIp: "10.0.0.2", Access: controlv1.Access_ACCESS_TOKEN, AccessSecret: secret[1:]},
		"port":   {SandboxId: "two", PodIp: "10.0.0.2", HttpsPorts: []uint32{65536}},
	} {
		t.Run("wrong "+name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p := w.joined()
				p.send(2, push(wrong))
				synctest.Wait()
				require.Empty(t, w.ids())
			})
		})
	}
}

// keys is a part of the API keys: those of one team.
func keys(last bool, team string, hashes ...string) *controlv1.AllocatorMessage {
	of := &controlv1.TeamKeys{Team: team}
	for _, hash := range hashes {
		of.Hashes = append(of.Hashes, []byte(hash))
	}
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Keys{
		Keys: &controlv1.Keys{Last: last, Teams: []*controlv1.TeamKeys{of}},
	}}
}

func TestKeysAreReplacedByTheLastPart(t *testing.T) {
	hashOf := func(key string) string { sum := sha256.Sum256([]byte(key)); return string(sum[:]) }
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		opens := func(team, key string) string {
			synctest.Wait()
			opens, known := w.keys.Opens(team, key)
			return fmt.Sprint(opens, " ", known)
		}
		const yes, no, unread = "true true", "false true", "false false"
		p := w.joined()
		require.Equal(t, unread, opens("a", "one"))
		p.send(0, keys(false, "a", hashOf("one"), hashOf("two")))
		require.Equal(t, unread, opens("a", "one"), "a part is missing")
		p.send(0, keys(true, "b", hashOf("three")))
		for key, of := range map[string]string{"one": "a", "two": "a", "three": "b"} {
			for _, team := range []string{"a", "b", ""} {
				require.Equal(t, team == of, opens(team, key) == yes, "%s for %q", key, team)
			}
		}
		p.send(0, keys(true, "a", hashOf("two")))
		require.Equal(t, []string{no, yes, no}, []string{opens("a", "one"), opens("a", "two"), opens("b", "three")}, "revoked")
		p.end <- nil
		require.Equal(t, yes, opens("a", "two"), "until the next leader sends its keys")
		p = w.joined()
		require.Equal(t, unread, opens("a", "two"), "that leader sends none")
		p.send(0, keys(true, "a", hashOf("two")))
		p.pong(p.ping())
		require.Equal(t, yes, opens("a", "two"))
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Keys{Keys: &controlv1.Keys{Unread: true, Last: true}}})
		require.Equal(t, unread, opens("a", "two"))
		p.send(0, keys(true, "", hashOf("none")))
		require.Equal(t, no, opens("", "none"), "a sandbox without a team is opened by no key")
	})
}
