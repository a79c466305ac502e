package rest

import (
	"context"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// calls are one of each kind.
var calls = [][2]string{{"POST", "/sandboxes"}, {"GET", "/sandboxes"}, {"GET", "/sandboxes/x"}, {"DELETE", "/v2/sandboxes/x"}}

// listen serves a replica's API on loopback.
func listen(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func TestFollowerForwardsCallsToTheLeader(t *testing.T) {
	leader := &fake{status: core.CallOK, outstanding: 2, sandboxes: map[string]core.Sandbox{"x": {Binding: core.Binding{ID: "x"}}}}
	follower := handler(t, &fake{leader: listen(t, handler(t, leader))})
	for _, m := range calls {
		direct := call(handler(t, leader), m[0], m[1], `{"templateID":"python"}`)
		passedOn := call(follower, m[0], m[1], `{"templateID":"python"}`)
		require.Equal(t, direct.Code, passedOn.Code)
		require.Equal(t, direct.Body.String(), passedOn.Body.String())
		for name := range direct.Header() {
			require.Equal(t, direct.Header().Get(name), passedOn.Header().Get(name), name)
		}
	}
	require.Equal(t, "python", leader.pool)
	require.Equal(t, []string{"x Killed", "x Killed"}, leader.released)

	// An error is the leader's as well, with the caller's request ID.
	require.Equal(t, "req-1", refusal(t, call(follower, "POST", "/sandboxes", `{}`), 400, apierror.BadRequest).RequestID)
}

func TestFollowerAndLeaderRefuseTheSameQueries(t *testing.T) {
	leader := &fake{status: core.CallOK}
	follower := handler(t, &fake{leader: listen(t, handler(t, leader))})
	for _, query := range []string{"?a=%zz", "?%zz", "?a;b", "?limit=1;nextToken=x", "?limit=%zz", "?a=1", "?limit=0"} {
		direct, passedOn := call(handler(t, leader), "GET", "/sandboxes"+query, ""), call(follower, "GET", "/sandboxes"+query, "")
		require.GreaterOrEqual(t, direct.Code, 400, query)
		require.Equal(t, direct.Code, passedOn.Code, query)
		require.Equal(t, direct.Body.String(), passedOn.Body.String(), query)
	}
	require.Contains(t, refusal(t, call(follower, "DELETE", "/sandboxes/x?a=%zz", ""), 400, apierror.BadRequest).Message, `query: invalid URL escape "%zz"`)
	require.Empty(t, leader.released)
}

func TestFollowerForwardsTheCallersKey(t *testing.T) {
	keys := keysIn(map[string]string{"team": keyOne})
	leader := &fake{}
	follower := handlerWithKeys(t, &fake{leader: listen(t, handlerWithKeys(t, leader, keys))}, keys)
	require.Equal(t, http.StatusOK, callWith(follower, "GET", "/sandboxes", http.Header{"X-Api-Key": {keyOne}}).Code)
	refusal(t, callWith(follower, "GET", "/sandboxes", nil), http.StatusUnauthorized, apierror.Unauthorized)
}

func TestSameOriginCallWorksThroughAFollower(t *testing.T) {
	leader := &fake{status: core.CallOK}
	follower := handler(t, &fake{leader: listen(t, handler(t, leader))})
	require.Equal(t, http.StatusNoContent, callWith(follower, "DELETE", "/sandboxes/x", http.Header{"Origin": {"http://" + host}}).Code)
	refusal(t, callWith(follower, "DELETE", "/sandboxes/x", http.Header{"Origin": {"http://evil.example"}}), http.StatusForbidden, apierror.CrossOrigin)
}

func TestForwardingLoopBetweenTwoReplicasEnds(t *testing.T) {
	var asked atomic.Int32
	two := &fake{}
	counted := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Header().Set("Connection", "close") // an idle connection would stop the clock
		handler(t, two).ServeHTTP(w, r)
	})
	one := &fake{leader: listen(t, counted)}
	two.leader = listen(t, handler(t, one))
	synctest.Test(t, func(t *testing.T) {
		for _, m := range calls {
			w := call(handler(t, one), m[0], m[1], `{"templateID":"python"}`)
			require.Contains(t, refusal(t, w, 503, apierror.NotLeader).Message, "no longer leads")
			require.Equal(t, "1", w.Header().Get("Retry-After"))
		}
	})
	require.LessOrEqual(t, int(asked.Load()), len(calls)*int(holdWait/askAgain))
}

func TestCallWithoutAKnownLeaderIsRefused(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for says, f := range map[string]*fake{"no leader is known": {followers: true}, "cannot be reached": {leader: closed.Addr().String()}} {
		synctest.Test(t, func(t *testing.T) {
			for _, m := range calls {
				began := time.Now()
				w := call(handler(t, f), m[0], m[1], `{"templateID":"python"}`)
				require.Equal(t, holdWait, time.Since(began).Round(askAgain))
				require.Contains(t, refusal(t, w, 503, apierror.NotLeader).Message, says)
				require.Equal(t, "1", w.Header().Get("Retry-After"))
			}
		})
		require.Empty(t, f.pool)
		require.Empty(t, f.released)
	}
}

func TestForwardedCallToASilentLeaderTimesOut(t *testing.T) {
	leader := listen(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		<-r.Context().Done()
	}))
	left, leave := context.WithTimeout(t.Context(), 50*time.Millisecond) // earlier than the limit of the call
	defer leave()
	w := call(handler(t, &fake{leader: leader, left: left}), "DELETE", "/events/webhooks/x", "") // not to be repeated
	require.Contains(t, refusal(t, w, 503, apierror.NotLeader).Message, "the outcome of the call is unknown")
	require.Equal(t, "false", w.Header().Get("Should-Retry"))
}

func TestForwardedCallIsCancelledWithItsCaller(t *testing.T) {
	arrived, gone := make(chan struct{}), make(chan struct{})
	leader := listen(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		close(arrived)
		<-r.Context().Done()
		close(gone)
	}))
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := request(ctx, "POST", "/sandboxes", strings.NewReader(`{"templateID":"python"}`))
		serve(handler(t, &fake{leader: leader}), httptest.NewRecorder(), r)
	}()
	select {
	case <-arrived:
	case <-time.After(10 * time.Second):
		t.Error("the call does not reach the leader")
	}
	leave()
	<-done
	select {
	case <-gone:
	case <-time.After(10 * time.Second):
		t.Error("the leader goes on")
	}
}

func TestForwardedClaimsBlockNoOtherCalls(t *testing.T) {
	leader := &fake{status: core.CallOK, blockClaims: true}
	follower := handler(t, &fake{leader: listen(t, handler(t, leader))})
	ctx, leave := context.WithCancel(t.Context())
	var claims sync.WaitGroup
	defer claims.Wait()
	defer leave()
	const many = 300
	for range many {
		claims.Go(func() {
			for ctx.Err() == nil { // on a busy machine the leader may not be reached within leaderDialWait
				serve(follower, httptest.NewRecorder(), request(ctx, "POST", "/sandboxes", strings.NewReader(`{"templateID":"python","waitTimeout":300}`)))
			}
		})
	}
	require.Eventually(t, func() bool {
		leader.mu.Lock()
		defer leader.mu.Unlock()
		return leader.claims >= many
	}, time.Minute, time.Millisecond, "claims wait for one another")
	for _, c := range [][2]string{{"DELETE", "/sandboxes/x"}, {"POST", "/v1/sandboxes/x/keepalive"}} {
		within, cancel := context.WithTimeout(t.Context(), time.Minute)
		w := httptest.NewRecorder()
		follower.ServeHTTP(w, request(within, c[0], c[1], nil))
		cancel()
		require.Equal(t, http.StatusNoContent, w.Code, "%s: %s", c[1], w.Body)
	}
}

func TestSlowReaderHoldsNoSlotOfAFollower(t *testing.T) {
	// A list of the leader is put together before it is sent on, within what may be in
	// progress.
	leader := &fake{live: someSandboxes(100)}
	at := listen(t, handler(t, leader))
	h := handler(t, &fake{leader: at})
	w := call(h, "GET", "/sandboxes", "")
	require.Equal(t, call(handler(t, leader), "GET", "/sandboxes", "").Body.String(), w.Body.String())
	require.Equal(t, 200, w.Code)
	a := &api{Options: Options{Allocator: &fake{leader: at}}, claims: newClass(1, 0), forwarder: newForwarder(nil, zap.NewNop()), others: newClass(2, answerWait)}
	p := &reply{held: held{budget: newBudget(100 << 10), free: smallAnswer}, header: http.Header{}}
	a.carryOut(action{class: a.others}, &openapi.Operation{}, p, request(t.Context(), "GET", "/sandboxes", nil), nil)
	require.True(t, p.full, "an answer of %d bytes was taken", p.held.buf.Len())
	require.Empty(t, a.others.slots.used, "it is not sent yet, and its slot is free")
	w = httptest.NewRecorder()
	r := request(t.Context(), "GET", "/sandboxes", nil)
	r.Header.Set("X-Request-Id", "req-1")
	p.send(w, r)
	refusal(t, w, 503, apierror.Overloaded)
}

func TestFollowerForwardsOverTLS(t *testing.T) {
	leader := &fake{status: core.CallOK}
	server := httptest.NewUnstartedServer(handler(t, leader))
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that fail
	server.StartTLS()
	t.Cleanup(server.Close)
	trusting := &tls.Dialer{Config: server.Client().Transport.(*http.Transport).TLSClientConfig}
	for name, c := range map[string]struct {
		dial dial
		code int
	}{"verified": {trusting.DialContext, 204}, "not verified": {(&tls.Dialer{}).DialContext, 503}, "plain": {nil, 503}} {
		limit, cancel := context.WithCancel(t.Context())
		if c.code != 204 { // it would be tried again
			time.AfterFunc(100*time.Millisecond, cancel)
		}
		follower, err := New(Options{
			Allocator: &fake{leader: server.Listener.Addr().String(), answering: limit}, DialLeader: c.dial, PublicScheme: "https", PublicHost: "sandbox.example.com",
			MinIdleTimeout: minIdle, Log: zap.NewNop(),
		})
		require.NoError(t, err)
		w := call(follower, "DELETE", "/sandboxes/x", "")
		require.Equal(t, c.code, w.Code, "%s: %s", name, w.Body)
		cancel()
	}
	require.Len(t, leader.released, 1)
}
