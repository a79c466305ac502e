package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/extproc/admin"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// router has a cache and tracker with two sandboxes, and a third that is only routable.
type router struct {
	http.Handler
	health    http.Handler
	options   admin.Options
	cache     *routecache.Cache
	ready     error
	failLooks func()
}

func newRouter(t require.TestingT) *router {
	r := &router{}
	var err error
	r.cache, err = routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return false }})
	require.NoError(t, err)
	now, open, lookError := time.Minute, map[look.Host]int{}, error(nil)
	tracker, err := lastactive.New(lastactive.Options{
		ConnectWindow: 5 * time.Second, Now: func() time.Duration { return now },
		Look: func(context.Context) (look.Look, error) { return look.Look{Gateway: "envoy-1", Hosts: open}, lookError },
	})
	require.NoError(t, err)
	at := func(i byte) netip.AddrPort { return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 8080) }
	host := func(i byte) look.Host { return look.Host{AddrPort: at(i)} }
	begin := func(id string, i byte) *lastactive.Entry {
		tracker.Expect(id, at(i).Addr(), 0)
		e, _ := tracker.Begin(sandboxid.MustKey(id), at(i), false)
		require.NotNil(t, e)
		return e
	}
	looks := func(after time.Duration) {
		now += after
		tracker.Look(context.Background())
	}
	begin("aa2", 1).Read()
	looks(0)
	looks(5 * time.Second) // it was idle then
	open[host(2)] = 1
	begin("aa1", 2).Read()
	looks(time.Second)
	looks(5 * time.Second)
	delete(open, host(2))
	looks(82500 * time.Millisecond)
	open[host(0)], open[host(3)] = 1, 2
	begin("bb1", 0)
	looks(time.Second)
	now += 500 * time.Millisecond
	for i, id := range []string{"bb1", "aa2", "aa1"} {
		r.cache.Put(id, routecache.Route{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), DefaultPort: 8080})
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "berth_test", Help: "help"}))
	r.options = admin.Options{
		Cache: r.cache, Tracker: tracker, Metrics: metrics, Now: func() time.Time { return noon },
		Ready: func() error { return r.ready }, Envoy: http.DefaultClient,
	}
	pages, err := admin.New(r.options)
	require.NoError(t, err)
	r.Handler, r.health = pages.Admin(), pages.Health()
	r.failLooks = func() {
		lookError = errors.New("Envoy does not answer")
		looks(0)
	}
	return r
}

// openOnly restricts the ports of a sandbox in the cache.
func (r *router) openOnly(id string, ports ...uint16) {
	for _, e := range r.cache.Dump() {
		if e.ID == id {
			e.Route.Ports = routecache.NewPorts(ports)
			r.cache.Put(id, e.Route)
		}
	}
}

func (r *router) get(target string) *httptest.ResponseRecorder {
	return r.getFrom("127.0.0.1:9901", target)
}

func (r *router) getFrom(host, target string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	request := httptest.NewRequest(http.MethodGet, target, nil)
	request.Host = host
	request = request.WithContext(context.WithValue(request.Context(), http.LocalAddrContextKey,
		&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9901}))
	r.ServeHTTP(w, request)
	return w
}

// Invariant: P6
func TestForeignHostIsRefusedOnLoopback(t *testing.T) {
	r := newRouter(t)
	for _, path := range []string{"/admin/last-active", "/admin/routes", "/metrics", "/debug/pprof/cmdline", "/healthz", "/"} {
		for _, host := range []string{"evil.example", "evil.example:9901", "127.0.0.1.evil.example", ""} {
			w := r.getFrom(host, path)
			require.Equal(t, http.StatusMisdirectedRequest, w.Code, "%s %s", host, path)
			require.Contains(t, w.Body.String(), `"reason":"host_refused"`)
		}
	}
	for _, host := range []string{"127.0.0.1:9901", "localhost:9901", "[::1]:9901"} {
		require.Equal(t, 200, r.getFrom(host, "/admin/routes").Code, host)
	}
	elsewhere := r.options
	elsewhere.AnyHost = true // the operator has opened the listener
	p, err := admin.New(elsewhere)
	require.NoError(t, err)
	r.Handler = p.Admin()
	require.Equal(t, 200, r.getFrom("10.0.0.1:9901", "/admin/routes").Code)
}

func TestLastActiveIsTheDocumentedJSON(t *testing.T) {
	r := newRouter(t)
	w := r.get("/admin/last-active?prefix=aa")
	require.Equal(t, 200, w.Code)
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	require.JSONEq(t, `{
		"now": "2030-01-01T12:00:00Z",
		"sandboxes": [
			{"sandboxID": "aa1", "podIP": "10.0.0.2", "lastActive": "2030-01-01T11:59:58.5Z", "ageSeconds": 1.5, "kind": "open", "openRequests": 0, "unreadAnswers": 0},
			{"sandboxID": "aa2", "podIP": "10.0.0.1", "lastActive": "2030-01-01T11:58:30Z", "ageSeconds": 90, "kind": "admission", "openRequests": 0, "unreadAnswers": 0}
		]
	}`, w.Body.String())
	r.failLooks()
	require.JSONEq(t, `{"now": "2030-01-01T12:00:00Z", "lookError": "Envoy does not answer", "sandboxes": []}`, r.get("/admin/last-active?prefix=x").Body.String())
}

func TestRoutesIsTheDocumentedJSON(t *testing.T) {
	r := newRouter(t)
	const routes = `"routes": [{"sandboxID": "aa1", "podIP": "10.0.0.2", "defaultPort": 8080}]`
	require.JSONEq(t, `{"fresh": false, `+routes+`}`, r.get("/admin/routes?id=aa1").Body.String())
	r.cache.SetFreshUntil(time.Hour)
	require.JSONEq(t, `{"fresh": true, `+routes+`}`, r.get("/admin/routes?id=aa1").Body.String())
	r.openOnly("aa1", 8080, 49983)
	require.JSONEq(t, `{"fresh": true, "routes": [{"sandboxID": "aa1", "podIP": "10.0.0.2", "defaultPort": 8080, "ports": [8080, 49983]}]}`,
		r.get("/admin/routes?id=aa1").Body.String())
}

func TestTextForms(t *testing.T) {
	r := newRouter(t)
	w := r.get("/admin/last-active?format=text")
	require.Equal(t, "text/plain; charset=utf-8", w.Header().Get("Content-Type"))
	const list = `aa1  10.0.0.2  2030-01-01T11:59:58Z  2s ago  open  open 0  unread 0
aa2  10.0.0.1  2030-01-01T11:58:30Z  90s ago  admission  open 0  unread 0
bb1  10.0.0.0  2030-01-01T12:00:00Z  0s ago  open  open 1  unread 1
`
	require.Equal(t, list, w.Body.String())
	r.failLooks()
	require.Contains(t, r.get("/admin/last-active?format=text").Body.String(), "cannot tell what is open: Envoy does not answer\n")
	r.openOnly("aa2", 8080, 49983)
	require.Equal(t, `aa1  10.0.0.2  default port 8080  ports all
aa2  10.0.0.1  default port 8080  ports 8080, 49983
bb1  10.0.0.0  default port 8080  ports all
`, r.get("/admin/routes?format=text").Body.String())
}

func TestFiltersWithoutMatchGiveEmptyList(t *testing.T) {
	r := newRouter(t)
	for query, want := range map[string]string{
		"":                      "aa1 aa2 bb1",
		"?format=json":          "aa1 aa2 bb1",
		"?id=aa1":               "aa1",
		"?prefix=aa":            "aa1 aa2",
		"?prefix=":              "aa1 aa2 bb1",
		"?id=aa1&prefix=aa":     "aa1",
		"?id=aa1&prefix=bb":     "",
		"?id=aa":                "",
		"?prefix=a1":            "",
		"?prefix=b&format=json": "bb1",
	} {
		var active admin.LastActive
		require.NoError(t, json.Unmarshal(r.get("/admin/last-active"+query).Body.Bytes(), &active))
		require.NotNil(t, active.Sandboxes, "null instead of an empty list")
		var got []string
		for _, s := range active.Sandboxes {
			if s.SandboxID != "" {
				got = append(got, s.SandboxID)
			}
		}
		require.Equal(t, want, strings.Join(got, " "), query)

		var routes admin.Routes
		require.NoError(t, json.Unmarshal(r.get("/admin/routes"+query).Body.Bytes(), &routes))
		require.NotNil(t, routes.Routes)
		got = nil
		for _, s := range routes.Routes {
			got = append(got, s.SandboxID)
		}
		require.Equal(t, want, strings.Join(got, " "), query)
	}
}

// An unknown parameter must not select everything.
func TestUnknownParametersAreRefused(t *testing.T) {
	r := newRouter(t)
	for query, says := range map[string]string{
		"?sandbox=aa1":        `parameter "sandbox"`,
		"?ID=aa1":             `parameter "ID"`,
		"?id=aa1&x":           `parameter "x"`,
		"?format=yaml":        `format="yaml"`,
		"?format=TEXT":        `format="TEXT"`,
		"?id=":                "must not be empty",
		"?id":                 "must not be empty",
		"?id=aa1&id=aa2":      "2 times",
		"?id=%zz":             "query",
		"?id=aa1;format=text": "query",
	} {
		for _, path := range []string{"/admin/last-active", "/admin/routes"} {
			w := r.get(path + query)
			require.Equal(t, 400, w.Code, query)
			var e struct {
				Code            int
				Reason, Message string
			}
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &e))
			require.Equal(t, 400, e.Code)
			require.Equal(t, "bad_request", e.Reason)
			require.Contains(t, e.Message, says, query)
		}
	}
}

func TestReadyzNamesReasonAndHealthzIgnoresIt(t *testing.T) {
	r := newRouter(t)
	require.Equal(t, 200, r.get("/readyz").Code)
	r.ready = errors.New("routes are not fresh")
	w := r.get("/readyz")
	require.Equal(t, 503, w.Code)
	require.Equal(t, "routes are not fresh\n", w.Body.String())
	w = r.get("/healthz")
	require.Equal(t, 200, w.Code)
	require.Equal(t, "ok\n", w.Body.String())
}

func TestMetricsAndProfilesAreServed(t *testing.T) {
	r := newRouter(t)
	require.Contains(t, r.get("/metrics").Body.String(), "berth_test 0")
	require.Contains(t, r.get("/debug/pprof/").Body.String(), "goroutine")
	require.Equal(t, 200, r.get("/debug/pprof/goroutine?debug=1").Code)
	require.Equal(t, 200, r.get("/debug/pprof/cmdline").Code)
}

func TestPagesOfEnvoyArePassedOnLocally(t *testing.T) {
	r := newRouter(t)
	r.options.Envoy = &http.Client{Transport: roundTrip(func(q *http.Request) (*http.Response, error) {
		if q.URL.Path == "/clusters" {
			return nil, errors.New("connection refused")
		}
		w := httptest.NewRecorder()
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, "%s %s", q.Method, q.URL)
		return w.Result(), nil
	})}
	pages, err := admin.New(r.options)
	require.NoError(t, err)
	r.Handler = pages.Admin()

	w := r.get("/admin/envoy/config_dump?include_eds")
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, "GET http://envoy/config_dump", w.Body.String())
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	require.Equal(t, http.StatusBadGateway, r.get("/admin/envoy/clusters").Code)
	require.Equal(t, http.StatusNotFound, r.get("/admin/envoy/quitquitquit").Code)

	r.options.AnyHost = true
	pages, err = admin.New(r.options)
	require.NoError(t, err)
	r.Handler = pages.Admin()
	require.Equal(t, http.StatusMisdirectedRequest, r.getFrom("router.example.com", "/admin/envoy/stats/prometheus").Code)
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestUnknownPageListsKnownPages(t *testing.T) {
	r := newRouter(t)
	for _, path := range []string{"/", "/admin", "/admin/last-active/", "/healthz/x"} {
		w := r.get(path)
		require.Equal(t, 404, w.Code, path)
		require.Contains(t, w.Body.String(), "/admin/last-active")
	}
}

func TestProfileMayOutlastListenerDeadlines(t *testing.T) {
	s := httptest.NewUnstartedServer(newRouter(t))
	s.Config.ReadTimeout = 100 * time.Millisecond
	s.Start()
	defer s.Close()
	for _, path := range []string{"/debug/pprof/profile?seconds=1", "/debug/pprof/trace?seconds=1"} {
		began := time.Now()
		answer, err := s.Client().Get(s.URL + path)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, answer.Body)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Equal(t, 200, answer.StatusCode)
		require.GreaterOrEqual(t, time.Since(began), time.Second, "it was cut short: %s", path)
	}
}

func TestHealthHandlerShowsNoSandboxAndNoProfile(t *testing.T) {
	r := newRouter(t)
	health := func(method, target string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r.health.ServeHTTP(w, httptest.NewRequest(method, target, nil))
		return w
	}
	require.Equal(t, "ok\n", health("GET", "/healthz").Body.String())
	require.Equal(t, "ok\n", health("GET", "/readyz").Body.String())
	require.Contains(t, health("GET", "/metrics").Body.String(), "berth_test 0")
	r.ready = errors.New("routes are not fresh")
	require.Equal(t, 503, health("GET", "/readyz").Code)
	require.Equal(t, 200, health("GET", "/healthz").Code)

	for _, method := range []string{"GET", "POST"} {
		for _, path := range []string{
			"/", "/admin", "/admin/last-active", "/admin/routes", "/admin/routes?format=text", "/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/cmdline",
			"/debug/pprof/profile", "/debug/pprof/symbol", "/debug/pprof/trace", "/metrics/", "/healthz/../debug/pprof/cmdline", "//admin/routes",
		} {
			w := health(method, path)
			if to := w.Header().Get("Location"); to != "" { // ServeMux sends clients to the clean path
				w = health(method, to)
			}
			require.Equal(t, 404, w.Code, "%s %s", method, path)
			require.NotContains(t, w.Body.String(), "/admin", "it tells of pages that are not here")
		}
	}
	require.Contains(t, health("GET", "/").Body.String(), "/healthz, /readyz or /metrics")
}

func TestOptionsAreRequired(t *testing.T) {
	_, err := admin.New(admin.Options{})
	require.Error(t, err)
}

type silent struct{}

func (silent) Errorf(string, ...any) {}
func (silent) FailNow()              {}

func Example() {
	w := newRouter(silent{}).get("/admin/last-active?prefix=aa&format=text")
	fmt.Print(w.Body)
	// Output:
	// aa1  10.0.0.2  2030-01-01T11:59:58Z  2s ago  open  open 0  unread 0
	// aa2  10.0.0.1  2030-01-01T11:58:30Z  90s ago  admission  open 0  unread 0
}
