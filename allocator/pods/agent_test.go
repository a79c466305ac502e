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
