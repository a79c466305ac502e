package envoy_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/routecache"
)

// memoryGroup is a cgroup whose memory is bounded, as that of a container is.
type memoryGroup struct {
	dir  string
	peak string // the file with its highest use
}

// newMemoryGroup makes one below the group of this process (version 1) or below the root (version 2,
// where a group with processes has no others below it).
func newMemoryGroup(t *testing.T, limit int64) *memoryGroup {
	t.Helper()
	const root = "/sys/fs/cgroup"
	parent, bound, peak := root, "memory.max", "memory.peak"
	if controllers, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")); err != nil {
		own, err := os.ReadFile("/proc/self/cgroup")
		require.NoError(t, err)
		parent, bound, peak = filepath.Join(root, "memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"
		for line := range strings.Lines(string(own)) {
			if _, path, ok := strings.Cut(strings.TrimSpace(line), ":memory:"); ok {
				if _, err := os.Stat(filepath.Join(parent, path)); err == nil { // of this namespace
					parent = filepath.Join(parent, path)
				}
			}
		}
	} else if below, _ := os.ReadFile(filepath.Join(root, "cgroup.subtree_control")); !strings.Contains(string(below), "memory") {
		t.Skipf("needs a cgroup with bounded memory: %s hands %q of %q down", root, below, controllers)
	}
	dir, err := os.MkdirTemp(parent, "berth-envoy-")
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) || strings.Contains(fmt.Sprint(err), "read-only") {
		t.Skipf("needs root, and cgroups that can be changed: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { // the processes in it have ended, and the kernel notices that a moment later
		require.Eventually(t, func() bool { return os.Remove(dir) == nil }, time.Minute, 10*time.Millisecond)
	})
	require.NoError(t, os.WriteFile(filepath.Join(dir, bound), []byte(strconv.FormatInt(limit, 10)), 0o600))
	return &memoryGroup{dir: dir, peak: peak}
}

// contain makes the process of a command a member before it begins.
func (m *memoryGroup) contain(cmd *exec.Cmd) {
	cmd.Args = append([]string{"sh", "-c", `echo $$ > "$0" && exec "$@"`, filepath.Join(m.dir, "cgroup.procs")}, cmd.Args...)
	cmd.Path = "/bin/sh"
}

// most is the highest use in MiB.
func (m *memoryGroup) most() int64 {
	raw, _ := os.ReadFile(filepath.Join(m.dir, m.peak))
	n, _ := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	return n >> 20
}

// inTheChart are the values of the chart that bound the memory of Envoy.
type inTheChart struct {
	Envoy struct {
		Concurrency  int    `json:"concurrency"`
		MaxHeapBytes uint64 `json:"maxHeapBytes"`
		Resources    struct {
			Limits struct {
				Memory resource.Quantity `json:"memory"`
			} `json:"limits"`
		} `json:"resources"`
	} `json:"envoy"`
	Gateway struct {
		MaxConnections uint32 `json:"maxConnections"`
		MaxStreams     uint32 `json:"maxStreams"`
		MaxHeaderKiB   uint32 `json:"maxHeaderKiB"`
	} `json:"gateway"`
}

// asInTheChart starts a gateway with the default values of the chart, in a cgroup with the limit of its container.
// Its router learns nothing about a sandbox that it does not know, so requests for one stay undecided.
func asInTheChart(t *testing.T) (*gateway, inTheChart) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", "charts", "berth", "values.yaml"))
	require.NoError(t, err)
	var chart inTheChart
	require.NoError(t, yaml.Unmarshal(raw, &chart))

	at := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") })).addr
	silent := silence(t)
	socket := filepath.Join(t.TempDir(), "router.sock")
	server, err := extproc.New(extproc.Options{
		Socket: socket, Hosts: extproc.Hosts{Domain: sandboxDomain}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
		Routes: &undecided{routes{at: map[string]routecache.Route{
			"abc": {Addr: at.Addr(), DefaultPort: at.Port()}, "silent": {Addr: silent.Addr(), DefaultPort: silent.Port()},
		}}},
		Sandboxes: sandboxes(t, at), TeamKeys: &extproc.TeamKeys{}, Metrics: prometheus.NewRegistry(), Log: zap.NewNop(),
	})
	require.NoError(t, err)
	listener, err := server.Listen(t.Context())
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		server.Stop(ended)
		serving.Wait()
	})
	return startGatewayWith(t, config{noRouter: true, workers: chart.Envoy.Concurrency, memory: chart.Envoy.Resources.Limits.Memory.Value(),
		settings: func(s *envoy.Settings) {
			s.RouterSocket, s.MaxHeap = socket, chart.Envoy.MaxHeapBytes
			s.MaxConnections, s.MaxStreams, s.MaxHeaderKiB = chart.Gateway.MaxConnections, chart.Gateway.MaxStreams, chart.Gateway.MaxHeaderKiB
		}}), chart
}

// silence is the address of a program that accepts connections, and reads nothing.
func silence(t *testing.T) netip.AddrPort {
	t.Helper()
	// The kernel keeps as little as it can, so that Envoy keeps the rest.
	l, err := (&net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10) }), err)
	}}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	})
	t.Cleanup(func() { l.Close(); accepting.Wait() })
	return netip.MustParseAddrPort(l.Addr().String())
}

// undecided knows routes, and learns nothing about other sandboxes.
type undecided struct{ routes }

func (u *undecided) Find(key sandboxid.Key) (routecache.Route, bool) {
	route, ok := u.at[key.String()]
	return route, ok
}

func (u *undecided) Lookup(ctx context.Context, key sandboxid.Key) (routecache.Answer, error) {
	if route, ok := u.Find(key); ok {
		return routecache.Answer{Status: routecache.Routable, Route: route}, nil
	}
	<-ctx.Done()
	return routecache.Answer{}, ctx.Err()
}

// unknownHost is that of a sandbox that the router does not know.
const unknownHost = "8080-unknown." + sandboxDomain

// burst has n clients connect and send a part of what they send. When all have done so, they send the rest at one
// time, and read until Envoy has no request in progress.
func (g *gateway) burst(n int, part, rest []byte) {
	g.Helper()
	var ready, done sync.WaitGroup
	begin, over := make(chan struct{}), make(chan struct{})
	for range n {
		ready.Add(1)
		done.Go(func() {
			c, err := net.Dial("tcp", g.addr)
			if err == nil {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				_, _ = c.Write(part)
			}
			ready.Done()
			<-begin
			if err == nil { // Envoy may refuse at any moment
				go func() { _, _ = io.Copy(io.Discard, c) }()
				_, _ = c.Write(rest)
			}
			<-over
		})
	}
	ready.Wait()
	close(begin)
	require.Eventually(g, func() bool { return g.ended() || g.counter(`http\.ingress\.downstream_rq_active`) == 0 }, time.Minute, time.Second)
	close(over)
	done.Wait()
}

// servesAgain waits until a sandbox that the router knows is served.
func (g *gateway) servesAgain() {
	g.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	require.Eventually(g, func() bool {
		request, err := http.NewRequestWithContext(g.Context(), http.MethodGet, "http://"+g.addr+"/", nil)
		require.NoError(g, err)
		request.Host = "abc." + sandboxDomain
		response, err := client.Do(request)
		if err != nil {
			return g.ended()
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	}, time.Minute, 100*time.Millisecond)
	require.False(g, g.ended(), "Envoy was ended at %d MiB", g.memory.most())
}

// ended reports whether Envoy has ended.
func (g *gateway) ended() bool {
	select {
	case <-g.envoy.Done():
		return true
	default:
		return false
	}
}

// Nothing in such a request needs a credential. What Envoy has for all of them until the router has decided, about five
// times their headers, is more than the limit of the container.
// Invariant: P8
func TestBurstOfUndecidedRequestsEndsNoEnvoy(t *testing.T) {
	if testing.Short() {
		t.Skip("needs Envoy and a memory cgroup")
	}
	const clients = 4000
	for name, send := range map[string]func(*gateway, inTheChart){
		"long paths over HTTP/1.1": func(g *gateway, chart inTheChart) {
			request := undecidedRequest(int(chart.Gateway.MaxHeaderKiB-1)<<10, 0)
			g.burst(clients, request[:len(request)-2], request[len(request)-2:])
		},
		"headers above the bound over HTTP/1.1": func(g *gateway, _ inTheChart) {
			g.burst(clients, nil, undecidedRequest(60_000, 0))
		},
		"many headers over HTTP/1.1": func(g *gateway, chart inTheChart) {
			const headers = 190
			request := undecidedRequest(0, (int(chart.Gateway.MaxHeaderKiB-1)<<10)/headers)
			g.burst(clients, request[:len(request)-2], request[len(request)-2:])
		},
		"long paths over HTTP/2": func(g *gateway, chart inTheChart) {
			g.burst(clients/40, []byte(http2.ClientPreface), undecidedStreams(40, hpack.HeaderField{
				Name: ":path", Value: "/" + strings.Repeat("d", int(chart.Gateway.MaxHeaderKiB-1)<<10), Sensitive: true,
			}))
		},
		"headers of a few bytes over HTTP/2": func(g *gateway, chart inTheChart) { // they are in the table of the connection
			fields := []hpack.HeaderField{{Name: ":path", Value: "/"}}
			for range (chart.Gateway.MaxHeaderKiB - 1) / 4 {
				fields = append(fields, hpack.HeaderField{Name: "x-a", Value: strings.Repeat("c", 3800)})
			}
			g.burst(clients/40, []byte(http2.ClientPreface), undecidedStreams(int(chart.Gateway.MaxStreams), fields...))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g, chart := asInTheChart(t)
			send(g, chart)
			require.False(t, g.ended(), "Envoy was ended at %d MiB", g.memory.most())
			g.servesAgain()
			t.Logf("at most %d of %d MiB; %d requests were decoded, %d of them shed", g.memory.most(), chart.Envoy.Resources.Limits.Memory.Value()>>20,
				g.counter(`http\.ingress\.downstream_rq_total`), g.counter(`http\.ingress\.downstream_rq_overload_close`))
		})
	}
}

// Each upload waits in Envoy for a sandbox that does not read, with the window of its stream and a buffer to the sandbox.
// All of them want more than the limit of the container.
// Invariant: P8
func TestUploadsToASilentSandboxEndNoEnvoy(t *testing.T) {
	if testing.Short() {
		t.Skip("needs Envoy and a memory cgroup")
	}
	for name, c := range map[string]struct{ connections, each int }{
		"one on each connection": {4000, 1}, "as many as a connection can have": {80, 120},
	} {
		t.Run(name, func(t *testing.T) {
			g, chart := asInTheChart(t)
			var sent counter
			var uploading sync.WaitGroup
			ctx, cancel := context.WithCancel(t.Context())
			for range c.connections {
				var p http.Protocols
				p.SetUnencryptedHTTP2(true)
				transport := &http.Transport{Protocols: &p, DisableCompression: true, ReadBufferSize: 1 << 10}
				defer transport.CloseIdleConnections()
				for range c.each {
					uploading.Go(func() {
						request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.addr+"/", io.TeeReader(io.LimitReader(zeros{}, 64<<20), &sent))
						if assert.NoError(t, err) {
							request.Host = "silent." + sandboxDomain
							if response, err := transport.RoundTrip(request); err == nil { // Envoy may refuse, or end the connection
								_ = response.Body.Close()
							}
						}
					})
				}
			}
			all := sent.stands(t, 60)
			require.False(t, g.ended(), "Envoy was ended at %d MiB", g.memory.most())
			t.Logf("the clients have sent %d MiB; Envoy had at most %d of %d MiB; %d requests were decoded, %d of them shed", all>>20,
				g.memory.most(), chart.Envoy.Resources.Limits.Memory.Value()>>20, g.counter(`http\.ingress\.downstream_rq_total`),
				g.counter(`http\.ingress\.downstream_rq_overload_close`))
			cancel()
			uploading.Wait()
			g.servesAgain()
		})
	}
}

// undecidedRequest is a request with a path, and 190 headers, of so many bytes each.
func undecidedRequest(path, header int) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "GET /%s HTTP/1.1\r\nHost: %s\r\n", strings.Repeat("a", path), unknownHost)
	for i := range 190 {
		if name := fmt.Sprintf("x-h-%03d: ", i); header > len(name)+2 {
			b.WriteString(name + strings.Repeat("b", header-len(name)-2) + "\r\n")
		}
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// undecidedStreams are the frames of one connection, after the preface, that ask so many times with these fields.
func undecidedStreams(count int, fields ...hpack.HeaderField) []byte {
	var frames, block bytes.Buffer
	framer, encoder := http2.NewFramer(&frames, nil), hpack.NewEncoder(&block)
	_ = framer.WriteSettings() // writes to a buffer succeed
	fields = append([]hpack.HeaderField{{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: unknownHost}}, fields...)
	for i := range count {
		block.Reset()
		for _, f := range fields {
			_ = encoder.WriteField(f)
		}
		id, first := uint32(2*i+1), block.Next(16<<10)
		_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: true, EndHeaders: block.Len() == 0})
		for block.Len() > 0 {
			next := block.Next(16 << 10)
			_ = framer.WriteContinuation(id, block.Len() == 0, next)
		}
	}
	return frames.Bytes()
}
