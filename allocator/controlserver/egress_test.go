package controlserver

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

func accessKey(t *testing.T) *sandboxaccess.Key {
	key, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	return key
}

// egressJoin is the Join of an egress router.
func egressJoin() *controlv1.RouterMessage {
	m := join(testRouter, 0)
	j := m.GetJoin()
	j.MaxStaleNanos, j.EgressMaxStaleNanos, j.GatewayHash = 0, uint64(30*time.Second), make([]byte, sha256.Size)
	return m
}

// guarded is a sandbox with rules, which every way to open it has a secret for.
func guarded() core.Sandbox {
	sb := sandbox("k3x9")
	sb.Pool = core.PoolKey{Namespace: "sandboxes", Name: "python"}
	sb.Access, sb.Team, sb.Agent.Port, sb.Agent.Egress, sb.Incarnation = core.AccessToken, "a", 49983, true, 3
	sb.Network = core.EgressRules{Allow: []string{"api.example.org"}, Deny: []string{"0.0.0.0/0"}}
	sb.PoolEgress = &core.PoolEgress{
		EgressRules: core.EgressRules{Deny: []string{"192.0.2.0/24"}}, Ports: []uint16{443, 8443},
	}
	return sb
}

// Invariant: P35
func TestEgressRoutersGetRulesAndNoSecret(t *testing.T) {
	run(t, func(w *world) {
		w.o.AccessKey = accessKey(t)
		stream := w.open()
		require.NoError(t, stream.Send(egressJoin()))
		joined, ok := w.leader.seen()[0].(core.SessionJoined)
		require.True(t, ok)
		require.True(t, joined.Egress)
		require.Equal(t, 30*time.Second, joined.MaxStale)
		sb := guarded()
		hash := sha256.Sum256([]byte(w.o.AccessKey.EgressToken("k3x9", 3)))
		want := &controlv1.Route{SandboxId: "k3x9", PodIp: "10.0.0.1", Pool: "python", Egress: &controlv1.Egress{
			Pool:  &controlv1.EgressRules{Deny: []string{"192.0.2.0/24"}},
			Claim: &controlv1.EgressRules{Allow: []string{"api.example.org"}, Deny: []string{"0.0.0.0/0"}},
			Ports: []uint32{443, 8443}, Incarnation: 3, TokenHash: hash[:],
		}}
		unknown := guarded()
		unknown.PoolEgress = nil
		for _, e := range []core.Effect{
			core.SendSnapshot{Stream: joined.Stream, Sequence: 1, Routes: []core.Sandbox{sb}},
			core.SendRoute{Stream: joined.Stream, Sequence: 2, Sandbox: sb},
			core.SendResolved{Stream: joined.Stream, ID: "k3x9", Sandbox: &sb},
			core.SendResolved{Stream: joined.Stream, ID: "k3x9", Sleeper: &sb},
			core.SendRoute{Stream: joined.Stream, Sequence: 3, Sandbox: unknown},
		} {
			require.True(t, w.Deliver(7, e))
		}
		for i := range 5 {
			m, err := stream.Recv()
			require.NoError(t, err)
			require.Nil(t, m.GetKeys(), "keys open sandboxes")
			raw, err := proto.Marshal(m)
			require.NoError(t, err)
			secret := w.o.AccessKey.Secret("k3x9")
			require.NotContains(t, string(raw), string(secret[:]))
			require.NotContains(t, hex.EncodeToString(raw), hex.EncodeToString([]byte(w.o.AccessKey.EgressToken("k3x9", 3))))
			var got *controlv1.Route
			switch {
			case m.GetSnapshot() != nil:
				got = m.GetSnapshot().GetRoutes()[0]
			case m.GetRoute() != nil:
				got = m.GetRoute()
			case m.GetResolved().GetRoute() != nil:
				got = m.GetResolved().GetRoute()
			default:
				got = m.GetResolved().GetAsleep().GetRoute()
			}
			if i == 4 {
				want.Egress.Pool, want.Egress.Ports = nil, nil
			}
			require.True(t, proto.Equal(want, got), "want %v, got %v", want, got)
		}
	})
}

func TestIngressRoutersGetNoRulesOfEgress(t *testing.T) {
	s := newServer(t, zap.NewNop())
	s.o.AccessKey = accessKey(t)
	sb := guarded()
	require.Nil(t, s.route(s.add(false).id, &sb).GetEgress())
	require.NotNil(t, s.route(s.add(true).id, &sb).GetEgress())
}

func TestJoinOfAnEgressRouterIsChecked(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*controlv1.Join)
		code   codes.Code
		says   string
	}{
		"a max-stale of ingress": {func(j *controlv1.Join) { j.MaxStaleNanos = 1 }, codes.InvalidArgument, "join.max_stale_nanos 1"},
		"too short": {func(j *controlv1.Join) { j.EgressMaxStaleNanos = uint64(minEgressStale) - 1 },
			codes.InvalidArgument, "join.egress_max_stale_nanos"},
		"too long":         {func(j *controlv1.Join) { j.EgressMaxStaleNanos = uint64(maxStale) + 1 }, codes.InvalidArgument, "join.egress_max_stale_nanos"},
		"no gateway":       {func(j *controlv1.Join) { j.GatewayHash = nil }, codes.InvalidArgument, "join.gateway_hash"},
		"no key to use":    {func(*controlv1.Join) {}, codes.FailedPrecondition, "no access key"},
		"half of a secret": {func(j *controlv1.Join) { j.GatewayHash = []byte{1} }, codes.InvalidArgument, "join.gateway_hash"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				if name != "no key to use" {
					w.o.AccessKey = accessKey(t)
				}
				m := egressJoin()
				c.change(m.GetJoin())
				stream := w.open()
				require.NoError(t, stream.Send(m))
				fails(t, stream, c.code, c.says)
				synctest.Wait()
				require.Empty(t, w.leader.seen())
			})
		})
	}
}
