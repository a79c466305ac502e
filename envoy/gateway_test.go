package envoy_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
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
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/envoy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// play handles one stream and its first message.
type play = func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error

// script is an ext_proc server with the behaviour that a test sets.
type script struct {
	extprocv3.UnimplementedExternalProcessorServer
	mu   sync.Mutex
	play play
}

func (s *script) set(play play) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.play = play
}

func (s *script) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	s.mu.Lock()
	play := s.play
	s.mu.Unlock()
	m, err := stream.Recv()
	if err != nil {
		return nil // Envoy has ended the stream
	}
	return play(stream, m)
}

// gateway is a real Envoy with the real bootstrap, a scripted router, and a
// server that stands for a pod and counts.
type gateway struct {
	*testing.T
	router *script
	// routerServer is what Envoy talks to; stop ends it at once.
	routerServer *grpc.Server
	settings     envoy.Settings
	in           inEnvoy
	// addr and health are the addresses of the listeners. At plain a real Envoy Gateway forwards to config.backend.
	addr, health, plain string
	envoy               *proc.Process
	memory              *memoryGroup // if it is bounded
	admin               *http.Client
	podAddr             netip.AddrPort
	// hits are requests that reached the pod, connections those it accepted.
	hits, connections atomic.Int64
}

// config is the configuration of a test's gateway.
type config struct {
	// in is whose Envoy it is. Default: own.
	in inEnvoy
	// attacked: a real Envoy Gateway takes the PROXY protocol, and has a policy that sets filters by name.
	attacked bool
	// settings changes the settings, patch what is rendered from them.
	settings func(*envoy.Settings)
	patch    func(*bootstrapv3.Bootstrap)
	// register adds the services of the router; default: the script.
	register func(grpc.ServiceRegistrar)
	codec    encoding.CodecV2 // of the router's server; default: gRPC's own
	// tap, if set, wraps the listener of the router's socket.
	tap func(net.Listener) net.Listener
	// podAddress is where the pod listens. Default 127.0.0.1:0.
	podAddress string
	// backend is where a real Envoy Gateway with the object forwards the requests of its other listener.
	backend uint16
	// noRouter: nothing listens on the router's socket, or a real router does.
	noRouter bool
	// onlyAllowed leaves the admin socket as it is. Otherwise it also shows what this
	// file reads: /listeners and /stats.
	onlyAllowed bool
	// workers is how many threads serve. Default 1.
	workers int
	// memory bounds Envoy's cgroup, in bytes. 0: Envoy has none of its own.
	memory int64
	// mistaken: Envoy may count mistakes of the router, because the test makes them.
	mistaken bool
}

func startGateway(t *testing.T) *gateway { return startGatewayWith(t, config{}) }

func startGatewayWith(t *testing.T, c config) *gateway {
	t.Helper()
	if testing.Short() {
		t.Skip("needs real Envoy: run without -short")
	}
	bin, err := devcluster.EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "berth-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	g := &gateway{T: t, router: &script{play: admit(nil)}, settings: envoy.Settings{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), HealthListen: netip.MustParseAddrPort("127.0.0.1:0"),
		RouterSocket: filepath.Join(dir, "router.sock"), AdminSocket: filepath.Join(dir, "admin.sock"),
	}}
	c.in = cmp.Or(c.in, own)
	g.in = c.in
	g.admin = envoy.AdminClient(g.settings.AdminSocket)
	switch {
	case c.in == behindEnvoyGateway:
		g.settings.TrustedHops = 1
	case !c.in.isBerths():
		admin := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(commonPort(t, "127.0.0.1")))
		g.settings.HealthListen, g.settings.Other = netip.AddrPort{}, &envoy.OtherGateway{Admin: admin}
		g.admin = tcpAdmin(admin)
	}
	if c.settings != nil {
		c.settings(&g.settings)
	}
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	if !c.noRouter {
		var options []grpc.ServerOption
		if c.codec != nil {
			options = append(options, grpc.ForceServerCodecV2(c.codec))
		}
		g.routerServer = grpc.NewServer(options...)
		if c.register == nil {
			extprocv3.RegisterExternalProcessorServer(g.routerServer, g.router)
		} else {
			c.register(g.routerServer)
		}
		socket, err := net.Listen("unix", g.settings.RouterSocket)
		require.NoError(t, err)
		if c.tap != nil {
			socket = c.tap(socket)
		}
		serving.Go(func() { _ = g.routerServer.Serve(socket) }) // ends with Stop
		t.Cleanup(g.routerServer.Stop)
	}

	if c.podAddress == "" {
		c.podAddress = "127.0.0.1:0"
	}
	pod, err := net.Listen("tcp", c.podAddress)
	require.NoError(t, err)
	g.podAddr = netip.MustParseAddrPort(pod.Addr().String())
	podServer := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			g.hits.Add(1)
			_ = json.NewEncoder(w).Encode(r.Header)
		}),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				g.connections.Add(1)
			}
		},
	}
	serving.Go(func() { _ = podServer.Serve(pod) }) // ends with Close
	t.Cleanup(func() { podServer.Close() })

	if c.memory > 0 {
		g.memory = newMemoryGroup(t, c.memory) // before the supervisor, which ends what is in it
	}
	if c.in == inRealEnvoyGateway {
		g.addr = g.realGateway(c, c.backend)
		g.watch(c)
		return g
	}
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, g.render(c.in, func(b *bootstrapv3.Bootstrap) {
		if !c.onlyAllowed && c.in.isBerths() {
			b.Admin.AllowPaths = append(b.Admin.AllowPaths, prefix("/listeners"), prefix("/stats"))
		}
		if c.patch != nil {
			c.patch(b)
		}
	}), 0o600))
	supervisor, err := proc.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, supervisor.Close()) })
	cmd := exec.Command(bin, "-c", file, "--disable-hot-restart", "--concurrency", strconv.Itoa(max(c.workers, 1)), "--log-level", "error")
	if g.memory != nil {
		g.memory.contain(cmd)
	}
	var log output
	cmd.Stderr = &log
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("Envoy: %s", log.String())
		}
	})
	g.envoy, err = supervisor.Start(cmd)
	require.NoError(t, err)
	g.watch(c)
	require.Eventually(t, func() bool {
		select {
		case <-g.envoy.Done():
			t.Errorf("Envoy ended: %s", log.String())
			return true
		default:
		}
		if c.onlyAllowed {
			code, _ := g.adminPage(http.MethodGet, "/ready")
			return code == http.StatusOK
		}
		listeners := g.listeners()
		if !c.in.isBerths() {
			g.addr = listeners[otherListener]
			return g.addr != ""
		}
		g.addr, g.health = listeners["ingress"], listeners["health"]
		return g.addr != "" && g.health != ""
	}, time.Minute, 20*time.Millisecond)
	require.False(t, t.Failed())
	if c.in == behindEnvoyGateway {
		g.addr = g.realGateway(c, netip.MustParseAddrPort(g.addr).Port())
	}
	return g
}

// watch looks at the end of the test, while Envoy still runs, for mistakes that it has counted.
func (g *gateway) watch(c config) {
	g.Cleanup(g.admin.CloseIdleConnections)
	if !c.mistaken {
		g.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			require.NoError(g, stack.Mistakes(ctx, g.admin))
		})
	}
}

// render is the bootstrap as Envoy reads it.
func (g *gateway) render(in inEnvoy, patch func(*bootstrapv3.Bootstrap)) []byte {
	var bootstrap *bootstrapv3.Bootstrap
	if in.isBerths() {
		var err error
		bootstrap, err = envoy.Bootstrap(g.settings)
		require.NoError(g, err)
	} else {
		bootstrap = g.otherEnvoy(in)
	}
	patch(bootstrap)
	raw, err := protojson.Marshal(bootstrap)
	require.NoError(g, err)
	return raw // JSON is YAML
}

func prefix(path string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: path}}
}

// output keeps the end of the output of a process.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	const most = 64 << 10
	if o.buf.Len() > most {
		o.buf.Reset()
	}
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// adminPage asks Envoy's admin socket. The status is 0 as long as it does not answer.
func (g *gateway) adminPage(method, target string) (code int, body string) {
	g.Helper()
	r, err := http.NewRequestWithContext(g.Context(), method, "http://envoy"+target, http.NoBody)
	require.NoError(g, err)
	response, err := g.admin.Do(r)
	if err != nil {
		return 0, ""
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(g, err)
	return response.StatusCode, string(raw)
}

// listeners asks Envoy which addresses its listeners got. There is none as long
// as it does not answer.
func (g *gateway) listeners() map[string]string {
	_, body := g.adminPage(http.MethodGet, "/listeners")
	all := map[string]string{}
	for line := range strings.Lines(body) {
		if name, addr, ok := strings.Cut(strings.TrimSpace(line), "::"); ok && !strings.HasSuffix(addr, ":0") {
			all[name] = addr
		}
	}
	return all
}

// counter is one of Envoy's statistics, 0 if it has none of that name.
func (g *gateway) counter(name string) int {
	g.Helper()
	code, body := g.adminPage(http.MethodGet, "/stats?format=json&filter=^"+name+"$")
	require.Equal(g, http.StatusOK, code)
	var stats struct{ Stats []struct{ Value int } }
	require.NoError(g, json.Unmarshal([]byte(body), &stats))
	total := 0
	for _, s := range stats.Stats {
		total += s.Value
	}
	return total
}

// rss is the memory that Envoy has, in bytes.
func (g *gateway) rss() int64 { return rss(g.T, g.envoy.Pid()) }

func rss(t *testing.T, pid int) int64 {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "statm"))
	require.NoError(t, err)
	fields := strings.Fields(string(raw))
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	require.NoError(t, err)
	return pages * int64(syscall.Getpagesize())
}

// answer is the answer that a client received.
type answer struct {
	code   int
	header http.Header
	body   string
}

const host = "8080-abc.sandbox.example.com"

// do sends a request over a connection of its own.
func (g *gateway) do(r *http.Request) answer {
	g.Helper()
	client := &http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}, Timeout: time.Minute,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	response, err := client.Do(r)
	require.NoError(g, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(g, err)
	return answer{response.StatusCode, response.Header, string(body)}
}

// answer sends bytes over a connection of their own. A connection that is closed
// without an answer has code 0.
func (g *gateway) answer(request string) answer {
	g.Helper()
	c, err := net.Dial("tcp", g.addr)
	require.NoError(g, err)
	defer c.Close()
	require.NoError(g, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(c, request)
	require.NoError(g, err)
	method, _, _ := strings.Cut(request, " ")
	response, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
	if err != nil {
		require.NotErrorIs(g, err, os.ErrDeadlineExceeded, request)
		return answer{body: err.Error()}
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body) // what is cut off shows
	return answer{response.StatusCode, response.Header, string(body)}
}

func (g *gateway) request(host, path string, header http.Header) *http.Request {
	g.Helper()
	r, err := http.NewRequestWithContext(g.Context(), http.MethodGet, "http://"+g.addr+path, http.NoBody)
	require.NoError(g, err)
	r.Host = host
	for name, values := range header {
		r.Header[name] = values
	}
	return r
}

func (g *gateway) get(header http.Header) (int, string) {
	g.Helper()
	a := g.do(g.request(host, "/", header))
	return a.code, a.body
}

// admit answers with this metadata; a nil value is left out.
func admit(fields map[string]*structpb.Value) play {
	return func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
		return stream.Send(&extprocv3.ProcessingResponse{
			Response:        &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
			DynamicMetadata: metadata(fields),
		})
	}
}

func metadata(fields map[string]*structpb.Value) *structpb.Struct {
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: fields}),
	}}
}

func text(s string) *structpb.Value { return structpb.NewStringValue(s) }

func (g *gateway) admitted(id string) map[string]*structpb.Value {
	return map[string]*structpb.Value{envoy.MetadataDst: text(string(envoy.AppendDestination(nil, g.podAddr))), envoy.MetadataID: text(id)}
}
