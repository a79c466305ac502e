package envoy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/extproc/wire"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

const (
	sandboxDomain = "sandbox.example.com"
	gatewayHost   = "gateway.example.com"
)

// edge is a real Envoy with the real router before three pods: those of the
// sandboxes abc and def, and a stranger outside the pod ranges, to which the
// sandbox "out" would lead. All listen on one port.
type edge struct {
	*gateway
	port               int
	abc, def, stranger *pod
	router             *recorder
	routes             *routes
	keys               extproc.TeamKeys
}

// terms makes id another sandbox in the pod def, with these terms.
func (e *edge) terms(id string, terms routecache.Terms) {
	e.routes.mu.Lock()
	defer e.routes.mu.Unlock()
	e.routes.at[id] = routecache.Route{Addr: e.def.addr.Addr(), DefaultPort: uint16(e.port), Terms: &terms}
}

// routes knows where sandboxes are.
type routes struct {
	mu sync.Mutex
	at map[string]routecache.Route
}

// Find finds nothing, so that every decision looks up.
func (*routes) Find(sandboxid.Key) (routecache.Route, bool) {
	return routecache.Route{}, false
}

func (r *routes) Lookup(_ context.Context, key sandboxid.Key) (routecache.Answer, error) {
	id := key.String()
	r.mu.Lock()
	defer r.mu.Unlock()
	if id == "gone" {
		return routecache.Answer{Status: routecache.Gone, End: routecache.End{Reason: "Idle", AtUnix: 1700000000}}, nil
	}
	route, ok := r.at[id]
	if !ok {
		return routecache.Answer{Status: routecache.Unknown}, nil
	}
	return routecache.Answer{Status: routecache.Routable, Route: route}, nil
}

func (*routes) Await(ctx context.Context, _ sandboxid.Key, _ routecache.Status) error {
	<-ctx.Done()
	return ctx.Err()
}
func (*routes) AwaitJoined(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func (r *routes) Wake(ctx context.Context, id sandboxid.Key) (routecache.Answer, error) {
	return r.Lookup(ctx, id)
}

func (*routes) Known(sandboxid.Key) bool { return false }

// recorder is the router's codec. It records the messages that the router gets.
type recorder struct {
	wire.Codec
	mu     sync.Mutex
	seen   http.Header // of all requests since it was emptied
	newest mem.SliceBuffer
}

// last returns the newest message.
func (r *recorder) last() mem.SliceBuffer {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.newest
}

func (r *recorder) Unmarshal(data mem.BufferSlice, v any) error {
	if _, ok := v.(*wire.Request); ok {
		var m extprocv3.ProcessingRequest
		message := data.Materialize()
		if err := proto.Unmarshal(message, &m); err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.newest = message
		for _, h := range m.GetRequestHeaders().GetHeaders().GetHeaders() {
			r.seen[h.GetKey()] = append(r.seen[h.GetKey()], string(h.GetRawValue()))
		}
	}
	return r.Codec.Unmarshal(data, v)
}

// take returns what the router was sent since the last call.
func (r *recorder) take() http.Header {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen
	r.seen = http.Header{}
	return seen
}

// echo is what the pods answer.
type echo struct {
	Pod, Host, Path string
	Header          http.Header
}

func echoing(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(echo{name, r.Host, r.RequestURI, r.Header})
	})
}

func startEdge(t *testing.T, handler func(name string) http.Handler) *edge {
	t.Helper()
	return startEdgeIn(t, own, handler)
}

func startEdgeIn(t *testing.T, in inEnvoy, handler func(name string) http.Handler) *edge {
	t.Helper()
	e := &edge{port: commonPort(t, "127.1.0.1", "127.1.0.2", "127.2.0.1")}
	at := func(ip string) string { return fmt.Sprintf("%s:%d", ip, e.port) }
	e.abc, e.def, e.stranger = listen(t, at("127.1.0.1"), handler("abc")), listen(t, at("127.1.0.2"), handler("def")), listen(t, at("127.2.0.1"), handler("stranger"))
	route := func(ip string, ports ...uint16) routecache.Route {
		return routecache.Route{Addr: netip.MustParseAddr(ip), DefaultPort: uint16(e.port), Ports: routecache.NewPorts(ports)}
	}
	e.routes = &routes{at: map[string]routecache.Route{
		"abc": route("127.1.0.1"), "def": route("127.1.0.2"), "out": route("127.2.0.1"), "private": route("127.1.0.2", 1),
	}}
	server, err := extproc.New(extproc.Options{
		Socket:    "unused", // the test's own server has the socket
		Hosts:     extproc.Hosts{Domain: sandboxDomain, Gateways: []string{gatewayHost}, Paths: true},
		PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("127.1.0.0/16")},
		Routes:    e.routes,
		Sandboxes: sandboxes(t, e.abc.addr, e.def.addr), TeamKeys: &e.keys, Metrics: prometheus.NewRegistry(), Log: zap.NewNop(),
	})
	require.NoError(t, err)
	e.router = &recorder{seen: http.Header{}}
	e.gateway = startGatewayWith(t, config{
		in:       in,
		settings: func(s *envoy.Settings) { s.Paths = true },
		register: server.Register,
		codec:    e.router,
	})
	return e
}

// Only the generated types allocate, so a message that allocates has taken the slow way.
func TestMessagesOfEnvoyTakeTheQuickWay(t *testing.T) {
	e := startEdge(t, echoing)
	post := e.request(e.host("abc"), "/upload?x=%C3%A9", http.Header{"Content-Type": {"application/json"}})
	post.Method, post.Body = http.MethodPost, io.NopCloser(strings.NewReader("{}"))
	all := map[string]*http.Request{
		"a browser": e.request(e.host("abc"), "/", http.Header{"Accept": {"text/html"}, "Sec-Fetch-Mode": {"navigate"}}),
		"an SDK":    e.request(gatewayHost, "/", http.Header{"E2b-Sandbox-Id": {"abc"}, "E2b-Sandbox-Port": {strconv.Itoa(e.port)}}),
		"a body":    post,
		"credentials": e.request(e.host("abc"), "/", http.Header{
			"Cookie": {sandboxaccess.CookieName + "=x; other=y"}, "E2b-Traffic-Access-Token": {"z"}, "X-Api-Key": {sandboxaccess.KeyPrefix + "x"},
		}),
		"a WebSocket": e.request(e.host("abc"), "/", http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="},
		}),
		"bytes beyond ASCII": e.request(e.host("abc"), "/", http.Header{"Accept": {"\xff\xc3\xa9"}}),
		"an unknown sandbox": e.request(e.host("unknown"), "/", nil),
	}
	var request wire.Request
	for name, r := range all {
		t.Run(name, func(t *testing.T) {
			e.do(r)
			message := mem.BufferSlice{e.router.last()}
			read := func() {
				if err := (wire.Codec{}).Unmarshal(message, &request); err != nil {
					t.Error(err)
				}
			}
			read() // takes memory for the largest message so far
			require.NotEmpty(t, request.Headers)
			require.Zero(t, testing.AllocsPerRun(1000, read))
		})
	}
}

// expecting takes every route for that of its sandbox.
type expecting struct{ *admission.Sandboxes }

func (e expecting) Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (admission.Admission, admission.Why, time.Duration) {
	e.Put(id.String(), route)
	return e.Sandboxes.Admit(id, route, port, http2)
}

// sandboxes have looked once, and have seen requests to these: their next ones are not bounded.
func sandboxes(t *testing.T, listed ...netip.AddrPort) extproc.Sandboxes {
	t.Helper()
	hosts := map[look.Host]int{}
	for _, at := range listed {
		hosts[look.Host{AddrPort: at}] = 1
	}
	all, err := admission.New(admission.Options{
		Routes: routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return false }},
		Uses: lastactive.Options{
			Now: bootclock.Now, ConnectWindow: envoy.ConnectWindow,
			Look: func(context.Context) (look.Look, error) { return look.Look{Gateway: "this", Hosts: hosts}, nil },
		},
	})
	require.NoError(t, err)
	all.SetFreshUntil(time.Hour)
	require.Empty(t, all.Uses().FinalReport(t.Context()).LookError) // it has looked
	return expecting{all}
}

// commonPort finds a port that is free at all addresses.
func commonPort(t *testing.T, ips ...string) int {
	t.Helper()
	for range 100 {
		var all []net.Listener
		port := 0
		for _, ip := range ips {
			l, err := net.Listen("tcp", fmt.Sprintf("%s:%d", ip, port))
			if err != nil {
				break
			}
			all = append(all, l)
			port = l.Addr().(*net.TCPAddr).Port
		}
		for _, l := range all {
			l.Close()
		}
		if len(all) == len(ips) {
			return port
		}
	}
	t.Fatal("no port is free at all addresses")
	return 0
}

// host is the name of a sandbox's port at which its pod listens.
func (e *edge) host(id string) string { return fmt.Sprintf("%d-%s.%s", e.port, id, sandboxDomain) }
