package look_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive/look"
)

// listener sends each request where its header says; with "h2: yes" as HTTP/2.
const listener = `
name: requests
address: {socket_address: {address: 127.0.0.1, port_value: %d}}
filter_chains:
- filters:
  - name: envoy.filters.network.http_connection_manager
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
      stat_prefix: requests
      upgrade_configs: [{upgrade_type: websocket}]
      http_filters:
      - name: envoy.filters.http.router
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
      route_config:
        virtual_hosts:
        - name: pods
          domains: ["*"]
          routes:
          - {match: {prefix: /, headers: [{name: h2, string_match: {exact: "yes"}}]}, route: {cluster: pods_h2, timeout: 0s}}
          - {match: {prefix: /}, route: {cluster: pods_h1, timeout: 0s}}
`

// gateway is a real Envoy with the clusters and the admin interface of the bootstrap.
type gateway struct {
	testing.TB
	dir        string
	supervisor *proc.Supervisor
	envoy      *proc.Process
	addr       string
}

func startGateway(t testing.TB) *gateway {
	if testing.Short() {
		t.Skip("needs real Envoy: run without -short")
	}
	dir, err := os.MkdirTemp("", "berth-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	g := &gateway{TB: t, dir: dir}
	g.supervisor, err = proc.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.supervisor.Close()) })
	g.start()
	return g
}

func (g *gateway) socket() string { return filepath.Join(g.dir, "admin.sock") }

// start starts an Envoy with the same admin socket as the one before.
func (g *gateway) start() {
	g.Helper()
	bin, err := devcluster.EnvoyBinary(g.Context(), nil)
	require.NoError(g, err)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(g, err)
	g.addr = free.Addr().String()
	bootstrap, err := envoy.Bootstrap(envoy.Settings{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), RouterSocket: filepath.Join(g.dir, "router.sock"), AdminSocket: g.socket(),
	})
	require.NoError(g, err)
	raw, err := yaml.YAMLToJSON(fmt.Appendf(nil, listener, netip.MustParseAddrPort(g.addr).Port()))
	require.NoError(g, err)
	var parsed bootstrapv3.Bootstrap_StaticResources
	require.NoError(g, protojson.Unmarshal(fmt.Appendf(nil, `{"listeners": [%s]}`, raw), &parsed))
	resources := bootstrap.GetStaticResources()
	resources.Listeners = parsed.GetListeners()
	for _, c := range resources.GetClusters() {
		if c.GetType() == clusterv3.Cluster_ORIGINAL_DST {
			c.LbConfig = &clusterv3.Cluster_OriginalDstLbConfig_{OriginalDstLbConfig: &clusterv3.Cluster_OriginalDstLbConfig{UseHttpHeader: true}}
		}
	}
	raw, err = protojson.Marshal(bootstrap)
	require.NoError(g, err)
	file := filepath.Join(g.dir, "envoy.json")
	require.NoError(g, os.WriteFile(file, raw, 0o600))
	free.Close()
	cmd := exec.Command(bin, "-c", file, "--disable-hot-restart", "--concurrency", "3", "--log-level", "error")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	g.envoy, err = g.supervisor.Start(cmd)
	require.NoError(g, err)
	require.Eventually(g, func() bool {
		select {
		case <-g.envoy.Done():
			g.Errorf("Envoy ended: %s", log.String())
			return true
		default:
		}
		c, err := net.Dial("tcp", g.addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	}, time.Minute, 20*time.Millisecond)
	require.False(g, g.Failed())
}

func (g *gateway) kill() {
	require.NoError(g, g.envoy.Signal(syscall.SIGKILL))
	<-g.envoy.Done()
}

// pod answers late, silently or not at all, as the path says.
func (g *gateway) pod() netip.AddrPort {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(g, err)
	ctx, cancel := context.WithCancel(context.Background())
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/begins":
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
		case "/websocket":
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
			_, _ = c.Read(make([]byte, 1)) // until the client goes
			return
		case "/short":
			return
		}
		select {
		case <-r.Context().Done():
		case <-ctx.Done():
		}
	})
	server := &http.Server{Handler: handler, Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(l) })
	g.Cleanup(func() { cancel(); server.Close(); serving.Wait() })
	return netip.MustParseAddrPort(l.Addr().String())
}

// opens sends requests that stay open, until end is called.
func (g *gateway) opens(to netip.AddrPort, path string, n int, header http.Header) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	transport := &http.Transport{}
	var open sync.WaitGroup
	for range n {
		open.Go(func() {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+g.addr+path, http.NoBody)
			if err != nil {
				return
			}
			r.Header = header.Clone()
			r.Header.Set("x-envoy-original-dst-host", to.String())
			response, err := transport.RoundTrip(r)
			if err != nil {
				return
			}
			defer response.Body.Close()
			<-ctx.Done()
		})
	}
	end = sync.OnceFunc(func() { cancel(); open.Wait(); transport.CloseIdleConnections() })
	g.Cleanup(end)
	return end
}

// shows waits until a look shows so many open, or that there is nothing at all.
func (g *gateway) shows(r *look.Reader, want map[netip.AddrPort]int) {
	g.Helper()
	var got map[netip.AddrPort]int
	require.Eventually(g, func() bool {
		l, err := r.Look(g.Context())
		got = map[netip.AddrPort]int{}
		for h, n := range l.Hosts {
			if n > 0 {
				got[h.AddrPort] += n
			}
		}
		return err == nil && fmt.Sprint(got) == fmt.Sprint(want)
	}, time.Minute, 20*time.Millisecond, "want %v, got %v", want, &got)
}

func TestEnvoyShowsOpenRequestsUntilTheyEnd(t *testing.T) {
	g := startGateway(t)
	r, _ := reader(t, g.socket())
	pod, second := g.pod(), g.pod()
	slow := g.unreachable()
	none := map[netip.AddrPort]int{}
	upgrade := http.Header{"Connection": {"upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Key": {"x3JJHMbDL1EzLkh9GBhXDw=="}, "Sec-Websocket-Version": {"13"}}
	for name, c := range map[string]struct {
		to     netip.AddrPort
		path   string
		n      int
		header http.Header
	}{
		"silent WebSocket":                   {pod, "/websocket", 1, upgrade},
		"answer that begins late":            {pod, "/", 1, http.Header{}},
		"answer that says nothing more":      {pod, "/begins", 1, http.Header{}},
		"stream of HTTP/2":                   {pod, "/begins", 3, http.Header{"H2": {"yes"}}},
		"requests at once to a new address":  {second, "/", 200, http.Header{}},
		"request that waits for connections": {slow, "/", 2, http.Header{}},
	} {
		t.Run(name, func(t *testing.T) {
			end := g.opens(c.to, c.path, c.n, c.header)
			defer end()
			g.shows(r, map[netip.AddrPort]int{c.to: c.n})
			if c.to != slow {
				for range 20 { // and goes on to
					l, err := r.Look(t.Context())
					require.NoError(t, err)
					require.Equal(t, c.n, l.Hosts[look.Host{AddrPort: c.to}]+l.Hosts[look.Host{AddrPort: c.to, HTTP2: true}])
				}
			}
			end()
			g.shows(r, none)
		})
	}
	t.Run("two ports", func(*testing.T) {
		one, two := g.opens(pod, "/begins", 1, http.Header{}), g.opens(second, "/", 2, http.Header{})
		g.shows(r, map[netip.AddrPort]int{pod: 1, second: 2})
		one()
		g.shows(r, map[netip.AddrPort]int{second: 2})
		two()
		g.shows(r, none)
	})
}

// unreachable is an address that accepts no connection and refuses none.
func (g *gateway) unreachable() netip.AddrPort {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	require.NoError(g, err)
	g.Cleanup(func() { _ = syscall.Close(fd) })
	require.NoError(g, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(g, syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	require.NoError(g, err)
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*syscall.SockaddrInet4).Port))
	c, err := net.Dial("tcp", at.String()) // takes the only place
	require.NoError(g, err)
	g.Cleanup(func() { c.Close() })
	return at
}

func TestStoppedEnvoyIsNoLook(t *testing.T) {
	g := startGateway(t)
	r, _ := reader(t, g.socket())
	pod := g.pod()
	end := g.opens(pod, "/begins", 1, http.Header{})
	defer end()
	g.shows(r, map[netip.AddrPort]int{pod: 1})
	require.NoError(t, g.envoy.Signal(syscall.SIGSTOP))
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		_, err := r.Look(ctx)
		cancel()
		require.ErrorContains(t, err, "no answer from Envoy")
	}
	require.NoError(t, g.envoy.Signal(syscall.SIGCONT))
	g.shows(r, map[netip.AddrPort]int{pod: 1})
}

// Invariant: I4
func TestKilledEnvoyHasNothingOpen(t *testing.T) {
	g := startGateway(t)
	r, connections := reader(t, g.socket())
	pod := g.pod()
	g.opens(pod, "/begins", 1, http.Header{})
	g.shows(r, map[netip.AddrPort]int{pod: 1})
	before, err := r.Look(t.Context())
	require.NoError(t, err)

	connections.Store(1)
	g.kill()
	_, err = r.Look(t.Context())
	require.ErrorContains(t, err, "refuses")
	connections.Store(0)
	ended, err := r.Look(t.Context())
	require.NoError(t, err)
	require.Equal(t, before.Gateway, ended.Gateway)
	require.Nil(t, ended.Hosts)

	g.start()
	_, err = r.Look(t.Context())
	require.ErrorContains(t, err, "first look")
	after, err := r.Look(t.Context())
	require.NoError(t, err)
	require.Equal(t, before.Gateway, after.Gateway)
	require.NotNil(t, after.Hosts)
}

// A stopped Envoy keeps its connections, and another one takes its socket.
func TestSuccessorOfAStoppedEnvoyIsRead(t *testing.T) {
	g := startGateway(t)
	r, _ := reader(t, g.socket())
	g.shows(r, map[netip.AddrPort]int{})
	stopped := g.envoy
	require.NoError(t, stopped.Signal(syscall.SIGSTOP))
	g.start()
	_, err := r.Look(t.Context())
	require.ErrorContains(t, err, "first look")
	pod := g.pod()
	g.opens(pod, "/begins", 1, http.Header{})
	g.shows(r, map[netip.AddrPort]int{pod: 1})
	require.NoError(t, stopped.Signal(syscall.SIGKILL))
}
