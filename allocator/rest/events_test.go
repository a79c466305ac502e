package rest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/api/apierror"
)

// openStream opens a stream of events at a server. next returns the next event or comment, "" at the
// end of the stream.
func openStream(t *testing.T, base, query, lastID string) (w *http.Response, next func() string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v1/events?"+query, http.NoBody)
	require.NoError(t, err)
	if lastID != "" {
		r.Header.Set("Last-Event-ID", lastID)
	}
	w, err = http.DefaultClient.Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { cancel(); _ = w.Body.Close() })
	lines := bufio.NewReader(w.Body)
	return w, func() string {
		var all []string
		for {
			line, err := lines.ReadString('\n')
			if line == "\n" || err != nil {
				return strings.Join(all, " ")
			}
			all = append(all, strings.TrimSpace(line))
		}
	}
}

func published(r *events.Ring, id, team string) {
	r.Publish(events.Event{Type: events.Created, At: noon, SandboxID: id, Pool: "python", Team: team})
}

const createdA = `id: 7.1 event: created data: {"at":"2030-01-01T12:00:00Z","pool":"python","sandboxID":"a","team":"blue","type":"created"}`

func TestStreamGoesOnAfterItsLastEvent(t *testing.T) {
	ring := events.New(7)
	base := "http://" + listen(t, handler(t, &fake{events: ring}))
	w, next := openStream(t, base, "", "")
	require.Equal(t, "text/event-stream", w.Header.Get("Content-Type"))
	require.Equal(t, ": heartbeat id: 7.0", next())
	published(ring, "a", "blue")
	require.Equal(t, createdA, next())
	ring.Publish(events.Event{Type: events.Released, At: noon, SandboxID: "a", Pool: "python", User: "eve", Reason: "Idle"})
	require.Equal(t, `id: 7.2 event: released data: {"at":"2030-01-01T12:00:00Z","pool":"python","reason":"Idle","sandboxID":"a","type":"released","user":"eve"}`, next())

	_, again := openStream(t, base, "", "7.1")
	require.Equal(t, ": heartbeat id: 7.1", again())
	require.Contains(t, again(), "id: 7.2 event: released")

	_, later := openStream(t, base, "", "6.90") // of the leader before
	require.Equal(t, `id: 7.0 event: gap data: {"message":"events may be lost; read GET /v1/sandboxes to see what is now","reason":"leaderChanged"}`, later())
	require.Equal(t, ": heartbeat id: 7.0", later())
	require.Equal(t, createdA, later())

	ring.Close()
	require.Equal(t, "", next(), "the stream ends with its leader")
	for range events.Size {
		published(ring, "a", "")
	}
	_, slow := openStream(t, base, "", "7.1")
	require.Equal(t, ": heartbeat id: 7.1", slow())
	require.Contains(t, slow(), `id: 7.2 event: gap data: {"message":"events may be lost; read GET /v1/sandboxes to see what is now","reason":"overwritten"}`)
	require.Contains(t, slow(), "id: 7.3 event: created")
}

func TestStreamSelectsByTeamAndPool(t *testing.T) {
	ring := events.New(7)
	base := "http://" + listen(t, handler(t, &fake{events: ring}))
	_, blue := openStream(t, base, "team=blue", "7.0")
	_, ruby := openStream(t, base, "pool=ruby", "7.0")
	require.Contains(t, blue(), "7.0")
	require.Contains(t, ruby(), "7.0")
	published(ring, "r", "red")
	published(ring, "b", "blue")
	ring.Publish(events.Event{Type: events.Ready, SandboxID: "x", Pool: "ruby", Team: "red"})
	require.Contains(t, blue(), `"sandboxID":"b"`)
	require.Contains(t, ruby(), `"sandboxID":"x"`)
}

// revocable has one key, which any caller presents, until it is revoked. An API server may give a key another role or
// team too.
type revocable struct {
	revoked atomic.Bool
	means   atomic.Pointer[access.Caller] // nil: as at first
	mu      sync.Mutex
	current context.Context // until the next change
	end     context.CancelFunc
}

func newRevocable() *revocable {
	k := &revocable{}
	k.current, k.end = context.WithCancel(context.Background())
	return k
}

func (k *revocable) Callers() []access.Caller { return nil }

func (k *revocable) Current() context.Context {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.current
}

// change changes the keys: this one, or others.
func (k *revocable) change(revoked bool) {
	k.revoked.Store(revoked)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.end()
	k.current, k.end = context.WithCancel(context.Background())
}

func (k *revocable) Caller(string) (access.Caller, error) {
	if k.revoked.Load() {
		return access.Caller{}, access.ErrUnknownKey
	}
	if c := k.means.Load(); c != nil {
		return *c, nil
	}
	return access.Caller{Key: "k", Team: "blue", Role: access.Member}, nil
}

// keyChanges are what ends a long call: the key is revoked, or means something else.
var keyChanges = map[string]func(*revocable){
	"revoked":      func(k *revocable) { k.change(true) },
	"another team": func(k *revocable) { k.turn(access.Caller{Key: "k", Team: "red", Role: access.Member}) },
	"another role": func(k *revocable) { k.turn(access.Caller{Key: "k", Team: "blue", Role: access.ReadOnly}) },
}

// turn makes the key mean another caller.
func (k *revocable) turn(c access.Caller) {
	k.means.Store(&c)
	k.change(false)
}

// Invariant: P6
func TestStreamEndsWhenItsKeyIsRevoked(t *testing.T) {
	for name, change := range keyChanges {
		t.Run(name, func(t *testing.T) {
			ring, keys := events.New(7), newRevocable()
			server := httptest.NewServer(handlerWithKeys(t, &fake{events: ring}, keys))
			t.Cleanup(server.Close)
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/v1/events", http.NoBody)
			require.NoError(t, err)
			r.Header.Set("X-API-Key", keyOne)
			w, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			defer w.Body.Close()
			published(ring, "a", "blue")
			lines := bufio.NewReader(w.Body)
			for line := ""; !strings.Contains(line, `"sandboxID":"a"`); {
				line, err = lines.ReadString('\n')
				require.NoError(t, err)
			}
			change(keys)
			published(ring, "b", "blue")
			for {
				line, err := lines.ReadString('\n')
				require.NotContains(t, line, `"sandboxID":"b"`, "an event after the change")
				if errors.Is(err, io.EOF) {
					return
				}
				require.NoError(t, err)
			}
		})
	}
}

func TestStreamHasOnlyEventsThatItsCallerSees(t *testing.T) {
	ring := events.New(7)
	published(ring, "b", "blue")
	published(ring, "r", "red")
	ring.Close()
	for _, c := range []struct {
		caller access.Caller
		has    string
	}{{access.Caller{Role: access.Admin}, "br"}, {access.Caller{Role: access.Member, Team: "blue"}, "b"}, {access.Caller{Role: access.ReadOnly, Team: "red"}, "r"}, {access.Caller{}, ""}} {
		a := &api{Options: Options{Allocator: &fake{events: ring}}}
		w := httptest.NewRecorder()
		r := request(access.With(t.Context(), c.caller), "GET", "/v1/events", nil)
		r.Header.Set("Last-Event-ID", "7.0")
		require.NoError(t, a.sendEvents(w, r))
		for _, id := range []string{"b", "r"} {
			require.Equal(t, strings.Contains(c.has, id), strings.Contains(w.Body.String(), `"sandboxID":"`+id+`"`), "%+v %s", c.caller, id)
		}
	}
}

func TestFollowerForwardsStreamsEventByEvent(t *testing.T) {
	ring := events.New(7)
	leader := listen(t, handler(t, &fake{events: ring}))
	serving, stop := context.WithCancel(t.Context())
	base := "http://" + listen(t, handler(t, &fake{leader: leader, serving: serving}))
	w, next := openStream(t, base, "", "")
	require.Equal(t, "text/event-stream", w.Header.Get("Content-Type"))
	require.Equal(t, ": heartbeat id: 7.0", next())
	published(ring, "a", "blue")
	require.Equal(t, createdA, next())
	stop()
	require.Equal(t, "", next(), "the stream ends when the follower shuts down")
}

func TestStreamsAreBoundedInNumberAndTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &api{Options: Options{Allocator: &fake{events: events.New(7)}}, streams: newClass(2, streamLife)}
		h := a.stream(operation(t, "streamEvents"), a.sendEvents)
		began := time.Now()
		first := make(chan struct{})
		go func() {
			defer close(first)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, request(t.Context(), "GET", "/v1/events", nil))
			require.GreaterOrEqual(t, strings.Count(w.Body.String(), ": heartbeat\n"), int(streamLife/heartbeat))
		}()
		synctest.Wait()
		refusal(t, call(h, "GET", "/v1/events", ""), 503, apierror.Overloaded)
		<-first
		require.Equal(t, streamLife, time.Since(began))
	})
}

func TestStreamsOfATeamAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &api{Options: Options{Allocator: &fake{events: events.New(7)}}, streams: newClass(maxStreams, streamLife)}
		a.streams.slots.most = teamStreams
		h := a.stream(operation(t, "streamEvents"), a.sendEvents)
		open := func(team string) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			r := request(access.With(t.Context(), access.Caller{Team: team, Role: access.ReadOnly}), "GET", "/v1/events", nil)
			r.Header.Set("X-Request-Id", "req-1")
			h.ServeHTTP(w, r)
			return w
		}
		var all sync.WaitGroup
		for range teamStreams {
			all.Go(func() { open("noisy") })
		}
		synctest.Wait()
		e := refusal(t, open("noisy"), http.StatusTooManyRequests, apierror.QuotaExceeded)
		require.Contains(t, e.Message, `team "noisy": 50 streams of events`)
		for range teamStreams {
			all.Go(func() { require.Equal(t, http.StatusOK, open("quiet").Code) })
		}
		all.Wait()
		require.Equal(t, http.StatusOK, open("noisy").Code)
	})
}

// net/http sends no body for HEAD, so a proxy reuses the connection as soon as it has the header.
func TestHeadOfStreamEndsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		for _, f := range []*fake{{events: events.New(7)}, {followers: true}} {
			w := call(handler(t, f), "HEAD", "/v1/events", "")
			require.Equal(t, http.StatusOK, w.Code, w.Body)
			require.Equal(t, "text/event-stream", w.Header().Get("Content-Type"))
			require.Empty(t, w.Body)
		}
		require.Zero(t, time.Since(began))
	})
}

func TestWrongStreamsAreRefused(t *testing.T) {
	h := handler(t, &fake{events: events.New(7)})
	refusal(t, call(h, "GET", "/v1/events?x=1", ""), 400, apierror.BadRequest)
	r := request(t.Context(), "GET", "/v1/events", nil)
	r.Header.Set("Last-Event-ID", "x")
	r.Header.Set("X-Request-Id", "req-1")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "Last-Event-ID")
	synctest.Test(t, func(t *testing.T) {
		refusal(t, call(handler(t, &fake{followers: true}), "GET", "/v1/events", ""), 503, apierror.NotLeader)
	})
}
