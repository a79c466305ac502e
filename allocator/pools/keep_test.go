package pools

import (
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

// Invariant: P37
func TestCoreKnowsTheEgressModeAndListsOfAPool(t *testing.T) {
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
	lists := core.EgressRules{Allow: []string{"a.example.com"}, Deny: []string{"0.0.0.0/0"}}
	for mode, behind := range map[v1alpha1.EgressMode]bool{v1alpha1.EgressGateway: true, v1alpha1.EgressNone: false} {
		spec := p.keep(&v1alpha1.SandboxPool{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "demo", ResourceVersion: "1"},
			Spec: v1alpha1.SandboxPoolSpec{
				Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "image"}}}},
				Agent:    &v1alpha1.PoolAgent{Enabled: true, Port: 49983},
				Egress:   &v1alpha1.PoolEgress{Mode: mode, Allow: lists.Allow, Deny: lists.Deny, Ports: []int32{8443, 443}},
			},
		})
		require.Equal(t, core.Agent{Port: 49983, Egress: behind}, spec.Agent, "pods that are not behind it are not handed out")
		require.Equal(t, &core.PoolEgress{EgressRules: lists, Ports: []uint16{443, 8443}}, spec.Egress, "for sandboxes of the mode before")
	}
}
