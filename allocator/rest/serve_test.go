package rest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/pipetest"
)

// onPipes serves an API and calls f with what connects to it, all in a bubble.
func onPipes(t *testing.T, h http.Handler, f func(t *testing.T, send func(request string) net.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		listener := pipetest.Listen()
		s := &http.Server{Handler: h, ReadHeaderTimeout: time.Second}
		served := make(chan error, 1)
		go func() { served <- s.Serve(listener) }()
		defer func() {
			listener.HangUp()
			require.NoError(t, s.Close())
			<-served
		}()
		f(t, func(request string) net.Conn {
			client := listener.Connect()
			_, err := io.WriteString(client, request)
			require.NoError(t, err)
			return client
		})
	})
}

const released = "DELETE /sandboxes/x HTTP/1.1\r\nHost: localhost\r\n\r\n"

// answered reads one answer.
func answered(t *testing.T, c net.Conn) (code int, body string) {
	t.Helper()
	w, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	raw, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	return w.StatusCode, string(raw)
}

// someSandboxes are more than an answer's buffer takes.
func someSandboxes(n int) (all []core.Sandbox) {
	for i := range n {
		all = append(all, core.Sandbox{Binding: core.Binding{ID: fmt.Sprintf("id%03d", i), ClaimedAt: noon, Metadata: map[string]string{"a": strings.Repeat("x", maxMetadata-1)}}})
	}
	return all
}

func TestWaitingClaimsLeaveRoomForReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{status: core.CallOK, blockClaims: true}
		h := handler(t, f)
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		for range claimsInFlight {
			waiting.Go(func() {
				serve(h, httptest.NewRecorder(), request(ctx, "POST", "/sandboxes", strings.NewReader(`{"templateID":"python"}`)))
			})
		}
		synctest.Wait()
		refusal(t, call(h, "POST", "/sandboxes", `{"templateID":"python"}`), 503, apierror.Overloaded)
		require.Equal(t, http.StatusNoContent, call(h, "DELETE", "/sandboxes/x", "").Code)
		require.Equal(t, http.StatusNoContent, call(h, "POST", "/v1/sandboxes/x/keepalive", "").Code)
		require.Equal(t, http.StatusNoContent, call(h, "POST", "/sandboxes/x/timeout", `{"timeout":1}`).Code)
		cancel()
		waiting.Wait()
	})
}

// Invariant: P3
func TestTeamThatWaitsLeavesSlotsToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{status: core.CallOK, blockClaims: true}
		h := handlerWithKeys(t, f, keysIn(map[string]string{"one": keyOne, "two": keyTwo}))
		ctx, cancel := context.WithCancel(t.Context())
		claim := func(ctx context.Context, key string) *httptest.ResponseRecorder {
			w, r := httptest.NewRecorder(), request(ctx, "POST", "/sandboxes", strings.NewReader(`{"templateID":"python"}`))
			r.Header.Set("X-API-Key", key)
			r.Header.Set("X-Request-Id", "req-1")
			serve(h, w, r)
			return w
		}
		var waiting sync.WaitGroup
		for range claimsInFlight {
			waiting.Go(func() { claim(ctx, keyOne) })
		}
		synctest.Wait()
		require.Equal(t, claimsInFlight*teamShare/(teamShare+1), f.claims, "the others were refused")
		refusal(t, claim(ctx, keyOne), 503, apierror.Overloaded)
		f.blockClaims = false
		require.Equal(t, http.StatusCreated, claim(t.Context(), keyTwo).Code)
		cancel()
		waiting.Wait()
	})
}

func TestBudgetIsSharedBetweenTeams(t *testing.T) {
	fill := func(c *budget, team string) (n int) {
		for c.take(team, 1) {
			n++
		}
		return n
	}
	c := newBudget(1000)
	require.Equal(t, 800, fill(c, "a"))
	require.Equal(t, 160, fill(c, "b"))
	require.Equal(t, 32, fill(c, "c"))
	require.Zero(t, fill(c, "a"))
	c.giveBack("a", 800)
	require.Equal(t, 614, fill(c, "b"), "what a team has left")
	c.overdraw("b", 20)
	require.True(t, c.overdrawn("b"), "more than its share")
	require.False(t, c.overdrawn("c"))
	require.False(t, c.take("c", 200), "more than there is")
	c.giveBack("b", 774+20)
	c.giveBack("c", 32)
	require.Equal(t, 1000, c.left)
	require.Empty(t, c.used)
	require.True(t, c.take("a", 500))
	require.False(t, c.take("a", 500), "the rest at once")
	require.True(t, c.take("b", 400))

	require.Equal(t, claimsInFlight, claimSlots(1000), "enough for three pools whose places are all taken")
	for _, queue := range []int{10_000, 10_001, 10_004} {
		require.GreaterOrEqual(t, fill(newBudget(claimSlots(queue)), "a"), queue)
	}
}

func TestCallsInProgressAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{block: true}
		h := handler(t, f)
		ctx, cancel := context.WithCancel(t.Context())
		var serving sync.WaitGroup
		for range inFlight {
			serving.Go(func() { serve(h, httptest.NewRecorder(), request(ctx, "DELETE", "/sandboxes/x", nil)) })
		}
		synctest.Wait()
		w := call(h, "GET", "/sandboxes", "")
		refusal(t, w, 503, apierror.Overloaded)
		require.Equal(t, "1", w.Header().Get("Retry-After"))
		cancel()
		serving.Wait()
		f.block = false
		require.Equal(t, 200, call(h, "GET", "/sandboxes", "").Code, "places were not given back")
	})
}

func TestMissingBodyHoldsNoSlot(t *testing.T) {
	f := &fake{status: core.CallOK, live: someSandboxes(10)}
	onPipes(t, handler(t, f), func(t *testing.T, send func(string) net.Conn) {
		began := time.Now()
		var slow []net.Conn
		for range inFlight {
			slow = append(slow, send("GET /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n"))
		}
		synctest.Wait()
		code, body := answered(t, send(released))
		require.Equal(t, http.StatusNoContent, code, body)
		require.Zero(t, time.Since(began))
		for _, c := range slow {
			answer, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Contains(t, string(answer), "HTTP/1.1 408")
			require.Contains(t, string(answer), string(apierror.RequestTimeout))
		}
		require.Equal(t, bodyWait+linger, time.Since(began), "then they are closed")
	})
}

func TestSlowBodyTimesOut(t *testing.T) {
	onPipes(t, handler(t, &fake{}), func(t *testing.T, send func(string) net.Conn) {
		began := time.Now()
		for _, path := range []string{"/sandboxes", "/sandboxes/x/timeout", "/v1/sandboxes/x/keepalive", declarePath} {
			c := send("POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
			var sending sync.WaitGroup
			sending.Go(func() { // a byte now and then makes it no longer
				for {
					time.Sleep(bodyWait / 4)
					if _, err := c.Write([]byte(" ")); err != nil {
						return
					}
				}
			})
			answer, _ := io.ReadAll(c)
			require.Contains(t, string(answer), "HTTP/1.1 408", path)
			require.Equal(t, bodyWait+linger, time.Since(began))
			c.Close()
			sending.Wait()
			began = time.Now()
		}
	})
}

func TestUnreadAnswerHoldsNoSlot(t *testing.T) {
	f := &fake{status: core.CallOK, live: someSandboxes(2)}
	onPipes(t, handler(t, f), func(t *testing.T, send func(string) net.Conn) {
		began := time.Now()
		var slow []net.Conn
		for range inFlight {
			slow = append(slow, send("GET /sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n"))
		}
		synctest.Wait()
		code, body := answered(t, send(released))
		require.Equal(t, http.StatusNoContent, code, body)
		require.Zero(t, time.Since(began))
		time.Sleep(sendWait)
		synctest.Wait()
		for _, c := range slow {
			_, err := io.Copy(io.Discard, c)
			require.NoError(t, err)
		}
		require.Equal(t, sendWait, time.Since(began), "they are closed")
	})
}

func TestUnreadAnswersAreBounded(t *testing.T) {
	f := &fake{status: core.CallOK, live: someSandboxes(100)}
	h := handler(t, f)
	size := call(h, "GET", "/sandboxes", "").Body.Len()
	onPipes(t, h, func(t *testing.T, send func(string) net.Conn) {
		for range answerBytes / (size - smallAnswer) {
			send("GET /sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n")
			synctest.Wait()
		}
		w := call(h, "GET", "/sandboxes", "")
		refusal(t, w, 503, apierror.Overloaded)
		require.Equal(t, "1", w.Header().Get("Retry-After"))
		require.Equal(t, http.StatusNoContent, call(h, "DELETE", "/sandboxes/x", "").Code)
		require.Equal(t, 200, call(h, "GET", "/sandboxes?limit=1", "").Code, "what is small needs no room")
		require.Equal(t, 201, call(h, "POST", "/sandboxes", `{"templateID":"python"}`).Code)
		time.Sleep(sendWait)
		synctest.Wait()
		require.Equal(t, 200, call(h, "GET", "/sandboxes", "").Code, "its room was not given back")
	})
}

// worstMetadata is what takes most room in JSON among all that a claim may have: each byte
// is escaped to six, and the keys are as short, and so as many, as can be.
func worstMetadata() map[string]string {
	var escaped []string
	for b := byte(' '); b < utf8.RuneSelf; b++ { // control characters are refused
		if raw, _ := json.Marshal(string(rune(b))); len(raw) == len(`"\u0000"`) {
			escaped = append(escaped, string(rune(b)))
		}
	}
	all, room := map[string]string{"": ""}, maxMetadata
	for keys := escaped; ; { // of one byte, of two bytes, and so on
		var longer []string
		for _, key := range keys {
			if len(key) > room {
				all[""] = strings.Repeat("<", room)
				return all
			}
			all[key] = ""
			room -= len(key)
			for _, b := range escaped {
				longer = append(longer, key+b)
			}
		}
		keys = longer
	}
}

func TestClaimIsAnsweredEvenWhenTheBudgetIsUsed(t *testing.T) {
	longest := func(n int) string { return strings.Repeat("a", n) } // what Kubernetes and DNS take
	f := &fake{claimed: func(s *core.Sandbox) {
		s.ID, s.Phase, s.DefaultPort = longest(20), core.Starting, 65535
		s.Pool.Name, s.Pod.Name = longest(253), longest(253)
		s.ClaimedAt = noon.Add(time.Nanosecond)
		s.EndAt, s.IdleTimeout = s.ClaimedAt.Add(time.Hour), maxTimeout-time.Nanosecond
	}}
	a := &api{
		Options: Options{Allocator: f, PublicScheme: "https", PublicHost: longest(253) + ":65535", Log: zap.NewNop()},
		claims:  newClass(2, answerWait), answers: newBudget(0), audit: newAudit(zap.NewNop()),
	}
	body, err := json.Marshal(map[string]any{"templateID": "python", "user": strings.Repeat("<", 256), "metadata": worstMetadata()})
	require.NoError(t, err)
	w := httptest.NewRecorder()
	a.handle(action{class: a.claims, f: a.create}, operation(t, "createSandbox")).ServeHTTP(w, request(t.Context(), "POST", "/sandboxes", bytes.NewReader(body)))
	require.Equal(t, http.StatusCreated, w.Code, w.Body)
	require.Equal(t, worstMetadata(), f.claim.Binding.Metadata)
	require.Greater(t, w.Body.Len(), smallAnswer*9/10, "much more room than any answer needs")
}

func TestListsNeedRoomBeforeTheyAreBuilt(t *testing.T) {
	f := &fake{}
	h := handler(t, f)
	synctest.Test(t, func(t *testing.T) {
		f.block = true
		ctx, cancel := context.WithCancel(t.Context())
		var asking sync.WaitGroup
		for range answerBytes / (10_000 << 10) {
			asking.Go(func() {
				serve(h, httptest.NewRecorder(), request(ctx, "GET", "/v1/last-active?limit=10000", nil))
			})
		}
		synctest.Wait()
		refusal(t, call(h, "GET", "/v1/last-active?limit=10000", ""), 503, apierror.Overloaded)
		cancel()
		asking.Wait()
		f.block = false
		require.Equal(t, 200, call(h, "GET", "/v1/last-active?limit=10000", "").Code)
	})
}

func TestBodiesAreBoundedByClass(t *testing.T) {
	f := &fake{status: core.CallOK}
	h := handler(t, f)
	onPipes(t, h, func(t *testing.T, send func(string) net.Conn) {
		const sent = 60 << 10
		for range bodyBytes * teamShare / (teamShare + 1) / (sent - smallBody) { // what one team gets
			send(fmt.Sprintf("POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s", sent+1, strings.Repeat(" ", sent)))
		}
		synctest.Wait()
		large := `{"templateID":"python"}` + strings.Repeat(" ", sent)
		refusal(t, call(h, "POST", "/sandboxes", large), 503, apierror.Overloaded)
		require.Equal(t, 201, call(h, "POST", "/sandboxes", `{"templateID":"python"}`).Code, "a small one needs no room")
		require.Equal(t, http.StatusNoContent, call(h, "POST", "/v1/sandboxes/x/keepalive", strings.Repeat(" ", sent)).Code, "claims take the room of other calls")
		time.Sleep(bodyWait)
		synctest.Wait()
		require.Equal(t, 201, call(h, "POST", "/sandboxes", large).Code, "its room was not given back")
	})
}

func TestRefusedCallIsNotReadAndIsClosed(t *testing.T) {
	keyed := handlerWithKeys(t, &fake{}, keysIn(map[string]string{"team": keyOne}))
	for name, c := range map[string]struct {
		h       http.Handler
		request string
		code    int
	}{
		"no key":         {keyed, "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n", 401},
		"no key, chunks": {keyed, "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 401},
		"foreign host":   {handler(t, &fake{}), "POST /sandboxes HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 100\r\n\r\n", 421},
		"cross-origin":   {handler(t, &fake{}), "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nContent-Length: 100\r\n\r\n", 403},
		"no such page":   {handler(t, &fake{}), "POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n", 404},
		"not served":     {handler(t, &fake{}), "PUT /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n", 405},
		"too large":      {handler(t, &fake{}), fmt.Sprintf("POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n", maxBody+1), 413},
	} {
		t.Run(name, func(t *testing.T) {
			onPipes(t, c.h, func(t *testing.T, send func(string) net.Conn) {
				began := time.Now()
				conn := send(c.request)
				w, err := http.ReadResponse(bufio.NewReader(conn), nil)
				require.NoError(t, err)
				require.Equal(t, c.code, w.StatusCode)
				require.True(t, w.Close)
				require.Zero(t, time.Since(began), "its body was waited for")
				_, err = io.Copy(io.Discard, conn)
				require.NoError(t, err)
				require.Equal(t, linger, time.Since(began))
			})
		})
	}
}

func TestConnectionIsKeptAfterAReadBody(t *testing.T) {
	onPipes(t, handler(t, &fake{status: core.CallOK}), func(t *testing.T, send func(string) net.Conn) {
		const claim = "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 23\r\n\r\n" + `{"templateID":"python"}`
		conn := send(claim)
		code, body := answered(t, conn)
		require.Equal(t, 201, code, body)
		_, err := io.WriteString(conn, released)
		require.NoError(t, err)
		code, body = answered(t, conn)
		require.Equal(t, 204, code, body)
	})
}

// The longest wait is longer than every deadline of a connection.
func TestClaimsMayWaitLongerThanOtherCalls(t *testing.T) {
	f := &fake{blockClaims: true}
	onPipes(t, handler(t, f), func(t *testing.T, send func(string) net.Conn) {
		began := time.Now()
		body := `{"templateID":"python","waitTimeout":300}`
		conn := send(fmt.Sprintf("POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
		code, body := answered(t, conn)
		require.Equal(t, 503, code)
		require.Contains(t, body, string(apierror.Timeout))
		require.Equal(t, MaxWait+answerWait, time.Since(began))
	})
}

// operation is one of the OpenAPI document.
func operation(t *testing.T, id string) *openapi.Operation {
	document, err := openapi.Load()
	require.NoError(t, err)
	i := slices.IndexFunc(document.Operations, func(o openapi.Operation) bool { return o.ID == id })
	require.GreaterOrEqual(t, i, 0)
	return &document.Operations[i]
}
