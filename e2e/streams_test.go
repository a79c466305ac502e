package e2e

import (
	"bufio"
	"fmt"
	"net/http"
	"testing"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// metric reads a counter or gauge that has no labels from an admin listener.
func (e *env) metric(admin, name string) float64 {
	e.t.Helper()
	a, err := do(e.t.Context(), http.DefaultClient, http.MethodGet, admin+"/metrics", "", "")
	require.NoError(e.t, err)
	return e.value(a, name)
}

func (e *env) value(a answer, name string) float64 {
	e.t.Helper()
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	all, err := harness.ParseMetrics([]byte(a.body))
	require.NoError(e.t, err)
	require.Contains(e.t, all, name)
	return all[name]
}

// unread adds up what the routers have answered and Envoy may not have read.
func (e *env) unread() (sum float64) {
	e.t.Helper()
	listeners, err := e.site.admins(e.t.Context())
	require.NoError(e.t, err)
	require.NotEmpty(e.t, listeners)
	for _, dial := range listeners {
		a, err := do(e.t.Context(), e.clientOf(dial, 0), http.MethodGet, "http://localhost/metrics", "", "")
		require.NoError(e.t, err)
		sum += e.value(a, "berth_router_answers_unread")
	}
	return sum
}

// A request may be open for days. Envoy read the router's answer when the request began, so no
// release waits for the end of the request.
// Invariant: P10
func TestOpenStreamsDoNotHoldUpReleases(t *testing.T) {
	e := startHere(t, 2)
	client := e.client()
	client.Timeout = 0 // of a whole answer, however long it is to be
	open, other := e.claim(), e.claim()
	e.reaches(client, other)
	socket, response, err := websocket.Dial(t.Context(), "ws://"+e.host(8080, open.SandboxID)+"/ws",
		&websocket.DialOptions{HTTPClient: client})
	require.NoError(t, err)
	defer socket.CloseNow()
	require.Equal(t, http.StatusSwitchingProtocols, response.StatusCode)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://gateway/sse?interval=50ms", http.NoBody)
	require.NoError(t, err)
	r.Host = e.host(8080, open.SandboxID)
	stream, err := client.Do(r)
	require.NoError(t, err)
	defer stream.Body.Close()
	require.Equal(t, http.StatusOK, stream.StatusCode)
	events := bufio.NewScanner(stream.Body)
	flows := func() {
		t.Helper()
		require.NoError(t, socket.Write(t.Context(), websocket.MessageText, []byte("ahoy")))
		_, message, err := socket.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, "ahoy", string(message))
		for range 6 { // two events
			require.True(t, events.Scan(), events.Err())
		}
	}
	flows()

	for _, s := range []openapi.Sandbox{other, open} {
		flows()
		a := e.api(http.MethodDelete, "/sandboxes/"+s.SandboxID, "")
		require.Equal(t, http.StatusNoContent, a.code, a.body)
		require.Equal(t, "0", a.header.Get(rest.OutstandingHeader), "routers that have not acknowledged")
		e.gone(client, s)
		e.eventually(func() error { // the request before this was answered a moment ago
			if n := e.unread(); n != 0 {
				return fmt.Errorf("%v answers are unread", n)
			}
			return nil
		})
	}
}
