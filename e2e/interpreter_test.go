package e2e

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// E2B's code interpreter SDKs run code in the pool of examples/code-interpreter, and frameworks use its sandboxes.
func TestCodeInterpreterSDKsAndFrameworksUseTheExample(t *testing.T) {
	onThisMachine(t, "needs the image of the example")
	e := start(t, 0)
	e.interpreterPool(4)
	environment := append(e.overHTTP(), "POOL="+e.pool+"-code")
	runClient(t, environment, pythonClients, "python3", "frameworks.py")
	runClient(t, environment, nodeClients, "node", "frameworks.mjs")
	runClient(t, environment, nodeClients, "node", "code.cjs")
	runClient(t, environment, pythonClients, "python3", "code.py")
}

var latestFlag = flag.Bool("e2e.latest", false, "run the newest releases of all SDKs and frameworks too")

// The clients are not pinned: a release of today may break what worked yesterday.
func TestLatestSDKsAndFrameworksWork(t *testing.T) {
	onThisMachine(t, "needs the image of the example")
	if !*latestFlag {
		t.Skip("depends on what the registries have today: -e2e.latest")
	}
	e := start(t, 0)
	e.interpreterPool(4)
	plain := e.newPool(e.pool+"-sdk", 6)
	plain.Spec.Template.Spec.Containers[0].Args = []string{fmt.Sprintf("--ports=%d,%d", stack.DemoPorts()[0], agentPort)}
	e.createPool(plain)
	tools := e.otherPool("tools", 3, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, NewFiles: v1alpha1.NewFilesAnywhere}
	})
	for _, c := range []struct {
		pool    string
		project func() (devcluster.Packages, error)
		program []string
	}{
		{plain.Name, latestPythonClients, []string{"python3", "agent.py"}},
		{plain.Name, latestNodeClients, []string{"node", "agent.cjs"}},
		{tools, latestPythonClients, []string{"python3", "tools.py", "sync"}},
		{tools, latestPythonClients, []string{"python3", "tools.py", "async"}},
		{tools, latestNodeClients, []string{"node", "tools.cjs"}},
		{e.pool + "-code", latestPythonClients, []string{"python3", "code.py"}},
		{e.pool + "-code", latestNodeClients, []string{"node", "code.cjs"}},
		{e.pool + "-code", latestPythonClients, []string{"python3", "frameworks.py"}},
		{e.pool + "-code", latestNodeClients, []string{"node", "frameworks.mjs"}},
	} {
		runClient(t, append(e.overHTTP(), "POOL="+c.pool), c.project, c.program...)
	}
}

// interpreterPool makes the pool of examples/code-interpreter under a name of the test's own. Mastra asks for a pause
// at the timeout, so it accepts that.
func (e *env) interpreterPool(warm int32) {
	e.t.Helper()
	pool, err := stack.InterpreterPool(e.t.Context(), e.site.namespace(), filepath.Join(e.t.TempDir(), "code"), os.Stderr)
	require.NoError(e.t, err)
	pool.Name, pool.Spec.Warm, pool.Spec.AcceptPause = e.pool+"-code", warm, v1alpha1.PauseEnds
	e.createPool(pool)
	e.waitFull(pool.Name, warm)
}

// runClient runs a program in sdk with a project's packages.
func runClient(
	t *testing.T, environment []string, project func() (devcluster.Packages, error), program ...string,
) {
	t.Helper()
	packages, err := project()
	require.NoError(t, err)
	t.Run(program[1], func(t *testing.T) {
		dir := t.TempDir()
		require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755)) // other users enter it
		stockSDK{program: program}.run(t, installed(t, packages), "", append(environment, "DIR="+dir))
	})
}
