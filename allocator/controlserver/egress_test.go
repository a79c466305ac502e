package controlserver

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/credentials"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/internal/controltls"
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

// Invariant: P35
func TestCertificateOpensSessionsOfItsKindOnly(t *testing.T) {
	authority, err := controltls.NewAuthority(time.Now())
	require.NoError(t, err)
	for name, joins := range map[string]struct{ own, other *controlv1.RouterMessage }{
		controltls.RouterName: {join(testRouter, 0), egressJoin()},
		controltls.EgressName: {egressJoin(), join(testRouter, 0)},
	} {
		f, err := authority.Issue(name, time.Now())
		require.NoError(t, err)
		pair, err := tls.X509KeyPair(f.Cert, f.Key)
		require.NoError(t, err)
		ctx := peer.NewContext(t.Context(), &peer.Peer{
			AuthInfo: grpccredentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{pair.Leaf}}},
		})
		s := newServer(t, zap.NewNop())
		s.o.AccessKey = accessKey(t)
		require.NoError(t, s.check(ctx, &fakeLeader{}, joins.own.GetJoin()))
		err = s.check(ctx, &fakeLeader{}, joins.other.GetJoin())
		require.Equal(t, codes.PermissionDenied, status.Code(err))
		mode, missing := "Egress", controltls.EgressName
		if name == controltls.EgressName {
			mode, missing = "Ingress", controltls.RouterName
		}
		require.ErrorContains(t, err, "a router with --mode="+mode+" needs a certificate for the DNS name "+missing+
			": give its --control-tls-dir one: the certificate is for the DNS names [\""+name)
	}
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
			if m.GetCredentials() != nil {
				m, err = stream.Recv()
				require.NoError(t, err)
			}
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
				require.True(t, proto.Equal(&controlv1.Asleep{}, m.GetResolved().GetAsleep()), "nothing of it may leave")
				continue
			}
			if i == 4 {
				want.Egress.Pool, want.Egress.Ports = nil, nil
			}
			require.True(t, proto.Equal(want, got), "want %v, got %v", want, got)
		}
	})
}

// Invariant: P38
func TestOnlyEgressRoutersGetTheHeadersOfASandbox(t *testing.T) {
	s, err := New(Options{
		MaxStale: time.Minute, LeaderAddress: func() string { return "" }, AccessKey: accessKey(t), Log: zap.NewNop(),
	})
	require.NoError(t, err)
	sb := guarded()
	sb.PoolEgress.Credentials = []core.EgressCredential{{Host: "a.example", Port: 8443, Header: "authorization", Value: "openai/key"}}
	sb.Network.Headers = s.sealer.Seal(sb.ID, []credentials.Header{{Host: "b.example", Port: 443, Name: "x-key", Value: "canary"}})
	require.NotContains(t, string(sb.Network.Headers), "canary")
	ingress, egress := s.add(false).id, s.add(true).id
	require.NotContains(t, s.route(ingress, &sb).String(), "canary")
	got := s.route(egress, &sb).GetEgress()
	require.False(t, got.GetHeadersUnknown())
	require.True(t, proto.Equal(&controlv1.Egress{Headers: []*controlv1.EgressHeader{
		{Host: "a.example", Port: 8443, Name: "authorization", Credential: "openai/key"},
		{Host: "b.example", Port: 443, Name: "x-key", Value: "canary"},
	}}, &controlv1.Egress{Headers: got.GetHeaders()}))

	unread := guarded()
	unread.PoolEgress.CredentialsUnknown = true
	require.True(t, s.route(egress, &unread).GetEgress().GetHeadersUnknown(), "those of its pool cannot be read")
	other := guarded()
	other.ID, other.Network.Headers = "other", sb.Network.Headers
	got = s.route(egress, &other).GetEgress()
	require.True(t, got.GetHeadersUnknown(), "they were sealed for another sandbox")
	require.Empty(t, got.GetHeaders())

	closed := guarded()
	closed.Network.Headers, closed.PoolEgress = sb.Network.Headers, nil
	require.Empty(t, s.route(egress, &closed).GetEgress().GetHeaders(), "its pool lets it reach nothing")
}

func TestHeadersThatCannotBeReadAreLoggedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, log := observer.New(zap.ErrorLevel)
		s := newServer(t, zap.New(core))
		s.o.AccessKey = accessKey(t)
		egress := s.add(true).id
		routes := func() int {
			for i := range 1000 {
				sb := guarded()
				sb.ID, sb.Network.Headers = fmt.Sprint("other", i), []byte("of a key that is gone")
				require.True(t, s.route(egress, &sb).GetEgress().GetHeadersUnknown())
			}
			return len(log.TakeAll())
		}
		require.Equal(t, 1, routes())
		time.Sleep(time.Minute)
		require.Equal(t, 1, routes())
	})
}

// fakeValues are values that do not change before set.
type fakeValues struct {
	mu      sync.Mutex
	values  map[string]string
	changed chan struct{}
}

func (v *fakeValues) All() (map[string]string, <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.values, v.changed
}

func (v *fakeValues) set(values map[string]string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.values = values
	close(v.changed)
	v.changed = make(chan struct{})
}

// Invariant: P38
func TestEachChangeOfValuesReachesEgressRouters(t *testing.T) {
	run(t, func(w *world) {
		all := &fakeValues{changed: make(chan struct{})}
		w.o.AccessKey, w.o.Credentials, w.o.Keys = accessKey(t), all, &fakeKeys{changed: make(chan struct{})}
		stream := w.open()
		require.NoError(t, stream.Send(egressJoin()))
		n := w.leader.seen()[0].(core.SessionJoined).Stream
		receive := receiver(t, stream)
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1})
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		require.True(t, receive().GetSnapshot().GetLast())
		require.True(t, receive().GetCredentials().GetUnread())
		require.NotNil(t, receive().GetPong(), "the router is fresh only after it has the values")
		long := strings.Repeat("v", 4<<10)
		many := map[string]string{}
		for i := range 1_000 {
			many[fmt.Sprint("a/", i)] = long
		}
		for _, values := range []map[string]string{{"a/b": "c"}, {}, many} {
			all.set(values)
			got, last := map[string]string{}, false
			for !last {
				m := receive()
				require.Less(t, proto.Size(m), 2<<20)
				require.Zero(t, m.GetSequence())
				maps.Copy(got, m.GetCredentials().GetValues())
				last = m.GetCredentials().GetLast()
			}
			require.Equal(t, values, got)
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
		"too short": {func(j *controlv1.Join) { j.EgressMaxStaleNanos = uint64(controlv1.MinEgressMaxStale) - 1 },
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
