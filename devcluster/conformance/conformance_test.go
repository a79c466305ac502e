package conformance_test

import (
	"flag"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/conformance"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// TestMain raises the number of parallel subtests: they mostly wait.
func TestMain(m *testing.M) {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		_ = flag.Set("test.parallel", "24") // the flag exists in every test binary
	}
	goleak.VerifyTestMain(m)
}

// Invariant: P13
func TestProcessNodeBehavesAsAKubelet(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a real kube-apiserver and etcd: run without -short")
	}
	bin := t.TempDir()
	require.NoError(t, stack.Build(t.Context(), bin, false, "demo-sandbox"))
	cluster := devcluster.Start(t, devcluster.Options{Nodes: 1, NodePath: []string{bin}})
	conformance.Run(t, conformance.Options{
		RestConfig: cluster.RestConfig(),
		Client:     &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	})
}
