package client

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/api/openapi"
)

// The examples need an API. A test in e2e runs them with one.
func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv("BERTH_API_URL") == "" {
		if err := flag.Set("test.skip", "^Example"); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	http.DefaultClient.CloseIdleConnections()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// script answers each call with the next handler; the last one answers all further calls. It is an
// http.RoundTripper, so that time can stand still.
type script struct {
	t     *testing.T
	steps []http.HandlerFunc
	seen  []*http.Request
}

func (s *script) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	s.seen = append(s.seen, r)
	step := s.steps[min(len(s.seen), len(s.steps))-1]
	if step == nil {
		return nil, errors.New("connection reset")
	}
	w := httptest.NewRecorder()
	step(w, r)
	return w.Result(), nil
}

func scripted(t *testing.T, steps ...http.HandlerFunc) (*Client, *script) {
	t.Helper()
	s := &script{t: t, steps: steps}
	c, err := New(Options{URL: "http://api", Key: "secret", HTTP: &http.Client{Transport: s}})
	require.NoError(t, err)
	return c, s
}

func status200(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }
}

func refuse(status int, reason string, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"code":%d,"reason":%q,"message":"m","requestID":"r1","sandboxID":"s1"}`, status, reason)
	}
}

func TestClaimIsRepeatedWithTheSameKeyAndBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := scripted(t, nil, refuse(504, "timeout", "Should-Retry", "false"),
			refuse(503, "not_leader", "Retry-After", "2"), status200(`{"sandboxID":"a"}`))
		began := time.Now()
		got, err := c.Claim(t.Context(), openapi.NewSandbox{TemplateID: "demo"})
		require.NoError(t, err)
		require.Equal(t, "a", got.SandboxID)
		require.Len(t, s.seen, 4)
		require.GreaterOrEqual(t, time.Since(began), 2*time.Second, "Retry-After")
		for _, r := range s.seen {
			require.NotEmpty(t, r.Header.Get("Idempotency-Key"))
			require.Equal(t, s.seen[0].Header.Get("Idempotency-Key"), r.Header.Get("Idempotency-Key"))
			require.Equal(t, "secret", r.Header.Get("X-API-Key"))
			require.Equal(t, s.seen[0].ContentLength, r.ContentLength)
		}
		_, err = c.ClaimBatch(t.Context(), openapi.NewClaims{Pool: "demo", Count: 2})
		require.NoError(t, err)
		require.NotEmpty(t, s.seen[4].Header.Get("Idempotency-Key"))
		require.NotEqual(t, s.seen[0].Header.Get("Idempotency-Key"), s.seen[4].Header.Get("Idempotency-Key"))
	})
}

func TestCallsAreRepeatedOnlyWhereThatHelps(t *testing.T) {
	get := func(ctx context.Context, c *Client) error { _, err := c.Get(ctx, "a"); return err }
	claim := func(ctx context.Context, c *Client) error {
		_, err := c.Claim(ctx, openapi.NewSandbox{})
		return err
	}
	declare := func(ctx context.Context, c *Client) error { _, err := c.DeclareDead(ctx, "a", "b"); return err }
	snapshot := func(ctx context.Context, c *Client) error { _, err := c.Snapshot(ctx, "a", "b"); return err }
	for _, x := range []struct {
		name  string
		call  func(context.Context, *Client) error
		step  http.HandlerFunc
		calls int
	}{
		{"broken connection", get, nil, 1 + maxRepeats},
		{"no leader", get, refuse(503, "not_leader"), 1 + maxRepeats},
		{"outcome unknown", claim, refuse(504, "timeout", "Should-Retry", "false"), 1 + maxRepeats},
		{"no warm pod", claim, refuse(429, "pool_empty", "Retry-After", "1"), 1},
		{"too many claims per second", claim, refuse(429, "rate_limited", "Retry-After", "1"), 1 + maxRepeats},
		{"key reused", claim, refuse(409, "idempotency_key_reused"), 1},
		{"unknown", get, refuse(404, "sandbox_not_found"), 1},
		{"broken server", get, refuse(500, "internal"), 1},
		{"not repeatable", declare, refuse(503, "not_leader"), 1},
		{"not repeatable, broken connection", declare, nil, 1},
		{"snapshot, not repeatable", snapshot, refuse(503, "sandbox_busy"), 1},
		{"snapshot, broken connection", snapshot, nil, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, s := scripted(t, x.step)
				require.Error(t, x.call(t.Context(), c))
				require.Len(t, s.seen, x.calls)
			})
		})
	}
}

func TestCallEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := scripted(t, refuse(503, "not_leader", "Retry-After", "60"))
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		began := time.Now()
		_, err := c.Get(ctx, "a")
		require.ErrorContains(t, err, "not_leader")
		require.Zero(t, time.Since(began), "the pause would last longer than the context")
		require.Len(t, s.seen, 1)

		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		_, err = c.Get(ctx, "a")
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestErrorHasWhatTheAPISays(t *testing.T) {
	c, _ := scripted(t, refuse(429, "pool_empty", "Retry-After", "3"))
	_, err := c.Claim(t.Context(), openapi.NewSandbox{})
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, Error{
		Status: 429, Reason: "pool_empty", Message: "m", SandboxID: "s1", RequestID: "r1", RetryAfter: 3 * time.Second,
	}, *e)
	require.EqualError(t, err, "pool_empty: m (request r1)")
	require.True(t, IsLimit(err))
	require.False(t, IsNotFound(err) || IsRefused(err) || IsNotFound(nil))
	for status, is := range map[int]func(error) bool{404: IsNotFound, 410: IsNotFound, 401: IsRefused, 403: IsRefused} {
		c, _ := scripted(t, refuse(status, "x"))
		_, err := c.Get(t.Context(), "a")
		require.True(t, is(err), status)
	}
	c, _ = scripted(t, status200("<html>"))
	_, err = c.Get(t.Context(), "a")
	require.ErrorContains(t, err, "not Berth's")
	c, _ = scripted(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusTeapot) })
	_, err = c.Get(t.Context(), "a")
	require.ErrorAs(t, err, &e)
	require.Equal(t, 418, e.Status)
	require.Contains(t, e.Message, "no")
}

func TestRepeatedKillOfAReleasedSandboxSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := scripted(t, nil, refuse(404, "sandbox_gone"))
		require.NoError(t, c.Kill(t.Context(), "a"))
		c, _ = scripted(t, refuse(404, "sandbox_gone"))
		require.True(t, IsNotFound(c.Kill(t.Context(), "a")), "another caller has released it")
		c, _ = scripted(t, nil, refuse(404, "sandbox_not_found"))
		require.True(t, IsNotFound(c.Kill(t.Context(), "a")))
	})
}

func TestRepeatedDeletionOfASnapshotSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := scripted(t, nil, refuse(404, "snapshot_not_found"))
		require.NoError(t, c.DeleteSnapshot(t.Context(), "work:v1"))
		require.Equal(t, "DELETE /templates/work:v1", s.seen[1].Method+" "+s.seen[1].URL.Path)
		c, _ = scripted(t, refuse(404, "snapshot_not_found"))
		require.True(t, IsNotFound(c.DeleteSnapshot(t.Context(), "work:v1")), "another caller has deleted it")
		c, _ = scripted(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
		require.NoError(t, c.DeleteSnapshot(t.Context(), "work:v1"))
	})
}

func TestSnapshotIsNamedByTheCallerOrBerth(t *testing.T) {
	var bodies []string
	c, s := scripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		bodies = append(bodies, string(body))
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"snapshotID":"work:v1","sandboxID":"a","files":3}`)
	})
	for _, name := range []string{"work:v1", ""} {
		got, err := c.Snapshot(t.Context(), "a", name)
		require.NoError(t, err)
		require.Equal(t, "work:v1", got.SnapshotID)
	}
	require.Equal(t, "POST /sandboxes/a/snapshots", s.seen[0].Method+" "+s.seen[0].URL.Path)
	require.JSONEq(t, `{"name":"work:v1"}`, bodies[0])
	require.JSONEq(t, `{}`, bodies[1])
}

func TestStopIsAPauseWithoutMemoryAndIsNotRepeated(t *testing.T) {
	var bodies []string
	c, s := scripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		bodies = append(bodies, string(body))
		w.WriteHeader(http.StatusNoContent)
	}, refuse(503, "sandbox_busy"))
	require.NoError(t, c.Stop(t.Context(), "a"))
	require.Error(t, c.Stop(t.Context(), "a"))
	require.Len(t, s.seen, 2)
	require.Equal(t, "POST /sandboxes/a/pause", s.seen[0].Method+" "+s.seen[0].URL.Path)
	require.JSONEq(t, `{"memory":false}`, bodies[0])
}

func TestRulesOfASandboxAreReplacedAsAWhole(t *testing.T) {
	var bodies []string
	taken := func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		bodies = append(bodies, string(body))
		w.WriteHeader(http.StatusNoContent)
	}
	c, s := scripted(t, refuse(503, "egress_pending"), taken, taken, refuse(409, "egress_missing"))
	rules := openapi.SandboxNetworkUpdate{AllowOut: []string{"a.example"}, DenyOut: []string{"0.0.0.0/0"}}
	require.NoError(t, c.SetNetwork(t.Context(), "a", rules))
	require.NoError(t, c.SetNetwork(t.Context(), "a", openapi.SandboxNetworkUpdate{}))
	require.Error(t, c.SetNetwork(t.Context(), "a", openapi.SandboxNetworkUpdate{}))
	require.Len(t, s.seen, 4, "one that is pending is repeated")
	require.Equal(t, "PUT /sandboxes/a/network", s.seen[3].Method+" "+s.seen[3].URL.Path)
	require.JSONEq(t, `{"allowOut":["a.example"],"denyOut":["0.0.0.0/0"]}`, bodies[0])
	require.JSONEq(t, `{}`, bodies[1])
}

func TestSnapshotsAreReadPageAfterPage(t *testing.T) {
	c, s := scripted(t, page(`[{"snapshotID":"a:x"},{"snapshotID":"b:x"}]`, "t1"), page(`[{"snapshotID":"c:x"}]`, ""))
	var names []string
	for one, err := range c.Snapshots(t.Context(), openapi.ListSnapshotsParams{SandboxID: new("s1"), Limit: new(2)}) {
		require.NoError(t, err)
		names = append(names, one.SnapshotID)
	}
	require.Equal(t, []string{"a:x", "b:x", "c:x"}, names)
	require.Equal(t, "/snapshots?sandboxID=s1&limit=2", s.seen[0].URL.RequestURI())
	require.Equal(t, "/snapshots?sandboxID=s1&limit=2&nextToken=t1", s.seen[1].URL.RequestURI())
}

// page is an answer that names the next page.
func page(body, next string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Next-Token", next)
		fmt.Fprint(w, body)
	}
}

func TestListReadsEveryPageAndCanStop(t *testing.T) {
	c, s := scripted(t, page(`[{"sandboxID":"a"},{"sandboxID":"b"}]`, "t1"), page(`[]`, "t2"),
		page(`[{"sandboxID":"c"}]`, ""))
	list := c.List(t.Context(), openapi.ListSandboxesParams{Template: new("demo")})
	read := func() (ids []string) {
		for x, err := range list {
			require.NoError(t, err)
			ids = append(ids, x.SandboxID)
		}
		return ids
	}
	require.Equal(t, []string{"a", "b", "c"}, read())
	require.Equal(t, "template=demo&nextToken=t2", s.seen[2].URL.RawQuery)
	s.steps = s.steps[2:]
	require.Equal(t, []string{"c"}, read(), "the sequence can be read again")
	require.Equal(t, "template=demo", s.seen[3].URL.RawQuery)

	c, s = scripted(t, page(`[{"sandboxID":"a"}]`, "t1"))
	for range c.List(t.Context(), openapi.ListSandboxesParams{}) {
		break
	}
	require.Len(t, s.seen, 1)
	c, _ = scripted(t, refuse(403, "forbidden"))
	for _, err := range c.List(t.Context(), openapi.ListSandboxesParams{}) {
		require.True(t, IsRefused(err))
	}
}

func TestURLNamesThePortInTheHost(t *testing.T) {
	s := &openapi.Sandbox{SandboxID: "k3x9", URL: "https://8080-k3x9.sandbox.example.com:8443/"}
	for port, want := range map[int]string{0: s.URL, 3000: "https://3000-k3x9.sandbox.example.com:8443/"} {
		got, err := URL(s, port)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, port := range []int{-1, 65536} {
		_, err := URL(s, port)
		require.Error(t, err)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{}, {URL: "127.0.0.1:80"}, {URL: "ftp://a"}, {URL: "http://a", Key: "a\nb"}} {
		_, err := New(o)
		require.ErrorIs(t, err, ErrConfig)
		require.NotContains(t, err.Error(), "a\nb")
	}
}

func TestKeyIsNotSentAfterARedirect(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the key went to %s", r.Host)
	}))
	defer elsewhere.Close()
	redirects := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusFound))
	defer redirects.Close()
	c, err := New(Options{URL: redirects.URL, Key: "secret"})
	require.NoError(t, err)
	_, err = c.Get(t.Context(), "a")
	require.ErrorContains(t, err, "302")
	http.DefaultClient.CloseIdleConnections()
}

// The names of sandboxes need not resolve. Requests and the agent reach the gateway, with the host of the sandbox.
func TestGatewayIsReachedForEverySandbox(t *testing.T) {
	var hosts []string
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hosts = append(hosts, r.Host+" "+r.Header.Get("X-API-Key"))
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "http://elsewhere.invalid/", http.StatusFound)
		}
	}))
	defer gateway.Close()
	c, err := New(Options{URL: "http://api.invalid", Key: "secret", Gateway: gateway.Listener.Addr().String()})
	require.NoError(t, err)
	defer c.Sandboxes().CloseIdleConnections()
	s := &openapi.Sandbox{
		SandboxID: "k3x9", URL: "http://8080-k3x9.sandbox.invalid/", EnvdAccessToken: new("token"), EnvdVersion: "0.6.4",
	}
	address, err := URL(s, 3000)
	require.NoError(t, err)
	for path, status := range map[string]int{"": 200, "away": 302} {
		response, err := c.Sandboxes().Get(address + path)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, status, response.StatusCode)
	}
	agent, err := c.Agent(s, AgentOptions{})
	require.NoError(t, err)
	_, err = agent.ReadFile(t.Context(), "/x")
	require.NoError(t, err)
	require.Equal(t,
		[]string{"3000-k3x9.sandbox.invalid ", "3000-k3x9.sandbox.invalid ", "49983-k3x9.sandbox.invalid "}, hosts)

	_, err = New(Options{URL: "http://api.invalid", Gateway: "gateway"})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, `Gateway "gateway": must be host:port`)
}
