package look_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive/look"
)

// reader returns a Reader of the socket and the number of connections that it uses.
func reader(t testing.TB, socket string) (*look.Reader, *atomic.Int64) {
	var connections atomic.Int64
	r, err := look.New(socket, func() int { return int(connections.Load()) })
	require.NoError(t, err)
	return r, &connections
}

// admin listens on a socket as Envoy does.
func admin(t testing.TB, socket string, page http.HandlerFunc) (end func()) {
	_ = os.Remove(socket)
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	server := &http.Server{Handler: page}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	end = sync.OnceFunc(func() { server.Close(); serving.Wait() })
	t.Cleanup(end)
	return end
}

// clusters is a page as Envoy 1.40 writes it.
func clusters(hosts ...string) string {
	var page strings.Builder
	page.WriteString("router::observability_name::router\nrouter::10.9.9.9:80::rq_active::7\n")
	for _, cluster := range []string{"pods_h1", "pods_h2", "pods_h1_tls", "pods_h2_tls"} {
		fmt.Fprintf(&page, "%[1]s::observability_name::%[1]s\n%[1]s::default_priority::max_connections::1024\n", cluster)
		for _, h := range hosts {
			if of, host, _ := strings.Cut(h, " "); of == cluster {
				name, counts, _ := strings.Cut(host, " ")
				var active, pending int
				fmt.Sscanf(counts, "%d+%d", &active, &pending)
				for _, line := range []string{
					"cx_active::1", fmt.Sprint("rq_active::", active), "rq_error::0", fmt.Sprint("rq_pending_active::", pending), "rq_total::9",
					"hostname::" + cluster + name, "health_flags::healthy", "region::", "success_rate::-1",
				} {
					fmt.Fprintf(&page, "%s::%s::%s\n", cluster, name, line)
				}
			}
		}
	}
	return page.String()
}

func TestOpenRequestsAreSummedOverAllEntries(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "admin.sock")
	var page atomic.Value
	page.Store(clusters(
		"pods_h1 10.0.0.1:80 1+0", "pods_h1 10.0.0.1:80 2+3", "pods_h2 10.0.0.1:80 4+0", "pods_h1 10.0.0.1:81 0+0",
		"pods_h1 [fd00::1]:80 0+1", "pods_h2 [fd00::]:80 5+0", "pods_h1 [::ffff:10.0.0.2]:80 6+0",
		"pods_h1_tls 10.0.0.1:80 10+20", "pods_h2_tls 10.0.0.3:443 0+7",
	))
	admin(t, socket, func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "/clusters", r.URL.String())
		for line := range strings.Lines(page.Load().(string)) {
			_, _ = w.Write([]byte(line))
		}
	})
	r, _ := reader(t, socket)
	_, err := r.Look(t.Context())
	require.ErrorContains(t, err, "first look")
	l, err := r.Look(t.Context())
	require.NoError(t, err)
	at := func(addr string, http2 bool) look.Host {
		return look.Host{AddrPort: netip.MustParseAddrPort(addr), HTTP2: http2}
	}
	require.Equal(t, map[look.Host]int{
		at("10.0.0.1:80", false):  36,
		at("10.0.0.1:80", true):   4,
		at("10.0.0.1:81", false):  0,
		at("[fd00::1]:80", false): 1,
		at("[fd00::]:80", true):   5,
		at("10.0.0.2:80", false):  6,
		at("10.0.0.3:443", true):  7,
	}, l.Hosts)
	require.Equal(t, 9, l.Entries)
	require.LessOrEqual(t, len(l.Gateway), 128)

	page.Store(clusters())
	l, err = r.Look(t.Context())
	require.NoError(t, err)
	require.NotNil(t, l.Hosts, "Envoy has not ended")
	require.Empty(t, l.Hosts)
}

func TestDoubtfulAnswerIsNoLook(t *testing.T) {
	good := clusters("pods_h1 10.0.0.1:80 1+0")
	for name, c := range map[string]struct {
		page http.HandlerFunc
		says string
	}{
		"another status": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, "503"},
		"cut off": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(good))
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, "not complete"},
		"cut off, of a length that is not said": {func(w http.ResponseWriter, _ *http.Request) {
			c, _, _ := http.NewResponseController(w).Hijack()
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n", good)
			c.Close()
		}, "no length"},
		"without a cluster": {func(w http.ResponseWriter, _ *http.Request) {
			part, _, _ := strings.Cut(good, "pods_h2_tls")
			_, _ = w.Write([]byte(part))
		}, "pods_h2_tls"},
		"no number": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(good + "pods_h1::10.0.0.1:80::rq_active::many\n"))
		}, "invalid line"},
		"no address": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(good + "pods_h1::example.com:80::rq_active::1\n"))
		}, "invalid line"},
		"nothing": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "no answer from Envoy"},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "admin.sock")
			var broken atomic.Bool
			admin(t, socket, func(w http.ResponseWriter, r *http.Request) {
				if broken.Load() {
					c.page(w, r)
					return
				}
				_, _ = w.Write([]byte(good))
			})
			r, _ := reader(t, socket)
			_, _ = r.Look(t.Context())
			_, err := r.Look(t.Context())
			require.NoError(t, err)
			broken.Store(true)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if c.says != "no answer from Envoy" {
				ctx = t.Context()
			}
			_, err = r.Look(ctx)
			require.ErrorContains(t, err, c.says)
			broken.Store(false)
			_, err = r.Look(t.Context())
			require.NoError(t, err)
		})
	}
}

func TestMissingSocketIsNoLook(t *testing.T) {
	r, _ := reader(t, filepath.Join(t.TempDir(), "admin.sock"))
	for range 3 {
		_, err := r.Look(t.Context())
		require.ErrorContains(t, err, "no admin socket")
	}
}

func TestEnvoyReplacedDuringLookIsNoLook(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "admin.sock")
	var replace atomic.Bool
	next := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, clusters()) }
	admin(t, socket, func(w http.ResponseWriter, _ *http.Request) {
		if replace.Load() {
			admin(t, socket, next)
		}
		fmt.Fprint(w, clusters())
	})
	r, _ := reader(t, socket)
	_, _ = r.Look(t.Context())
	first, err := r.Look(t.Context())
	require.NoError(t, err)
	replace.Store(true)
	_, err = r.Look(t.Context())
	require.ErrorContains(t, err, "another Envoy")
	_, err = r.Look(t.Context())
	require.ErrorContains(t, err, "first look")
	second, err := r.Look(t.Context())
	require.NoError(t, err)
	require.Equal(t, first.Gateway, second.Gateway)
}

// The one before lives and would answer.
func TestLookReachesTheEnvoyOnTheSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "admin.sock")
	admin(t, socket, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, clusters()) })
	r, _ := reader(t, socket)
	_, _ = r.Look(t.Context())
	_, err := r.Look(t.Context())
	require.NoError(t, err)
	admin(t, socket, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, clusters("pods_h1 10.0.0.1:80 1+0")) })
	_, err = r.Look(t.Context())
	require.ErrorContains(t, err, "first look")
	l, err := r.Look(t.Context())
	require.NoError(t, err)
	require.Len(t, l.Hosts, 1)
}

func TestRefusingUnconnectedEnvoyHasEnded(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "admin.sock")
	end := admin(t, socket, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, clusters("pods_h1 10.0.0.1:80 1+0")) })
	r, connections := reader(t, socket)
	_, _ = r.Look(t.Context())
	before, err := r.Look(t.Context())
	require.NoError(t, err)
	connections.Store(1)
	end()
	_, err = r.Look(t.Context())
	require.ErrorContains(t, err, "refuses")
	connections.Store(0)
	l, err := r.Look(t.Context())
	require.NoError(t, err)
	require.Nil(t, l.Hosts)
	require.Equal(t, before.Gateway, l.Gateway)

	late, _ := reader(t, socket) // it has not known that Envoy
	_, err = late.Look(t.Context())
	require.ErrorContains(t, err, "first look")
	_, err = late.Look(t.Context())
	require.NoError(t, err)
}

func BenchmarkLookAt10000Hosts(b *testing.B) {
	hosts := make([]string, 10_000)
	for i := range hosts {
		hosts[i] = fmt.Sprintf("pods_h1 10.1.%d.%d:8080 1+0", i/250, i%250)
	}
	page := []byte(clusters(hosts...))
	socket := filepath.Join(b.TempDir(), "admin.sock")
	admin(b, socket, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(page) })
	r, _ := reader(b, socket)
	_, _ = r.Look(b.Context())
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	for b.Loop() {
		if l, err := r.Look(b.Context()); err != nil || len(l.Hosts) != len(hosts) {
			b.Fatal(err)
		}
	}
}
