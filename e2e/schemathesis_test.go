package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Schemathesis makes calls from the OpenAPI document, valid and invalid ones, and compares the
// answers with it. They go through the gateway, so that the answers of Envoy are compared too. The
// test has a Berth to itself, because the calls release every sandbox they learn of.
func TestAPIKeepsToItsDocument(t *testing.T) {
	e := startAlone(t, 2, overTLS)
	dir := installed(t, schemathesis)
	settings, err := filepath.Abs("schemathesis")
	require.NoError(t, err)
	url := fmt.Sprintf("https://api.%s:%d", e.stack.Domain, e.gatewayPort())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "python3", "-m", "schemathesis.cli",
		"--config-file", filepath.Join(settings, "config.toml"), "run", url+"/openapi.json", "--url", url,
		"--tls-verify", e.stack.CAFile, "--header", "X-API-Key: "+e.site.key())
	command.Dir = t.TempDir() // it keeps what it has found there
	command.Env = append(e.domainOnly(dir, settings), "NO_COLOR=1", "SCHEMATHESIS_HOOKS=waits")
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
}
