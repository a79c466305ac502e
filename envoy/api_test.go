package envoy_test

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/controltls"
)

const apiHost = "api." + sandboxDomain

// apiGateway is a gateway that serves an API at these addresses.
func apiGateway(t *testing.T, addresses ...string) (g *gateway, asked *atomic.Int64) {
	t.Helper()
	g = startGatewayWith(t, config{settings: func(s *envoy.Settings) {
		s.API = &envoy.API{Domain: sandboxDomain}
		for _, a := range addresses {
			endpoint, err := envoy.ParseEndpoint(a)
			require.NoError(t, err)
			s.API.Endpoints = append(s.API.Endpoints, endpoint)
		}
	}})
	asked = &atomic.Int64{}
	g.router.set(func(stream extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
		asked.Add(1)
		return admit(g.admitted("abc"))(stream, m)
	})
	return g, asked
}

// fakeAPI is an API that answers what it was asked.
type fakeAPI struct {
	*httptest.Server
	mu   sync.Mutex
	seen []*http.Request
}

func newFakeAPI(t *testing.T) *fakeAPI {
	r := &fakeAPI{}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		r.mu.Lock()
		r.seen = append(r.seen, q)
		r.mu.Unlock()
		w.Header().Set("X-Berth-Reason", "of_the_api")
		w.WriteHeader(http.StatusTeapot)
		_, _ = w.Write(body)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *fakeAPI) last() *http.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seen[len(r.seen)-1]
}

func (r *fakeAPI) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.seen)
}

func address(s *httptest.Server) string { return strings.TrimPrefix(s.URL, "http://") }

func TestOnlyTheAPIsHostReachesTheAPI(t *testing.T) {
	api := newFakeAPI(t)
	g, asked := apiGateway(t, address(api.Server))
	for _, host := range []string{apiHost, apiHost + ":8443", strings.ToUpper(apiHost), apiHost + ".", apiHost + ".:80"} {
		before := api.count()
		a := g.answer("POST /v2/sandboxes?x=%2e%2e HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nContent-Length: 2\r\n" +
			"X-API-Key: k\r\nX-Forwarded-For: 1.2.3.4\r\nX-Envoy-Retry-On: 5xx\r\nX-Berth-Reason: x\r\nE2b-Sandbox-Id: abc\r\n\r\n{}")
		require.Equal(t, http.StatusTeapot, a.code, "%s: %s", host, a.body)
		require.Equal(t, "{}", a.body)
		require.Equal(t, "of_the_api", a.header.Get("X-Berth-Reason"), "the API is Berth")
		require.Equal(t, before+1, api.count())
		r := api.last()
		require.Equal(t, "/v2/sandboxes?x=%2e%2e", r.RequestURI)
		require.Equal(t, "k", r.Header.Get("X-Api-Key"))
		require.NotContains(t, r.Header.Get("X-Forwarded-For"), "1.2.3.4", "a client named an address")
		require.NotEmpty(t, r.Header.Get("X-Forwarded-For"))
		require.Equal(t, "http", r.Header.Get("X-Forwarded-Proto"))
		for name := range r.Header {
			require.False(t, strings.HasPrefix(name, "X-Envoy-") || strings.HasPrefix(name, "X-Berth-"), name)
		}
	}
	require.Zero(t, asked.Load(), "the router was asked about a call to the API")
	require.Zero(t, g.hits.Load(), "a call to the API reached a sandbox")

	calls := api.count()
	for _, host := range []string{
		sandboxDomain, "8080-abc." + sandboxDomain, "80-api." + sandboxDomain, "x." + apiHost, "api.example.org", "api", "xapi." + sandboxDomain,
		apiHost + "," + apiHost, apiHost + ":80,x", apiHost + ":x", apiHost + ":", apiHost + "..", "api-x." + sandboxDomain, "apixsandbox.example.com",
	} {
		before := asked.Load()
		g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")
		require.Equal(t, before+1, asked.Load(), "the router decides about host %q", host)
	}
	require.Equal(t, calls, api.count(), "another host reached the API")
	a := g.answer("OPTIONS * HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: close\r\n\r\n")
	require.NotEqual(t, http.StatusTeapot, a.code, "a request without a path has no route to the API")
}

// An API without keys believes the last address in X-Forwarded-For.
func TestOnlyLocalClientsAreNamedByLoopback(t *testing.T) {
	for _, local := range []bool{false, true} {
		api := newFakeAPI(t)
		endpoint, err := envoy.ParseEndpoint(address(api.Server))
		require.NoError(t, err)
		g := startGatewayWith(t, config{settings: func(s *envoy.Settings) {
			s.API = &envoy.API{Domain: sandboxDomain, Endpoints: []envoy.Endpoint{endpoint}, LocalClients: local}
		}})
		for _, forged := range []string{"", "X-Forwarded-For: 127.0.0.1\r\n", "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 10.0.0.1\r\n"} {
			a := g.answer("GET /sandboxes HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: close\r\n" + forged + "\r\n")
			require.Equal(t, http.StatusTeapot, a.code, a.body)
			named := api.last().Header.Values("X-Forwarded-For")
			require.Len(t, named, 1)
			require.Equal(t, local, named[0] == "127.0.0.1", named)
		}
	}
}

func TestWithoutAPIItsHostIsLeftToTheRouter(t *testing.T) {
	g := startGateway(t)
	g.router.set(admit(g.admitted("abc")))
	require.Equal(t, http.StatusOK, g.do(g.request(apiHost, "/", nil)).code)
	require.EqualValues(t, 1, g.hits.Load())
}

func TestAPIFailuresSayWhetherToRetry(t *testing.T) {
	g, _ := apiGateway(t, closed(t))
	ask := func(g *gateway) (answer, apierror.Error) {
		a := g.answer("POST /sandboxes HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
		var e apierror.Error
		require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
		require.Equal(t, a.code, e.Code)
		require.Equal(t, string(e.Reason), a.header.Get(envoy.ReasonHeader))
		require.NotContains(t, e.Message, "sandbox")
		return a, e
	}
	a, e := ask(g)
	require.Equal(t, apierror.APIUnreachable, e.Reason)
	require.Equal(t, http.StatusServiceUnavailable, a.code)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Empty(t, a.header.Get("Should-Retry"))

	broken, _ := apiGateway(t, breaking(t, ""))
	a, e = ask(broken)
	require.Equal(t, apierror.APIReset, e.Reason)
	require.Equal(t, http.StatusBadGateway, a.code)
	require.Equal(t, "false", a.header.Get("Should-Retry"), "E2B's SDKs would claim twice")
	require.Empty(t, a.header.Get("Retry-After"))
}

func TestOnlyItsPathReachesTheServerOfMCP(t *testing.T) {
	api, tools := newFakeAPI(t), newFakeAPI(t)
	addresses := map[string]string{"api": address(api.Server), "mcp": address(tools.Server), "closed": closed(t)}
	start := func(mcp string) *gateway {
		return startGatewayWith(t, config{settings: func(s *envoy.Settings) {
			s.API = &envoy.API{Domain: sandboxDomain}
			var errs [2]error
			s.API.Endpoints, s.API.MCP = make([]envoy.Endpoint, 1), make([]envoy.Endpoint, 1)
			s.API.Endpoints[0], errs[0] = envoy.ParseEndpoint(addresses["api"])
			s.API.MCP[0], errs[1] = envoy.ParseEndpoint(addresses[mcp])
			require.Equal(t, [2]error{}, errs)
		}})
	}
	g := start("mcp")
	g.router.set(admit(g.admitted("abc")))
	ask := func(g *gateway, host, path string) answer {
		return g.answer("POST " + path + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nContent-Length: 2\r\n" +
			"Authorization: Bearer k\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n{}")
	}
	for _, path := range []string{"/mcp", "/mcp?x=1"} {
		require.Equal(t, http.StatusTeapot, ask(g, apiHost, path).code)
		r := tools.last()
		require.Equal(t, path, r.RequestURI)
		require.Equal(t, "Bearer k", r.Header.Get("Authorization"))
		require.NotContains(t, r.Header.Values("X-Forwarded-For"), "127.0.0.1", "a client named an address")
	}
	calls := tools.count()
	for _, path := range []string{"/", "/mcp/", "/mcpx", "/MCP", "/x/../mcp", "//mcp", "/%6dcp", "/sandboxes"} {
		require.Equal(t, http.StatusTeapot, ask(g, apiHost, path).code)
		require.Equal(t, path, api.last().RequestURI)
	}
	require.Equal(t, http.StatusOK, ask(g, "8080-abc."+sandboxDomain, "/mcp").code, "the path is a sandbox's own at its host")
	require.Equal(t, calls, tools.count())

	var e apierror.Error
	a := ask(start("closed"), apiHost, "/mcp")
	require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
	require.Equal(t, apierror.APIUnreachable, e.Reason)
}

// A replica breaks every connection that carries a call. Another one has ended.
func TestCallsToTheAPIAreSentOnce(t *testing.T) {
	var calls atomic.Int64
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls.Add(1)
		c, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}))
	t.Cleanup(api.Close)
	for _, endpoints := range [][]string{{address(api)}, {closed(t), address(api)}} {
		g, _ := apiGateway(t, endpoints...)
		for range 5 {
			before := calls.Load()
			a := g.answer("POST /sandboxes HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
			require.Equal(t, http.StatusBadGateway, a.code, "a replica that does not listen is passed over: %s", a.body)
			require.Equal(t, before+1, calls.Load(), "a call was repeated")
		}
	}
}

func TestEventsOfTheAPIArriveOneByOne(t *testing.T) {
	more := make(chan struct{})
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			_, _ = io.WriteString(w, "data: "+strconv.Itoa(i)+"\n\n")
			_ = http.NewResponseController(w).Flush()
			<-more
		}
	}))
	t.Cleanup(api.Close)
	g, _ := apiGateway(t, address(api))
	c, err := net.Dial("tcp", g.addr)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(c, "GET /v1/events HTTP/1.1\r\nHost: "+apiHost+"\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for i := range 3 {
		require.True(t, lines.Scan())
		require.Equal(t, "data: "+strconv.Itoa(i), lines.Text())
		require.True(t, lines.Scan())
		more <- struct{}{}
	}
	require.False(t, lines.Scan())
}

// The authority is a mounted Secret, which the kubelet replaces by moving a link.
func TestAPIIsVerifiedByTheNewestAuthority(t *testing.T) {
	role := func(a *controltls.Authority, name string) (dir string) {
		f, err := a.Issue(name, time.Now())
		require.NoError(t, err)
		dir = t.TempDir()
		for file, content := range map[string][]byte{controltls.CertFile: f.Cert, controltls.KeyFile: f.Key, controltls.CAFile: f.CA} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, file), content, 0o600))
		}
		return dir
	}
	ours, err := controltls.NewAuthority(time.Now())
	require.NoError(t, err)
	others, err := controltls.NewAuthority(time.Now())
	require.NoError(t, err)
	// What clients get is of the same authority and has another name.
	clients, allocator := role(ours, controltls.RouterName), role(ours, controltls.AllocatorName)
	secured, err := controltls.NewAPI(filepath.Join(clients, controltls.CertFile), filepath.Join(clients, controltls.KeyFile), allocator)
	require.NoError(t, err)
	defer secured.Close()
	api := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	api.Config.SetKeepAlivesEnabled(false)
	api.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that Envoy gives up
	api.Listener = tls.NewListener(api.Listener, secured.Config())
	api.Start()
	defer api.Close()

	dir := t.TempDir()
	trust := func(a *controltls.Authority) {
		version, err := os.MkdirTemp(dir, "..version-")
		require.NoError(t, err)
		f, err := a.Files()
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(version, controltls.CAFile), f.CA, 0o600))
		require.NoError(t, os.Symlink(filepath.Base(version), filepath.Join(dir, "..data_new")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_new"), filepath.Join(dir, "..data")))
	}
	trust(ours)
	require.NoError(t, os.Symlink(filepath.Join("..data", controltls.CAFile), filepath.Join(dir, controltls.CAFile)))
	endpoint, err := envoy.ParseEndpoint(address(api))
	require.NoError(t, err)
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) {
		s.API = &envoy.API{Domain: sandboxDomain, Endpoints: []envoy.Endpoint{endpoint}, TLS: &envoy.APITLS{
			CAFile: filepath.Join(dir, controltls.CAFile), ServerName: controltls.AllocatorName, SecretFile: filepath.Join(dir, "envoy-api.yaml"),
		}}
		raw, err := envoy.APISecret(*s)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(s.API.TLS.SecretFile, raw, 0o600))
	}})
	answers := func(code int) func() bool {
		return func() bool {
			return g.answer("GET /teams HTTP/1.1\r\nHost: "+apiHost+"\r\nConnection: close\r\n\r\n").code == code
		}
	}
	require.Eventually(t, answers(http.StatusTeapot), time.Minute, 10*time.Millisecond)
	trust(others)
	require.Eventually(t, answers(http.StatusServiceUnavailable), time.Minute, 10*time.Millisecond, "a false API is believed")
	trust(ours)
	require.Eventually(t, answers(http.StatusTeapot), time.Minute, 10*time.Millisecond, "the authority is not read again")
}

// Invariant: P5
func TestMaskedHostDoesNotLeadToTheAPI(t *testing.T) {
	api := newFakeAPI(t)
	g, _ := apiGateway(t, address(api.Server))
	for _, clear := range []bool{false, true} {
		fields := g.admitted("abc")
		if clear {
			fields[envoy.MetadataTLS] = text("yes")
		}
		g.router.set(func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
					Response: &extprocv3.CommonResponse{
						HeaderMutation:  &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{set(":authority", apiHost)}},
						ClearRouteCache: clear,
					},
				}},
				DynamicMetadata: metadata(fields),
			})
		})
		a := g.do(g.request(host, "/", nil))
		if clear {
			require.Equal(t, http.StatusServiceUnavailable, a.code, a.body)
		} else {
			require.Equal(t, http.StatusOK, a.code, a.body)
		}
	}
	require.Zero(t, api.count())
}
