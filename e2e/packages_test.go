package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// Versions of what the tests use besides E2B's SDKs.
const (
	playwrightVersion = "1.65.1"
	viteVersion       = "8.3.8" // as in examples/vite/package.json
)

var (
	schemathesis = devcluster.PyPI("schemathesis", "4.32.5")
	pythonMCP    = devcluster.PyPI("mcp", "2.3.0")
)

// installPackages installs all packages of the tests into the cache, some side by side: they wait for the
// registries. It runs before the first test, so that no deadline of a test and no timeout of a sandbox
// includes an installation.
func installPackages(ctx context.Context) error {
	all := []devcluster.Packages{schemathesis, pythonMCP, e2bCLI}
	for _, c := range slices.Concat(newSDKs, oldSDKs, toolSDKs) {
		all = append(all, c.packages("e2b", c.version))
	}
	for _, project := range []func() (devcluster.Packages, error){
		stack.InterpreterPackages, pythonClients, nodeClients, pythonExample, nodeExample,
	} {
		packages, err := project()
		if err != nil {
			return err
		}
		all = append(all, packages)
	}
	if os.Getenv("BERTH_E2E_CHROMIUM") != "" {
		all = append(all, devcluster.NPM("playwright-core", playwrightVersion), devcluster.NPM("vite", viteVersion), axe)
	}
	var some errgroup.Group
	some.SetLimit(4)
	for _, p := range all {
		some.Go(func() error {
			_, err := p.Dir(ctx, os.Stderr)
			return err
		})
	}
	return some.Wait()
}

// installed returns the directory of packages.
func installed(t *testing.T, p devcluster.Packages) string {
	t.Helper()
	dir, err := p.Dir(t.Context(), os.Stderr)
	require.NoError(t, err)
	return dir
}

// pythonClients and nodeClients are the code interpreter SDKs and the frameworks that use E2B's SDKs.
func pythonClients() (devcluster.Packages, error) {
	requirements, err := os.ReadFile(filepath.Join("sdk", "requirements.txt"))
	return devcluster.PyPIProject("clients", string(requirements)), err
}

func nodeClients() (devcluster.Packages, error) {
	packages, err := os.ReadFile(filepath.Join("sdk", "package.json"))
	return devcluster.NPMProject("clients", string(packages)), err
}

// latestPythonClients and latestNodeClients are the newest releases of today.
func latestPythonClients() (devcluster.Packages, error) {
	requirements, err := os.ReadFile(filepath.Join("sdk", "requirements.txt"))
	unpinned := regexp.MustCompile("==.*").ReplaceAllString(string(requirements), "")
	return devcluster.PyPIProject("latest-clients", "# "+time.Now().Format(time.DateOnly)+"\n"+unpinned), err
}

func latestNodeClients() (devcluster.Packages, error) {
	packages, err := os.ReadFile(filepath.Join("sdk", "package.json"))
	text := regexp.MustCompile(`": "[0-9].*?"`).ReplaceAllString(string(packages), `": "latest"`)
	text = strings.Replace(text, "{", `{"version":"0.0.0-`+time.Now().Format(time.DateOnly)+`",`, 1)
	return devcluster.NPMProject("latest-clients", text), err
}

// pythonExample is what examples/python needs.
func pythonExample() (devcluster.Packages, error) {
	requirement, err := os.ReadFile(filepath.Join("..", "examples", "python", "requirements.txt"))
	name, version, found := strings.Cut(strings.TrimSpace(string(requirement)), "==")
	if err == nil && !found {
		err = errors.New("examples/python/requirements.txt must be one line, name==version")
	}
	return devcluster.PyPI(name, version), err
}

// nodeExample is what examples/typescript needs.
func nodeExample() (devcluster.Packages, error) {
	packages, err := os.ReadFile(filepath.Join("..", "examples", "typescript", "package.json"))
	return devcluster.NPMProject("example", string(packages)), err
}
