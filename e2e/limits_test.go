package e2e

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// Invariant: I4, P25
func TestNoisySandboxIsLimitedAndItsNeighbourIsNot(t *testing.T) {
	const atOnce, open = 2000, 20
	// No second request comes in the time of the test.
	limits := []string{"--sandbox-requests-per-second=0.001", "--sandbox-open-requests=20"}
	e := startAlone(t, 3, stack.Options{RouterArgs: limits})
	noisy, _ := e.claimIdle(e.pool, leastIdle)
	neighbour, crowded := e.claim(), e.claim()
	client := e.client()
	ask := func(s openapi.Sandbox) answer { return e.get(client, e.host(8080, s.SandboxID), "/healthz") }
	limited := func(s openapi.Sandbox, reason apierror.Reason) {
		t.Helper()
		a := ask(s)
		require.Equal(t, http.StatusTooManyRequests, a.code, a.body)
		require.Equal(t, reason, a.refusal(t).Reason)
		after, err := strconv.Atoi(a.header.Get("Retry-After"))
		require.NoError(t, err)
		require.Positive(t, after)
	}

	codes := make(chan int, atOnce)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range atOnce/8 - 1 {
				a, err := do(t.Context(), client, http.MethodGet, "http://gateway/healthz", e.host(8080, noisy.SandboxID), "")
				if err != nil {
					t.Error(err)
				}
				codes <- a.code
			}
		})
	}
	all.Wait()
	close(codes)
	for code := range codes {
		require.Equal(t, http.StatusOK, code, "a burst passes")
	}
	var used time.Time
	for range 8 {
		used = time.Now()
		require.Equal(t, http.StatusOK, ask(noisy).code)
	}
	limited(noisy, apierror.RateLimited)
	require.Equal(t, http.StatusOK, ask(neighbour).code)

	// The refused requests go on. They are no use, so the sandbox is released for being idle.
	ended := make(chan struct{})
	all.Go(func() {
		for {
			select {
			case <-ended:
				return
			case <-time.After(50 * time.Millisecond):
				a, err := do(t.Context(), client, http.MethodGet, "http://gateway/", e.host(8080, noisy.SandboxID), "")
				if err != nil {
					t.Error(err)
					return
				}
				if a.code != http.StatusTooManyRequests && a.code != http.StatusGone && a.code != http.StatusServiceUnavailable {
					t.Errorf("%d %s", a.code, a.body)
				}
			}
		}
	})
	e.reaped(noisy, used)
	close(ended)
	all.Wait()

	sockets := make([]*websocket.Conn, open)
	for i := range sockets {
		sockets[i] = e.open(crowded)
	}
	e.eventually(func() error { // a look has shown them
		if code := ask(crowded).code; code != http.StatusTooManyRequests {
			return fmt.Errorf("it was answered %d", code)
		}
		return nil
	})
	limited(crowded, apierror.TooManyOpen)
	require.Equal(t, http.StatusOK, ask(neighbour).code)
	e.echoes(sockets[open-1], "what is open goes on")
	require.NoError(t, sockets[0].Close(websocket.StatusNormalClosure, ""))
	e.eventually(func() error {
		if code := ask(crowded).code; code != http.StatusOK {
			return fmt.Errorf("it was answered %d", code)
		}
		return nil
	})
}
