package console_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/console"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

const address = "https://console.example.com"

// fakeAPI answers calls and notes them.
type fakeAPI struct {
	mu      sync.Mutex
	callers map[string]openapi.Caller // by key
	answers map[string]any            // by method and path
	calls   []string                  // those but for /v1/caller, with their keys
	bodies  []string
	headers []http.Header
	refusal map[string]int // statuses by method and path
	stream  chan string    // what the stream of events sends
}

func newAPI() *fakeAPI {
	caller := func(name, team string, role openapi.CallerRole) openapi.Caller {
		return openapi.Caller{Key: name, Team: team, Role: role, PublicURL: "https://sandbox.example.com:8443", Version: "0.0.0"}
	}
	return &fakeAPI{
		callers: map[string]openapi.Caller{
			"k-admin": caller("ada", "blue", openapi.Admin), "k-member": caller("mo", "blue", openapi.Member),
			"k-reader": caller("ria", "blue", openapi.ReadOnly), "": caller("", "", openapi.Admin),
		},
		answers: map[string]any{
			"GET /v1/pools":         openapi.Pools{Pools: []openapi.Pool{}},
			"GET /v1/sessions":      openapi.Sessions{Sessions: []openapi.ListedSession{}},
			"GET /v1/fences":        openapi.Fences{Fences: []openapi.Fence{}},
			"GET /v1/teams":         openapi.TeamStatuses{Teams: []openapi.TeamStatus{}},
			"GET /v1/sandboxes":     openapi.SandboxRecords{Sandboxes: []openapi.SandboxRecord{}},
			"GET /v1/last-active":   openapi.LastActive{Sandboxes: []openapi.Activity{}},
			"GET /events/sandboxes": []openapi.LifecycleEvent{},
		},
		refusal: map[string]int{},
	}
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	key, call := r.Header.Get("X-API-Key"), r.Method+" "+r.URL.Path
	f.mu.Lock()
	caller, known := f.callers[key]
	if call != "GET /v1/caller" {
		f.calls, f.bodies = append(f.calls, key+" "+r.Method+" "+r.URL.RequestURI()), append(f.bodies, string(body))
	}
	f.headers = append(f.headers, r.Header.Clone())
	answer, found := f.answers[call]
	status := f.refusal[call]
	f.mu.Unlock()
	switch {
	case !known:
		fail(w, http.StatusUnauthorized, "unauthorized", "unknown key")
	case call == "GET /v1/caller":
		answered(w, caller)
	case status != 0:
		fail(w, status, "refused", "the API says why")
	case call == "GET /v1/events":
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(http.StatusOK)
		for text := range f.stream {
			_, _ = io.WriteString(w, text)
			_ = http.NewResponseController(w).Flush()
		}
	case r.Method != http.MethodGet && answer == nil:
		w.WriteHeader(http.StatusNoContent)
	case !found:
		fail(w, http.StatusNotFound, "not_found", "there is nothing at "+r.URL.Path)
	default:
		answered(w, answer)
	}
}

func answered(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func fail(w http.ResponseWriter, status int, reason, message string) {
	w.WriteHeader(status)
	answered(w, openapi.Error{Code: status, Reason: reason, Message: message})
}

// made returns the calls since the last time.
func (f *fakeAPI) made() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := f.calls
	f.calls = nil
	return all
}

// site is a console with a browser in front of it that keeps its cookies.
type site struct {
	t       testing.TB
	api     *fakeAPI
	console *console.Console
	now     time.Time
	cookies map[string]string
}

func open(t testing.TB, api *fakeAPI, edits ...func(*console.Options)) *site {
	t.Helper()
	s := &site{t: t, api: api, now: noon, cookies: map[string]string{}}
	u, err := url.Parse(address)
	require.NoError(t, err)
	o := console.Options{
		API: console.Handler(api), APIURL: "http://localhost", URL: u, Sealing: [32]byte{1}, Log: zap.NewNop(),
		Now: func() time.Time { return s.now },
	}
	for _, edit := range edits {
		edit(&o)
	}
	s.console, err = console.New(o)
	require.NoError(t, err)
	return s
}

// send sends a request, as the browser would from a page of the console, and keeps the cookies.
func (s *site) send(method, target string, form url.Values, edits ...func(*http.Request)) *httptest.ResponseRecorder {
	s.t.Helper()
	r := httptest.NewRequestWithContext(context.Background(), method, address+target, strings.NewReader(form.Encode()))
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Origin", address)
		r.Header.Set("Sec-Fetch-Site", "same-origin")
	}
	r.TLS = nil
	for name, value := range s.cookies {
		r.AddCookie(&http.Cookie{Name: name, Value: value})
	}
	for _, edit := range edits {
		edit(r)
	}
	w := httptest.NewRecorder()
	s.console.ServeHTTP(w, r)
	for _, c := range w.Result().Cookies() {
		require.True(s.t, c.HttpOnly && c.Secure && c.SameSite == http.SameSiteStrictMode && c.Path == "/" && c.Domain == "", c)
		require.True(s.t, strings.HasPrefix(c.Name, "__Host-berth-console"), c)
		if s.cookies[c.Name] = c.Value; c.MaxAge < 0 {
			delete(s.cookies, c.Name)
		}
	}
	return w
}

func (s *site) get(target string, edits ...func(*http.Request)) *httptest.ResponseRecorder {
	s.t.Helper()
	return s.send(http.MethodGet, target, nil, edits...)
}

func (s *site) signIn(key string) {
	s.t.Helper()
	w := s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {key}})
	require.Equal(s.t, http.StatusSeeOther, w.Code, w.Body)
	s.api.made()
}

// toSignIn says that an answer leads to the sign-in.
func toSignIn(t testing.TB, w *httptest.ResponseRecorder) *url.URL {
	t.Helper()
	require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
	u, err := url.Parse(w.Header().Get("Location"))
	require.NoError(t, err)
	require.Equal(t, "/console/sign-in", u.Path)
	return u
}

func header(name, value string) func(*http.Request) {
	return func(r *http.Request) {
		if r.Header.Del(name); value != "" {
			r.Header.Set(name, value)
		}
	}
}

func host(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }

// pagesOf are the pages that need no object.
var pagesOf = []string{
	"/console/", "/console/pools", "/console/sandboxes", "/console/routers", "/console/fences", "/console/teams", "/console/connect",
}

func TestSignInLeadsBackToThePage(t *testing.T) {
	s := open(t, newAPI())
	require.NotContains(t, s.get(toSignIn(t, s.get("/console/")).String()).Body.String(), "Your session has ended.")
	s.signIn("k-member")
	s.now = s.now.Add(13 * time.Hour)
	u := toSignIn(t, s.get("/console/sandboxes?pool=demo&after=x"))
	require.Equal(t, "/console/sandboxes?pool=demo&after=x", u.Query().Get("return"))
	form := s.get(u.String())
	require.Equal(t, http.StatusOK, form.Code)
	require.Contains(t, form.Body.String(), `value="/console/sandboxes?pool=demo&amp;after=x"`)
	require.Contains(t, form.Body.String(), "Your session has ended.")

	w := s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {" k-member\n"}, "return": {"/console/sandboxes?pool=demo"}})
	require.Equal(t, http.StatusSeeOther, w.Code)
	require.Equal(t, "/console/sandboxes?pool=demo", w.Header().Get("Location"))
	w = s.get("/console/")
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.Contains(t, w.Body.String(), "mo")
	for _, call := range s.api.made() {
		require.True(t, strings.HasPrefix(call, "k-member "), call)
	}
}

// Invariant: P26
func TestReturnIsAlwaysAPageOfTheConsole(t *testing.T) {
	for _, target := range []string{
		"", "/", "//evil.example", "https://evil.example/console/", "/console/../admin", "/console//evil.example", `/console/\evil`,
		"/console/a b", "/console/sign-in", "/console/enter?token=x", "javascript:alert(1)", "/consoles/", "/console/\u202e",
		"/console/" + strings.Repeat("x", 5000), "/console/%2e%2e/x", "http:/console/",
	} {
		s := open(t, newAPI())
		w := s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {"k-admin"}, "return": {target}})
		require.Equal(t, http.StatusSeeOther, w.Code, target)
		require.Equal(t, "/console/", w.Header().Get("Location"), target)
	}
}

func TestWrongKeyIsASentenceBesideTheField(t *testing.T) {
	for key, says := range map[string]string{
		"": "Enter an API key.", "nosuch": "The API does not know this key.", "a b": "This is not an API key", "\u00e4": "This is not an API key",
		strings.Repeat("x", 257): "This is not an API key",
	} {
		s := open(t, newAPI())
		w := s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {key}})
		require.Equal(t, http.StatusUnprocessableEntity, w.Code)
		require.Contains(t, w.Body.String(), says)
		require.Contains(t, w.Body.String(), `aria-describedby="key-error"`)
		require.Empty(t, s.cookies)
		if len(key) > 5 {
			require.NotContains(t, w.Body.String(), key)
		}
	}
}

func TestSignInsAreBoundedInAll(t *testing.T) {
	s := open(t, newAPI())
	try := func() int {
		return s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {"nosuch"}}).Code
	}
	for range 20 {
		require.Equal(t, http.StatusUnprocessableEntity, try())
	}
	require.Equal(t, http.StatusTooManyRequests, try())
	s.now = s.now.Add(200 * time.Millisecond)
	require.Equal(t, http.StatusUnprocessableEntity, try())
	require.Equal(t, http.StatusTooManyRequests, try())
}

// Invariant: P26
func TestSessionIsSealedAndEnds(t *testing.T) {
	api := newAPI()
	s := open(t, api)
	s.signIn("k-admin")
	const name = "__Host-berth-console"
	sealed := s.cookies[name]
	require.NotContains(t, sealed, "k-admin")
	raw := []byte(sealed)
	for i := range raw { // every character counts
		raw[i] ^= 1
		s.cookies[name] = string(raw)
		toSignIn(t, s.get("/console/"))
		raw[i] ^= 1
	}
	for _, value := range []string{"", "x", sealed + "A", sealed[:20], "k-admin", strings.Repeat("A", 8000)} {
		s.cookies[name] = value
		toSignIn(t, s.get("/console/"))
	}
	s.cookies[name] = sealed
	other := open(t, api) // another replica with the same key, and one with another key
	other.cookies[name] = sealed
	require.Equal(t, http.StatusOK, other.get("/console/").Code)
	foreign := open(t, api, func(o *console.Options) { o.Sealing = [32]byte{2} })
	foreign.cookies[name] = sealed
	toSignIn(t, foreign.get("/console/"))

	s.now = noon.Add(12 * time.Hour)
	require.Equal(t, http.StatusOK, s.get("/console/").Code)
	s.now = noon.Add(12*time.Hour + time.Second)
	toSignIn(t, s.get("/console/"))
	s.now = noon.Add(-6 * time.Minute)
	toSignIn(t, s.get("/console/"))
}

// Invariant: P26
func TestRevokedKeyEndsItsSession(t *testing.T) {
	api := newAPI()
	s := open(t, api)
	s.signIn("k-member")
	require.Equal(t, http.StatusOK, s.get("/console/").Code)
	delete(api.callers, "k-member")
	u := toSignIn(t, s.get("/console/pools"))
	require.Equal(t, "key", u.Query().Get("why"))
	require.Empty(t, s.cookies)
	require.Equal(t, http.StatusUnauthorized, s.get("/console/events").Code)
}

func TestSignOutEndsTheSessionOfTheBrowser(t *testing.T) {
	s := open(t, newAPI())
	s.signIn("k-member")
	w := s.send(http.MethodPost, "/console/sign-out", nil)
	require.Equal(t, http.StatusSeeOther, w.Code)
	require.Empty(t, s.cookies)
	toSignIn(t, s.get("/console/"))
}

// Invariant: P26
func TestFormsOfOtherOriginsDoNothing(t *testing.T) {
	forms := map[string]url.Values{
		"/console/sign-in": {"key": {"k-admin"}}, "/console/sign-out": {}, "/console/sandboxes/abc/end": {}, "/console/sandboxes/abc/open": {},
		"/console/sandboxes/abc/timeout": {"timeout": {"5"}}, "/console/pools/demo/scale": {"warm": {"1"}, "generation": {"1"}},
		"/console/routers/r/declare-dead": {"reason": {"x"}, "sure": {"yes"}},
	}
	for _, signedIn := range []bool{true, false} {
		s := open(t, newAPI(), func(o *console.Options) { o.Open = !signedIn })
		if signedIn {
			s.signIn("k-admin")
		}
		kept := fmt.Sprint(s.cookies)
		for target, form := range forms {
			for name, edit := range map[string]func(*http.Request){
				"other":     func(r *http.Request) { r.Header.Set("Origin", "https://evil.example") },
				"sandbox":   func(r *http.Request) { r.Header.Set("Origin", "https://8080-abc.sandbox.example.com:8443") },
				"null":      func(r *http.Request) { r.Header.Set("Origin", "null") },
				"plain":     func(r *http.Request) { r.Header.Set("Origin", "http://console.example.com") },
				"port":      func(r *http.Request) { r.Header.Set("Origin", address+":8443") },
				"none":      func(r *http.Request) { r.Header.Del("Origin"); r.Header.Del("Sec-Fetch-Site") },
				"same-site": func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "same-site") },
				"cross":     func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") },
				"user":      func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "none") },
			} {
				w := s.send(http.MethodPost, target, form, edit)
				require.Equal(t, http.StatusForbidden, w.Code, "%s from %s", target, name)
				require.Contains(t, w.Body.String(), "nothing was done", "%s from %s", target, name)
			}
		}
		require.Empty(t, s.api.made())
		require.Equal(t, kept, fmt.Sprint(s.cookies))
	}
}

// Invariant: P26
func TestOnlyHostsOfTheConsoleAreAnswered(t *testing.T) {
	s := open(t, newAPI())
	for _, name := range []string{"evil.example", "127.0.0.1.nip.io", "x.console.example.com", "api.sandbox.example.com", "", "console.example.com:8443"} {
		w := s.get("/console/sign-in", host(name))
		require.Equal(t, http.StatusMisdirectedRequest, w.Code, name)
		require.NotContains(t, w.Body.String(), "<form", name)
	}
	for _, name := range []string{"console.example.com", "CONSOLE.example.com:443", "localhost:8082", "127.0.0.1:1", "[::1]:80"} {
		require.Equal(t, http.StatusOK, s.get("/console/sign-in", host(name)).Code, name)
	}
	alone := open(t, newAPI(), func(o *console.Options) { o.URL = nil })
	w := alone.get("/console/sign-in")
	require.Equal(t, http.StatusMisdirectedRequest, w.Code)
	require.Contains(t, w.Body.String(), "--console-url")
}

// Invariant: P26
func TestKeyIsAskedForOnlyOnProtectedConnections(t *testing.T) {
	for _, test := range []struct {
		edits []func(*http.Request)
		asks  bool
	}{
		{asks: true},
		{[]func(*http.Request){host("localhost:9"), header("Origin", "http://localhost:9")}, true},
		{[]func(*http.Request){header("X-Forwarded-Proto", "https")}, true},
		{[]func(*http.Request){header("X-Forwarded-Proto", "https, http")}, false},
		{[]func(*http.Request){header("X-Forwarded-Proto", "http")}, false},
		{[]func(*http.Request){header("Upgrade-Insecure-Requests", "1"), header("Sec-Fetch-Site", "")}, false},
	} {
		s := open(t, newAPI())
		w := s.get("/console/sign-in", test.edits...)
		require.Equal(t, test.asks, strings.Contains(w.Body.String(), `name="key"`), w.Body)
		if !test.asks {
			require.Contains(t, w.Body.String(), "not connected through TLS")
		}
		w = s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {"k-admin"}}, test.edits...)
		require.Equal(t, test.asks, w.Code == http.StatusSeeOther, w.Body)
		require.Equal(t, test.asks, len(s.cookies) == 1)
	}
}

func TestPagesHaveTheHeadersOfAClosedPage(t *testing.T) {
	s := open(t, newAPI())
	s.signIn("k-admin")
	for _, target := range append(pagesOf, "/console/sign-in", "/console/nosuch", "/console/pools/nosuch") {
		w := s.get(target)
		h := w.Header()
		require.Equal(t, "no-store", h.Get("Cache-Control"), target)
		require.Equal(t, "nosniff", h.Get("X-Content-Type-Options"), target)
		require.Equal(t, "same-origin", h.Get("Referrer-Policy"), target)
		require.Equal(t, "same-origin", h.Get("Cross-Origin-Opener-Policy"), target)
		policy := h.Get("Content-Security-Policy")
		require.True(t, strings.HasPrefix(policy, "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'"), policy)
		require.Contains(t, policy, "base-uri 'none'; frame-ancestors 'none'", target)
		require.NotContains(t, policy, "unsafe", target)
		body := w.Body.String()
		require.NotContains(t, body, " style=", target)
		require.NotContains(t, body, "<style", target)
		require.NotRegexp(t, `<script[^>]*>[^<]`, body, target)
		require.NotRegexp(t, ` on[a-z]+=`, body, target)
		require.Equal(t, 1, strings.Count(body, "<h1"), target)
		require.Contains(t, body, `<main id="main"`, target)
	}
}

func TestAssetsAreKeptByTheirDigest(t *testing.T) {
	s := open(t, newAPI())
	page := s.get("/console/sign-in").Body.String()
	found := 0
	for _, part := range strings.Split(page, `"`) {
		if !strings.HasPrefix(part, "/console/static/") {
			continue
		}
		found++
		w := s.get(part)
		require.Equal(t, http.StatusOK, w.Code, part)
		require.Equal(t, "public, max-age=31536000, immutable", w.Header().Get("Cache-Control"), part)
		require.NotEmpty(t, w.Header().Get("Content-Type"), part)
		require.Equal(t, http.StatusNotFound, s.get(strings.Replace(part, "-", "-0", 1)).Code, part)
	}
	require.GreaterOrEqual(t, found, 3)
}

func TestPagesForOperatorsNeedAnAdmin(t *testing.T) {
	for key, admin := range map[string]bool{"k-admin": true, "k-member": false, "k-reader": false} {
		s := open(t, newAPI())
		s.signIn(key)
		for _, target := range []string{"/console/routers", "/console/fences", "/console/teams", "/console/routers/r/declare-dead"} {
			w := s.get(target)
			require.Equal(t, !admin, w.Code == http.StatusForbidden, "%s %s: %d", key, target, w.Code)
		}
		require.Equal(t, admin, strings.Contains(s.get("/console/").Body.String(), `href="/console/teams"`))
	}
}

// The API refuses: the console passes on what it says.
// Invariant: P26
func TestRefusalsOfTheAPIAreShown(t *testing.T) {
	for target, call := range map[string]string{
		"/console/sandboxes/abc/end": "DELETE /sandboxes/abc", "/console/sandboxes/abc/open": "POST /v1/sandboxes/abc/links",
		"/console/sandboxes/abc/timeout": "POST /sandboxes/abc/timeout", "/console/pools/demo/scale": "POST /v1/pools/demo/scale",
		"/console/routers/r/declare-dead": "POST /v1/sessions/r/declare-dead",
	} {
		s := open(t, newAPI())
		s.api.refusal[call] = http.StatusForbidden
		s.signIn("k-reader")
		w := s.send(http.MethodPost, target, url.Values{"timeout": {"5"}, "warm": {"1"}, "generation": {"1"}, "reason": {"x"}, "sure": {"yes"}})
		require.Equal(t, http.StatusForbidden, w.Code, target)
		require.Contains(t, w.Body.String(), "The API says why.", target)
		require.Len(t, s.api.made(), 1, target)
	}
}

func TestPageOfAPoolShowsItsLatestFailures(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/pools/demo"] = poolOf("demo")
	s := open(t, api)
	s.signIn("k-reader")
	failures := func() string {
		body := s.get("/console/pools/demo").Body.String()
		_, part, found := strings.Cut(body, `<section id="failures"`)
		require.True(t, found, body)
		part, _, _ = strings.Cut(part, "</section>")
		return part
	}
	require.Contains(t, failures(), "The pods cannot be read now")
	api.answers["GET /v1/pools/demo/diagnostics"] = openapi.PoolDiagnostics{}
	require.Contains(t, failures(), "None since the leader began to lead.")
	api.answers["GET /v1/pools/demo/diagnostics"] = openapi.PoolDiagnostics{Failures: []openapi.PodFailure{
		{PodName: "demo-2", Reason: "OOMKilled", Message: "container main: exit code 137", At: noon.Add(-time.Minute)}, {PodName: "demo-1", Reason: "Deleted", At: noon},
	}}
	part := failures()
	require.Contains(t, part, "OOMKilled: container main: exit code 137</td>")
	require.Contains(t, part, "Deleted</td>")
	require.Contains(t, part, `datetime="2030-01-01T11:59:00Z"`)
	require.Less(t, strings.Index(part, "demo-2"), strings.Index(part, "demo-1"), "the latest is first")
}

func TestFormsAnswerBesideTheirFields(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/pools/demo"] = poolOf("demo")
	api.answers["GET /v1/sandboxes/abc"] = openapi.SandboxExplanation{Sandbox: recordOf("abc"), Now: noon}
	api.answers["GET /v1/sessions"] = openapi.Sessions{Sessions: []openapi.ListedSession{{SessionID: "r"}}}
	s := open(t, api)
	s.signIn("k-admin")
	for _, test := range []struct {
		target string
		form   url.Values
		field  string
	}{
		{"/console/pools/demo/scale", url.Values{"warm": {"many"}, "generation": {"1"}}, "warm"},
		{"/console/pools/demo/scale", url.Values{"warm": {"-1"}, "generation": {"1"}}, "warm"},
		{"/console/pools/demo/scale", url.Values{"warm": {"1"}, "maxWarm": {"10001"}, "generation": {"1"}}, "maxWarm"},
		{"/console/pools/demo/scale", url.Values{"warm": {"1"}, "maxPods": {"x"}, "generation": {"1"}}, "maxPods"},
		{"/console/sandboxes/abc/timeout", url.Values{"timeout": {"0"}}, "timeout"},
		{"/console/sandboxes/abc/timeout", url.Values{"timeout": {`"><script>`}}, "timeout"},
		{"/console/routers/r/declare-dead", url.Values{"sure": {"yes"}}, "reason"},
		{"/console/routers/r/declare-dead", url.Values{"reason": {"its machine is gone"}}, "reason"},
	} {
		w := s.send(http.MethodPost, test.target, test.form)
		require.Equal(t, http.StatusUnprocessableEntity, w.Code, test.form)
		require.Contains(t, w.Body.String(), `aria-describedby="`+test.field+`-error"`, test.form)
		require.NotContains(t, w.Body.String(), "<script>", test.form)
		for _, call := range s.api.made() {
			require.Contains(t, call, "k-admin GET ", test.form)
		}
	}
}

func TestFormsMakeTheirCall(t *testing.T) {
	api := newAPI()
	api.answers["POST /v1/pools/demo/scale"] = poolOf("demo")
	api.answers["POST /v1/sandboxes/abc/links"] = openapi.Link{URL: "https://8080-abc.sandbox.example.com:8443/x"}
	api.answers["POST /v1/sessions/r/declare-dead"] = openapi.DeadDeclared{SessionID: "r"}
	s := open(t, api)
	s.signIn("k-admin")
	for _, test := range []struct {
		target, call, body, to string
		form                   url.Values
	}{
		{"/console/pools/demo/scale", "k-admin POST /v1/pools/demo/scale", `{"generation":7,"maxPods":0,"maxWarm":9,"warm":3}`, "/console/pools/demo?done=scaled",
			url.Values{"warm": {"3"}, "maxWarm": {"9"}, "maxPods": {""}, "generation": {"7"}}},
		{"/console/sandboxes/abc/end", "k-admin DELETE /sandboxes/abc", "", "/console/sandboxes/abc?done=ended", nil},
		{"/console/sandboxes/abc/timeout", "k-admin POST /sandboxes/abc/timeout", `{"timeout":600}`, "/console/sandboxes/abc?done=moved", url.Values{"timeout": {"600"}}},
		{"/console/sandboxes/abc/open", "k-admin POST /v1/sandboxes/abc/links", `{}`, "https://8080-abc.sandbox.example.com:8443/x", nil},
		{"/console/routers/r/declare-dead", "k-admin POST /v1/sessions/r/declare-dead", `{"reason":"its machine is gone"}`, "/console/fences?done=declared",
			url.Values{"reason": {" its machine is gone "}, "sure": {"yes"}}},
	} {
		w := s.send(http.MethodPost, test.target, test.form)
		require.Equal(t, http.StatusSeeOther, w.Code, "%s: %s", test.target, w.Body)
		require.Equal(t, test.to, w.Header().Get("Location"))
		require.Equal(t, []string{test.call}, s.api.made())
		if last := s.api.bodies[len(s.api.bodies)-1]; test.body != "" {
			require.JSONEq(t, test.body, last)
		}
	}
}

func TestLargeFormsAreRefused(t *testing.T) {
	s := open(t, newAPI())
	s.signIn("k-admin")
	w := s.send(http.MethodPost, "/console/sandboxes/abc/timeout", url.Values{"timeout": {strings.Repeat("1", 9000)}})
	require.Equal(t, http.StatusRequestEntityTooLarge, w.Code)
	require.Equal(t, http.StatusRequestEntityTooLarge, s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {strings.Repeat("1", 9000)}}).Code)
	require.Equal(t, http.StatusRequestURITooLong, s.get("/console/sandboxes?user="+strings.Repeat("x", 5000)).Code)
	require.Equal(t, http.StatusMethodNotAllowed, s.send(http.MethodDelete, "/console/sandboxes/abc", nil).Code)
	require.Empty(t, s.api.made())
}

func poolOf(name string) openapi.Pool {
	return openapi.Pool{
		Name: name, CreatedAt: noon, Generation: 7, Spec: openapi.PoolSpec{Warm: 3, Images: []string{name}, Ports: []int{}},
		Conditions: []openapi.Condition{},
	}
}

func recordOf(id string) openapi.SandboxRecord {
	return openapi.SandboxRecord{
		SandboxID: id, Pool: "demo", Phase: openapi.RecordPhaseRunning, ClaimedAt: noon, PodName: "demo-1", PodIP: "10.0.0.1",
		URL: "https://8080-" + id + ".sandbox.example.com:8443/", Ports: []int{}, DefaultPort: 8080,
	}
}

// hostile is a text as a tenant could write it.
const hostile = "</td></textarea><script>alert(1)</script><img src=x onerror=alert(2)>\"'>\u202eevil\u2066\x1b]52;c;x\x07\u200b{{.}}javascript:alert(3)"

// escaped is what of it must not be in a page.
var escaped = []string{"<script>alert", "<img src=x", "\u202e", "\u2066", "\x1b", "\x07", "\u200b"}

func harmless(t testing.TB, what string, w *httptest.ResponseRecorder) {
	t.Helper()
	require.Contains(t, w.Body.String(), "alert(1)", what) // it is shown
	for _, text := range escaped {
		require.NotContains(t, w.Body.String(), text, what)
	}
	require.NotContains(t, w.Body.String(), `href="javascript:`, what)
}

// Invariant: P26
func TestHostileTextIsShownAsText(t *testing.T) {
	api := newAPI()
	pool := poolOf(hostile)
	pool.Conditions = []openapi.Condition{{Type: "Degraded", Status: "True", Reason: hostile, Message: hostile}, {Type: "Ready", Status: hostile}}
	pod := openapi.PodDiagnostics{
		Name: hostile, Phase: hostile, Reason: hostile, Message: hostile, CreatedAt: noon, Node: hostile, NodeProblem: hostile, PodIP: hostile,
		Conditions: []openapi.Condition{{Type: hostile, Status: "False", Reason: hostile, Message: hostile}},
		Containers: []openapi.ContainerDiagnostics{{Name: hostile, Image: hostile, State: openapi.ContainerDiagnosticsState(hostile), Reason: hostile, Message: hostile, LastEnd: hostile}},
		Warnings:   []openapi.PodWarning{{Reason: hostile, Message: hostile, LastSeen: noon}}, WarningsProblem: hostile,
	}
	record := recordOf("abc")
	record.Pool, record.Team, record.User, record.PodName, record.PodIP, record.URL = hostile, hostile, hostile, hostile, hostile, "javascript:alert(1)//"
	record.Metadata, record.Message = map[string]string{hostile: hostile}, hostile
	record.Workload = &openapi.Workload{Images: []string{hostile}}
	ended := record
	ended.SandboxID, ended.Phase, ended.Reason, ended.ReleasedAt = "ended", openapi.RecordPhaseEnded, hostile, &noon
	session := openapi.AwaitedSession{SessionID: hostile, Address: new(hostile), Until: openapi.AwaitedSessionUntilExpired}
	fence := openapi.Fence{SandboxID: hostile, Pool: hostile, PodName: hostile, PodIP: hostile, Reason: hostile, ReleasedAt: noon, WaitsFor: []openapi.AwaitedSession{session}}
	event := openapi.LifecycleEvent{Type: openapi.SandboxLifecycleKilled, Timestamp: noon, SandboxID: hostile, SandboxTemplateID: hostile, SandboxTeamID: hostile}
	event.EventData.Reason = new(hostile)
	activity := openapi.Activity{SandboxID: "abc", Kind: hostile, Why: new(hostile), Router: new(hostile), Asks: []string{hostile}, Awaits: []string{hostile}, LastActive: noon}
	for path, answer := range map[string]any{
		"/v1/pools": openapi.Pools{Pools: []openapi.Pool{pool}}, "/v1/pools/demo": pool,
		"/v1/pools/demo/diagnostics": openapi.PoolDiagnostics{
			Pool: pool, Pods: []openapi.PodDiagnostics{pod}, Failures: []openapi.PodFailure{{PodName: hostile, Reason: hostile, Message: hostile, At: noon}},
		},
		"/v1/sandboxes":       openapi.SandboxRecords{Sandboxes: []openapi.SandboxRecord{record, ended}},
		"/v1/last-active":     openapi.LastActive{Sandboxes: []openapi.Activity{activity}},
		"/v1/sandboxes/abc":   openapi.SandboxExplanation{Sandbox: record, Now: noon, Activity: &activity},
		"/v1/sandboxes/ended": openapi.SandboxExplanation{Sandbox: ended, Now: noon},
		"/v1/sandboxes/abc/route": openapi.RouteExplanation{SandboxID: "abc", Why: hostile, PodNotReady: hostile, Fence: &fence, Ports: []int{},
			Routers: []openapi.RouterOfRoute{{SessionID: hostile, Address: hostile}}},
		"/v1/sandboxes/abc/diagnostics": openapi.SandboxDiagnostics{Sandbox: record, Pod: &pod, Egress: &openapi.SandboxEgress{
			Pool: &openapi.EgressRules{Allow: []string{hostile}, Deny: []string{hostile}}, Claim: &openapi.EgressRules{Deny: []string{hostile}},
			Destinations: []openapi.EgressDestination{{Host: hostile, Port: 443, LastAt: noon}, {Host: hostile, Reason: hostile, LastAt: noon}},
		}},
		"/v1/sandboxes/ended/diagnostics": openapi.SandboxDiagnostics{Sandbox: ended, PodProblem: hostile, LogLines: []string{hostile}},
		"/v2/sandboxes/abc/logs":          openapi.SandboxLogsV2{Logs: []openapi.SandboxLogEntry{{Timestamp: noon, Message: hostile}}},
		"/events/sandboxes":               []openapi.LifecycleEvent{event}, "/events/sandboxes/abc": []openapi.LifecycleEvent{event},
		"/v1/sessions": openapi.Sessions{Sessions: []openapi.ListedSession{{SessionID: hostile, Address: new(hostile)}}},
		"/v1/fences":   openapi.Fences{Fences: []openapi.Fence{fence}},
		"/v1/teams":    openapi.TeamStatuses{Teams: []openapi.TeamStatus{{Team: hostile, Keys: []openapi.KeyOfTeam{{Name: hostile, Role: hostile}}}}},
	} {
		api.answers["GET "+path] = answer
	}
	admin := api.callers["k-admin"]
	admin.Key, admin.Team, admin.Version = hostile, hostile, hostile
	api.callers["k-admin"] = admin
	s := open(t, api)
	s.signIn("k-admin")
	for _, target := range append(pagesOf, "/console/pools/demo", "/console/sandboxes/abc", "/console/sandboxes/ended", "/console/sandboxes/abc/end",
		"/console/routers/"+url.PathEscape(hostile)+"/declare-dead", "/console/sandboxes?user="+url.QueryEscape(hostile)) {
		w := s.get(target)
		require.Equal(t, http.StatusOK, w.Code, "%s: %s", target, w.Body)
		harmless(t, target, w)
	}
	w := s.send(http.MethodPost, "/console/sandboxes/abc/timeout", url.Values{"timeout": {hostile}})
	harmless(t, "form", w)
	api.answers["POST /v1/sandboxes/abc/links"] = openapi.Link{URL: "javascript:alert(1)"}
	require.Equal(t, http.StatusBadGateway, s.send(http.MethodPost, "/console/sandboxes/abc/open", nil).Code)
	admin.PublicURL = "https://x; script-src *"
	api.callers["k-admin"] = admin
	require.NotContains(t, s.get("/console/sandboxes/abc").Header().Get("Content-Security-Policy"), "*")
}

func TestPageOfASandboxShowsWhatLeavesIt(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/sandboxes/abc"] = openapi.SandboxExplanation{Sandbox: recordOf("abc"), Now: noon}
	api.answers["GET /v1/sandboxes/abc/diagnostics"] = openapi.SandboxDiagnostics{}
	s := open(t, api)
	s.signIn("k-reader")
	body := s.get("/console/sandboxes/abc").Body.String()
	require.Contains(t, body, `<section id="egress" data-live`) // the script swaps what is there only
	require.NotContains(t, body, "What leaves it</h2>")
	e := openapi.SandboxEgress{
		Claim:    &openapi.EgressRules{Allow: []string{"api.example.com"}, Deny: []string{"0.0.0.0/0"}},
		Admitted: 12, Refused: 3, Open: 1, SentBytes: 5 << 20, Gateways: 3, GatewaysSilent: 1,
		Destinations: []openapi.EgressDestination{
			{Host: "api.example.com", Port: 443, Count: 12, LastAt: noon}, {Host: "192.0.2.1", Port: 80, Reason: "egress_refused", Count: 3, LastAt: noon},
		},
	}
	api.answers["GET /v1/sandboxes/abc/diagnostics"] = openapi.SandboxDiagnostics{Egress: &e}
	body = s.get("/console/sandboxes/abc").Body.String()
	for _, text := range []string{
		"<dd>not known</dd>", "<code>api.example.com</code> and all but <code>0.0.0.0/0</code>", "80, 443", "12 let through, 3 refused, 1 open",
		"5.0 MiB sent", "1 of 3 gateways did not answer", `<bdi>192.0.2.1</bdi></th><td class="number">80</td>`, "egress_refused",
	} {
		require.Contains(t, body, text)
	}
	require.NotContains(t, body, "No egress gateway")
	e.Gateways, e.GatewaysSilent = 0, 0
	require.Contains(t, s.get("/console/sandboxes/abc").Body.String(), "No egress gateway is connected")
}

func TestMissingPartsLeaveTheRestOfAPage(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/sandboxes/abc"] = openapi.SandboxExplanation{Sandbox: recordOf("abc"), Now: noon}
	s := open(t, api)
	s.signIn("k-member")
	w := s.get("/console/sandboxes/abc") // nothing else is answered
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.Contains(t, w.Body.String(), "demo-1")
	require.Contains(t, w.Body.String(), "The log cannot be read now: there is nothing at /v2/sandboxes/abc/logs.")
}

func TestPageOfASandboxDrawsItsUsage(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/sandboxes/abc"] = openapi.SandboxExplanation{Sandbox: recordOf("abc"), Now: noon}
	api.answers["GET /sandboxes/abc/metrics"] = []openapi.SandboxMetric{
		{Timestamp: noon.Add(-time.Minute), CPUUsedPct: 50, CPUCount: 2, MemUsed: 3 << 20}, {Timestamp: noon, CPUUsedPct: 25, CPUCount: 2, MemUsed: 1 << 20},
	}
	s := open(t, api)
	s.signIn("k-reader")
	body := s.get("/console/sandboxes/abc").Body.String()
	require.Contains(t, body, "CPUs: latest 0.5, highest 1")
	require.Contains(t, body, "memory: latest 1 MiB, highest 3 MiB")
	require.Equal(t, 1, strings.Count(strings.Join(api.made(), "\n"), "/metrics"), "a view of the page asks the agent once")

	api.answers["GET /sandboxes/abc/metrics"] = []openapi.SandboxMetric{{Timestamp: noon, CPUUsedPct: 25}} // no agent
	body = s.get("/console/sandboxes/abc").Body.String()
	require.Contains(t, body, `<section id="hour" data-live`) // the script swaps what is there only
	require.NotContains(t, body, "<figure")
	api.refusal["GET /sandboxes/abc/metrics"] = http.StatusNotImplemented
	w := s.get("/console/sandboxes/abc")
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, w.Body.String(), "No measurement: the API says why.")
}

func TestListAsksForOnePageOfTheChosenSandboxes(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/sandboxes"] = openapi.SandboxRecords{Sandboxes: []openapi.SandboxRecord{recordOf("abc")}, NextToken: "t/1"}
	s := open(t, api)
	s.signIn("k-admin")
	w := s.get("/console/sandboxes?pool=demo&user=ann&team=blue&metadata=" + url.QueryEscape("job=17 a=b&c") + "&phase=ended&after=t0")
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.Contains(t, w.Body.String(), "after=t%2F1")
	var asked url.Values
	for _, call := range api.made() {
		if _, query, ok := strings.Cut(call, "GET /v1/sandboxes?"); ok {
			asked, _ = url.ParseQuery(query)
		}
	}
	metadata, err := url.ParseQuery(asked.Get("metadata"))
	require.NoError(t, err)
	require.Equal(t, url.Values{"job": {"17"}, "a": {"b%26c"}}, metadata)
	asked.Del("metadata")
	require.Equal(t, url.Values{"pool": {"demo"}, "user": {"ann"}, "team": {"blue"}, "phase": {"ended"}, "limit": {"100"}, "nextToken": {"t0"}}, asked)

	s.get("/console/sandboxes?id=abc")
	require.Contains(t, strings.Join(api.made(), "\n"), "prefix=abc&phase=starting,running,fallingAsleep,asleep,waking,stopped,released,ended&")

	s.get("/console/sandboxes?phase=asleep")
	require.Contains(t, strings.Join(api.made(), "\n"), "phase=fallingAsleep,asleep,waking&")
	s.get("/console/sandboxes?phase=stopped")
	require.Contains(t, strings.Join(api.made(), "\n"), "phase=stopped&")
}

func TestStoppedSandboxIsShownWithoutAPod(t *testing.T) {
	api := newAPI()
	stopped := recordOf("abc")
	stopped.Phase, stopped.PodName, stopped.PodIP = openapi.RecordPhaseStopped, "", ""
	api.answers["GET /v1/sandboxes/abc"] = openapi.SandboxExplanation{Sandbox: stopped, Now: noon}
	s := open(t, api)
	s.signIn("k-admin")
	shown := s.get("/console/sandboxes/abc").Body.String()
	for _, want := range []string{"<dt>Pod</dt><dd>none</dd>", "<strong>Stopped</strong>", "it has its files, and no pod", "Its address"} {
		require.Contains(t, shown, want)
	}
}

func TestListShowsUseAndEndOfEachSandbox(t *testing.T) {
	api := newAPI()
	live, gone := recordOf("live"), recordOf("gone")
	gone.Phase, gone.Reason, gone.ReleasedAt = openapi.RecordPhaseEnded, "IdleTimeout", new(noon.Add(-2*time.Hour))
	api.answers["GET /v1/sandboxes"] = openapi.SandboxRecords{Sandboxes: []openapi.SandboxRecord{live, gone}}
	api.answers["GET /v1/last-active"] = openapi.LastActive{Sandboxes: []openapi.Activity{{
		SandboxID: "live", LastActive: noon.Add(-20 * time.Minute), Next: &openapi.NextRelease{Reason: openapi.EndTime, At: noon.Add(90 * time.Second)},
	}}}
	s := open(t, api)
	s.signIn("k-admin")
	list := s.get("/console/sandboxes?phase=all").Body.String()
	for _, want := range []string{
		`<td><time datetime="2030-01-01T11:40:00Z" title="2030-01-01 11:40:00 UTC">20 min ago</time></td>`,
		`<td><time datetime="2030-01-01T12:01:30Z" title="2030-01-01 12:01:30 UTC">in 1 min 30 s</time> <span class="quiet">end time</span></td>`,
		`<td><time datetime="2030-01-01T10:00:00Z" title="2030-01-01 10:00:00 UTC">2 h 0 min ago</time> <span class="quiet">idle timeout</span></td>`,
		`href="/console/sandboxes/live/end"`,
	} {
		require.Contains(t, list, want)
	}
	require.NotContains(t, list, `href="/console/sandboxes/gone/end"`)
}

func TestFullPageHasBoundedBytes(t *testing.T) {
	api := newAPI()
	var page openapi.SandboxRecords
	for i := range 100 {
		r := recordOf(fmt.Sprintf("%020d", i))
		r.User, r.Team, r.Pool = strings.Repeat("u", 256), strings.Repeat("t", 63), strings.Repeat("p", 63)
		page.Sandboxes = append(page.Sandboxes, r)
	}
	page.NextToken = "next"
	api.answers["GET /v1/sandboxes"] = page
	s := open(t, api)
	s.signIn("k-admin")
	w := s.get("/console/sandboxes")
	require.Equal(t, 100, strings.Count(w.Body.String(), "<tr><th scope=\"row\">"))
	require.Less(t, w.Body.Len(), 150<<10)
}

func TestEventsArePassedOnWithTheKeyOfTheSession(t *testing.T) {
	api := newAPI()
	api.stream = make(chan string)
	s := open(t, api)
	server := httptest.NewServer(s.console)
	defer server.Close()
	local := func(r *http.Request) {
		r.Host = strings.TrimPrefix(server.URL, "http://")
		r.Header.Set("Origin", server.URL)
	}
	require.Equal(t, http.StatusSeeOther, s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {"k-reader"}}, local).Code)
	read := func(edits ...func(*http.Request)) *http.Response {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/console/events", http.NoBody)
		require.NoError(t, err)
		for name, value := range s.cookies {
			r.AddCookie(&http.Cookie{Name: name, Value: value})
		}
		for _, edit := range edits {
			edit(r)
		}
		w, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		t.Cleanup(func() { _ = w.Body.Close() })
		return w
	}
	require.Equal(t, http.StatusForbidden, read(header("Sec-Fetch-Site", "cross-site")).StatusCode)
	require.Equal(t, http.StatusUnauthorized, read(header("Cookie", "")).StatusCode)
	api.made()
	w := read(header("Last-Event-ID", "7.1"))
	require.Equal(t, http.StatusOK, w.StatusCode)
	require.Equal(t, "text/event-stream", w.Header.Get("Content-Type"))
	const event = "id: 7.2\nevent: created\ndata: {}\n\n"
	buffer := make([]byte, len(event))
	for range 3 {
		api.stream <- event
		_, err := io.ReadFull(w.Body, buffer)
		require.NoError(t, err)
		require.Equal(t, event, string(buffer))
	}
	require.Equal(t, []string{"k-reader GET /v1/events"}, api.made())
	require.Equal(t, "7.1", api.headers[len(api.headers)-1].Get("Last-Event-ID"))
	close(api.stream) // as the API does when the key is revoked
	rest, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	require.Empty(t, rest)
	http.DefaultClient.CloseIdleConnections()
}

func TestAPIWithoutKeysNeedsNoSignIn(t *testing.T) {
	s := open(t, newAPI(), func(o *console.Options) { o.Open, o.URL = true, nil })
	local := host("127.0.0.1:8082")
	w := s.get("/console/", local, header("X-Forwarded-For", "192.0.2.1"))
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.NotContains(t, w.Body.String(), "Sign out")
	for _, h := range s.api.headers { // the API judges where the call comes from
		require.Equal(t, "192.0.2.1", h.Get("X-Forwarded-For"))
	}
	require.Equal(t, http.StatusSeeOther, s.send(http.MethodPost, "/console/sandboxes/abc/end", nil, local, header("Origin", "http://127.0.0.1:8082")).Code)
	require.Equal(t, http.StatusForbidden, s.send(http.MethodPost, "/console/sandboxes/abc/end", nil, local, header("Origin", "http://127.0.0.1:9999")).Code)
}

func TestEntryOpensOneSession(t *testing.T) {
	entry := console.Entry{Key: "k-member", Token: "a token"}
	s := open(t, newAPI(), func(o *console.Options) { o.Entry, o.URL = &entry, nil })
	local := host("127.0.0.1:40001")
	require.Equal(t, http.StatusForbidden, s.get("/console/enter?token=wrong", local).Code)
	require.Equal(t, http.StatusForbidden, s.get("/console/enter", local).Code)
	require.Contains(t, s.get("/console/sign-in", local).Body.String(), "berth console")
	require.Equal(t, http.StatusNotFound, s.send(http.MethodPost, "/console/sign-in", url.Values{"key": {"k-admin"}}, local, header("Origin", "http://127.0.0.1:40001")).Code)
	require.Equal(t, http.StatusSeeOther, s.get(entry.Path(), local).Code)
	require.Contains(t, s.cookies, "__Host-berth-console-40001")
	require.Equal(t, http.StatusOK, s.get("/console/", local).Code)
	require.Equal(t, http.StatusForbidden, s.get(entry.Path(), local).Code)
	require.Equal(t, http.StatusMisdirectedRequest, s.get("/console/", host("evil.example")).Code)

	none := open(t, newAPI())
	require.Equal(t, http.StatusForbidden, none.get("/console/enter?token=").Code)
}

func TestConnectHasTheAddressesOfTheInstallation(t *testing.T) {
	api := newAPI()
	api.answers["GET /v1/pools"] = openapi.Pools{Pools: []openapi.Pool{poolOf("py")}}
	s := open(t, api)
	s.signIn("k-reader")
	body := s.get("/console/connect").Body.String()
	for _, line := range []string{
		"export E2B_DOMAIN=sandbox.example.com:8443\n", "Sandbox.create(&#39;py&#39;)", "curl -X POST https://api.sandbox.example.com:8443/sandboxes", "$E2B_API_KEY",
	} {
		require.Contains(t, body, line)
	}
	require.NotContains(t, body, "k-reader")
	plain := api.callers["k-reader"]
	plain.PublicURL = "http://localhost:8080"
	api.callers["k-reader"] = plain
	require.Contains(t, s.get("/console/connect").Body.String(), "export E2B_API_URL=http://api.localhost:8080\nexport E2B_SANDBOX_URL=http://localhost:8080\n")
}

func TestLinksOfOtherSitesLeadOn(t *testing.T) {
	s := open(t, newAPI())
	s.signIn("k-member")
	kept := s.cookies
	s.cookies = map[string]string{} // the browser does not send it
	w := s.get("/console/sandboxes?pool=demo", header("Sec-Fetch-Site", "cross-site"), header("Sec-Fetch-Mode", "navigate"))
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, w.Body.String(), `<meta http-equiv="refresh" content="0; url=/console/sandboxes?pool=demo">`)
	s.cookies = kept
	require.Equal(t, http.StatusOK, s.get("/console/sandboxes?pool=demo", header("Sec-Fetch-Site", "same-origin")).Code)
	require.Equal(t, http.StatusUnauthorized, open(t, newAPI()).get("/console/", header("Sec-Fetch-Dest", "empty")).Code)
}

func TestUnreachableAPIIsAPageThatTriesAgain(t *testing.T) {
	s := open(t, newAPI())
	s.signIn("k-member")
	s.api.refusal["GET /v1/pools"] = http.StatusBadRequest
	require.Equal(t, http.StatusBadRequest, s.get("/console/pools").Code)
	broken := open(t, newAPI(), func(o *console.Options) {
		o.API = console.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	})
	broken.cookies = s.cookies
	w := broken.get("/console/pools")
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), "data-events")
	require.Contains(t, w.Body.String(), "The API cannot be reached; try again.")
}

func TestOptionsAreRequired(t *testing.T) {
	_, err := console.New(console.Options{})
	require.ErrorContains(t, err, "APIURL is required")
	plain, _ := url.Parse("http://console.example.com")
	_, err = console.New(console.Options{API: http.DefaultTransport, APIURL: "x", Log: zap.NewNop(), URL: plain})
	require.ErrorContains(t, err, "must be https://")
}
