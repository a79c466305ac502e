package main

import (
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
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

func TestEnvoyConfigForOtherGatewaysIsOneObject(t *testing.T) {
	settings := envoy.Settings{
		Listen: netip.MustParseAddrPort("0.0.0.0:8080"), RouterSocket: "/r", AdminSocket: "/a", TrustedHops: 1, Paths: true, E2BStatuses: true,
		MaxConnections: 7, MaxStreams: 8, MaxHeaderKiB: 9,
	}
	common := []string{
		"envoy-config", "--gateway-namespace=edge", "--router-socket=/r", "--admin-socket=/a", "--trusted-hops=1", "--paths", "--e2b-statuses",
		"--max-connections=7", "--max-streams=8", "--max-header-kib=9",
	}
	gateway := []string{"--for=envoy-gateway", "--gateway=public", "--gateway-listener=sandboxes"}
	istio := []string{"--for=istio", "--gateway-labels=istio=edge,app=x", "--gateway-port=8443"}
	target := envoy.PatchTarget{Namespace: "edge", Gateway: "public", Listener: "sandboxes"}
	port := envoy.FilterTarget{Namespace: "edge", Labels: map[string]string{"istio": "edge", "app": "x"}, Port: 8443}
	policy := func(o envoy.OtherGateway, to envoy.PatchTarget) ([]byte, error) {
		settings.Other = &o
		return envoy.EnvoyPatchPolicy(settings, to)
	}
	filter := func(o envoy.OtherGateway, to envoy.FilterTarget) ([]byte, error) {
		settings.Other = &o
		return envoy.EnvoyFilter(settings, to)
	}
	at := netip.MustParseAddrPort
	later, secure := target, port
	later.EnvoyListener, secure.Domain = "tcp-443", "a.b"
	for name, c := range map[string]struct {
		args []string
		want func() ([]byte, error)
	}{
		"Envoy Gateway": {gateway, func() ([]byte, error) { return policy(envoy.OtherGateway{Admin: at("127.0.0.1:19000")}, target) }},
		"with TLS": {append(slices.Clone(gateway), "--gateway-tls", "--envoy-listener=tcp-443", "--gateway-admin=[::1]:1"), func() ([]byte, error) {
			return policy(envoy.OtherGateway{TLS: true, Admin: at("[::1]:1")}, later)
		}},
		"Istio": {istio, func() ([]byte, error) { return filter(envoy.OtherGateway{Admin: at("127.0.0.1:15000")}, port) }},
		"Istio with TLS": {append(slices.Clone(istio), "--gateway-tls", "--domain=a.b"), func() ([]byte, error) {
			return filter(envoy.OtherGateway{TLS: true, Admin: at("127.0.0.1:15000")}, secure)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			want, err := c.want()
			require.NoError(t, err)
			stdout, err := berth(t, slices.Concat(common, c.args)...)
			require.NoError(t, err)
			require.Equal(t, string(want), stdout)
		})
	}
}

func TestFlagsOfOtherGatewaysAreCheckedByName(t *testing.T) {
	gateway := []string{"--for=envoy-gateway", "--gateway-namespace=edge", "--gateway=public", "--gateway-listener=sandboxes"}
	istio := []string{"--for=istio", "--gateway-namespace=edge", "--gateway-labels=istio=edge", "--gateway-port=8443"}
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--for=nginx"}, "--for"},
		{[]string{"--gateway=public"}, "--for: needed"},
		{gateway[:3], "--gateway-listener \"\""},
		{[]string{gateway[0], gateway[2], gateway[3]}, "--gateway-namespace \"\""},
		{append(gateway, "--gateway=a'b"), "--gateway \"a'b\""},
		{append(gateway, "--envoy-listener=a'b"), "--envoy-listener \"a'b\""},
		{append(gateway, "--gateway-admin=10.0.0.1:19000"), "--gateway-admin \"10.0.0.1:19000\": must be ip:port on loopback"},
		{append(gateway, "--gateway-port=1"), "--gateway-port: has no meaning with --for=envoy-gateway"},
		{append(gateway, "--gateway-labels=a=b"), "--gateway-labels: has no meaning"},
		{append(gateway, "--health-listen=0.0.0.0:8082"), "--health-listen: has no meaning"},
		{append(gateway, "--listen=0.0.0.0:81"), "--listen: has no meaning"},
		{append(gateway, "--tls-dir=/tls"), "--tls-dir: has no meaning"},
		{append(gateway, "--proxy-protocol"), "--proxy-protocol: has no meaning"},
		{append(gateway, "--api=a:80", "--domain=a.b"), "--api: has no meaning"},
		{append(gateway, "--max-heap=67108864"), "--max-heap: has no meaning"},
		{append(gateway, "--router-socket=r"), "router socket"},
		{istio[:3], "--gateway-port \"0\""},
		{[]string{istio[0], istio[1], istio[3]}, "--gateway-labels \"\""},
		{append(istio, "--gateway-labels=a/b/c=d"), "--gateway-labels \"a/b/c=d\""},
		{append(istio, "--gateway-tls"), "--domain \"\""},
		{append(istio, "--gateway=public"), "--gateway: has no meaning with --for=istio"},
	} {
		stdout, err := berth(t, append([]string{"envoy-config"}, c.args...)...)
		require.ErrorContains(t, err, c.says, "%v", c.args)
		require.Empty(t, stdout)
	}
}
