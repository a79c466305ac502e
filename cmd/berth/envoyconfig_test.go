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
		"behind a load balancer": {[]string{"--trusted-hops=2", "--proxy-protocol", "--max-heap=67108864"}, func(s *envoy.Settings) {
			s.TrustedHops, s.ProxyProtocol, s.MaxHeap = 2, true, 64<<20
		}},
		"the API": {[]string{"--api=10.0.0.1:80,api.svc:81", "--domain=a.b"}, func(s *envoy.Settings) {
			s.API = &envoy.API{Domain: "a.b", Endpoints: []envoy.Endpoint{{Host: "10.0.0.1", Port: 80}, {Host: "api.svc", Port: 81}}}
		}},
		"MCP": {[]string{"--api=api.svc:81", "--mcp=mcp.svc:82", "--domain=a.b"}, func(s *envoy.Settings) {
			s.API = &envoy.API{
				Domain: "a.b", Endpoints: []envoy.Endpoint{{Host: "api.svc", Port: 81}}, MCP: []envoy.Endpoint{{Host: "mcp.svc", Port: 82}},
			}
		}},
		"E2B's statuses": {[]string{"--e2b-statuses"}, func(s *envoy.Settings) { s.E2BStatuses = true }},
		"path mode":      {[]string{"--paths"}, func(s *envoy.Settings) { s.Paths = true }},
		"IPv6": {[]string{"--listen=[::]:80", "--health-listen=[::1]:81"}, func(s *envoy.Settings) {
			s.Listen, s.HealthListen = netip.MustParseAddrPort("[::]:80"), netip.MustParseAddrPort("[::1]:81")
		}},
		"bounds":             {[]string{"--max-streams=7", "--max-header-kib=64"}, func(s *envoy.Settings) { s.MaxStreams, s.MaxHeaderKiB = 7, 64 }},
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
		"--api=api.svc":                "--api: address",
		"--api=api.svc:0":              "--api: address",
		"--api=api.svc:80":             "domain",
		"--mcp=mcp.svc:80":             "--mcp: needs --api",
		"--output=/nonexistent/x":      "--output",
		"--trusted-hops=101":           "trusted hops 101",
		"--max-heap=1000":              "max heap 1000",
		"--max-streams=1025":           "max streams 1025",
		"--max-header-kib=65":          "max header size 65 KiB",
		"--tls-dir=/tls":               "--tls-dir: needs --output",
	} {
		stdout, err := berth(t, "envoy-config", arg)
		require.ErrorContains(t, err, says, arg)
		require.Empty(t, stdout)
	}
}

func TestEnvoyConfigWithTLSIsTwoFiles(t *testing.T) {
	dir := t.TempDir()
	_, err := berth(t, "envoy-config", "--tls-dir=/tls", "--output="+filepath.Join(dir, "envoy.yaml"))
	require.NoError(t, err)
	settings := envoy.Settings{
		Listen: netip.MustParseAddrPort("0.0.0.0:8080"), RouterSocket: "/run/berth/router.sock", AdminSocket: "/run/berth/envoy-admin.sock",
		TLS: &envoy.TLS{CertFile: "/tls/tls.crt", KeyFile: "/tls/tls.key", SecretFile: filepath.Join(dir, "envoy-tls.yaml")},
	}
	bootstrap, err := envoy.YAML(settings)
	require.NoError(t, err)
	secret, err := envoy.TLSSecret(settings)
	require.NoError(t, err)
	for name, want := range map[string][]byte{"envoy.yaml": bootstrap, "envoy-tls.yaml": secret} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))
	}
}

func TestEnvoyConfigVerifiesTheAPI(t *testing.T) {
	dir := t.TempDir()
	at := filepath.Join(dir, "envoy.yaml")
	_, err := berth(t, "envoy-config", "--api=a:80", "--domain=x.example.com", "--api-ca=/ca/ca.crt", "--output="+at)
	require.NoError(t, err)
	for name, want := range map[string]string{"envoy.yaml": "sni: allocator.berth.sh", "envoy-api.yaml": "exact: allocator.berth.sh"} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Contains(t, string(got), want)
	}
	_, err = berth(t, "envoy-config", "--api=a:80", "--domain=x.example.com", "--api-ca=/ca/ca.crt")
	require.ErrorContains(t, err, "--output")
	_, err = berth(t, "envoy-config", "--api-ca=/ca/ca.crt", "--output="+at)
	require.ErrorContains(t, err, "--api")
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
