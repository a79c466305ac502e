package e2e

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

const (
	// leastIdle is the shortest idle timeout.
	leastIdle = 5 * time.Second
	// leastBytes is the shortest idle timeout where bytes are counted: a shorter one counts as
	// this.
	leastBytes = time.Minute
	// maxLate ends a test in which nothing happens. Berth does not promise it.
	maxLate = 5 * time.Minute
)

var longFlag = flag.Bool("e2e.long", false, "use sandboxes for as long as make test-long does")

// lasts is how long a test does something: shorter where everything is tested.
func lasts(short, long time.Duration) time.Duration {
	if *longFlag {
		return long
	}
	return short
}

// in returns e for a part of its test.
func (e *env) in(t *testing.T) *env {
	part := *e
	part.t = t
	return &part
}

// allAtOnce runs all parts of a test at the same time, because most of their time is waiting.
func (e *env) allAtOnce(parts map[string]func(e *env)) {
	e.t.Helper()
	var all sync.WaitGroup
	for name, part := range parts {
		all.Go(func() { e.t.Run(name, func(t *testing.T) { part(e.in(t)) }) })
	}
	all.Wait()
}

// pass waits for d. The test is about what happens when nothing is done.
func (e *env) pass(d time.Duration) {
	e.t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-e.t.Context().Done():
		e.t.Fatal(e.t.Context().Err())
	}
}

// streaming is a client of requests that may last.
func (e *env) streaming() *http.Client {
	client := e.client()
	client.Timeout = 0
	return client
}

// otherPool creates a pool beside the env's own, and waits for its warm pods.
func (e *env) otherPool(name string, warm int32, change func(*v1alpha1.SandboxPoolSpec)) string {
	e.t.Helper()
	p := e.newPool(e.pool+"-"+name, warm)
	change(&p.Spec)
	e.createPool(p)
	e.waitFull(p.Name, warm)
	return p.Name
}

// waitFull waits until a pool has that many warm pods.
func (e *env) waitFull(pool string, warm int32) {
	e.t.Helper()
	e.eventually(func() error {
		if s := e.readPool(pool).Status; s.Warm < warm {
			return fmt.Errorf("%d of %d pods are warm: %+v", s.Warm, warm, s)
		}
		return nil
	})
}

// claimOf claims a sandbox of a pool as soon as the pool has a warm pod. It returns when the
// claim began. more are further fields of the claim, as JSON.
func (e *env) claimOf(pool, more string) (s openapi.Sandbox, asked time.Time) {
	e.t.Helper()
	var a answer
	e.eventually(func() error {
		asked = time.Now()
		a = e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,%s}`, pool, more))
		if a.code == http.StatusTooManyRequests || a.code == http.StatusNotFound {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	return sandboxOf(e.t, a), asked
}

// claimIdle takes a sandbox that has an idle timeout and no end.
func (e *env) claimIdle(pool string, idle time.Duration) (s openapi.Sandbox, asked time.Time) {
	e.t.Helper()
	s, asked = e.claimOf(pool, fmt.Sprintf(`"idleTimeout":%d`, idle/time.Second))
	require.Equal(e.t, 9999, s.EndAt.Year())
	require.InDelta(e.t, idle.Seconds(), s.IdleTimeout, 0)
	return s, asked
}

// live reports whether the API has the sandbox, which is no use of it.
func (e *env) live(s openapi.Sandbox) bool {
	e.t.Helper()
	a := e.api(http.MethodGet, "/sandboxes/"+s.SandboxID, "")
	if a.code == http.StatusOK {
		return true
	}
	require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason, a.body)
	return false
}

// reaped waits until a sandbox is released for being idle. It fails if that happens before the
// sandbox was idle for its timeout. used is a moment at which the sandbox was in use.
func (e *env) reaped(s openapi.Sandbox, used time.Time) {
	e.t.Helper()
	idle := time.Duration(s.IdleTimeout * float64(time.Second))
	e.ends(s, fact.ReasonIdleTimeout, used.Add(idle))
}

// ends waits until a sandbox is released for a reason, and fails if that happens before a
// moment. Then every router must answer that the sandbox is gone.
func (e *env) ends(s openapi.Sandbox, reason string, at time.Time) {
	e.t.Helper()
	e.pass(max(0, time.Until(at)-500*time.Millisecond))
	for e.live(s) {
		late := time.Since(at)
		require.Less(e.t, late, maxLate, "it is still there")
		if late < 0 {
			e.pass(20 * time.Millisecond)
		} else {
			e.pass(200 * time.Millisecond)
		}
	}
	ended := time.Now()
	require.False(e.t, ended.Before(at), "it was released %v too early", at.Sub(ended))
	fronts, err := e.site.fronts(e.t.Context())
	require.NoError(e.t, err)
	require.NotEmpty(e.t, fronts)
	for _, front := range fronts {
		client := e.clientOf(front, 0)
		e.eventually(func() error { // its router may hear of it a moment later
			a := e.get(client, e.host(8080, s.SandboxID), "/")
			switch a.code {
			case http.StatusOK:
				return fmt.Errorf("it is served by %s", a.identity(e.t).Pod)
			case http.StatusServiceUnavailable: // the test has ended the router
				return fmt.Errorf("%d %s", a.code, a.body)
			}
			require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason, a.body)
			return nil
		})
	}
	e.t.Logf("%s: gone %v late, 410 on all of %d routers %v late", reason, ended.Sub(at).Round(time.Millisecond),
		len(fronts), time.Since(at).Round(time.Millisecond))
	e.eventually(func() error {
		r, err := e.record(s.SandboxID)
		if err == nil && r.Status.Reason != reason {
			err = fmt.Errorf("reason %q, phase %q", r.Status.Reason, r.Status.Phase)
		}
		return err
	})
}

// open opens a WebSocket to a sandbox.
func (e *env) open(s openapi.Sandbox) *websocket.Conn {
	e.t.Helper()
	return e.openWith(e.streaming(), s)
}

// openWith is open with a client, whose requests may last.
func (e *env) openWith(client *http.Client, s openapi.Sandbox) *websocket.Conn {
	e.t.Helper()
	socket, response, err := websocket.Dial(e.t.Context(), "ws://"+e.host(8080, s.SandboxID)+"/ws",
		&websocket.DialOptions{HTTPClient: client})
	require.NoError(e.t, err)
	require.Equal(e.t, http.StatusSwitchingProtocols, response.StatusCode)
	e.t.Cleanup(func() { _ = socket.CloseNow() })
	return socket
}

func (e *env) echoes(socket *websocket.Conn, word string) {
	e.t.Helper()
	require.NoError(e.t, socket.Write(e.t.Context(), websocket.MessageText, []byte(word)))
	_, message, err := socket.Read(e.t.Context())
	require.NoError(e.t, err)
	require.Equal(e.t, word, string(message))
}

// request opens a request to a sandbox that may last.
func (e *env) request(s openapi.Sandbox, method, path string, body io.Reader) *http.Response {
	e.t.Helper()
	r, err := http.NewRequestWithContext(e.t.Context(), method, "http://gateway"+path, body)
	require.NoError(e.t, err)
	r.Host = e.host(8080, s.SandboxID)
	response, err := e.streaming().Do(r)
	require.NoError(e.t, err)
	e.t.Cleanup(func() { _ = response.Body.Close() })
	return response
}

// do sends a request to a sandbox and reads its answer.
func (e *env) do(method string, s openapi.Sandbox, path string) answer {
	e.t.Helper()
	a, err := do(e.t.Context(), e.client(), method, "http://gateway"+path, e.host(8080, s.SandboxID), "")
	require.NoError(e.t, err)
	return a
}

// sse reads one event each second to the end.
func (e *env) sse(s openapi.Sandbox, events int) {
	e.t.Helper()
	response := e.request(s, http.MethodGet, fmt.Sprintf("/sse?interval=1s&count=%d", events), http.NoBody)
	require.Equal(e.t, http.StatusOK, response.StatusCode)
	got := 0
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "id: ") {
			got++
		}
	}
	require.Equal(e.t, events, got)
}

// slowUpload sends a few bytes twice a second.
func (e *env) slowUpload(s openapi.Sandbox, d time.Duration) {
	e.t.Helper()
	const pieces, every = "bytes", 500 * time.Millisecond
	body, writes := io.Pipe()
	n := int(d / every)
	written := make(chan error, 1)
	go func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		var err error
		for i := 0; i < n && err == nil; i++ {
			_, err = io.WriteString(writes, pieces)
			<-ticker.C
		}
		written <- errors.Join(err, writes.Close())
	}()
	response := e.request(s, http.MethodPost, "/upload", body)
	require.NoError(e.t, <-written)
	raw, err := io.ReadAll(response.Body)
	require.NoError(e.t, err)
	require.Equal(e.t, http.StatusOK, response.StatusCode, string(raw))
	require.JSONEq(e.t, fmt.Sprintf(`{"bytes":%d}`, n*len(pieces)), string(raw))
}
