package envoy

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster"
)

func TestRealEnvoyAcceptsTheBootstrap(t *testing.T) {
	if testing.Short() {
		t.Skip("needs real Envoy: run without -short")
	}
	bin, err := devcluster.EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	version, err := exec.Command(bin, "--version").Output()
	require.NoError(t, err)
	require.Contains(t, string(version), "/"+Version[:strings.LastIndex(Version, ".")+1])
	for name, settings := range golden() {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "berth-")
			require.NoError(t, err)
			t.Cleanup(func() { os.RemoveAll(dir) })
			// But for files in a directory that exists: Envoy binds its admin socket,
			// and reads the TLS secret file, even to validate.
			settings.RouterSocket, settings.AdminSocket = filepath.Join(dir, "router.sock"), filepath.Join(dir, "admin.sock")
			if settings.TLS != nil {
				settings.TLS.SecretFile = filepath.Join(dir, "tls.yaml")
				secret, err := TLSSecret(settings)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(settings.TLS.SecretFile, secret, 0o600))
				api := *settings.API.TLS
				settings.API.TLS, api.SecretFile = &api, filepath.Join(dir, "api.yaml")
				secret, err = APISecret(settings)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(api.SecretFile, secret, 0o600))
			}
			raw, err := YAML(settings)
			require.NoError(t, err)
			isValid(t, bin, dir, raw)
		})
	}
	t.Run("egress.yaml", func(t *testing.T) {
		dir := t.TempDir()
		settings := egressDefaults()
		settings.RouterSocket, settings.AdminSocket = "/r.sock", filepath.Join(dir, "a")
		settings.CAFile = filepath.Join(dir, "ca.pem")
		server := httptest.NewTLSServer(http.NotFoundHandler())
		defer server.Close()
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
		require.NoError(t, os.WriteFile(settings.CAFile, ca, 0o600))
		raw, err := EgressYAML(settings)
		require.NoError(t, err)
		isValid(t, bin, dir, raw)
	})
}

// isValid requires that a real Envoy takes a configuration.
func isValid(t *testing.T, bin, dir string, raw []byte) {
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, raw, 0o600))
	out, err := exec.Command(bin, "--mode", "validate", "-c", file).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "OK")
}
