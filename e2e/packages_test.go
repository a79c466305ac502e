package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster"
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

// installPackages installs all packages of the tests into the cache, one after the other. It runs before
// the first test, so that no deadline of a test and no timeout of a sandbox includes an installation.
func installPackages(ctx context.Context) error {
	all := []devcluster.Packages{schemathesis, pythonMCP}
	for _, c := range slices.Concat(newSDKs, oldSDKs, toolSDKs) {
		all = append(all, c.packages("e2b", c.version))
	}
	python, errPython := pythonExample()
	node, errNode := nodeExample()
	if err := errors.Join(errPython, errNode); err != nil {
		return err
	}
	all = append(all, python, node)
	if os.Getenv("BERTH_E2E_CHROMIUM") != "" {
		all = append(all, devcluster.NPM("playwright-core", playwrightVersion), devcluster.NPM("vite", viteVersion))
	}
	for _, p := range all {
		if _, err := p.Dir(ctx, os.Stderr); err != nil {
			return err
		}
	}
	return nil
}

// installed returns the directory of packages.
func installed(t *testing.T, p devcluster.Packages) string {
	t.Helper()
	dir, err := p.Dir(t.Context(), os.Stderr)
	require.NoError(t, err)
	return dir
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
