package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// try runs the command, which is expected to end by itself.
func try(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	err = run(ctx, args, &out, &errs)
	require.NoError(t, ctx.Err(), "it went on with wrong flags")
	require.Empty(t, errs.String())
	return out.String(), err
}

func TestHelpAndVersionNeedNoOtherFlags(t *testing.T) {
	stdout, err := try(t, "--version")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Equal(t, cli.Version()+"\n", stdout)
	stdout, err = try(t, "--help")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Contains(t, stdout, "BERTH_ALLOCATOR_PUBLIC_URL")
}

func TestMissingFlagsAreNamed(t *testing.T) {
	_, err := try(t)
	require.ErrorContains(t, err, "--public-url")
}

func TestWrongFlagsAreAllNamedInOneError(t *testing.T) {
	_, err := try(t, "--public-url=ftp://x", "--api-listen=0.0.0.0:8081", "--control-listen=:9090", "--control-advertise=$(POD_IP):9090",
		"--pod-security=restricted", "--max-stale=0s", "--connect-window=1s", "--lease-duration=3s", "--shutdown-after=0s", "--log-level=loud",
		"--traces-to=collector", "--trace-percent=101", "--asleep-cpu=1 core", "--snapshots-kept=1s", "--snapshots-per-team=0", "--snapshot-bytes-per-team=many", "--snapshots=file:///x",
		"--egress-proxy=https://berth-egress:3128", "--egress-public=192.0.2.1:443,example.com:443")
	for _, wrong := range []string{
		`--public-url "ftp://x"`, `--api-listen "0.0.0.0:8081"`, `--api-advertise: required`, `--control-listen ":9090"`, `--control-advertise "$(POD_IP):9090"`,
		`--pod-security "restricted"`, "--max-stale 0s", "--connect-window 1s", "--lease-duration 3s", "--shutdown-after 0s", `--log-level "loud"`,
		`--traces-to "collector": must be http://host:port`, "--trace-percent 101: must be 0 to 100", `--asleep-cpu "1 core": must be 0 to 1000 cores`,
		"--snapshots-kept 1s: must be 0, for ever, or 1m to 87600h", "--snapshots-per-team 0: must be 1 to 10000", `--snapshot-bytes-per-team "many": must be a quantity`, "--snapshots: needs --access-key-file",
		`--egress-proxy "https://berth-egress:3128": must be http://<host>:<port>`, "--egress-proxy: needs --access-key-file",
		`--egress-public "example.com:443": must be ip:port`,
	} {
		require.ErrorContains(t, err, wrong)
	}
	require.Equal(t, 20, strings.Count(err.Error(), "\n"), "each wrong flag has one line")
}

func TestListenersOutsideLoopbackNeedProtection(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want []string // nothing: it may start
	}{
		"loopback needs nothing":                {nil, nil},
		"API without keys":                      {[]string{"--api-listen=10.0.0.1:8081"}, []string{"--api-listen", "--api-keys-namespace"}},
		"API without keys on every address":     {[]string{"--api-listen=:8081", "--api-advertise=10.0.0.1:8081"}, []string{"--api-listen", "--api-keys-namespace"}},
		"API with what belongs to the control":  {[]string{"--api-listen=10.0.0.1:8081", "--control-tls-dir=/x"}, []string{"--api-listen", "--api-keys-namespace"}},
		"API with keys":                         {[]string{"--api-listen=10.0.0.1:8081", "--api-keys-namespace=x"}, nil},
		"control without TLS":                   {[]string{"--control-listen=10.0.0.1:9090"}, []string{"--control-listen", "--control-tls-dir"}},
		"control without TLS, advertised well":  {[]string{"--control-listen=[::]:9090", "--control-advertise=[fd00::1]:9090"}, []string{"--control-listen", "--control-tls-dir"}},
		"control with what belongs to the API":  {[]string{"--control-listen=10.0.0.1:9090", "--api-keys-namespace=x"}, []string{"--control-listen", "--control-tls-dir"}},
		"control with TLS":                      {[]string{"--control-listen=10.0.0.1:9090", "--control-tls-dir=/x"}, nil},
		"an unreachable wildcard":               {[]string{"--api-listen=:8081", "--api-keys-namespace=x"}, []string{"--api-advertise"}},
		"a wildcard by name":                    {[]string{"--control-listen=0.0.0.0:9090", "--control-tls-dir=/x"}, []string{"--control-advertise"}},
		"an advertised wildcard":                {[]string{"--control-listen=[::]:9090", "--control-tls-dir=/x", "--control-advertise=[::]:9090"}, []string{"--control-advertise"}},
		"a variable that was not expanded":      {[]string{"--api-listen=:8081", "--api-keys-namespace=x", "--api-advertise=$(POD_IP):8081"}, []string{"--api-advertise"}},
		"a variable that was empty":             {[]string{"--api-listen=:8081", "--api-keys-namespace=x", "--api-advertise=:8081"}, []string{"--api-advertise"}},
		"wildcards, secured and advertised":     {[]string{"--api-listen=:8081", "--api-keys-namespace=x", "--api-advertise=10.0.0.1:8081", "--control-listen=[::]:9090", "--control-tls-dir=/x", "--control-advertise=[fd00::1]:9090"}, nil},
		"a certificate without its key":         {[]string{"--api-tls-cert=/x", "--control-tls-dir=/x"}, []string{"--api-tls-cert", "--api-tls-key"}},
		"a key without its certificate":         {[]string{"--api-tls-key=/x", "--control-tls-dir=/x"}, []string{"--api-tls-cert", "--api-tls-key"}},
		"TLS that replicas could not verify":    {[]string{"--api-tls-cert=/x", "--api-tls-key=/y"}, []string{"--api-tls-cert", "--control-tls-dir"}},
		"TLS of both":                           {[]string{"--api-tls-cert=/x", "--api-tls-key=/y", "--control-tls-dir=/x"}, nil},
		"a console without keys":                {[]string{"--console-listen=:8082"}, []string{"--console-listen", "--api-keys-namespace"}},
		"a console with keys":                   {[]string{"--console-listen=:8082", "--api-keys-namespace=x", "--console-url=https://console.example.com"}, nil},
		"a console on loopback":                 {[]string{"--console-listen=127.0.0.1:8082"}, nil},
		"a URL without a console":               {[]string{"--console-url=https://console.example.com"}, []string{"--console-url", "--console-listen"}},
		"a console in plain HTTP":               {[]string{"--console-listen=127.0.0.1:0", "--console-url=http://console.example.com"}, []string{"--console-url", "must be https://"}},
		"a console with a path":                 {[]string{"--console-listen=127.0.0.1:0", "--console-url=https://console.example.com/x"}, []string{"--console-url", "must be https://"}},
		"a console at the sandboxes' domain":    {[]string{"--console-listen=127.0.0.1:0", "--console-url=https://A."}, []string{"--console-url", "must not be a or below it"}},
		"a console below the sandboxes' domain": {[]string{"--console-listen=127.0.0.1:0", "--console-url=https://console.a:8443"}, []string{"--console-url", "must not be a or below it"}},
		"an address in brackets may be an IPv4": {[]string{"--api-advertise=[10.0.0.1]:8081"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var f flags
			_, err := cli.Parse(&f, "allocator", "", "BERTH_ALLOCATOR", append(c.args, "--public-url=http://a"), io.Discard, io.Discard)
			require.NoError(t, err)
			_, err = f.check()
			if c.want == nil {
				require.NoError(t, err)
				return
			}
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
			require.NotContains(t, err.Error(), "\n", "one mistake, one line")
		})
	}
}

func TestPublicURLIsOnlySchemeAndHost(t *testing.T) {
	for _, ok := range []string{"http://a", "https://sandbox.example.com", "http://127.0.0.1.nip.io:8080", "https://a/"} {
		f := flags{PublicURL: ok}
		_, err := f.check()
		require.NotContains(t, err.Error(), "--public-url", ok) // the other flags are wrong
	}
	for _, wrong := range []string{"", "a", "a:80", "//a", "http://", "http:///x", "ftp://a", "http://a/x", "http://user@a", "http://a?x=1", "http://a#x", "http://[", "http://a b"} {
		f := flags{PublicURL: wrong}
		_, err := f.check()
		require.ErrorContains(t, err, "--public-url", wrong)
	}
}

func TestPublicAddressesAreFewAndHavePorts(t *testing.T) {
	for value, says := range map[string]string{
		"1.1.1.1": "must be ip:port", "[::1]:0": "must be ip:port", "[fe80::1%eth0]:1": "must be ip:port",
		strings.TrimSuffix(strings.Repeat("192.0.2.1:443,", 9), ","): "has 9 addresses: at most 8",
	} {
		_, err := try(t, "--public-url=http://a", "--egress-public="+value)
		require.ErrorContains(t, err, says, value)
	}
}

func TestPodSecurityDefaultsToBaseline(t *testing.T) {
	var f flags
	_, err := cli.Parse(&f, "allocator", "", "BERTH_ALLOCATOR", []string{"--public-url=http://a"}, io.Discard, io.Discard)
	require.NoError(t, err)
	require.Equal(t, pools.PolicyBaseline, f.PodSecurity)
}

func TestConnectWindowDefaultsToEnvoys(t *testing.T) {
	var f flags
	_, err := cli.Parse(&f, "allocator", "", "BERTH_ALLOCATOR", []string{"--public-url=http://a"}, io.Discard, io.Discard)
	require.NoError(t, err)
	require.Equal(t, envoy.ConnectWindow, f.ConnectWindow)
	require.False(t, f.ReapDryRun)
	require.Equal(t, []string{"1.1.1.1:443", "[2606:4700:4700::1111]:443"}, f.EgressPublic)
	_, err = f.check()
	require.NoError(t, err)
}

func TestEveryFlagHasAnEnvironmentVariable(t *testing.T) {
	for name, value := range map[string]string{
		"PUBLIC_URL": "http://a", "NAMESPACE": "n", "KUBECONFIG": "/k", "API_LISTEN": "127.0.0.1:1", "API_ADVERTISE": "b:5", "API_KEYS_NAMESPACE": "keys", "API_TLS_CERT": "/cert", "API_TLS_KEY": "/key", "ACCESS_KEY_FILE": "/access/key",
		"CONTROL_LISTEN": "127.0.0.1:2", "CONTROL_ADVERTISE": "a:3", "CONTROL_TLS_DIR": "/tls", "POD_SECURITY": "privileged", "ADMIN_LISTEN": "127.0.0.1:4", "KUBE_QPS": "5", "KUBE_BURST": "6", "MAX_STALE": "7m", "CONNECT_WINDOW": "8s", "REAP_DRY_RUN": "true",
		"LEASE_DURATION": "30s", "LEASE_RENEW": "20s", "LEASE_RETRY": "1s", "SHUTDOWN_AFTER": "9s", "CLAIM_WAIT": "3s", "CLAIM_QUEUE": "11", "TEAM_LIMITS": "/limits", "JOURNAL_BYTES_PER_SECOND": "70000", "KEY_CALLS_PER_SECOND": "2.5", "LOG_LEVEL": "debug", "WALL_CLOCK_OFFSET": "-10m",
		"TRACES_TO": "http://collector:4317", "TRACE_PERCENT": "12.5", "ASLEEP_CPU": "50m", "EGRESS_PROXY": "http://berth-egress:3128", "EGRESS_UNCHECKED": "true", "EGRESS_PUBLIC": "192.0.2.1:80,[2001:db8::1]:443",
		"SNAPSHOTS": "file:///snapshots", "SNAPSHOTS_KEPT": "1h", "SNAPSHOTS_PER_TEAM": "12", "SNAPSHOT_BYTES_PER_TEAM": "1Gi",
	} {
		t.Setenv("BERTH_ALLOCATOR_"+name, value)
	}
	var f flags
	_, err := cli.Parse(&f, "allocator", "", "BERTH_ALLOCATOR", nil, io.Discard, io.Discard)
	require.NoError(t, err)
	require.Equal(t, flags{
		PublicURL: "http://a", Namespace: "n", Kubeconfig: "/k", APIListen: "127.0.0.1:1", APIAdvertise: "b:5", APIKeysNamespace: "keys", APITLSCert: "/cert", APITLSKey: "/key", AccessKeyFile: "/access/key",
		ControlListen: "127.0.0.1:2", ControlAdvertise: "a:3", ControlTLSDir: "/tls", PodSecurity: "privileged",
		AdminListen: "127.0.0.1:4", KubeQPS: 5, KubeBurst: 6, MaxStale: 7 * time.Minute, ConnectWindow: 8 * time.Second, ReapDryRun: true,
		LeaseDuration: 30 * time.Second, LeaseRenew: 20 * time.Second, LeaseRetry: time.Second, ShutdownAfter: 9 * time.Second, LogLevel: "debug", ClaimWait: 3 * time.Second, ClaimQueue: 11, TeamLimits: "/limits", JournalBytes: 70000, KeyCalls: 2.5, WallClockOffset: -10 * time.Minute,
		TracesTo: "http://collector:4317", TracePercent: 12.5, AsleepCPU: "50m", EgressProxy: "http://berth-egress:3128", EgressUnchecked: true, EgressPublic: []string{"192.0.2.1:80", "[2001:db8::1]:443"}, SnapshotStore: "file:///snapshots", SnapshotsKept: time.Hour, SnapshotsPerTeam: 12, SnapshotBytes: "1Gi",
	}, f)
	_, err = f.check()
	require.NoError(t, err)
}

func TestUnusableKubeconfigIsNamed(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := try(t, "--public-url=http://a")
	require.ErrorContains(t, err, "--kubeconfig")
	_, err = try(t, "--public-url=http://a", "--kubeconfig="+filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "--kubeconfig")
}

func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"c",
		"contexts":[{"name":"c","context":{"cluster":"c"}}],"clusters":[{"name":"c","cluster":{"server":%q}}]}`, server), 0o600))
	return file
}

// enough are flags for a replica on addresses that are free, without an API
// server.
func enough(t *testing.T, more ...string) []string {
	t.Helper()
	return append([]string{"--public-url=http://a", "--kubeconfig=" + kubeconfig(t, "http://127.0.0.1:1"), "--control-listen=127.0.0.1:0", "--api-listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"}, more...)
}

func TestTakenAddressIsNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for _, flag := range []string{"--control-listen", "--api-listen", "--admin-listen"} {
		_, err := try(t, enough(t, flag+"="+taken.Addr().String())...)
		require.ErrorContains(t, err, flag+": ")
	}
}

// dir writes files.
func dir(t *testing.T, files map[string]string) string {
	t.Helper()
	d := t.TempDir()
	for name, content := range files {
		require.NoError(t, os.WriteFile(filepath.Join(d, name), []byte(content), 0o600))
	}
	return d
}

// tlsDir is a certificate of the authority for the role.
func tlsDir(t *testing.T, a *controltls.Authority, role string) string {
	t.Helper()
	f, err := a.Issue(role, time.Now())
	require.NoError(t, err)
	return dir(t, map[string]string{controltls.CertFile: string(f.Cert), controltls.KeyFile: string(f.Key), controltls.CAFile: string(f.CA)})
}

func authority(t *testing.T) *controltls.Authority {
	t.Helper()
	a, err := controltls.NewAuthority(time.Now())
	require.NoError(t, err)
	return a
}

func TestUnusableDirectoryIsNamedBeforeServing(t *testing.T) {
	a := authority(t)
	for name, c := range map[string]struct{ flag, dir, want string }{
		"no certificate":        {"--control-tls-dir", t.TempDir(), controltls.CertFile},
		"a router's":            {"--control-tls-dir", tlsDir(t, a, controltls.RouterName), controltls.AllocatorName},
		"a key of another pair": {"--control-tls-dir", dir(t, map[string]string{controltls.CertFile: "x", controltls.KeyFile: "y"}), controltls.KeyFile},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := try(t, enough(t, c.flag+"="+c.dir)...)
			require.ErrorContains(t, err, c.flag+": ")
			require.ErrorContains(t, err, c.want)
		})
	}
}
