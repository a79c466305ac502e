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
	"strings"
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
	_, gatewayPort, err := net.SplitHostPort(e.address(e.site.front))
	require.NoError(t, err)
	e.runSDKs(append(os.Environ(), "E2B_API_KEY="+e.site.key(), "E2B_API_URL=http://"+e.address(e.site.api),
		"E2B_SANDBOX_URL=http://"+e.site.domain()+":"+gatewayPort))
}

// The domain is all that the SDKs know: host names lead to the API and to sandboxes.
func TestStockSDKsOverTLSNeedOnlyTheDomain(t *testing.T) {
	e := startAlone(t, 0, overTLS)
	e.runSDKs(e.domainOnly())
}

// overTLS is a Berth whose gateway serves sandboxes and the API over TLS.
var overTLS = stack.Options{TLS: true, Domain: "sandbox.localhost"}

// gatewayPort is the port of the gateway of a Berth with these options.
func (e *env) gatewayPort() uint16 { return e.stack.Gateways[0].Addr.Port() }

// domainOnly returns the environment of a program that knows the domain and the authority of such a
// Berth, with these folders of Python packages. What is in sdk/resolve makes names below localhost
// resolvable in Node and Python.
func (e *env) domainOnly(packages ...string) []string {
	resolve, err := filepath.Abs(filepath.Join("sdk", "resolve"))
	require.NoError(e.t, err)
	path := strings.Join(append(packages, resolve), ":")
	return append(os.Environ(),
		fmt.Sprintf("E2B_DOMAIN=%s:%d", e.stack.Domain, e.gatewayPort()), "E2B_API_KEY="+e.site.key(),
		"NODE_EXTRA_CA_CERTS="+e.stack.CAFile, "SSL_CERT_FILE="+e.stack.CAFile,
		"NODE_OPTIONS=--require="+filepath.Join(resolve, "resolve.cjs"), "PYTHONPATH="+path, "PYTHONDONTWRITEBYTECODE=1")
}

// runSDKs uses a Berth through E2B's SDKs, as their registries have them: the newest releases, and
// two that call the first generation of the API.
func (e *env) runSDKs(environment []string) {
	t := e.t
	t.Helper()
	pool := e.newPool(e.pool+"-sdk", 6)
	pool.Spec.Template.Spec.Containers[0].Args = []string{fmt.Sprintf("--ports=%d,%d", stack.DemoPorts()[0], agentPort)}
	e.createPool(pool)
	environment = append(environment, "POOL="+pool.Name)
	for _, c := range []struct {
		version string
		install func(dir, name, version string) *exec.Cmd
		program []string
	}{
		{"2.51.0", npm, []string{"node", "agent.cjs"}},
		{"2.20.1", npm, []string{"node", "agent.cjs"}},
		{"2.63.0", pip, []string{"python3", "agent.py"}},
		{"2.40.0", pip, []string{"python3", "agent.py"}},
	} {
		t.Run(c.program[0]+" "+c.version, func(t *testing.T) {
			name := c.program[0] + "-e2b-" + c.version
			dir := installed(t, name, func(dir string) *exec.Cmd { return c.install(dir, "e2b", c.version) })
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			command := exec.CommandContext(ctx, c.program[0], filepath.Join("sdk", c.program[1]), dir)
			command.Env = environment
			out, err := command.CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}

func npm(dir, name, version string) *exec.Cmd {
	return exec.Command("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", dir, name+"@"+version)
}

func pip(dir, name, version string) *exec.Cmd {
	return exec.Command("python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
		"--root-user-action=ignore", "--target", dir, name+"=="+version)
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
