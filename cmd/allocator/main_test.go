package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

func TestHelpAndVersionNeedNoOtherFlag(t *testing.T) {
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
	_, err := try(t, "--public-url=ftp://x", "--api-listen=0.0.0.0:8081", "--control-listen=:9090", "--max-stale=0s", "--window=1s",
		"--lease-duration=5s", "--shutdown-after=0s", "--log-level=loud")
	for _, wrong := range []string{
		`--public-url "ftp://x"`, `--api-listen "0.0.0.0:8081"`, `--control-listen ":9090"`, "--max-stale 0s", "--window 1s", "--lease-duration 5s", "--shutdown-after 0s", `--log-level "loud"`,
	} {
		require.ErrorContains(t, err, wrong)
	}
	require.Equal(t, 7, strings.Count(err.Error(), "\n"), "each wrong flag has one line")
}

func TestPublicURLIsASchemeAndAHostAndNothingElse(t *testing.T) {
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

func TestEveryFlagCanComeFromTheEnvironment(t *testing.T) {
	for name, value := range map[string]string{
		"PUBLIC_URL": "http://a", "NAMESPACE": "n", "KUBECONFIG": "/k", "API_LISTEN": "127.0.0.1:1", "CONTROL_LISTEN": "127.0.0.1:2",
		"CONTROL_ADVERTISE": "a:3", "ADMIN_LISTEN": "127.0.0.1:4", "KUBE_QPS": "5", "KUBE_BURST": "6", "MAX_STALE": "7m", "WINDOW": "8s",
		"LEASE_DURATION": "30s", "LEASE_RENEW": "20s", "LEASE_RETRY": "1s", "SHUTDOWN_AFTER": "9s", "LOG_LEVEL": "debug",
	} {
		t.Setenv("BERTH_ALLOCATOR_"+name, value)
	}
	var f flags
	_, err := cli.Parse(&f, "allocator", "", "BERTH_ALLOCATOR", nil, io.Discard, io.Discard)
	require.NoError(t, err)
	require.Equal(t, flags{
		PublicURL: "http://a", Namespace: "n", Kubeconfig: "/k", APIListen: "127.0.0.1:1", ControlListen: "127.0.0.1:2", ControlAdvertise: "a:3",
		AdminListen: "127.0.0.1:4", KubeQPS: 5, KubeBurst: 6, MaxStale: 7 * time.Minute, Window: 8 * time.Second,
		LeaseDuration: 30 * time.Second, LeaseRenew: 20 * time.Second, LeaseRetry: time.Second, ShutdownAfter: 9 * time.Second, LogLevel: "debug",
	}, f)
	_, err = f.check()
	require.NoError(t, err)
}

func TestKubeconfigIsNamedWhenItCannotBeUsed(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := try(t, "--public-url=http://a")
	require.ErrorContains(t, err, "--kubeconfig")
	_, err = try(t, "--public-url=http://a", "--kubeconfig="+filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "--kubeconfig")
}

func TestAddressThatIsTakenIsNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, []byte(`{"apiVersion":"v1","kind":"Config","current-context":"c",
		"contexts":[{"name":"c","context":{"cluster":"c"}}],"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}]}`), 0o600))
	for _, flag := range []string{"--control-listen", "--api-listen", "--admin-listen"} {
		args := []string{"--public-url=http://a", "--kubeconfig=" + kubeconfig, "--control-listen=127.0.0.1:0", "--api-listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"}
		_, err := try(t, append(args, flag+"="+taken.Addr().String())...)
		require.ErrorContains(t, err, flag+": ")
	}
}
