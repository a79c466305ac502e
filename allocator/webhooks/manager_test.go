package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeLog is a log of events of the team blue.
type fakeLog struct {
	mu      sync.Mutex
	first   uint64
	events  []eventlog.Event
	changed chan struct{}
}

func newFakeLog() *fakeLog { return &fakeLog{first: 1, changed: make(chan struct{})} }

func (l *fakeLog) add(sandbox string, types ...eventlog.Type) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range types {
		l.events = append(l.events, eventlog.Event{Number: l.first + uint64(len(l.events)), Type: t, Sandbox: sandbox, Team: "blue", At: 1})
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

// drop drops all but the last events.
func (l *fakeLog) drop(keep int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.events) - keep
	l.events, l.first = l.events[n:], l.first+uint64(n)
}

func (l *fakeLog) Last() (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first + uint64(len(l.events)) - 1, nil
}

func (l *fakeLog) After(at uint64, f eventlog.Filter, most int) (b eventlog.Batch, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b = eventlog.Batch{Next: at, First: l.first}
	if at+1 < l.first {
		b.Lost, b.Next = l.first-1-at, l.first-1
	}
	for _, e := range l.events {
		if e.Number <= b.Next || len(b.Events) == most {
			continue
		}
		if b.Next = e.Number; e.Team == f.Team && slices.Contains(f.Types, e.Type) {
			b.Events = append(b.Events, e)
		}
	}
	if b.Next == l.first+uint64(len(l.events))-1 {
		b.Changed = l.changed
	}
	return b, nil
}

var hooksResource = schema.GroupResource{Group: v1alpha1.Group, Resource: resourceName}

// memory is a Store.
type memory struct {
	mu      sync.Mutex
	objects map[string]v1alpha1.EventWebhook
	version int
}

func newMemory() *memory { return &memory{objects: map[string]v1alpha1.EventWebhook{}} }

func (m *memory) List(context.Context) ([]v1alpha1.EventWebhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.objects)), nil
}

func (m *memory) Get(_ context.Context, id string) (*v1alpha1.EventWebhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, ok := m.objects[id]
	if !ok {
		return nil, apierrors.NewNotFound(hooksResource, id)
	}
	return &o, nil
}

func (m *memory) Create(_ context.Context, o *v1alpha1.EventWebhook) (*v1alpha1.EventWebhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.put(o), nil
}

func (m *memory) put(o *v1alpha1.EventWebhook) *v1alpha1.EventWebhook {
	o = o.DeepCopy()
	m.version++
	o.ResourceVersion = strconv.Itoa(m.version)
	m.objects[o.Name] = *o
	return o
}

func (m *memory) Update(_ context.Context, o *v1alpha1.EventWebhook) (*v1alpha1.EventWebhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch there, ok := m.objects[o.Name]; {
	case !ok:
		return nil, apierrors.NewNotFound(hooksResource, o.Name)
	case there.ResourceVersion != o.ResourceVersion:
		return nil, apierrors.NewConflict(hooksResource, o.Name, errors.New("another version"))
	}
	return m.put(o), nil
}

func (m *memory) Delete(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.objects[id]; !ok {
		return apierrors.NewNotFound(hooksResource, id)
	}
	delete(m.objects, id)
	return nil
}

// ground is a Manager whose requests go to a function and not to a network.
type ground struct {
	*testing.T
	log   *fakeLog
	store *memory
	m     *Manager
	stop  func()
	// serve answers requests by URL.
	mu    sync.Mutex
	serve func(r *http.Request, body string) int
	got   map[string][]payload // by URL, answered with 2xx
}

func (g *ground) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	serve := g.serve
	g.mu.Unlock()
	code := serve(r, string(body))
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if code == 0 {
		return nil, errors.New("connection refused")
	}
	if code/100 == 2 {
		var p payload
		if err := json.Unmarshal(body, &p); err != nil {
			return nil, err
		}
		g.mu.Lock()
		g.got[r.URL.String()] = append(g.got[r.URL.String()], p)
		g.mu.Unlock()
	}
	return &http.Response{StatusCode: code, Body: http.NoBody, Header: http.Header{}, Request: r}, nil
}

func (g *ground) answers(f func(r *http.Request, body string) int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.serve = f
}

func (g *ground) received(url string) []payload {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.got[url])
}

func ok(*http.Request, string) int { return 200 }

func newGround(t *testing.T) *ground {
	g := &ground{T: t, log: newFakeLog(), store: newMemory(), serve: ok, got: map[string][]payload{}}
	g.lead("one key of the cluster, of 32 bytes")
	return g
}

// lead begins a term.
func (g *ground) lead(key string) {
	k, err := sandboxaccess.NewKey([]byte(key))
	require.NoError(g, err)
	g.m, err = New(Options{Store: g.store, Log: g.log, Key: k, Guard: &Guard{}, Valid: func() bool { return true }, Logger: zap.NewNop()})
	require.NoError(g, err)
	g.m.client.Transport = g
	ctx, cancel := context.WithCancel(g.Context())
	done := make(chan struct{})
	go func() { defer close(done); g.m.Run(ctx) }()
	g.stop = func() { cancel(); <-done }
	synctest.Wait()
}

func (g *ground) hook(url string) string {
	g.Helper()
	name, secret := "hook", "a secret of a team"
	enabled := true
	o, err := g.m.Create(g.Context(), "blue", Change{Name: &name, URL: &url, Secret: &secret, Enabled: &enabled, Events: []string{string(eventlog.Created), string(eventlog.Killed)}})
	require.NoError(g, err)
	return o.Name
}

var blue = Scope{Team: "blue"}

const target = "https://hooks.example.com/a"

// ordered requires that the events of each sandbox came in order, each at least once.
func (g *ground) ordered(url string, sandboxes int) {
	g.Helper()
	last := map[string]string{}
	for _, p := range g.received(url) {
		if p.Type == string(eventlog.Killed) {
			require.NotEmpty(g, last[p.SandboxID], "killed before it was created")
		}
		last[p.SandboxID] = p.Type
	}
	require.Len(g, last, sandboxes)
	for id, kind := range last {
		require.Equal(g, string(eventlog.Killed), kind, id)
	}
}

func (g *ground) lives(n int) {
	for i := range n {
		g.log.add(fmt.Sprintf("s%d", i), eventlog.Created)
	}
	for i := range n {
		g.log.add(fmt.Sprintf("s%d", i), eventlog.Updated, eventlog.Killed)
	}
}

func TestDeliveriesAreSignedAsE2BDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		var sent *http.Request
		var sentBody string
		g.answers(func(r *http.Request, body string) int { sent, sentBody = r, body; return 200 })
		g.log.add("s1", eventlog.Killed)
		synctest.Wait()
		require.Equal(t, id, sent.Header.Get("e2b-webhook-id"))
		require.Equal(t, "v1", sent.Header.Get("e2b-signature-version"))
		require.Equal(t, signature("a secret of a team", []byte(sentBody)), sent.Header.Get("e2b-signature"))
		require.Equal(t, "YuouM0o8pKJyrkZVR45vYimhIRzExMogPwMGjY_kzew", signature("secret", []byte("body")))
		require.NotContains(t, fmt.Sprint(sent.Header, sentBody), "a secret")
		all, err := g.m.Deliveries(blue, id, 10)
		require.NoError(t, err)
		require.Equal(t, all[0].ID, sent.Header.Get("e2b-delivery-id"))
		require.Equal(t, openapi.Success, all[0].Status)
		var body map[string]any
		require.NoError(t, json.Unmarshal([]byte(sentBody), &body))
		require.Equal(t, []string{"event_category", "event_data", "event_label", "id", "sandbox_build_id", "sandbox_execution_id", "sandbox_id", "sandbox_team_id", "sandbox_template_id", "timestamp", "type", "version"},
			slices.Sorted(maps.Keys(body)))
		g.stop()
	})
}

// Invariant: P22
func TestDeadTargetGetsEverythingWhenItIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		var attempts atomic.Int64
		g.answers(func(*http.Request, string) int { return []int{0, 500, 404, 302}[attempts.Add(1)%4] })
		g.lives(100)
		time.Sleep(time.Hour)
		require.Less(t, attempts.Load(), int64(60), "a dead target is not hammered")
		all, err := g.m.Deliveries(blue, id, 100)
		require.NoError(t, err)
		require.Equal(t, openapi.Failed, all[0].Status)
		g.answers(ok)
		time.Sleep(10 * time.Minute)
		g.ordered(target, 100)
		require.Zero(t, g.m.Stats().GivenUp)
		require.Zero(t, g.m.Stats().Lag)
		g.stop()
	})
}

// Invariant: P22
func TestSlowTargetDelaysNoOtherWebhook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		for i := range teamHooks - 1 {
			g.hook(fmt.Sprintf("https://slow.example.com/%d", i))
		}
		id := g.hook(target)
		g.answers(func(r *http.Request, _ string) int {
			if r.URL.Host == "slow.example.com" {
				<-r.Context().Done()
				return 0
			}
			return 200
		})
		g.lives(200)
		time.Sleep(3 * time.Second)
		g.ordered(target, 200)
		all, err := g.m.Deliveries(blue, id, 1000)
		require.NoError(t, err)
		require.Len(t, all, 100, "the last ones")
		g.stop()
	})
}

// The next leader goes on at the stored position.
//
// Invariant: P22
func TestDeliveryGoesOnUnderTheNextLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		var n atomic.Int64
		g.answers(func(*http.Request, string) int {
			time.Sleep(30 * time.Millisecond)
			if n.Add(1)%5 == 0 {
				return 503
			}
			return 200
		})
		g.lives(200)
		for range 3 {
			time.Sleep(2500 * time.Millisecond)
			g.stop()
			g.lead("one key of the cluster, of 32 bytes")
		}
		time.Sleep(10 * time.Minute)
		g.ordered(target, 200)
		last, err := g.log.Last()
		require.NoError(t, err)
		o, err := g.store.Get(t.Context(), id)
		require.NoError(t, err)
		require.EqualValues(t, last, o.Status.Through)
		g.stop()
	})
}

// Invariant: P22
func TestLaggingWebhookGetsOneGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		g.hook(target)
		g.answers(func(*http.Request, string) int { return 0 })
		g.lives(2000)
		time.Sleep(time.Minute)
		g.log.drop(100)
		g.stop()
		g.lead("one key of the cluster, of 32 bytes")
		time.Sleep(time.Minute)
		g.answers(ok)
		time.Sleep(10 * time.Minute)
		var gaps []payload
		for _, p := range g.received(target) {
			if p.Type == GapType {
				gaps = append(gaps, p)
			}
		}
		require.Len(t, gaps, 1)
		require.Equal(t, map[string]any{"lost": 5900.0}, gaps[0].Data)
		require.Len(t, g.received(target), 51, "the gap and the kills")
		g.stop()
	})
}

// An event that the target cannot take holds up its sandbox for some minutes, and no other.
//
// Invariant: P22
func TestPoisonousEventIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		g.answers(func(_ *http.Request, body string) int {
			if strings.Contains(body, `"sandbox_id":"s3"`) && strings.Contains(body, string(eventlog.Created)) {
				return 500
			}
			return 200
		})
		g.lives(10)
		time.Sleep(20 * time.Second)
		require.Len(t, g.received(target), 18)
		for range 20 {
			time.Sleep(20 * time.Second)
			g.log.add("other", eventlog.Created)
		}
		time.Sleep(10 * time.Minute)
		require.EqualValues(t, 1, g.m.Stats().GivenUp)
		require.Zero(t, g.m.Stats().Lag)
		all, err := g.m.Deliveries(blue, id, 100)
		require.NoError(t, err)
		i := slices.IndexFunc(all, func(d openapi.WebhookDelivery) bool { return d.Status == openapi.GivenUp })
		require.Equal(t, maxAttempts, all[i].Attempt)
		g.stop()
	})
}

// Invariant: P21
func TestWebhookWithoutItsSecretSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		o, err := g.store.Get(t.Context(), id)
		require.NoError(t, err)
		raw, err := json.Marshal(o)
		require.NoError(t, err)
		require.NotContains(t, string(raw), "a secret")
		g.stop()
		g.lead("another key of the cluster, too, of 32 bytes")
		g.log.add("s1", eventlog.Created)
		time.Sleep(time.Minute)
		require.Empty(t, g.received(target))
		require.Equal(t, 1, g.m.Stats().Locked)
		secret := "another secret"
		_, err = g.m.Update(t.Context(), blue, id, Change{Secret: &secret})
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Len(t, g.received(target), 1)
		// A secret cannot be moved to another webhook.
		moved, err := g.store.Get(t.Context(), id)
		require.NoError(t, err)
		moved.Spec.Team = "red"
		_, err = g.m.sealer.open(moved.Spec.Secret, moved.Name, moved.Spec.Team)
		require.ErrorIs(t, err, errSealed)
		g.stop()
	})
}

func TestWebhooksAreThoseOfTheTeam(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		red := Scope{Team: "red"}
		_, err := g.m.Get(red, id)
		require.ErrorContains(t, err, "there is none")
		require.ErrorContains(t, g.m.Delete(t.Context(), red, id), "there is none")
		_, err = g.m.Deliveries(red, id, 1)
		require.ErrorContains(t, err, "there is none")
		_, err = g.m.Update(t.Context(), red, id, Change{})
		require.ErrorContains(t, err, "there is none")
		all, err := g.m.List(red)
		require.NoError(t, err)
		require.Empty(t, all)
		all, err = g.m.List(Scope{All: true})
		require.NoError(t, err)
		require.Len(t, all, 1)
		for range teamHooks - 1 {
			g.hook(target)
		}
		_, err = g.m.Create(t.Context(), "blue", Change{})
		require.ErrorContains(t, err, `team "blue" has 10 webhooks`)
		url := "https://10.0.0.1/"
		_, err = g.m.Create(t.Context(), "red", Change{URL: &url})
		require.ErrorContains(t, err, "url: 10.0.0.1: not a public address")
		require.NoError(t, g.m.Delete(t.Context(), blue, id))
		g.log.add("s1", eventlog.Created)
		time.Sleep(time.Minute)
		require.Len(t, g.received(target), teamHooks-1)
		g.stop()
	})
}

func TestDisabledWebhookPassesEventsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGround(t)
		id := g.hook(target)
		on, off := true, false
		_, err := g.m.Update(t.Context(), blue, id, Change{Enabled: &off})
		require.NoError(t, err)
		g.log.add("s1", eventlog.Created)
		time.Sleep(time.Minute)
		_, err = g.m.Update(t.Context(), blue, id, Change{Enabled: &on})
		require.NoError(t, err)
		g.log.add("s2", eventlog.Created)
		time.Sleep(time.Minute)
		require.Len(t, g.received(target), 1)
		require.NoError(t, g.store.Delete(t.Context(), id)) // by another client
		g.log.add("s3", eventlog.Created)
		time.Sleep(time.Minute)
		g.log.add("s4", eventlog.Created)
		time.Sleep(time.Minute)
		require.Len(t, g.received(target), 2, "its deletion is noticed when a position is stored")
		g.stop()
	})
}

// Redirects are not followed, and a long answer is not read.
//
// Invariant: P21
func TestAnswersOfTargetsAreNotObeyed(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") }))
	defer elsewhere.Close()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/long" {
			w.WriteHeader(http.StatusOK)
			for {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		}
		http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
	}))
	defer s.Close()
	m, err := New(Options{Store: newMemory(), Log: newFakeLog(), Guard: &Guard{AllowHTTP: true, Allowed: prefixes("127.0.0.0/8", "::1/128")}, Valid: func() bool { return true }, Logger: zap.NewNop()})
	require.NoError(t, err)
	defer m.client.CloseIdleConnections()
	code, err := (&runner{m: m, url: s.URL, secret: "secret"}).send(t.Context(), "id", &payload{})
	require.ErrorContains(t, err, "the answer is 307")
	require.Equal(t, 307, code)
	code, err = (&runner{m: m, url: s.URL + "/long", secret: "secret"}).send(t.Context(), "id", &payload{})
	require.NoError(t, err)
	require.Equal(t, 200, code)
}
