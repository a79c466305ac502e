package egress_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/envoy"
)

// soon bounds how long a test waits for what must happen.
const soon = 20 * time.Second

// The sandboxes abc and def have these addresses. Each has its ID as its token, with "token-" before it.
const abcAddr, defAddr = "127.0.0.2", "127.0.0.3"

func credential(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// own is the credential of a sandbox.
func own(id string) string { return credential(id, "token-"+id) }

// head is a request with the credential of a sandbox, and with more headers.
func head(line, id string, headers ...string) string {
	all := append([]string{line + " HTTP/1.1", "Host: other.example.com", "Proxy-Authorization: " + own(id)}, headers...)
	return strings.Join(all, "\r\n") + "\r\n\r\n"
}

// outside counts loopback as outside, but for one address.
func outside(t testing.TB) *policy.Reach {
	reach, err := policy.NewReach(
		[]netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		[]netip.Prefix{netip.MustParsePrefix("127.9.9.9/32")})
	require.NoError(t, err)
	return reach
}

// rules allow these and deny everything else. None: everything is allowed.
func rules(t testing.TB, allow ...string) *policy.Rules {
	if len(allow) == 0 {
		return nil
	}
	r, err := policy.Parse(
		policy.List{Field: "allow", Entries: allow}, policy.List{Field: "deny", Entries: []string{"0.0.0.0/0"}})
	require.NoError(t, err)
	return r
}

// sandbox may reach what it is allowed at these ports.
func sandbox(t testing.TB, id, addr string, ports []uint16, allow ...string) egress.Sandbox {
	return egress.Sandbox{
		ID: id, Addr: netip.MustParseAddr(addr), TokenHash: sha256.Sum256([]byte("token-" + id)), Pool: "python",
		Policy: policy.Policy{Claim: rules(t, allow...), Ports: ports, Reach: outside(t)},
	}
}

// resolver knows names by heart. A name has its answers one after the other, and the last one for ever.
type resolver struct {
	mu    sync.Mutex
	names map[string][][]netip.Addr
	asked map[string]int
	gate  chan struct{} // if set, a look-up waits for a value
}

func (r *resolver) LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error) {
	r.mu.Lock()
	gate := r.gate
	r.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	name, absolute := strings.CutSuffix(host, ".")
	r.asked[name]++
	all := r.names[name]
	if !absolute || network != "ip" || len(all) == 0 {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	if len(all) > 1 {
		r.names[name] = all[1:]
	}
	return all[0], nil
}

func (r *resolver) set(name string, answers ...string) {
	var parsed [][]netip.Addr
	for _, answer := range answers {
		var addrs []netip.Addr
		for addr := range strings.FieldsSeq(answer) {
			addrs = append(addrs, netip.MustParseAddr(addr))
		}
		parsed = append(parsed, addrs)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[name] = parsed
}

func (r *resolver) times(name string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked[name]
}

func newResolver() *resolver {
	return &resolver{names: map[string][][]netip.Addr{}, asked: map[string]int{}}
}

// world is a real Envoy with the real router, an origin for plain HTTP, one for TLS, and one that repeats bytes.
type world struct {
	*gateway
	router   *egress.Server
	resolver *resolver
	stale    atomic.Bool
	log      *observer.ObservedLogs
	web      *httptest.Server
	secure   *httptest.Server
	echo     *echo
	// ports are those of the origins.
	ports                      []uint16
	webPort, tlsPort, echoPort string
	mu                         sync.Mutex
	peers                      []string // of the connections with requests to web
	requests                   []*http.Request
	hold                       chan struct{} // requests for /hold wait for it
	holding                    atomic.Int64
}

func newWorld(t testing.TB, patches ...func(*bootstrapv3.Bootstrap)) *world {
	w := &world{resolver: newResolver(), hold: make(chan struct{})}
	handler := http.HandlerFunc(func(a http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.peers, w.requests = append(w.peers, r.RemoteAddr), append(w.requests, r)
		w.mu.Unlock()
		if r.URL.Path == "/hold" {
			w.holding.Add(1)
			defer w.holding.Add(-1)
			select {
			case <-w.hold:
			case <-r.Context().Done():
			}
		}
		_, _ = io.WriteString(a, "hello")
	})
	w.web, w.secure, w.echo = httptest.NewServer(handler), httptest.NewTLSServer(handler), newEcho(t, "127.0.0.1:0")
	t.Cleanup(w.web.Close)
	t.Cleanup(w.secure.Close)
	for at, to := range map[net.Addr]*string{
		w.web.Listener.Addr(): &w.webPort, w.secure.Listener.Addr(): &w.tlsPort, w.echo.Addr(): &w.echoPort,
	} {
		port := at.(*net.TCPAddr).Port
		*to, w.ports = strconv.Itoa(port), append(w.ports, uint16(port))
	}
	for _, name := range []string{"web.example.com", "example.com", "echo.example.com"} {
		w.resolver.set(name, "127.0.0.1")
	}
	socket := filepath.Join(socketDir(t), "router.sock")
	core, log := observer.New(zapcore.DebugLevel)
	w.log = log
	var err error
	w.router, err = egress.New(egress.Options{
		Socket: socket, Resolver: w.resolver, Fresh: func() bool { return !w.stale.Load() }, MaxOpen: 12, Log: zap.New(core),
	})
	require.NoError(t, err)
	l, err := w.router.Listen(t.Context())
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() { assert.NoError(t, w.router.Serve(l)) })
	t.Cleanup(func() { w.router.Stop(within(t)); serving.Wait() })
	w.gateway = startEnvoy(t, socket, caFile(t, w.secure), patches...)
	require.NoError(t, w.replace([]egress.Sandbox{
		sandbox(t, "abc", abcAddr, w.ports), sandbox(t, "def", defAddr, w.ports),
	}))
	return w
}

// ended waits until all requests have ended that were cut.
func (w *world) ended(ctx context.Context) error {
	done := make(chan struct{})
	w.router.Barrier(func() { close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d requests: %w", w.router.Unended(), ctx.Err())
	}
}

// set, forget and replace change what the router knows, and wait for the end of what they cut.
func (w *world) set(s egress.Sandbox) error {
	if err := w.router.Set(s); err != nil {
		return err
	}
	return w.ended(within(w))
}

func (w *world) forget(id string) error {
	w.router.Forget(id)
	return w.ended(within(w))
}

func (w *world) replace(all []egress.Sandbox) error {
	if err := w.router.Replace(all); err != nil {
		return err
	}
	return w.ended(within(w))
}

// within returns a context for what must happen soon, also at the end of a test.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	t.Cleanup(cancel)
	return ctx
}

// caFile has the certificate of a server.
func caFile(t testing.TB, of *httptest.Server) string {
	file := filepath.Join(t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: of.Certificate().Raw})
	require.NoError(t, os.WriteFile(file, block, 0o600))
	return file
}

// echo repeats what it gets.
type echo struct {
	net.Listener
	open     atomic.Int64
	accepted atomic.Int64
	bytes    atomic.Int64
}

func newEcho(t testing.TB, at string) *echo {
	l, err := net.Listen("tcp", at)
	require.NoError(t, err)
	e := &echo{Listener: l}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			e.open.Add(1)
			e.accepted.Add(1)
			serving.Go(func() {
				defer e.open.Add(-1)
				defer c.Close()
				_, _ = io.Copy(c, io.TeeReader(c, e))
			})
		}
	})
	t.Cleanup(serving.Wait)
	t.Cleanup(func() { l.Close() })
	return e
}

func (e *echo) Write(b []byte) (int, error) {
	e.bytes.Add(int64(len(b)))
	return len(b), nil
}

// answer is what a client got. A connection that was closed without an answer has code 0.
type answer struct {
	code   int
	header http.Header
	body   string
}

func (a answer) reason() string { return a.header.Get(envoy.ReasonHeader) }

// raw sends bytes from an address, over a connection of their own.
func (g *gateway) raw(from, request string) answer {
	g.Helper()
	c := g.dial(from)
	defer c.Close()
	_, err := io.WriteString(c, request)
	require.NoError(g, err)
	method, _, _ := strings.Cut(request, " ")
	response, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
	if err != nil {
		require.NotErrorIs(g, err, os.ErrDeadlineExceeded, request)
		return answer{body: err.Error()}
	}
	if method == http.MethodConnect && response.StatusCode == http.StatusOK {
		return answer{code: http.StatusOK, header: response.Header}
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body) // what is cut off shows
	return answer{response.StatusCode, response.Header, string(body)}
}

// get sends a request in absolute form for a sandbox.
func (w *world) get(from, id, host, path string) answer {
	w.Helper()
	return w.raw(from, head("GET http://"+host+path, id))
}

// connect asks for a tunnel for a sandbox, and closes it.
func (w *world) connect(from, id, target string) answer {
	w.Helper()
	return w.raw(from, head("CONNECT "+target, id))
}

// tunnel is an open tunnel to something that repeats bytes.
type tunnel struct {
	net.Conn
	t testing.TB
	r *bufio.Reader
}

// open opens a tunnel.
func (g *gateway) open(from, id, target string) *tunnel {
	g.Helper()
	c := g.dial(from)
	_, err := io.WriteString(c, head("CONNECT "+target, id))
	require.NoError(g, err)
	tunnel := &tunnel{c, g.TB, bufio.NewReader(c)}
	response, err := http.ReadResponse(tunnel.r, &http.Request{Method: http.MethodConnect})
	require.NoError(g, err)
	require.Equal(g, http.StatusOK, response.StatusCode)
	tunnel.works()
	return tunnel
}

// works requires that the tunnel carries bytes in both directions.
func (c *tunnel) works() {
	c.t.Helper()
	_, err := io.WriteString(c, "ping\n")
	require.NoError(c.t, err)
	line, err := c.r.ReadString('\n')
	require.NoError(c.t, err)
	require.Equal(c.t, "ping\n", line)
}

// isCut requires that the tunnel ends.
func (c *tunnel) isCut() {
	c.t.Helper()
	_, err := io.Copy(io.Discard, c.r)
	require.NotErrorIs(c.t, err, os.ErrDeadlineExceeded, "the tunnel stays open")
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	require.Eventually(t, is, soon, time.Millisecond, what)
}

func readAll(t testing.TB, r io.Reader) string {
	t.Helper()
	raw, err := io.ReadAll(r)
	require.NoError(t, err)
	return string(raw)
}

// A router in a process of its own, which can be stopped and killed.
const routerSocket, routerPort = "BERTH_TEST_ROUTER_SOCKET", "BERTH_TEST_ROUTER_PORT"

// runRouter is that process. It admits the sandbox abc to a port.
func runRouter(socket string) {
	port, err := strconv.ParseUint(os.Getenv(routerPort), 10, 16)
	if err != nil {
		panic(err)
	}
	reach, err := policy.NewReach([]netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, nil)
	if err != nil {
		panic(err)
	}
	router, err := egress.New(egress.Options{
		Socket: socket, Resolver: newResolver(), Fresh: func() bool { return true }, Log: zap.NewNop(),
	})
	if err != nil {
		panic(err)
	}
	err = router.Replace([]egress.Sandbox{{
		ID: "abc", Addr: netip.MustParseAddr(abcAddr), TokenHash: sha256.Sum256([]byte("token-abc")),
		Policy: policy.Policy{Ports: []uint16{uint16(port)}, Reach: reach},
	}})
	if err != nil {
		panic(err)
	}
	l, err := router.Listen(context.Background())
	if err != nil {
		panic(err)
	}
	if err := router.Serve(l); err != nil {
		panic(err)
	}
}
