package envoy_test

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/envoy"
)

func TestRealEnvoyAcceptsTheBootstrap(t *testing.T) {
	if testing.Short() {
		t.Skip("needs real Envoy; not under -short")
	}
	bin, err := devcluster.EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	for name, health := range map[string]netip.AddrPort{"alone": {}, "with a health listener": netip.MustParseAddrPort("[::]:8082")} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "berth-")
			require.NoError(t, err)
			t.Cleanup(func() { os.RemoveAll(dir) })
			// The golden files' settings, but for sockets in a directory that exists:
			// Envoy binds its admin socket even to validate.
			raw, err := envoy.YAML(envoy.Settings{
				Listen: netip.MustParseAddrPort("0.0.0.0:8080"), HealthListen: health,
				RouterSocket: filepath.Join(dir, "router.sock"), AdminSocket: filepath.Join(dir, "admin.sock"),
			})
			require.NoError(t, err)
			file := filepath.Join(dir, "envoy.yaml")
			require.NoError(t, os.WriteFile(file, raw, 0o600))
			out, err := exec.Command(bin, "--mode", "validate", "-c", file).CombinedOutput()
			require.NoError(t, err, string(out))
			require.Contains(t, string(out), "OK")
		})
	}
}
