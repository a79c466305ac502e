package control

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/protobuf/proto"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
)

type resolver struct{}

func (resolver) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) { return nil, nil }

func newSandboxes(t *testing.T, now func() time.Duration) *Sandboxes {
	server, err := egress.New(egress.Options{
		Socket: "unused", Resolver: resolver{}, Fresh: func() bool { return true }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	s, err := New(Options{Server: server, Now: now, Log: zap.NewNop()})
	require.NoError(t, err)
	return s
}

// route is that of a sandbox of the pool python, which denies 9.9.9.0/24.
func route(id string, change func(*controlv1.Route)) *controlv1.Route {
	hash := sha256.Sum256([]byte(id))
	r := &controlv1.Route{SandboxId: id, PodIp: "10.0.0.1", Pool: "python", Egress: &controlv1.Egress{
		Pool: &controlv1.EgressRules{Deny: []string{"9.9.9.0/24"}}, Claim: &controlv1.EgressRules{},
		Incarnation: 3, TokenHash: hash[:],
	}}
	if change != nil {
		change(r)
	}
	return r
}

func dest(t *testing.T, text string) policy.Dest {
	d, err := policy.Destination(text, 0)
	require.NoError(t, err)
	return d
}

// Invariant: P35
func TestRulesOfPoolAndClaimBothCount(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*controlv1.Route)
		allowed string // of the destinations, by their place
	}{
		"the pool's":       {nil, "yyn"},
		"and the claim's":  {func(r *controlv1.Route) { r.Egress.Claim = deny("0.0.0.0/0", "a.example.com") }, "ynn"},
		"no claim":         {func(r *controlv1.Route) { r.Egress.Claim = nil }, "yyn"},
		"an unknown pool":  {func(r *controlv1.Route) { r.Egress.Pool = nil }, "nnn"},
		"no readable pool": {func(r *controlv1.Route) { r.Egress.Pool = deny("later than this version") }, "nnn"},
		"no readable rule": {func(r *controlv1.Route) { r.Egress.Claim = deny("later than this version") }, "nnn"},
		"no port":          {func(r *controlv1.Route) { r.Egress.Ports = []uint32{1 << 16} }, "nnn"},
		"other ports":      {func(r *controlv1.Route) { r.Egress.Ports = []uint32{8443} }, "nnn"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSandboxes(t, still)
			require.NoError(t, s.Replace([]*controlv1.Route{route("other", nil), route("abc", c.change)}))
			for _, set := range []bool{false, true} {
				if set {
					require.NoError(t, s.Set(route("abc", c.change)))
				}
				sandbox := find(t, s, "abc")
				require.Equal(t, uint64(3), sandbox.Incarnation)
				require.Equal(t, sha256.Sum256([]byte("abc")), sandbox.TokenHash)
				var got strings.Builder
				for _, to := range []string{"a.example.com:443", "8.8.8.8:443", "9.9.9.9:443"} {
					verdict, _ := sandbox.Policy.Decide(dest(t, to))
					got.WriteString(map[bool]string{true: "n", false: "y"}[verdict == policy.Refused])
				}
				require.Equal(t, c.allowed, got.String())
			}
		})
	}
}

// still is a clock that stands still.
func still() time.Duration { return 0 }

func deny(what string, allow ...string) *controlv1.EgressRules {
	return &controlv1.EgressRules{Allow: allow, Deny: []string{what}}
}

func find(t *testing.T, s *Sandboxes, id string) egress.Sandbox {
	for _, sandbox := range s.o.Server.Sandboxes() {
		if sandbox.ID == id {
			return sandbox
		}
	}
	t.Fatal("not known: " + id)
	return egress.Sandbox{}
}

func TestSandboxesOfAPoolShareItsRules(t *testing.T) {
	s := newSandboxes(t, still)
	require.NoError(t, s.Replace([]*controlv1.Route{route("a", nil), route("b", nil)}))
	require.Same(t, find(t, s, "a").Policy.Pool, find(t, s, "b").Policy.Pool)
	require.NoError(t, s.Set(route("b", func(r *controlv1.Route) { r.Egress.Pool = deny("0.0.0.0/0") })))
	require.NotSame(t, find(t, s, "a").Policy.Pool, find(t, s, "b").Policy.Pool)
	s.Forget("a")
	require.Len(t, s.Dump(), 1)
	require.Equal(t, []uint16{80, 443}, s.Dump()[0].Route.Ports.List())
}

// Invariant: P38
func TestHeadersOfARouteAreThoseOfTheSandbox(t *testing.T) {
	s := newSandboxes(t, still)
	require.NoError(t, s.Set(route("abc", func(r *controlv1.Route) {
		r.Egress.HeadersUnknown = true
		r.Egress.Headers = []*controlv1.EgressHeader{
			{Host: "a.example", Port: 8443, Name: "authorization", Credential: "openai/key"},
			{Host: "b.example", Name: "x-key", Value: "v"},
		}
	})))
	got := find(t, s, "abc")
	require.True(t, got.HeadersUnknown)
	require.Equal(t, []egress.Header{
		{Host: "a.example", Port: 8443, Name: "authorization", Credential: "openai/key"},
		{Host: "b.example", Port: 443, Name: "x-key", Value: "v"},
	}, got.Headers)
	require.NoError(t, s.Set(route("abc", nil)))
	got = find(t, s, "abc")
	require.False(t, got.HeadersUnknown)
	require.Empty(t, got.Headers)
}

func TestRulesThatCannotBeReadAreLoggedRarely(t *testing.T) {
	core, log := observer.New(zap.ErrorLevel)
	server := newSandboxes(t, still).o.Server
	s, err := New(Options{Server: server, Now: still, Log: zap.New(core)})
	require.NoError(t, err)
	var all []*controlv1.Route
	for i := range 1000 {
		all = append(all, route(fmt.Sprint("abc", i), func(r *controlv1.Route) { r.Egress.Claim = deny("of a later form") }))
	}
	require.NoError(t, s.Replace(all))
	require.Len(t, log.All(), 1)
}

func TestRoutesThatCannotBeEndTheStream(t *testing.T) {
	s := newSandboxes(t, still)
	for want, change := range map[string]func(*controlv1.Route){
		"pod_ip":         func(r *controlv1.Route) { r.PodIp = "x" },
		"token_hash":     func(r *controlv1.Route) { r.Egress = nil },
		"egress.headers": func(r *controlv1.Route) { r.Egress.Headers = []*controlv1.EgressHeader{{Port: 1 << 16}} },
		"sandbox ID":     func(r *controlv1.Route) { r.SandboxId = "A" },
	} {
		require.ErrorContains(t, s.Set(route("abc", change)), want)
		require.ErrorContains(t, s.Replace([]*controlv1.Route{route("abc", change)}), want)
	}
}

// Invariant: P39
func TestUsageIsThatOfKnownSandboxesOnly(t *testing.T) {
	s := newSandboxes(t, still)
	require.NoError(t, s.Set(route("abc", nil)))
	require.True(t, s.Usage("abc").GetKnown())
	require.True(t, proto.Equal(&controlv1.EgressUsage{}, s.Usage("def")))
}

func TestFreshnessEndsInTimeAndForGood(t *testing.T) {
	now := time.Duration(0)
	s := newSandboxes(t, func() time.Duration { return now })
	require.False(t, s.Fresh())
	s.SetFreshUntil(30 * time.Second)
	require.True(t, s.Fresh())
	now = 30 * time.Second
	require.False(t, s.Fresh())
	s.SetFreshUntil(time.Minute)
	require.True(t, s.Fresh())
	s.Expire()
	s.SetFreshUntil(time.Hour)
	require.False(t, s.Fresh(), "it was declared dead")
}

// BenchmarkMemory reports what the router keeps of a sandbox: 10,000 of them, each with 20 rules of its own.
func BenchmarkMemory(b *testing.B) {
	const sandboxes, rules = 10_000, 20
	for range b.N {
		server, err := egress.New(egress.Options{
			Socket: "unused", Resolver: resolver{}, Fresh: func() bool { return true }, Log: zap.NewNop(),
		})
		require.NoError(b, err)
		s, err := New(Options{Server: server, Now: still, Log: zap.NewNop()})
		require.NoError(b, err)
		heap := func() uint64 {
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		before := heap()
		for i := range sandboxes {
			require.NoError(b, s.Set(route(fmt.Sprintf("s%023d", i), func(r *controlv1.Route) {
				r.PodIp = fmt.Sprintf("10.1.%d.%d", i/250, i%250)
				r.Egress.Claim = deny("0.0.0.0/0")
				for n := range rules {
					r.Egress.Claim.Allow = append(r.Egress.Claim.Allow, fmt.Sprintf("host-%d-of-%d.example.com", n, i))
				}
			})))
		}
		b.ReportMetric(float64(heap()-before)/sandboxes, "B/sandbox")
		runtime.KeepAlive(s)
	}
}
