package rest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/allocator/webhooks"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// fake is an allocator that answers what the test says and notes what it was
// asked.
type fake struct {
	leader      string // "": this replica leads
	followers   bool   // this replica does not lead, and the leader is not known
	elected     bool   // it holds the lease
	left        context.Context
	changed     chan struct{} // nil: nothing changes
	answering   context.Context
	err         error
	block       bool // until the caller gives up
	blockClaims bool // the same, claims only
	sandboxes   map[string]core.Sandbox
	live        []core.Sandbox
	pools       []*v1alpha1.SandboxPool
	phase       core.Phase          // of what is claimed
	claimed     func(*core.Sandbox) // changes what is claimed
	status      core.CallStatus
	why         string // of a Sleep or a SetNetwork
	notArchived error  // of a Sleep
	store       *snapshots.Store
	outstanding int

	fences    []core.FenceStatus
	sessions  []core.SessionStatus
	truncated int
	dead      core.DeadDeclared
	teams     []core.TeamStatus

	activities  []core.ActivityStatus
	counts      map[string]core.Counts
	routes      map[string]core.RouteStatus
	events      *events.Ring
	history     *history.Ring
	eventLog    *eventlog.Log
	webhooks    *webhooks.Manager
	serving     context.Context // nil: it serves on
	inspected   map[string]inspect.Pod
	podFailures []core.PodFailure
	warnings    []corev1.Event // of pods that are gone
	log         string
	lastLines   []string
	logOptions  inspect.LogOptions
	logErr      error
	usage       map[string]inspect.Usage
	series      []inspect.Usage // before usage
	usageErr    error
	egress      openapi.SandboxEgress
	measured    []string

	mu       sync.Mutex
	which    []Filter
	kept     []string
	limits   []int
	asked    []string // the teams
	declared []string
	pool     string
	claim    core.Claim
	claims   int // how many came
	released []string
	queries  []Query
	scaled   []string
	stops    []bool // of the calls of Sleep
	rules    core.EgressRules
	// extending is how long the last call of Extend may take.
	extending time.Duration
}

func (f *fake) Leader() Leader {
	f.mu.Lock()
	defer f.mu.Unlock()
	return Leader{Here: f.leader == "" && !f.followers, Elected: f.elected, Address: f.leader, Left: f.left, Changed: f.changed}
}

func (f *fake) Answering() context.Context { return cmp.Or(f.answering, context.Background()) }

func (f *fake) wait(ctx context.Context) error {
	if f.block {
		<-ctx.Done()
		return ctx.Err()
	}
	return f.err
}

// minIdle is no whole number of seconds.
const minIdle = 6500 * time.Millisecond

// claimWait is how long claims wait that do not say.
const claimWait = 3 * time.Second

func (f *fake) ClaimWait() time.Duration { return claimWait }

func (f *fake) Claim(ctx context.Context, pool string, c core.Claim) (core.Sandbox, error) {
	f.mu.Lock()
	f.pool, f.claim = pool, c
	f.claims++
	f.mu.Unlock()
	if f.blockClaims {
		<-ctx.Done()
		return core.Sandbox{}, ctx.Err()
	}
	if err := f.wait(ctx); err != nil {
		return core.Sandbox{}, err
	}
	b := c.Binding
	b.ID, b.ClaimedAt = "k3x9", noon
	if c.Lifetime > 0 {
		b.EndAt = noon.Add(c.Lifetime)
	}
	if c.IdleTimeout != nil {
		b.IdleTimeout = *c.IdleTimeout
	}
	s := core.Sandbox{
		Binding: b, Phase: f.phase, Pool: core.PoolKey{Namespace: "default", Name: pool}, Pod: core.PodKey{Name: "python-abcdef"},
		IP: netip.MustParseAddr("10.0.0.1"), DefaultPort: 8080,
	}
	if f.claimed != nil {
		f.claimed(&s)
	}
	return s, nil
}

func (f *fake) ClaimBatch(ctx context.Context, pool string, c core.Claim) (live []core.Sandbox, ended []string, err error) {
	s, err := f.Claim(ctx, pool, c)
	for i := range c.AtLeast {
		s.ID = fmt.Sprintf("k3x%d", i)
		live = append(live, s)
	}
	for i := range c.Count - c.AtLeast {
		ended = append(ended, fmt.Sprintf("gone%d", i))
	}
	return live, ended, err
}

func (f *fake) Release(ctx context.Context, id, reason string) (core.CallStatus, int, error) {
	f.mu.Lock()
	f.released = append(f.released, id+" "+reason)
	f.mu.Unlock()
	return f.status, f.outstanding, f.wait(ctx)
}

func (f *fake) Sandbox(ctx context.Context, id string) (core.Sandbox, bool, error) {
	s, known := f.sandboxes[id]
	return s, known, f.wait(ctx)
}

// List lists what is in live.
func (f *fake) List(ctx context.Context, q Query) ([]core.Sandbox, error) {
	f.mu.Lock()
	f.queries = append(f.queries, q)
	f.mu.Unlock()
	list := slices.Clone(f.live)
	if q.Order == core.NewestFirst {
		slices.Reverse(list)
	}
	if q.After != (core.Mark{}) {
		at := slices.IndexFunc(list, func(s core.Sandbox) bool { return s.ID == q.After.ID && s.ClaimedAt.Equal(q.After.ClaimedAt) })
		list = list[1+at:]
	}
	list = slices.DeleteFunc(list, func(s core.Sandbox) bool {
		gone := s.Phase == core.Released || s.Phase == core.Ended
		return q.Pool != "" && q.Pool != s.Pool.Name || q.Team != "" && q.Team != s.Team || gone && !q.Gone || !gone && !q.Live ||
			s.ClaimedAt.Before(q.Since) || q.Keep != nil && !q.Keep(&s)
	})
	return list[:min(q.Most, len(list))], f.wait(ctx)
}

func (f *fake) Sleep(ctx context.Context, id string, stop bool) (core.SandboxCallAnswered, error) {
	f.mu.Lock()
	f.stops = append(f.stops, stop)
	f.mu.Unlock()
	return core.SandboxCallAnswered{Status: f.status, Sandbox: f.sandboxes[id], Why: f.why, Err: f.notArchived}, f.wait(ctx)
}

func (f *fake) MakeSnapshot(ctx context.Context, id string, of snapshots.Snapshot) (snapshots.Snapshot, core.SandboxCallAnswered, error) {
	e := core.SandboxCallAnswered{Status: f.status, Sandbox: f.sandboxes[id], Why: f.why}
	if f.store == nil || f.err != nil || f.status != core.CallOK {
		return of, e, f.wait(ctx)
	}
	of.SandboxID, of.Pool = id, "python"
	made, err := f.store.Write(ctx, of, 1<<20, func(_ context.Context, w io.Writer) (snapshots.Contents, error) {
		_, err := io.WriteString(w, "files of "+id)
		return snapshots.Contents{Entries: 3, Bytes: 9, LeftOut: map[string]int{"socket": 1}}, err
	})
	return made, e, err
}

func (f *fake) Extend(ctx context.Context, id string, lifetime time.Duration, wake bool) (core.SandboxCallAnswered, error) {
	f.mu.Lock()
	f.kept = append(f.kept, fmt.Sprintf("%s at least %v", id, lifetime))
	until, _ := ctx.Deadline()
	f.extending = time.Until(until)
	f.mu.Unlock()
	s := f.sandboxes[id]
	asleep := s.Phase == core.Asleep || s.Phase == core.Stopped
	woken := asleep && wake
	if asleep && !wake {
		return core.SandboxCallAnswered{Status: core.CallAsleep}, f.wait(ctx)
	}
	return core.SandboxCallAnswered{Status: f.status, Sandbox: s, Woken: woken, Why: f.why}, f.wait(ctx)
}

func (f *fake) Pool(name string) (*v1alpha1.SandboxPool, bool) {
	i := slices.IndexFunc(f.pools, func(p *v1alpha1.SandboxPool) bool { return p.Name == name })
	if i < 0 {
		return nil, false
	}
	return f.pools[i], true
}

func (f *fake) Pools() []*v1alpha1.SandboxPool { return f.pools }

func (f *fake) Counts(ctx context.Context) (map[string]core.Counts, error) {
	return f.counts, f.wait(ctx)
}

// Conditions are those of the object, and one of the counts.
func (f *fake) Conditions(p *v1alpha1.SandboxPool, counts core.Counts) []metav1.Condition {
	now := metav1.Condition{Type: "Counted", Message: fmt.Sprint(counts.Warm)}
	return append(slices.Clone(p.Status.Conditions), now)
}

func (f *fake) ScalePool(ctx context.Context, name string, s PoolScale) (*v1alpha1.SandboxPool, error) {
	f.mu.Lock()
	f.scaled = append(f.scaled, fmt.Sprint(name, " ", deref(s.Warm, -1), " ", deref(s.MaxWarm, -1), " ", deref(s.MaxPods, -1), " ", s.Generation))
	f.mu.Unlock()
	pool, _ := f.Pool(name)
	return pool, f.wait(ctx)
}

func (f *fake) Route(ctx context.Context, id string) (core.RouteStatus, bool, error) {
	st, known := f.routes[id]
	return st, known, f.wait(ctx)
}

func (f *fake) Pod(ctx context.Context, key core.PodKey) (inspect.Pod, error) {
	p, ok := f.inspected[key.Name]
	if err := f.wait(ctx); err != nil || ok {
		return p, err
	}
	p.Warnings = f.warnings
	return p, inspect.ErrGone
}

func (f *fake) PendingPods(ctx context.Context, _ string, _ int) (keys []core.PodKey, others int, err error) {
	for _, name := range slices.Sorted(maps.Keys(f.inspected)) {
		keys = append(keys, core.PodKey{Name: name})
	}
	return keys, 3, f.wait(ctx)
}

func (f *fake) PodFailures(ctx context.Context, _ string) ([]core.PodFailure, error) {
	return f.podFailures, f.wait(ctx)
}

func (f *fake) LogLines(ctx context.Context, _ core.Sandbox) ([]string, error) {
	return f.lastLines, f.wait(ctx)
}

func (f *fake) Logs(ctx context.Context, _ core.PodKey, o inspect.LogOptions) (io.ReadCloser, error) {
	f.logOptions = o
	return io.NopCloser(strings.NewReader(f.log)), errors.Join(f.logErr, f.wait(ctx))
}

func (f *fake) Usage(ctx context.Context, sandboxes []core.Sandbox) (map[string]inspect.Usage, error) {
	f.measured = nil
	for _, s := range sandboxes {
		f.measured = append(f.measured, s.ID)
	}
	return f.usage, errors.Join(f.usageErr, f.wait(ctx))
}

func (f *fake) UsageOver(ctx context.Context, s core.Sandbox) ([]inspect.Usage, error) {
	f.measured = []string{s.ID}
	all := slices.Clone(f.series)
	if u, ok := f.usage[s.ID]; ok {
		all = append(all, u)
	}
	return all, errors.Join(f.usageErr, f.wait(ctx))
}

func (f *fake) Serving() context.Context {
	if f.serving == nil {
		return context.Background()
	}
	return f.serving
}

func (f *fake) Events() (*events.Ring, error) { return f.events, f.err }

func (f *fake) EventLog() (*eventlog.Log, error) { return f.eventLog, f.err }

func (f *fake) History() (*history.Ring, error) { return f.history, f.err }

func (f *fake) Webhooks() (*webhooks.Manager, error) { return f.webhooks, f.err }

func (f *fake) Fences(ctx context.Context, most int) ([]core.FenceStatus, int, error) {
	f.mu.Lock()
	f.limits = append(f.limits, most)
	f.mu.Unlock()
	return f.fences, f.truncated, f.wait(ctx)
}

func (f *fake) Sessions(ctx context.Context, most int) ([]core.SessionStatus, int, error) {
	f.mu.Lock()
	f.limits = append(f.limits, most)
	f.mu.Unlock()
	return f.sessions, f.truncated, f.wait(ctx)
}

func (f *fake) KeepAlive(ctx context.Context, id string) (core.CallStatus, error) {
	f.mu.Lock()
	f.kept = append(f.kept, id)
	f.mu.Unlock()
	return f.status, f.wait(ctx)
}

func (f *fake) SetTimeout(ctx context.Context, id string, lifetime time.Duration) (core.CallStatus, error) {
	f.mu.Lock()
	f.kept = append(f.kept, id+" "+lifetime.String())
	f.mu.Unlock()
	return f.status, f.wait(ctx)
}

func (f *fake) SetNetwork(ctx context.Context, id string, rules core.EgressRules) (core.SandboxCallAnswered, error) {
	f.mu.Lock()
	f.kept, f.rules = append(f.kept, id), rules
	f.mu.Unlock()
	return core.SandboxCallAnswered{Status: f.status, Why: f.why}, f.wait(ctx)
}

func (f *fake) EgressUsage(ctx context.Context, id string) (openapi.SandboxEgress, error) {
	f.mu.Lock()
	f.kept = append(f.kept, id)
	f.mu.Unlock()
	return f.egress, f.wait(ctx)
}

func (f *fake) Activities(ctx context.Context, filter Filter, most int) ([]core.ActivityStatus, int, error) {
	f.mu.Lock()
	f.limits, f.which = append(f.limits, most), append(f.which, filter)
	f.mu.Unlock()
	return f.activities, f.truncated, f.wait(ctx)
}

func (f *fake) Teams(ctx context.Context, also []string, most int) ([]core.TeamStatus, int, error) {
	f.mu.Lock()
	f.limits, f.asked = append(f.limits, most), also
	f.mu.Unlock()
	return f.teams, f.truncated, f.wait(ctx)
}

func (f *fake) DeclareDead(ctx context.Context, session, by, reason string) (core.DeadDeclared, error) {
	f.mu.Lock()
	f.declared = append(f.declared, session+"|"+by+"|"+reason)
	f.mu.Unlock()
	return f.dead, f.wait(ctx)
}

func handler(t require.TestingT, f *fake) http.Handler { return handlerWithKeys(t, f, nil) }

func handlerWithKeys(t require.TestingT, f *fake, keys Keys) http.Handler {
	h, err := New(Options{
		Snapshots: f.store, SnapshotsKept: time.Hour,
		Allocator: f, Keys: keys, PublicScheme: "https", PublicHost: "sandbox.example.com:8443",
		MinIdleTimeout: minIdle, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	return h
}

func call(h http.Handler, method, target, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := request(context.Background(), method, target, strings.NewReader(body))
	r.Header.Set("X-Request-Id", "req-1")
	h.ServeHTTP(w, r)
	return w
}

// serve calls h as a server does: a handler that aborts has its connection closed.
func serve(h http.Handler, w http.ResponseWriter, r *http.Request) (aborted bool) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case http.ErrAbortHandler:
			aborted = true
		default:
			panic(p)
		}
	}()
	h.ServeHTTP(w, r)
	return false
}

// host is how the API is called.
const host = "localhost:8081"

func request(ctx context.Context, method, target string, body io.Reader) *http.Request {
	r := httptest.NewRequestWithContext(ctx, method, target, body)
	r.Host = host
	return r
}

// refusal checks that w is an error of the documented shape, and returns it.
func refusal(t *testing.T, w *httptest.ResponseRecorder, code int, reason apierror.Reason) *apierror.Error {
	t.Helper()
	require.Equal(t, code, w.Code, w.Body)
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	decoder := json.NewDecoder(w.Body)
	decoder.DisallowUnknownFields()
	var e apierror.Error
	require.NoError(t, decoder.Decode(&e))
	require.Equal(t, code, e.Code)
	require.Equal(t, reason, e.Reason)
	require.Equal(t, "req-1", e.RequestID)
	require.NotEmpty(t, e.Message)
	return &e
}

func TestUnservedPathsAreRefusedByName(t *testing.T) {
	h := handler(t, &fake{})
	for _, c := range [][2]string{
		{"POST", "/v2/sandboxes/k3x9/fork"}, {"GET", "/volumes"}, {"DELETE", "/templates/a"}, {"GET", "/secrets"},
	} {
		require.NotEmpty(t, refusal(t, call(h, c[0], c[1], ""), 501, apierror.NotImplemented).Message)
	}
	for _, c := range [][3]string{{"PUT", "/sandboxes", "GET, POST"}, {"PATCH", "/v2/sandboxes/k3x9", "DELETE, GET"}, {"GET", "/v1/sandboxes/x/keepalive", "POST"}} {
		w := call(h, c[0], c[1], "")
		require.Contains(t, refusal(t, w, 405, apierror.MethodRefused).Message, c[0])
		require.Equal(t, c[2], w.Header().Get("Allow"))
	}
	for _, path := range []string{"/", "/v1", "/v1/sandboxes/", "/sandboxesx", "/v2sandboxes", "/v2", "/sandboxes/"} {
		require.Contains(t, refusal(t, call(h, "GET", path, ""), 404, apierror.NotFound).Message, "/openapi.json")
	}
}

func TestCallTimeoutIsA503(t *testing.T) {
	for _, c := range [][2]string{{"POST", "/sandboxes"}, {"GET", "/sandboxes"}, {"GET", "/sandboxes/x"}, {"DELETE", "/sandboxes/x"}} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			w := call(handler(t, &fake{block: true}), c[0], c[1], `{"templateID":"python"}`)
			refusal(t, w, 503, apierror.Timeout)
			require.Equal(t, "1", w.Header().Get("Retry-After"))
			want := answerWait
			if c[0] == "POST" {
				want += claimWait
			}
			require.Equal(t, want, time.Since(began))
		})
	}
}

func TestGoneClientGetsNoAnswer(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w := httptest.NewRecorder()
	r := request(ctx, "DELETE", "/sandboxes/x", nil)
	require.True(t, serve(handler(t, &fake{block: true}), w, r))
	require.Empty(t, w.Body.String())
}

// net/http ends the context of a call when its client has closed its side.
func TestHalfClosedClientGetsNoEmptySuccess(t *testing.T) {
	leader := listen(t, handler(t, &fake{block: true}))
	for name, at := range map[string]string{"leader": leader, "follower": listen(t, handler(t, &fake{leader: leader}))} {
		for _, c := range calls {
			t.Run(name+" "+c[0]+" "+c[1], func(t *testing.T) {
				conn, err := net.Dial("tcp", at)
				require.NoError(t, err)
				defer conn.Close()
				body := `{"templateID":"python"}`
				_, err = fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s", c[0], c[1], len(body), body)
				require.NoError(t, err)
				require.NoError(t, conn.(*net.TCPConn).CloseWrite())
				answer, err := io.ReadAll(conn)
				require.NoError(t, err)
				require.Empty(t, string(answer))
			})
		}
	}
}

func TestOptionsAreRequired(t *testing.T) {
	_, err := New(Options{})
	require.Error(t, err)
}

type silent struct{}

func (silent) Errorf(string, ...any) {}
func (silent) FailNow()              {}

func Example() {
	h := handler(silent{}, &fake{})
	w := call(h, "POST", "/sandboxes", `{"templateID": "python", "timeout": 300}`)
	var s openapi.Sandbox
	_ = json.Unmarshal(w.Body.Bytes(), &s)
	fmt.Println(w.Code, s.URL)
	w = call(h, "DELETE", "/sandboxes/k3x9?force=true", "")
	fmt.Println(w.Body)
	// Output:
	// 201 https://8080-k3x9.sandbox.example.com:8443/
	// {"code":400,"reason":"bad_request","message":"force: unknown parameter","requestID":"req-1"}
}

func TestCrossOriginCallsAreRefused(t *testing.T) {
	for _, c := range []struct{ method, target string }{{"POST", "/sandboxes"}, {"DELETE", "/v2/sandboxes/x"}} {
		f := &fake{status: core.CallOK}
		for name, value := range map[string]string{"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"} {
			w := httptest.NewRecorder()
			r := request(t.Context(), c.method, c.target, strings.NewReader(`{"templateID":"python"}`))
			r.Header.Set("X-Request-Id", "req-1")
			r.Header.Set(name, value)
			handler(t, f).ServeHTTP(w, r)
			refusal(t, w, http.StatusForbidden, apierror.CrossOrigin)
		}
		require.Empty(t, f.pool, "nothing was claimed")
		require.Empty(t, f.released)
	}
}

// A browser adds no key by itself, so with keys it need not keep pages out.
//
// Invariant: P6
func TestPagesOfEveryOriginMayCallWithAKey(t *testing.T) {
	keys := keysIn(map[string]string{"team": keyOne})
	preflight := http.Header{"Origin": {"https://page.example"}, "Access-Control-Request-Method": {"POST"}, "Access-Control-Request-Headers": {"x-api-key"}}
	f := &fake{status: core.CallOK}
	for name, h := range map[string]http.Handler{
		"leader": handlerWithKeys(t, f, keys), "follower": handlerWithKeys(t, &fake{leader: listen(t, handlerWithKeys(t, f, keys))}, keys),
	} {
		for _, target := range []string{"/sandboxes", "/v2/sandboxes/x", "/none"} {
			w := callWith(h, "OPTIONS", target, preflight)
			require.Equal(t, http.StatusNoContent, w.Code, name)
			require.Empty(t, w.Body)
			require.Equal(t, "*", w.Header().Get("Access-Control-Allow-Origin"))
			require.Equal(t, "GET, HEAD, POST, PUT, PATCH, DELETE", w.Header().Get("Access-Control-Allow-Methods"))
			require.Equal(t, "7200", w.Header().Get("Access-Control-Max-Age"))
			for _, header := range []string{"X-API-Key", "Authorization", "Content-Type", "browser", "sdk_runtime", "Idempotency-Key"} {
				require.Contains(t, strings.Split(w.Header().Get("Access-Control-Allow-Headers"), ", "), header)
			}
		}
		for method, key := range map[string]string{"POST": keyOne, "GET": keyOne, "DELETE": "wrong"} {
			w := callWith(h, method, "/sandboxes", http.Header{"Origin": {"https://page.example"}, "Sec-Fetch-Site": {"cross-site"}, "X-Api-Key": {key}})
			require.Equal(t, map[string]int{"POST": 201, "GET": 200, "DELETE": 401}[method], w.Code, "%s %s", name, w.Body)
			require.Equal(t, []string{"*"}, w.Header()["Access-Control-Allow-Origin"], "browsers refuse two of them")
			require.Equal(t, []string{"X-Next-Token, X-Total-Running, RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset, Retry-After, Berth-Trace-Id"}, w.Header()["Access-Control-Expose-Headers"])
			require.NotContains(t, w.Header(), "Access-Control-Allow-Credentials")
		}
	}
	// Without keys every page could make sandboxes.
	for _, method := range []string{"OPTIONS", "GET", "POST"} {
		w := callWith(handler(t, &fake{}), method, "/sandboxes", preflight)
		for name := range w.Header() {
			require.NotContains(t, name, "Access-Control", method)
		}
	}
}

// Invariant: P6
func TestForeignHostIsRefusedWithoutKeys(t *testing.T) {
	ask := func(h http.Handler, host, origin string) *httptest.ResponseRecorder {
		r := request(t.Context(), "POST", "/sandboxes", strings.NewReader(`{"templateID":"python"}`))
		r.Host = host
		r.Header.Set("Origin", "http://"+origin)
		r.Header.Set("X-Request-Id", "req-1")
		r.Header.Set("X-API-Key", keyOne)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	for _, host := range []string{"evil.example", "evil.example:8081", "127.0.0.1.evil.example", "8080-k3x9.sandbox.example.com", "10.0.0.1:8081", ""} {
		f := &fake{}
		refusal(t, ask(handler(t, f), host, host), http.StatusMisdirectedRequest, apierror.HostRefused)
		require.Empty(t, f.pool, host)
		// With keys no name is needed to be known: nothing is done without a key.
		keys := keysIn(map[string]string{"team": keyOne})
		require.Equal(t, 201, ask(handlerWithKeys(t, f, keys), host, host).Code, host)
	}
	for _, host := range []string{"127.0.0.1:8081", "127.0.0.1", "[::1]:8081", "localhost:8081", "localhost", "Sandbox.Example.com", "sandbox.example.com:8443", "api.sandbox.example.com"} {
		require.Equal(t, 201, ask(handler(t, &fake{}), host, host).Code, host)
		w := ask(handler(t, &fake{}), host, "evil.example")
		refusal(t, w, http.StatusForbidden, apierror.CrossOrigin)
	}
}

// A gateway on the same machine connects from loopback for clients anywhere.
//
// Invariant: P6
func TestProxiedRemoteClientIsRefusedWithoutKeys(t *testing.T) {
	ask := func(h http.Handler, from ...string) *httptest.ResponseRecorder {
		return callWith(h, "POST", "/sandboxes", http.Header{"X-Forwarded-For": from, "X-Api-Key": {keyOne}})
	}
	for _, from := range [][]string{{"203.0.113.7"}, {"127.0.0.1, 203.0.113.7"}, {"127.0.0.1", "203.0.113.7"}, {"2001:db8::1"}, {"10.0.0.1"}, {""}, {"127.0.0.1,"}} {
		f := &fake{}
		refusal(t, ask(handler(t, f), from...), http.StatusMisdirectedRequest, apierror.HostRefused)
		require.Empty(t, f.pool, from)
		require.Equal(t, 201, ask(handlerWithKeys(t, f, keysIn(map[string]string{"team": keyOne})), from...).Code, from)
	}
	for _, from := range [][]string{nil, {"127.0.0.1"}, {"203.0.113.7,127.0.0.9"}, {"203.0.113.7", "::1"}} {
		require.Equal(t, 201, ask(handler(t, &fake{}), from...).Code, from)
	}
}

func TestFollowerRefusesForeignHostItself(t *testing.T) {
	leader := &fake{status: core.CallOK}
	follower := handler(t, &fake{leader: listen(t, handler(t, leader))})
	r := request(t.Context(), "DELETE", "/sandboxes/x", nil)
	r.Header.Set("X-Request-Id", "req-1")
	w := httptest.NewRecorder()
	follower.ServeHTTP(w, r)
	require.Equal(t, http.StatusNoContent, w.Code, "the leader sees the same host: %s", w.Body)
	r.Host = "evil.example"
	w = httptest.NewRecorder()
	follower.ServeHTTP(w, r)
	refusal(t, w, http.StatusMisdirectedRequest, apierror.HostRefused)
	require.Len(t, leader.released, 1)
}
