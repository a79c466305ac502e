package extproc

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/berth-sandbox/berth/extproc/socket"
)

func TestServeAfterStopReturnsNil(t *testing.T) {
	o, _ := newOptions(filepath.Join(t.TempDir(), "s"))
	server, err := New(o)
	require.NoError(t, err)
	l, err := server.Listen(t.Context())
	require.NoError(t, err)
	server.Stop(within(t))
	require.NoError(t, server.Serve(l))
}

func TestHealthIsNotServingAfterStop(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, _ := newOptions(socket)
	server := serve(t, o)
	r, err := healthv1.NewHealthClient(dial(t, socket)).Check(within(t), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_SERVING, r.GetStatus())
	server.stop(soon)
	r, err = server.health.Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, r.GetStatus())
}

// A successor takes over the path. The predecessor keeps its connections and does not remove the
// path when it ends.
func TestSuccessorTakesTheSocketAndKeepsIt(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	old, oldCache := newOptions(socket)
	oldCache.Put("abc", routeTo("10.1.0.1", 80).Route)
	first := serve(t, old)
	before := dial(t, socket)
	_, err := ask(t, before, get("80-abc."+domain))
	require.NoError(t, err)

	next, nextCache := newOptions(socket)
	nextCache.Put("abc", routeTo("10.1.0.2", 80).Route)
	second := serve(t, next)
	destination := func(conn *grpc.ClientConn) string {
		response, err := ask(t, conn, get("80-abc."+domain))
		require.NoError(t, err)
		return response.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields()["dst"].GetStringValue()
	}
	require.Equal(t, "10.1.0.1:80", destination(before))
	require.Equal(t, "10.1.0.2:80", destination(dial(t, socket)))

	first.stop(soon)
	require.Equal(t, "10.1.0.2:80", destination(dial(t, socket)), "the predecessor took the successor's socket with it")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "something but the socket was left behind")
	second.stop(soon)
}

// In containers a successor often has the same process ID, and so the same temporary name.
func TestStopKeepsSuccessorsTemporarySocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, _ := newOptions(socket)
	server := serve(t, o)
	require.NoError(t, os.WriteFile(temporaryName(socket), nil, 0o600))
	server.stop(soon)
	require.FileExists(t, temporaryName(socket))
	require.FileExists(t, socket)
}

func TestListenReplacesLeftoverOfACrash(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server, err := New(o)
	require.NoError(t, err)
	cache.Put("abc", podRoute)
	l, err := server.Listen(t.Context())
	require.NoError(t, err)
	require.NoError(t, l.Close()) // the process died: the path exists without a listener
	require.FileExists(t, socket)
	leftover, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporaryName(socket), Net: "unix"}) // died before the rename
	require.NoError(t, err)
	leftover.SetUnlinkOnClose(false)
	require.NoError(t, leftover.Close())

	o.Metrics = prometheus.NewRegistry()
	running := serve(t, o)
	_, err = ask(t, dial(t, socket), get("80-abc."+domain))
	require.NoError(t, err)
	running.stop(soon)
}

func TestStoppingServerReplacesNoSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	cache.Put("abc", podRoute)
	successor := serve(t, o)
	o.Metrics = prometheus.NewRegistry()
	server, err := New(o)
	require.NoError(t, err)
	ended, end := context.WithCancel(t.Context())
	end()
	_, err = server.Listen(ended)
	require.ErrorIs(t, err, context.Canceled)
	entries, err := os.ReadDir(filepath.Dir(socket))
	require.NoError(t, err)
	require.Len(t, entries, 1, "something but the socket was left behind")
	_, err = ask(t, dial(t, socket), get("80-abc."+domain))
	require.NoError(t, err)
	successor.stop(soon)
}

func TestFailedListenNamesErrorAndLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "taken"), 0o700))
	for name, c := range map[string]struct{ socket, says string }{
		"no such folder": {filepath.Join(dir, "missing", "s"), "no such file or directory"},
		"a folder":       {filepath.Join(dir, "taken"), "file exists"},
		"too long":       {filepath.Join(dir, strings.Repeat("x", 107)), "shorter"},
	} {
		o, _ := newOptions(c.socket)
		server, err := New(o)
		require.NoError(t, err)
		_, err = server.Listen(t.Context())
		require.ErrorContains(t, err, c.says, name)
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// Without them, and when its admin socket refuses connections, Envoy has ended.
func TestEnvoyConnectionsAreCounted(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, _ := newOptions(socket)
	server := serve(t, o)
	require.Zero(t, server.Connections())
	conns := []*grpc.ClientConn{dial(t, socket), dial(t, socket)}
	for i, conn := range conns {
		_, err := ask(t, conn, get("no sandbox"))
		require.NoError(t, err)
		require.Equal(t, i+1, server.Connections())
	}
	for i, conn := range conns {
		require.NoError(t, conn.Close())
		require.Eventually(t, func() bool { return server.Connections() == 1-i }, soon, time.Millisecond)
	}
	server.stop(soon)
}

// The umask of the process is that of whoever starts it.
func TestSocketModeIsTheSameWhateverTheUmask(t *testing.T) {
	for _, mask := range []int{0, 0o022, 0o077, 0o777} {
		socket := filepath.Join(t.TempDir(), "s")
		o, _ := newOptions(socket)
		server, err := New(o)
		require.NoError(t, err)
		before := syscall.Umask(mask)
		l, err := server.Listen(t.Context())
		syscall.Umask(before)
		require.NoError(t, err)
		info, err := os.Stat(socket)
		require.NoError(t, err)
		require.Equal(t, os.ModeSocket|0o660, info.Mode(), "umask %#o", mask)
		require.NoError(t, l.Close())
	}
}

func temporaryName(path string) string { return socket.Temporary(path) }
