package main

import (
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/envoy"
)

func TestEnvoyConfigIsTheBootstrapOfItsFlags(t *testing.T) {
	settings := envoy.Settings{
		Listen: netip.MustParseAddrPort("0.0.0.0:8080"), RouterSocket: "/run/berth/router.sock", AdminSocket: "/run/berth/envoy-admin.sock",
	}
	for name, c := range map[string]struct {
		args []string
		with func(*envoy.Settings)
	}{
		"defaults":          {nil, func(*envoy.Settings) {}},
		"a health listener": {[]string{"--health-listen=0.0.0.0:8082"}, func(s *envoy.Settings) { s.HealthListen = netip.MustParseAddrPort("0.0.0.0:8082") }},
		"an empty one":      {[]string{"--health-listen="}, func(*envoy.Settings) {}},
		"IPv6": {[]string{"--listen=[::]:80", "--health-listen=[::1]:81"}, func(s *envoy.Settings) {
			s.Listen, s.HealthListen = netip.MustParseAddrPort("[::]:80"), netip.MustParseAddrPort("[::1]:81")
		}},
		"a bound, and paths": {[]string{"--max-connections=7", "--router-socket=/r", "--admin-socket=/a"}, func(s *envoy.Settings) { s.MaxConnections, s.RouterSocket, s.AdminSocket = 7, "/r", "/a" }},
	} {
		t.Run(name, func(t *testing.T) {
			s := settings
			c.with(&s)
			want, err := envoy.YAML(s)
			require.NoError(t, err)
			stdout, err := berth(t, append([]string{"envoy-config"}, c.args...)...)
			require.NoError(t, err)
			require.Equal(t, string(want), stdout)

			file := filepath.Join(t.TempDir(), "envoy.yaml")
			stdout, err = berth(t, append([]string{"envoy-config", "--output=" + file}, c.args...)...)
			require.NoError(t, err)
			require.Empty(t, stdout)
			got, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got))
		})
	}
}

func TestEnvoyConfigNamesTheFlagThatIsWrong(t *testing.T) {
	for arg, says := range map[string]string{
		"--listen=:8080":               "--listen",
		"--health-listen=:8082":        "--health-listen",
		"--health-listen=localhost:80": "--health-listen",
		"--health-listen=0.0.0.0:8080": "health listen address",
		"--router-socket=r":            "router socket",
		"--output=/nonexistent/x":      "--output",
	} {
		stdout, err := berth(t, "envoy-config", arg)
		require.ErrorContains(t, err, says, arg)
		require.Empty(t, stdout)
	}
}

// A container that is started again finds its last run's file, which Envoy may be
// reading.
func TestOutputReplacesTheWholeFileOrNothing(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, []byte("of the last run"), 0o600))
	reader, err := os.Open(file)
	require.NoError(t, err)
	defer reader.Close()
	_, err = berth(t, "envoy-config", "--output="+file)
	require.NoError(t, err)
	before, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "of the last run", string(before), "it was written over under a reader")

	require.NoError(t, os.Remove(file))
	require.NoError(t, os.Mkdir(file, 0o700))
	_, err = berth(t, "envoy-config", "--output="+file)
	require.ErrorContains(t, err, "--output: ")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "something is left over")
}
