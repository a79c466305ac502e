package pods_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// egressPool is a pool of the mode Gateway.
func egressPool() *v1alpha1.SandboxPool {
	return agentPool(func(s *v1alpha1.SandboxPoolSpec, _ *corev1.Container) {
		s.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway}
	})
}

// inNetwork gives a pod what the kubelet gives it.
func inNetwork(p *corev1.Pod) *corev1.Pod {
	p.Status.PodIP = "10.0.0.1"
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return p
}

// Invariant: P37
func TestTemplateDoesNotDecideAboutTheEgressLabel(t *testing.T) {
	for _, said := range []string{v1alpha1.EgressByGateway, "none"} {
		pool := egressPool()
		pool.Spec.Template.Metadata.Labels = map[string]string{v1alpha1.LabelEgress: said}
		p := pods.Build(pool, "p", withAgent())
		require.Equal(t, v1alpha1.EgressByGateway, p.Labels[v1alpha1.LabelEgress])
		require.True(t, pods.Observe(p).Egress)
		pool.Spec.Egress.Mode = v1alpha1.EgressNone
		p = pods.Build(pool, "p", withAgent())
		require.NotContains(t, p.Labels, v1alpha1.LabelEgress)
		require.False(t, pods.Observe(p).Egress)
	}
}

// Invariant: P37
func TestPodBehindAGatewayTriesItsNetworkFirst(t *testing.T) {
	tries := func(settings pods.Settings, pool *v1alpha1.SandboxPool) bool {
		spec := pods.Build(pool, "p", settings).Spec
		first := spec.InitContainers[0]
		require.Equal(t, []string{"agent", "install", "/berth"}, first.Command, "nothing runs before it")
		for _, e := range first.Env {
			if e == (corev1.EnvVar{Name: "BERTH_EGRESS", Value: v1alpha1.EgressByGateway}) {
				return true
			}
		}
		return false
	}
	pool := egressPool()
	pool.Spec.Template.Spec.InitContainers = []corev1.Container{{Name: "own", Image: "x"}}
	require.True(t, tries(withAgent(), pool))
	unchecked := withAgent()
	unchecked.EgressUnchecked = true
	require.False(t, tries(unchecked, pool))
	require.True(t, pods.Observe(pods.Build(pool, "p", unchecked)).Egress)
	require.NotEqual(t, pods.TemplateHash(pool, withAgent()), pods.TemplateHash(pool, unchecked))
	require.False(t, tries(withAgent(), agentPool(nil)))
	require.Equal(t, pods.TemplateHash(agentPool(nil), withAgent()), pods.TemplateHash(agentPool(nil), unchecked))
}

// Invariant: P37
func TestPodBehindAGatewayKnowsWhatToTry(t *testing.T) {
	settings := withAgent()
	settings.EgressPublic = "192.0.2.1:443"
	env := pods.Build(egressPool(), "p", settings).Spec.InitContainers[0].Env
	require.Contains(t, env, corev1.EnvVar{Name: "BERTH_EGRESS_PUBLIC", Value: "192.0.2.1:443"})
	require.Contains(t, env, corev1.EnvVar{Name: "BERTH_NODE_IPS", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.hostIPs"},
	}})
	require.Equal(t, pods.TemplateHash(egressPool(), withAgent()), pods.TemplateHash(egressPool(), settings))
}

func TestTemplateHashHasTheEgressModeAndNotTheRules(t *testing.T) {
	pool := egressPool()
	hash := pods.TemplateHash(pool, withAgent())
	pool.Spec.Egress.Allow, pool.Spec.Egress.Ports = []string{"example.com"}, []int32{22}
	require.Equal(t, hash, pods.TemplateHash(pool, withAgent()), "rules need no new pods")
	pool.Spec.Egress.Mode = v1alpha1.EgressNone
	require.NotEqual(t, hash, pods.TemplateHash(pool, withAgent()))
	require.Equal(t, pods.TemplateHash(agentPool(nil), withAgent()), pods.TemplateHash(pool, withAgent()))
}

// Invariant: P37
func TestPodWithoutItsEgressLabelIsNotHandedOut(t *testing.T) {
	seen := pods.Observe(inNetwork(pods.Build(egressPool(), "p", withAgent())))
	require.True(t, seen.Egress && seen.Ready && !seen.Used && !seen.Mislabelled, "%+v", seen)
	for _, label := range []string{"", "none"} {
		p := inNetwork(pods.Build(egressPool(), "p", withAgent()))
		p.Labels[v1alpha1.LabelEgress] = label
		if label == "" {
			delete(p.Labels, v1alpha1.LabelEgress)
		}
		seen := pods.Observe(p)
		require.True(t, seen.Egress && seen.Used && seen.Mislabelled, "%+v", seen)
	}
	other := inNetwork(pods.Build(agentPool(nil), "p", withAgent()))
	other.Labels[v1alpha1.LabelEgress] = v1alpha1.EgressByGateway
	seen = pods.Observe(other)
	require.False(t, seen.Egress || seen.Used || seen.Mislabelled, "it reaches less than it was made for: %+v", seen)
}

func TestVariableOfTheEgressModeIsRefusedInTemplates(t *testing.T) {
	pool := agentPool(func(_ *v1alpha1.SandboxPoolSpec, c *corev1.Container) {
		c.Env = []corev1.EnvVar{{Name: "BERTH_EGRESS"}}
	})
	require.ErrorContains(t, pods.CheckAgent(pool, withAgent()), "containers[0].env[0]: BERTH_EGRESS is the agent's")
}

func TestPodBehindAGatewayIsToldItsAddresses(t *testing.T) {
	f := setUp(t)
	writer, err := pods.NewWriter(pods.WriterOptions{Settings: withAgent(), Options: kube.Options{
		Clients: f.clients, Namespace: "default", Submit: f.sink.Submit, Log: zaptest.NewLogger(t),
	}, Gateway: func() string { return "10.96.0.9:3128" }})
	require.NoError(t, err)
	for name, pool := range map[string]*v1alpha1.SandboxPool{"behind": egressPool(), "beside": agentPool(nil)} {
		pool.Namespace = "default"
		require.NoError(t, writer.Create(t.Context(), pool, core.CreatePod{Name: name}))
		spec := f.get(name).Spec
		env := corev1.EnvVar{Name: "BERTH_EGRESS_GATEWAY", Value: "10.96.0.9:3128"}
		if name == "behind" {
			require.Contains(t, spec.InitContainers[0].Env, env)
		} else {
			require.Empty(t, spec.InitContainers[0].Env)
		}
		require.NotContains(t, spec.Containers[0].Env, env)
	}
}

// It sees the pod of a sandbox, whose label another client removes.
// Invariant: P37
func TestRemovedEgressLabelOfASandboxIsPutBack(t *testing.T) {
	f := setUp(t)
	pool := egressPool()
	pool.Namespace = "default"
	api := f.clients.Kubernetes.CoreV1().Pods("default")
	made, err := api.Create(t.Context(), pods.Build(pool, "egress", withAgent()), metav1.CreateOptions{})
	require.NoError(t, err)
	plain := agentPool(nil)
	plain.Namespace = "default"
	other, err := api.Create(t.Context(), pods.Build(plain, "plain", withAgent()), metav1.CreateOptions{})
	require.NoError(t, err)
	l := f.labeler(1)
	f.patch("egress", `{"metadata":{"labels":{"berth.sh/egress":null}}}`)
	require.True(t, pods.Observe(f.get("egress")).Mislabelled)
	for _, p := range []*corev1.Pod{made, other} {
		l.Label(core.LabelPod{Pod: pods.KeyOf(p), Pool: "pool", ID: "x", Restored: true})
	}
	require.Eventually(t, func() bool { return l.Waiting() == 0 }, time.Minute, 10*time.Millisecond)
	p := f.get("egress")
	require.Equal(t, v1alpha1.EgressByGateway, p.Labels[v1alpha1.LabelEgress])
	require.Equal(t, v1alpha1.PhaseClaimed, p.Labels[v1alpha1.LabelPhase])
	require.False(t, pods.Observe(p).Mislabelled)
	require.NotContains(t, f.get("plain").Labels, v1alpha1.LabelEgress)
}
