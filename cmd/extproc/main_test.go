package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

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

// enough are the flags that have no default.
func enough(more ...string) []string {
	return append([]string{"--domain=sandbox.example.com", "--allocator=127.0.0.1:9090", "--pod-cidrs=10.0.0.0/8"}, more...)
}

func TestHelpAndVersionNeedNoOtherFlag(t *testing.T) {
	stdout, err := try(t, "--version")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Equal(t, cli.Version()+"\n", stdout)
	stdout, err = try(t, "--help")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Contains(t, stdout, "BERTH_ROUTER_DOMAIN")
	require.Contains(t, stdout, "--pod-cidrs")
}

func TestMissingFlagsAreAllNamed(t *testing.T) {
	_, err := try(t)
	for _, flag := range []string{"--domain", "--allocator", "--pod-cidrs"} {
		require.ErrorContains(t, err, flag)
	}
}

func TestWrongFlagsAreAllNamedInOneError(t *testing.T) {
	_, err := try(t, "--domain=Sandbox.Example.com", "--allocator=127.0.0.1:9090,allocator,b:", "--pod-cidrs=10.0.0.0/8,10.0.0.1,x",
		"--cache-size=0", "--negative-ttl=0s", "--max-stale=999ms", "--lookup-timeout=5s", "--shutdown-after=-1s", "--log-level=loud")
	for _, wrong := range []string{
		`--domain "Sandbox.Example.com"`, `--allocator "allocator"`, `--allocator "b:"`, `--pod-cidrs "10.0.0.1"`, `--pod-cidrs "x"`,
		"--cache-size 0", "--negative-ttl 0s", "--max-stale 999ms", "--lookup-timeout 5s", "--shutdown-after -1s", `--log-level "loud"`,
	} {
		require.ErrorContains(t, err, wrong)
	}
	require.NotContains(t, err.Error(), "127.0.0.1:9090")
	require.NotContains(t, err.Error(), `"10.0.0.0/8"`)
	require.Equal(t, 10, strings.Count(err.Error(), "\n"), "each wrong flag has one line")
}

func TestAddressesThatCannotBeListenedOnAreNamed(t *testing.T) {
	socket := "--socket=" + filepath.Join(t.TempDir(), "s")
	_, err := try(t, enough(socket, "--admin-listen=256.0.0.1:1")...)
	require.ErrorContains(t, err, "--admin-listen")
	_, err = try(t, enough("--socket=/nonexistent/s", "--admin-listen=127.0.0.1:0")...)
	require.ErrorContains(t, err, "router socket")
}

func TestEveryFlagCanComeFromTheEnvironment(t *testing.T) {
	for name, value := range map[string]string{
		"DOMAIN": "sandbox.example.com", "ALLOCATOR": "a:1,b:2", "POD_CIDRS": "10.0.0.0/8,fd00::/8", "SOCKET": "/s", "ADMIN_LISTEN": "127.0.0.1:1",
		"CACHE_SIZE": "5", "NEGATIVE_TTL": "2s", "MAX_STALE": "1m", "LOOKUP_TIMEOUT": "3s", "SHUTDOWN_AFTER": "4s", "LOG_LEVEL": "warn",
	} {
		t.Setenv("BERTH_ROUTER_"+name, value)
	}
	t.Setenv("BERTH_ROUTER_VERSION", "1.2.3") // not a flag's
	var f flags
	_, err := cli.Parse(&f, "extproc", "", "BERTH_ROUTER", nil, io.Discard, io.Discard)
	require.NoError(t, err)
	require.Equal(t, flags{
		Domain: "sandbox.example.com", Allocator: []string{"a:1", "b:2"}, PodCIDRs: []string{"10.0.0.0/8", "fd00::/8"}, Socket: "/s",
		AdminListen: "127.0.0.1:1", CacheSize: 5, NegativeTTL: 2 * time.Second, MaxStale: time.Minute, LookupTimeout: 3 * time.Second,
		ShutdownAfter: 4 * time.Second, LogLevel: "warn",
	}, f)
	_, err = f.check()
	require.NoError(t, err)
}

func TestEmptyEnvironmentIsNotAValue(t *testing.T) {
	t.Setenv("BERTH_ROUTER_DOMAIN", "")
	t.Setenv("BERTH_ROUTER_POD_CIDRS", "")
	_, err := try(t, "--allocator=127.0.0.1:9090")
	require.Error(t, err)
}

// A router without an allocator: healthy, not ready, and gone without an error
// when it is told to stop.
func TestRouterRunsWithoutAnAllocatorAndStops(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	logs, stderr := io.Pipe()
	socket := filepath.Join(t.TempDir(), "s")
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, enough("--allocator=127.0.0.1:1", "--socket="+socket, "--admin-listen=127.0.0.1:0"), io.Discard, stderr)
		stderr.Close()
	}()
	lines := bufio.NewScanner(logs)
	var listening struct{ Msg, Admin string }
	for listening.Msg != "listening" {
		require.True(t, lines.Scan(), "it ended")
		require.NoError(t, json.Unmarshal(lines.Bytes(), &listening))
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() {
		}
	}()
	for path, code := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 200, "/admin/last-active": 200} {
		r, err := http.Get("http://" + listening.Admin + path)
		require.NoError(t, err)
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		r.Body.Close()
		require.Equal(t, code, r.StatusCode, path)
		if path == "/metrics" {
			require.Contains(t, string(body), "berth_routecache_fresh 0")
		}
	}
	http.DefaultClient.CloseIdleConnections()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	_, err = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	conn.Close()

	began := time.Now()
	cancel()
	require.NoError(t, <-ended)
	require.Less(t, time.Since(began), 5*time.Second)
	<-drained
}

func TestRouterToldToStopBeforeItBeganStops(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.NoError(t, run(ctx, enough("--allocator=127.0.0.1:1", "--socket="+filepath.Join(t.TempDir(), "s"), "--admin-listen=127.0.0.1:0"), io.Discard, io.Discard))
}
