package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// agentPort is the port on which E2B's SDKs expect their agent.
const agentPort = 49983

// The variables name the API and the gateway, and headers name the sandbox.
func TestStockSDKsWorkOverPlainHTTP(t *testing.T) {
	onThisMachine(t, "does not depend on the cluster")
	e := start(t, 0)
	address := func(dial dialer) string {
		conn, err := dial(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		return conn.RemoteAddr().String()
	}
	_, gatewayPort, err := net.SplitHostPort(address(e.site.front))
	require.NoError(t, err)
	e.runSDKs("E2B_API_URL=http://"+address(e.site.api), "E2B_SANDBOX_URL=http://"+e.site.domain()+":"+gatewayPort)
}

// The domain is all that the SDKs know: host names lead to the API and to sandboxes. What is in
// sdk/resolve makes names below localhost resolvable in Node and Python.
func TestStockSDKsOverTLSNeedOnlyTheDomain(t *testing.T) {
	e := startAlone(t, 0, stack.Options{TLS: true, Domain: "sandbox.localhost"})
	resolve, err := filepath.Abs(filepath.Join("sdk", "resolve"))
	require.NoError(t, err)
	e.runSDKs(fmt.Sprintf("E2B_DOMAIN=%s:%d", e.stack.Domain, e.stack.Gateways[0].Addr.Port()),
		"NODE_EXTRA_CA_CERTS="+e.stack.CAFile, "SSL_CERT_FILE="+e.stack.CAFile,
		"NODE_OPTIONS=--require="+filepath.Join(resolve, "resolve.cjs"), "PYTHONPATH="+resolve, "PYTHONDONTWRITEBYTECODE=1")
}

// runSDKs uses a Berth through E2B's SDKs, as their registries have them: the newest releases, and
// two that call the first generation of the API.
func (e *env) runSDKs(variables ...string) {
	t := e.t
	t.Helper()
	pool := e.newPool(e.pool+"-sdk", 6)
	pool.Spec.Template.Spec.Containers[0].Args = []string{fmt.Sprintf("--ports=%d,%d", stack.DemoPorts()[0], agentPort)}
	e.createPool(pool)
	environment := append(os.Environ(), "POOL="+pool.Name, "E2B_API_KEY="+e.site.key())
	environment = append(environment, variables...)
	for _, c := range []struct {
		version string
		install func(dir, version string) *exec.Cmd
		program []string
	}{
		{"2.51.0", npm, []string{"node", "agent.cjs"}},
		{"2.20.1", npm, []string{"node", "agent.cjs"}},
		{"2.63.0", pip, []string{"python3", "agent.py"}},
		{"2.40.0", pip, []string{"python3", "agent.py"}},
	} {
		t.Run(c.program[0]+" "+c.version, func(t *testing.T) {
			dir := installed(t, c.program[0]+"-e2b-"+c.version, func(dir string) *exec.Cmd { return c.install(dir, c.version) })
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			command := exec.CommandContext(ctx, c.program[0], filepath.Join("sdk", c.program[1]), dir)
			command.Env = environment
			out, err := command.CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}

func npm(dir, version string) *exec.Cmd {
	return exec.Command("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", dir, "e2b@"+version)
}

func pip(dir, version string) *exec.Cmd {
	return exec.Command("python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
		"--root-user-action=ignore", "--target", dir, "e2b=="+version)
}

// installed returns a directory in the cache that a command has filled. It runs the command once.
func installed(t *testing.T, name string, install func(dir string) *exec.Cmd) string {
	t.Helper()
	cache, err := devcluster.CacheDir()
	require.NoError(t, err)
	dir := filepath.Join(cache, name)
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		require.NoError(t, err)
		return dir
	}
	part := dir + ".part"
	require.NoError(t, os.RemoveAll(part))
	require.NoError(t, os.MkdirAll(part, 0o755))
	out, err := install(part).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Rename(part, dir))
	return dir
}
