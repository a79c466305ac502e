package pools

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func newPools(t *testing.T) *Pools {
	clients, err := kube.NewClients(&rest.Config{}, 0, 0)
	require.NoError(t, err)
	policy, err := NewPolicy(PolicyBaseline)
	require.NoError(t, err)
	p, err := New(Options{
		Options: kube.Options{Clients: clients, Namespace: "default", Submit: func(core.Event) {}, Log: zaptest.NewLogger(t)},
		Policy:  policy, Egress: true,
		Settings: pods.Settings{ServeOn: time.Second, AgentImage: "agent", AgentKey: "key"},
	})
	require.NoError(t, err)
	return p
}

// behindGateway is a pool with an egress mode.
func behindGateway(mode v1alpha1.EgressMode, version string) *v1alpha1.SandboxPool {
	return &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "demo", ResourceVersion: version},
		Spec: v1alpha1.SandboxPoolSpec{
			Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "image"}}}},
			Agent:    &v1alpha1.PoolAgent{Enabled: true, Port: 49983},
			Egress:   &v1alpha1.PoolEgress{Mode: mode},
		},
	}
}

// Invariant: P37
func TestCoreKnowsTheEgressModeAndListsOfAPool(t *testing.T) {
	p := newPools(t)
	lists := core.EgressRules{Allow: []string{"a.example.com"}, Deny: []string{"0.0.0.0/0"}}
	for mode, behind := range map[v1alpha1.EgressMode]bool{v1alpha1.EgressGateway: true, v1alpha1.EgressNone: false} {
		pool := behindGateway(mode, "1")
		pool.Spec.Egress = &v1alpha1.PoolEgress{
			Mode: mode, Allow: lists.Allow, Deny: lists.Deny, Ports: []int32{8443, 443}, Credentials: []v1alpha1.EgressCredential{
				{Host: "A.example.", Header: "Authorization", Secret: v1alpha1.EgressSecretKey{Name: "openai", Key: "key"}},
				{Host: "b.example", Port: 8443, Header: "X-Key", Secret: v1alpha1.EgressSecretKey{Name: "b", Key: "c"}},
			},
		}
		spec := p.keep(pool)
		require.Equal(t, core.Agent{Port: 49983, Egress: behind}, spec.Agent, "pods that are not behind it are not handed out")
		require.Equal(t, &core.PoolEgress{EgressRules: lists, Ports: []uint16{443, 8443}, Credentials: []core.EgressCredential{
			{Host: "a.example", Port: 443, Header: "authorization", Value: "openai/key"}, {Host: "b.example", Port: 8443, Header: "x-key", Value: "b/c"},
		}}, spec.Egress, "for sandboxes of the mode before")
	}
}

// Invariant: P38
func TestCredentialThatCannotBeSetIsNamed(t *testing.T) {
	key := v1alpha1.EgressSecretKey{Name: "s", Key: "k"}
	for _, c := range []struct {
		credential v1alpha1.EgressCredential
		says       string
	}{
		{v1alpha1.EgressCredential{Host: "*.b.example", Header: "b"}, "without a wildcard"},
		{v1alpha1.EgressCredential{Host: "b.example:8443", Header: "b"}, "into the field port"},
		{v1alpha1.EgressCredential{Host: "https://b.example", Header: "b"}, "host"},
		{v1alpha1.EgressCredential{Host: "192.0.2.1", Header: "b"}, "host"},
		{v1alpha1.EgressCredential{Host: "b.example", Header: "Host"}, "proxies read it"},
		{v1alpha1.EgressCredential{Host: "b.example", Port: 80, Header: "b"}, "port 80"},
		{v1alpha1.EgressCredential{Host: "A.example", Header: "A"}, "an earlier entry"},
	} {
		all, err := credentialsOf(&v1alpha1.PoolEgress{Credentials: []v1alpha1.EgressCredential{{Host: "a.example", Header: "a", Secret: key}, c.credential}})
		require.ErrorContains(t, err, "spec.egress.credentials[1]: ")
		require.ErrorContains(t, err, c.says)
		require.Equal(t, []core.EgressCredential{{Host: "a.example", Port: 443, Header: "a", Value: "s/k"}}, all)
	}
}

// A mistake in a credential must not have requests go out bare that had a header before.
//
// Invariant: P38
func TestWrongCredentialKeepsThoseOfBefore(t *testing.T) {
	p := newPools(t)
	pool := func(version, host string) *v1alpha1.SandboxPool {
		pool := behindGateway(v1alpha1.EgressGateway, version)
		pool.Spec.Egress.Credentials = []v1alpha1.EgressCredential{{Host: host, Header: "a", Secret: v1alpha1.EgressSecretKey{Name: "s", Key: "k"}}}
		return pool
	}
	require.True(t, p.keep(pool("1", "https://a.example")).Egress.CredentialsUnknown, "nothing was there before")
	good := p.keep(pool("2", "a.example")).Egress
	require.False(t, good.CredentialsUnknown)
	spec := p.keep(pool("3", "https://a.example"))
	require.Same(t, good, spec.Egress)
	require.NotEmpty(t, spec.Refused)
}

func TestWrongListLeavesSandboxesTheListsOfBefore(t *testing.T) {
	p := newPools(t)
	everything := []string{"0.0.0.0/0"}
	version := 0
	keep := func(mode v1alpha1.EgressMode, allow string, deny ...string) core.Pool {
		version++
		pool := behindGateway(mode, strconv.Itoa(version))
		pool.Spec.Egress.Allow, pool.Spec.Egress.Deny = []string{allow}, deny
		return p.keep(pool)
	}
	lists := func(allow string, deny ...string) *core.PoolEgress {
		return &core.PoolEgress{EgressRules: core.EgressRules{Allow: []string{allow}, Deny: deny}}
	}
	spec := keep(v1alpha1.EgressGateway, "no name", everything...)
	require.Equal(t, lists("no name", everything...), spec.Egress, "there is none before: the routers let nothing pass")
	require.Equal(t, lists("no name either", everything...), keep(v1alpha1.EgressGateway, "no name either", everything...).Egress)
	require.Empty(t, keep(v1alpha1.EgressGateway, "a.example.com", everything...).Refused)
	for range 2 {
		spec = keep(v1alpha1.EgressGateway, "no name", everything...)
		require.Contains(t, spec.Refused, "spec.egress.allow[0]")
		require.Equal(t, lists("a.example.com", everything...), spec.Egress)
	}
	require.Equal(t, lists("a.example.com", everything...), keep(v1alpha1.EgressNone, "b.example.com").Egress, "without 0.0.0.0/0 in deny")
	require.Equal(t, lists("b.example.com", everything...), keep(v1alpha1.EgressGateway, "b.example.com", everything...).Egress)
}
