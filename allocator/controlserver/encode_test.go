package controlserver

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

func TestEffectsReachTheRouterInOrder(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		k3x9 := sandbox("k3x9")
		k3x9.Ports = []uint16{8080, 49983}
		idle := sandbox("idle")
		idle.IdleTimeout, idle.MinBytes = 90*time.Second, 1024
		wakeable := sandbox("wakeable")
		wakeable.Wakeable = true
		narrowed := sandbox("new")
		narrowed.Ports = []uint16{65535}
		for _, e := range []core.Effect{
			core.SendSnapshot{Stream: n, Sequence: 1, Routes: []core.Sandbox{k3x9}},
			core.SendPong{Stream: n, Nonce: 5},
			core.SendRoute{Stream: n, Sequence: 2, Sandbox: sandbox("new")},
			core.SendRoute{Stream: n, Sequence: 3, Sandbox: narrowed},
			core.SendRelease{Stream: n, Sequence: 4, IDs: []string{"k3x9", "x7"}, Ends: []core.End{{Reason: "Idle", At: time.Unix(1234567, 890)}, {}}},
			core.SendResolved{Stream: n, ID: "k3x9", Sandbox: &k3x9},
			core.SendResolved{Stream: n, ID: "gone", Gone: true, End: core.End{Reason: "Killed", At: time.Unix(1234567, 0)}},
			core.SendResolved{Stream: n, ID: "unknown"},
			core.SendResolved{Stream: n, ID: "starting", Starting: true, Hold: 1500 * time.Millisecond},
			core.SendResolved{Stream: n, ID: "idle", Sandbox: &idle},
			core.SendClose{Stream: n, Sequence: 5, ID: "idle"},
			core.SendResolved{Stream: n, ID: "idle", Sleeper: &idle, Busy: true},
			core.SendResolved{Stream: n, ID: "wakeable", Sleeper: &wakeable},
			core.SendQuiesce{Stream: n, Number: 3, Questions: []core.Question{{ID: "k3x9"}, {ID: "idle", MinBytes: 2048}}},
			core.SendProbe{Stream: n, ID: "k3x9", To: netip.MustParseAddrPort("10.0.0.1:9000"), Path: "/busy", Number: 5},
			core.SendResume{Stream: n, IDs: []string{"idle"}},
		} {
			require.True(t, w.Deliver(7, e))
		}
		route := func(id string, ports ...uint32) *controlv1.Route {
			return &controlv1.Route{SandboxId: id, PodIp: "10.0.0.1", DefaultPort: 8080, Ports: ports}
		}
		for _, want := range []*controlv1.AllocatorMessage{
			{Term: 7, Sequence: 1, Message: &controlv1.AllocatorMessage_Snapshot{Snapshot: &controlv1.Snapshot{Last: true, Routes: []*controlv1.Route{route("k3x9", 8080, 49983)}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Keys{Keys: &controlv1.Keys{Last: true}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: 5}}},
			{Term: 7, Sequence: 2, Message: &controlv1.AllocatorMessage_Route{Route: route("new")}},
			{Term: 7, Sequence: 3, Message: &controlv1.AllocatorMessage_Route{Route: route("new", 65535)}},
			{Term: 7, Sequence: 4, Message: &controlv1.AllocatorMessage_Release{Release: &controlv1.Release{
				SandboxIds: []string{"k3x9", "x7"}, Ends: []*controlv1.End{{Reason: "Idle", AtUnix: 1234567}, {}},
			}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "k3x9", Answer: &controlv1.Resolved_Route{Route: route("k3x9", 8080, 49983)}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "gone", Answer: &controlv1.Resolved_Gone{Gone: &controlv1.Gone{End: &controlv1.End{Reason: "Killed", AtUnix: 1234567}}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "unknown", Answer: &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "starting", Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: 1500}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "idle", Answer: &controlv1.Resolved_Route{Route: &controlv1.Route{SandboxId: "idle", PodIp: "10.0.0.1", DefaultPort: 8080, MinBytesPerMinute: 1024}}}}},
			{Term: 7, Sequence: 5, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "idle", Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "idle", Answer: &controlv1.Resolved_Asleep{Asleep: &controlv1.Asleep{Busy: true, Route: &controlv1.Route{SandboxId: "idle", PodIp: "10.0.0.1", DefaultPort: 8080, MinBytesPerMinute: 1024}}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "wakeable", Answer: &controlv1.Resolved_Asleep{Asleep: &controlv1.Asleep{Wakeable: true, Route: route("wakeable")}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: &controlv1.Quiesce{Number: 3, Questions: []*controlv1.Question{
				{SandboxId: "k3x9"}, {SandboxId: "idle", MinBytesPerMinute: 2048},
			}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Probe{Probe: &controlv1.Probe{SandboxId: "k3x9", PodIp: "10.0.0.1", Port: 9000, Path: "/busy", Number: 5}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resume{Resume: &controlv1.Resume{SandboxIds: []string{"idle"}}}},
		} {
			want.Journal, want.Position = "j", 110
			got, err := stream.Recv()
			require.NoError(t, err)
			require.True(t, proto.Equal(want, got), "want %v, got %v", want, got)
		}
	})
}

// The token itself never leaves the allocators on this stream.
func TestRouteHasTheTermsOfTheClaim(t *testing.T) {
	key, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	s := newServer(t, zap.NewNop())
	sb := sandbox("k3x9")
	sb.Pool = core.PoolKey{Namespace: "sandboxes", Name: "python"}
	sb.Team, sb.Access, sb.MaskHost, sb.HTTPSPorts = "a", core.AccessTeam, "localhost:${PORT}", []uint16{443, 8443}
	want := &controlv1.Route{
		SandboxId: "k3x9", PodIp: "10.0.0.1", DefaultPort: 8080, Access: controlv1.Access_ACCESS_TEAM, Team: "a",
		MaskHost: "localhost:${PORT}", HttpsPorts: []uint32{443, 8443}, Pool: "python",
	}
	require.True(t, proto.Equal(want, s.route(0, &sb)), "without a key no credential is valid")
	s.o.AccessKey = key
	secret := key.Secret("k3x9")
	want.AccessSecret = secret[:]
	require.True(t, proto.Equal(want, s.route(0, &sb)))
	sb.Access = core.AccessToken
	require.Equal(t, controlv1.Access_ACCESS_TOKEN, s.route(0, &sb).GetAccess())
	require.NotContains(t, s.route(0, &sb).String(), key.Token("k3x9"))
	require.Empty(t, s.route(0, &sb).GetTeam(), "no key opens it")
	sb.Access = core.AccessPublic
	require.Nil(t, s.route(0, &sb).GetAccessSecret())
	require.Equal(t, controlv1.Access_ACCESS_PUBLIC, s.route(0, &sb).GetAccess())
}

func TestDeliverIgnoresOtherEffects(t *testing.T) {
	s := newServer(t, zap.NewNop())
	require.False(t, s.Deliver(7, core.CreatePod{}))
	require.False(t, s.Deliver(7, core.Claimed{}))
}

func TestOnlyTheLastSnapshotPartIsAcknowledged(t *testing.T) {
	for size, parts := range map[int]int{0: 1, 1: 1, snapshotPart: 1, snapshotPart + 1: 2, 3 * snapshotPart: 3} {
		e := core.SendSnapshot{Sequence: 9, Routes: make([]core.Sandbox, size)}
		for i := range e.Routes {
			e.Routes[i] = sandbox(fmt.Sprint(i))
		}
		messages := newServer(t, zap.NewNop()).snapshot(7, e)
		require.Len(t, messages, parts, "%d routes", size)
		sent := 0
		for i, m := range messages {
			last := i == parts-1
			require.Equal(t, last, m.GetSnapshot().GetLast())
			require.Equal(t, last, m.GetSequence() == 9)
			require.EqualValues(t, 7, m.GetTerm())
			for _, r := range m.GetSnapshot().GetRoutes() {
				require.Equal(t, fmt.Sprint(sent), r.GetSandboxId())
				sent++
			}
		}
		require.Equal(t, size, sent)
	}
}

func TestSnapshotPartFitsTheGRPCLimit(t *testing.T) {
	longest := core.Sandbox{Binding: core.Binding{ID: strings.Repeat("x", 57)}, IP: netip.MustParseAddr("fd00:1111:2222:3333:4444:5555:6666:7777"), DefaultPort: 65535}
	for port := range uint16(64) { // as many as a pool can name
		longest.Ports = append(longest.Ports, 65535-64+port)
	}
	longest.Pool.Name = strings.Repeat("x", 40)
	longest.HTTPSPorts, longest.MaskHost = longest.Ports, strings.Repeat("x", 253)
	e := core.SendSnapshot{Routes: make([]core.Sandbox, snapshotPart)}
	for i := range e.Routes {
		e.Routes[i] = longest
	}
	require.Less(t, proto.Size(newServer(t, zap.NewNop()).snapshot(1, e)[0]), 2<<20)
}

func TestSnapshotOfTheLongestRulesFitsTheGRPCLimit(t *testing.T) {
	rules := core.EgressRules{Allow: make([]string, 256), Deny: make([]string, 256)}
	for i := range rules.Allow {
		rules.Allow[i], rules.Deny[i] = strings.Repeat("x", 1024), strings.Repeat("y", 1024)
	}
	run(t, func(w *world) {
		w.o.AccessKey = accessKey(t)
		stream := w.open()
		require.NoError(t, stream.Send(egressJoin()))
		joined, ok := w.leader.seen()[0].(core.SessionJoined)
		require.True(t, ok)
		e := core.SendSnapshot{Stream: joined.Stream, Sequence: 1}
		for i := range 9 {
			sb := sandbox(strings.Repeat("a", i+1))
			sb.Agent = core.Agent{Port: 49983, Egress: true}
			sb.PoolEgress = &core.PoolEgress{EgressRules: rules}
			e.Routes = append(e.Routes, sb)
		}
		require.True(t, w.Deliver(7, e))
		routes := 0
		for last := false; !last; {
			m, err := stream.Recv() // of a client with the default limit
			require.NoError(t, err)
			routes, last = routes+len(m.GetSnapshot().GetRoutes()), m.GetSnapshot().GetLast()
			require.Less(t, proto.Size(m), 2<<20)
		}
		require.Equal(t, 9, routes)
	})
}

// Invariant: P15
func TestEachChangeOfKeysReachesEveryRouter(t *testing.T) {
	run(t, func(w *world) {
		hash := func(b byte) [sha256.Size]byte { return [sha256.Size]byte{b} }
		all := &fakeKeys{changed: make(chan struct{})}
		w.o.Keys = all
		stream, n := w.joined()
		next := receiver(t, stream)
		receive := func() *controlv1.AllocatorMessage {
			m := next()
			require.EqualValues(t, 7, m.GetTerm())
			require.Equal(t, m.GetSnapshot() != nil, m.GetSequence() > 0, "keys need no acknowledgement")
			return m
		}
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1})
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		require.True(t, receive().GetSnapshot().GetLast())
		require.True(t, receive().GetKeys().GetUnread())
		require.NotNil(t, receive().GetPong(), "the router is fresh only after it has the keys")
		all.set(map[string][][sha256.Size]byte{"a": {hash(1), hash(2)}})
		require.True(t, proto.Equal(&controlv1.Keys{Last: true, Teams: []*controlv1.TeamKeys{
			{Team: "a", Hashes: [][]byte{append([]byte{1}, make([]byte, 31)...), append([]byte{2}, make([]byte, 31)...)}},
		}}, receive().GetKeys()))
		all.set(map[string][][sha256.Size]byte{}) // all are revoked
		require.True(t, proto.Equal(&controlv1.Keys{Last: true}, receive().GetKeys()))
	})
}

func TestEveryPartOfTheKeysFitsTheGRPCLimit(t *testing.T) {
	all := &fakeKeys{byTeam: map[string][][sha256.Size]byte{"many": make([][sha256.Size]byte, keysPart+1)}}
	for i := range keysPart {
		all.byTeam[fmt.Sprintf("%063d", i)] = make([][sha256.Size]byte, 1)
	}
	s := newServer(t, zap.NewNop())
	s.o.Keys = all
	messages, _ := s.keys(7)
	require.Len(t, messages, 3)
	sent := map[string]int{}
	for i, m := range messages {
		require.Equal(t, i == len(messages)-1, m.GetKeys().GetLast())
		require.Less(t, proto.Size(m), 3<<20)
		for _, of := range m.GetKeys().GetTeams() {
			sent[of.GetTeam()] += len(of.GetHashes())
		}
	}
	require.Len(t, sent, keysPart+1)
	require.Equal(t, keysPart+1, sent["many"])
}

// A router leaves the journal that it is in for that of a snapshot.
func TestNoSnapshotIsSentWithoutAValidLease(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		w.leader.deposed.Store(true)
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1})
		m, err := stream.Recv()
		require.Equal(t, codes.FailedPrecondition, status.Code(err), "got %v", m)
	})
}

// The next leader may have claimed the sandbox meanwhile.
func TestNoQuestionIsAnsweredWithoutAValidLease(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		w.leader.deposed.Store(true)
		w.Deliver(7, core.SendResolved{Stream: n, ID: "abc"})
		m, err := stream.Recv()
		require.Equal(t, codes.FailedPrecondition, status.Code(err), "got %v", m)
	})
}

func TestNoPongWithoutAValidLease(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1})
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		for range 3 { // the snapshot, the keys and the pong
			_, err := stream.Recv()
			require.NoError(t, err)
		}
		w.leader.deposed.Store(true)
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 2})
		m, err := stream.Recv()
		require.Equal(t, codes.FailedPrecondition, status.Code(err), "got %v", m)
		require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, w.leader.seen())
	})
}

// The server checks the lease when it sends the pong, not when the core decides to send it.
func TestQueuedPongNeedsAValidLeaseWhenSent(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		big := make([]core.Sandbox, 5*snapshotPart) // more than the stream buffers before the router reads
		for i := range big {
			big[i] = sandbox(strings.Repeat("x", 57))
		}
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1, Routes: big})
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		synctest.Wait()
		w.leader.deposed.Store(true)
		for {
			m, err := stream.Recv()
			if err != nil {
				require.Equal(t, codes.FailedPrecondition, status.Code(err))
				return
			}
			require.Nil(t, m.GetPong())
		}
	})
}
