package rest

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
)

// follower returns an allocator that knows no leader.
func follower() *fake {
	return &fake{followers: true, status: core.CallOK, changed: make(chan struct{}), sandboxes: map[string]core.Sandbox{"x": {Binding: core.Binding{ID: "x"}}}}
}

// know changes what an allocator knows of the leader.
func (f *fake) know(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	close(f.changed)
	f.changed = make(chan struct{})
}

// elect makes the API at an address that of a new leader, or this replica for "".
func (f *fake) elect(address string) {
	left := context.WithValue(context.Background(), attemptKey{}, nil) // it never ends, and is not equal to another
	f.know(func() { f.followers, f.leader, f.left = false, address, left })
}

// begin makes a call in a goroutine of its own.
func begin(h http.Handler, method, target, body string, headers ...string) <-chan *httptest.ResponseRecorder {
	done := make(chan *httptest.ResponseRecorder, 1)
	go func() {
		w := httptest.NewRecorder()
		r := request(context.Background(), method, target, strings.NewReader(body))
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		r.Header.Set("X-Request-Id", "req-1")
		h.ServeHTTP(w, r)
		done <- w
	}()
	return done
}

// leaders are servers of the API in the place of leaders. They note what they were asked.
type leaders struct {
	mu    sync.Mutex
	asked []*http.Request
}

// add returns the address of another one. It closes idle connections, which would stop the clock of a test.
func (l *leaders) add(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	return listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		l.asked = append(l.asked, r)
		l.mu.Unlock()
		w.Header().Set("Connection", "close")
		_, _ = io.ReadAll(r.Body)
		h(w, r)
	}))
}

// seen returns what was asked.
func (l *leaders) seen() []*http.Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.asked)
}

func answers(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); _, _ = io.WriteString(w, body) }
}

// breaks breaks the connection before it answers.
func breaks(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// ends answers as a replica does that no longer leads.
func ends(w http.ResponseWriter, _ *http.Request) {
	apierror.New(apierror.NotLeader, "it has ended").Write(w)
}

// Invariant: P24
func TestCallsAreHeldUntilThisReplicaLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follower()
		h := handler(t, f)
		var all []<-chan *httptest.ResponseRecorder
		for _, m := range calls {
			all = append(all, begin(h, m[0], m[1], `{"templateID":"python"}`))
		}
		time.Sleep(holdWait - time.Second)
		synctest.Wait()
		require.Zero(t, f.claims)
		require.Equal(t, 503, call(h, "GET", "/health", "").Code, "it is answered at once")
		f.elect("")
		for i, done := range all {
			require.Less(t, (<-done).Code, 300, calls[i])
		}
		require.Equal(t, 200, call(h, "GET", "/health", "").Code)
		require.Equal(t, 1, f.claims)
		require.Empty(t, f.claim.Binding.IdempotencyKey, "an internal key is for forwarded claims")
	})
}

// Invariant: P24
func TestReplicaThatRecoversHoldsForwardedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follower()
		h := handler(t, f)
		refusal(t, <-begin(h, "GET", "/sandboxes", "", forwardedHeader, "1"), 503, apierror.NotLeader)
		f.elected = true
		done := begin(h, "GET", "/sandboxes", "", forwardedHeader, "1")
		time.Sleep(holdWait / 2)
		f.elect("")
		require.Equal(t, 200, (<-done).Code)
	})
}

// Invariant: P24
func TestHeldClaimHasTheRestOfItsWait(t *testing.T) {
	for body, wait := range map[string]time.Duration{
		`{"templateID":"python"}`:                    0,
		`{"templateID":"python","waitTimeout":60}`:   25 * time.Second,
		`{"templateID":"python","waitTimeout":60.0}`: 25 * time.Second,
	} {
		synctest.Test(t, func(t *testing.T) {
			f := follower()
			// A second of the time was spent at another replica.
			f.elected = true
			done := begin(handler(t, f), "POST", "/sandboxes", body, forwardedHeader, "1", waitedHeader, "26000")
			time.Sleep(holdWait - time.Second)
			f.elect("")
			require.Equal(t, 201, (<-done).Code)
			require.Equal(t, wait, f.claim.Wait, body)
		})
	}
	synctest.Test(t, func(t *testing.T) {
		h := handler(t, follower())
		for body, wait := range map[string]time.Duration{
			`{"templateID":"python","waitTimeout":60}`: time.Minute,
			`{"templateID":"python","waitTimeout":1}`:  holdWait,
			`{"templateID":"python","waitTimeout":""}`: holdWait, // the leader would say what is wrong
		} {
			began := time.Now()
			refusal(t, call(h, "POST", "/sandboxes", body), 503, apierror.NotLeader)
			require.Equal(t, wait, time.Since(began), body)
		}
	})
}

// Invariant: P24
func TestKeyIsCheckedAgainAfterTheHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follower()
		keys := &changingKeys{known: keysIn(map[string]string{"one": keyOne})}
		h := handlerWithKeys(t, f, keys)
		done := begin(h, "DELETE", "/sandboxes/x", "", "X-API-Key", keyOne)
		synctest.Wait()
		keys.set(keysIn(nil))
		f.elect("")
		refusal(t, <-done, 401, apierror.Unauthorized)
		require.Empty(t, f.released)
	})
}

// changingKeys are keys that a test changes.
type changingKeys struct {
	mu    sync.Mutex
	known knownKeys
}

func (k *changingKeys) set(known knownKeys) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.known = known
}

func (k *changingKeys) Caller(key string) (access.Caller, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.known.Caller(key)
}

func (k *changingKeys) Current() context.Context { return context.Background() }

func (k *changingKeys) Callers() []access.Caller { return nil }

// Invariant: P24
func TestHeldCallsOfOneTeamLeaveRoomForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := follower()
		h := handlerWithKeys(t, f, keysIn(map[string]string{"one": keyOne, "two": keyTwo}))
		var held []<-chan *httptest.ResponseRecorder
		for range inFlight {
			held = append(held, begin(h, "GET", "/sandboxes/x", "", "X-API-Key", keyOne))
		}
		time.Sleep(time.Second)
		other := begin(h, "GET", "/sandboxes/x", "", "X-API-Key", keyTwo)
		synctest.Wait()
		f.elect("")
		require.Equal(t, 200, (<-other).Code)
		refused := 0
		for _, done := range held {
			if w := <-done; w.Code != 200 {
				require.Equal(t, "1", w.Header().Get("Retry-After"))
				require.Contains(t, refusal(t, w, 503, apierror.NotLeader).Message, "as many requests wait")
				refused++
			}
		}
		require.Equal(t, inFlight/(teamShare+1), refused, "a team alone has four fifths")
	})
}

// Invariant: P24
func TestForwardedClaimIsRepeatedUnderOneKey(t *testing.T) {
	for _, path := range []string{"/sandboxes", "/v1/claims"} {
		for name, own := range map[string]string{"of the caller": "k", "internal": ""} {
			for how, first := range map[string]http.HandlerFunc{"breaks": breaks, "ends": ends} {
				var l leaders
				one, two := l.add(t, first), l.add(t, answers(201, "{}"))
				synctest.Test(t, func(t *testing.T) {
					f := follower()
					f.elect(one)
					var headers []string
					if own != "" {
						headers = []string{keyHeader, own}
					}
					done := begin(handler(t, f), "POST", path, `{"templateID":"python"}`, headers...)
					for len(l.seen()) == 0 {
						time.Sleep(time.Millisecond)
					}
					f.elect(two)
					w := <-done
					require.Equal(t, 201, w.Code, w.Body)
					require.Empty(t, w.Header().Get(keyHeader))
				})
				asked := l.seen()
				require.Len(t, asked, 2, "%s %s %s", path, name, how)
				key := asked[0].Header.Get(keyHeader)
				require.Equal(t, key, asked[1].Header.Get(keyHeader))
				if own == "" {
					require.True(t, strings.HasPrefix(key, fact.InternalKeys) && len(key) > 20, key)
				} else {
					require.Equal(t, own, key)
				}
			}
		}
	}
}

// Until the connection has ended at the other side too, that leader may be carrying the call out.
// Invariant: P24
func TestBrokenCallIsNotRepeatedAtItsLeader(t *testing.T) {
	var l leaders
	f := follower()
	f.elect(l.add(t, breaks))
	synctest.Test(t, func(t *testing.T) {
		f.changed = make(chan struct{})
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
		require.Contains(t, refusal(t, w, 503, apierror.NotLeader).Message, "the outcome of the call is unknown")
	})
	require.Len(t, l.seen(), 1)
}

// Invariant: P24
func TestCallsThatMayNotBeRepeatedAreSentOnce(t *testing.T) {
	for _, m := range [][2]string{
		{"POST", "/events/webhooks"}, {"DELETE", "/events/webhooks/x"}, {"POST", "/v1/pools/python/scale"}, {"POST", "/v1/sessions/x/declare-dead"},
	} {
		for _, c := range []struct {
			first http.HandlerFunc
			code  int
			times int // at the next leader
		}{{breaks, 503, 0}, {ends, 200, 1}} { // the second one has done nothing
			var l, next leaders
			one, two := l.add(t, c.first), next.add(t, answers(200, "{}"))
			synctest.Test(t, func(t *testing.T) {
				f := follower()
				f.elect(one)
				done := begin(handler(t, f), m[0], m[1], "{}")
				for len(l.seen()) == 0 {
					time.Sleep(time.Millisecond)
				}
				f.elect(two)
				w := <-done
				require.Equal(t, c.code, w.Code, m)
				if c.code == 503 {
					require.Equal(t, "false", w.Header().Get("Should-Retry"))
					refusal(t, w, 503, apierror.NotLeader)
				}
			})
			require.Len(t, l.seen(), 1)
			require.Len(t, next.seen(), c.times)
		}
	}
}

// Invariant: P24
func TestRepeatedKillThatFindsItDoneSucceeds(t *testing.T) {
	gone := string(missing("x", apierror.SandboxGone, "this sandbox was released earlier").JSON())
	for _, c := range []struct {
		first http.HandlerFunc
		code  int
	}{{breaks, 204}, {ends, 404}} {
		var l leaders
		one, two := l.add(t, c.first), l.add(t, answers(404, gone))
		synctest.Test(t, func(t *testing.T) {
			f := follower()
			f.elect(one)
			done := begin(handler(t, f), "DELETE", "/sandboxes/x", "")
			for len(l.seen()) == 0 {
				time.Sleep(time.Millisecond)
			}
			f.elect(two)
			require.Equal(t, c.code, (<-done).Code)
		})
	}
}

// The sandbox of the first attempt has been released, and no answer has named it.
// Invariant: P24
func TestClaimWhoseLostSandboxEndedGetsAnother(t *testing.T) {
	var l leaders
	gone := string(apierror.New(apierror.SandboxGone, "it has been released").JSON())
	one, two := l.add(t, breaks), l.add(t, func(w http.ResponseWriter, r *http.Request) {
		code, body := 410, gone
		if len(l.seen()) == 3 {
			code, body = 201, "{}"
		}
		answers(code, body)(w, r)
	})
	synctest.Test(t, func(t *testing.T) {
		f := follower()
		f.elect(one)
		done := begin(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
		for len(l.seen()) == 0 {
			time.Sleep(time.Millisecond)
		}
		f.elect(two)
		require.Equal(t, 201, (<-done).Code)
	})
	asked := l.seen()
	require.NotEqual(t, asked[1].Header.Get(keyHeader), asked[2].Header.Get(keyHeader))
}

// Invariant: P24
func TestCallsAtALeaderThatHasLeftAreRepeated(t *testing.T) {
	var l leaders
	over := make(chan struct{}) // ends a call that waits for its leader
	hangs := l.add(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-over:
		}
	})
	next := l.add(t, answers(201, "{}"))
	f := follower()
	left, leave := context.WithCancel(t.Context())
	f.know(func() { f.followers, f.leader, f.left = false, hangs, left })
	done := begin(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
	require.Eventually(t, func() bool { return len(l.seen()) == 1 }, time.Minute, time.Millisecond)
	f.elect(next)
	leave()
	limit := time.AfterFunc(20*time.Second, func() { close(over) })
	require.Equal(t, 201, (<-done).Code)
	require.True(t, limit.Stop(), "the call has waited for a leader that has left")
	require.Equal(t, l.seen()[0].Header.Get(keyHeader), l.seen()[1].Header.Get(keyHeader))
}

// Invariant: P24
func TestClientsCannotUseInternalKeys(t *testing.T) {
	f := &fake{}
	w := <-begin(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`, keyHeader, fact.InternalKeys+"x")
	require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, keyHeader)
	require.Zero(t, f.claims)
}

// Invariant: P24
func TestClosingReplicaAnswersInTime(t *testing.T) {
	var l leaders
	f := follower()
	f.elect(l.add(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	var serving, answering context.CancelFunc
	f.serving, serving = context.WithCancel(t.Context())
	f.answering, answering = context.WithCancel(t.Context())
	h := handler(t, f)
	require.Empty(t, (<-begin(h, "GET", "/openapi.json", "")).Header().Get("Connection"))
	serving()
	require.Equal(t, 503, call(h, "GET", "/health", "").Code)
	require.Equal(t, "close", (<-begin(h, "GET", "/openapi.json", "")).Header().Get("Connection"))
	done := begin(h, "POST", "/sandboxes", `{"templateID":"python","waitTimeout":300}`)
	require.Eventually(t, func() bool { return len(l.seen()) == 1 }, time.Minute, time.Millisecond)
	answering()
	require.Contains(t, refusal(t, <-done, 503, apierror.NotLeader).Message, "shutting down")
}
