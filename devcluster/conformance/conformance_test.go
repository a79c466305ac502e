package conformance_test

import (
	"context"
	"flag"
	"net"
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/conformance"
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
	cluster := devcluster.Start(t, devcluster.Options{Nodes: 1, NodePath: []string{conformance.BuildSandbox(t)}})
	conformance.Run(t, conformance.Options{
		RestConfig: cluster.RestConfig(),
		Dial: func(ctx context.Context, podIP string, port int) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", net.JoinHostPort(podIP, strconv.Itoa(port)))
		},
	})
}
