package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// BuildSandbox builds the demo-sandbox binary, static, and returns the directory
// it is in: a process node's path, or the content of an image.
func BuildSandbox(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "demo-sandbox"),
		"github.com/berth-sandbox/berth/cmd/demo-sandbox")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "build demo-sandbox: %s", out)
	return dir
}
