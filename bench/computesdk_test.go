package bench

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// BenchmarkComputeSDK runs e2e/sdk/tti.mjs: ComputeSDK, which uses E2B's SDK, creates 100 sandboxes in three ways and
// runs a command in each. The pool is full at the begin of each.
func BenchmarkComputeSDK(b *testing.B) {
	const count = 100
	bin := b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "allocator", "extproc", "demo-sandbox", "agent"))
	berth := harness.NewRun(b, history.Settings{}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{bin}},
		Stack:   stack.Options{BinDir: bin, GatewayHosts: []string{"127.0.0.1"}},
	})
	const pool = "computesdk"
	berth.CreatePool(pool, count, func(p *v1alpha1.SandboxPool) {
		p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: agent.Port}
		p.Spec.MaxPods = new(int32(count)) // the start of other pods is not measured
	})
	project, err := os.ReadFile(filepath.Join("..", "e2e", "sdk", "package.json"))
	require.NoError(b, err)
	packages, err := devcluster.NPMProject("clients", string(project)).Dir(b.Context(), os.Stderr)
	require.NoError(b, err)

	program := filepath.Join("..", "e2e", "sdk", "tti.mjs")
	command := exec.CommandContext(b.Context(), "node", program, packages, fmt.Sprint(count))
	command.Env = append(os.Environ(), "POOL="+pool, "E2B_API_KEY=e2b_0123456789abcdef",
		"E2B_API_URL="+berth.Stack.Allocators[0].API,
		fmt.Sprintf("E2B_SANDBOX_URL=http://127.0.0.1:%d", berth.Gateways[0].Addr.Port()))
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	require.NoError(b, err)
	out, err := command.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, command.Start())
	lines := bufio.NewScanner(out)
	for range 3 {
		require.Eventually(b, func() bool {
			p, err := berth.ReadPool(b.Context(), pool)
			return err == nil && p.Status.Warm == count && p.Status.Claimed+p.Status.Pending+p.Status.Releasing == 0
		}, 10*time.Minute, 200*time.Millisecond)
		_, err := fmt.Fprintln(in)
		require.NoError(b, err)
		require.True(b, lines.Scan(), "the program has ended")
		b.Log(lines.Text())
	}
	require.NoError(b, command.Wait())
}
