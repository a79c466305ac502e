package pods

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestPodNamesTheAgentThatItWasMadeWith(t *testing.T) {
	for _, command := range [][]string{nil, {"python3", "serve.py", "8080"}} {
		pool := &v1alpha1.SandboxPool{}
		pool.Spec.Template.Spec.Containers = []corev1.Container{{Command: command}}
		require.Zero(t, observe(slim(Build(pool, "p", Settings{})), zap.NewNop()).AgentPort)
		pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
		built := Build(pool, "p", Settings{AgentImage: "agent", AgentKey: "key"})
		require.EqualValues(t, 49983, observe(built, zap.NewNop()).AgentPort)
		require.EqualValues(t, 49983, observe(slim(built), zap.NewNop()).AgentPort, "the watch keeps less of a pod")
	}
}

func TestPortOfTheAgentIsThatOfTheCommand(t *testing.T) {
	for _, c := range []struct {
		port    uint16
		command []string
	}{
		{0, nil},
		{0, []string{"serve"}},
		{0, []string{"berth-agent", "run", "--listen=:49983"}}, // that of the image: not one that the allocator put there
		{0, []string{"/berth/berth-agent", "run"}},
		{0, []string{"/berth/berth-agent", "run", "--listen=:x"}},
		{0, []string{"/berth/berth-agent", "run", "--listen=:65536"}},
		{1, []string{"/berth/berth-agent", "run", "--listen=:1"}},
		{49983, []string{"/berth/berth-agent", "run", "--listen=:49983", "--", "serve", "--listen=:80"}},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Command: c.command}, {
			Command: []string{"/berth/berth-agent", "run", "--listen=:2"}}}}}
		require.Equal(t, c.port, agentPort(pod), c.command)
	}
	require.Zero(t, agentPort(&corev1.Pod{}))
}
