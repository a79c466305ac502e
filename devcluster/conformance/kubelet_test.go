package conformance_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/devcluster/conformance"
)

func TestKubeletBehavesAsTheTableSays(t *testing.T) {
	kubeconfig, image := os.Getenv("BERTH_E2E_KUBECONFIG"), os.Getenv("BERTH_E2E_SANDBOX_IMAGE")
	if kubeconfig == "" || image == "" {
		t.Skip("needs a cluster with real nodes: set BERTH_E2E_KUBECONFIG to its kubeconfig and BERTH_E2E_SANDBOX_IMAGE to an image there that has demo-sandbox on its PATH")
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	conformance.RunInCluster(t, config, image)
}
