package poststart_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/poststart"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func leads() bool { return true }

// pod is a server that stands for the sandbox's pod.
func pod(t *testing.T, h http.HandlerFunc) (core.Sandbox, v1alpha1.PostStartHook) {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	at := s.Listener.Addr().(*net.TCPAddr).AddrPort()
	return core.Sandbox{
		Binding: core.Binding{ID: "k3x9", Metadata: map[string]string{"k": "v"}, User: "ada"}, Pool: core.PoolKey{Name: "python"}, IP: at.Addr(),
	}, v1alpha1.PostStartHook{Port: int32(at.Port()), Path: "/start?x=1", TimeoutSeconds: 10}
}

func TestHookRequestNamesTheSandbox(t *testing.T) {
	var got map[string]any
	s, hook := pod(t, func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, http.MethodPost, r.Method)
		require.Equal(t, "/start?x=1", r.URL.RequestURI())
		require.Equal(t, "application/json", r.Header.Get("Content-Type"))
		raw, _ := io.ReadAll(r.Body)
		require.NoError(t, json.Unmarshal(raw, &got))
		w.WriteHeader(http.StatusNoContent)
	})
	require.NoError(t, caller(t, nil, leads).Call(t.Context(), hook, 1, s))
	require.Equal(t, map[string]any{"sandboxID": "k3x9", "pool": "python", "metadata": map[string]any{"k": "v"}, "user": "ada"}, got)

	port := hook.Port
	hook.Port = 0 // then it is the pool's default port
	require.NoError(t, caller(t, nil, leads).Call(t.Context(), hook, uint16(port), s))
}

func TestHookFailsOnAnyAnswerBut2xx(t *testing.T) {
	var calls atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the allocator followed a redirect of the pod") }))
	defer elsewhere.Close()
	for _, code := range []int{302, 404, 500, 503} {
		calls.Store(0)
		s, hook := pod(t, func(w http.ResponseWriter, _ *http.Request) {
			calls.Add(1)
			w.Header().Set("Location", elsewhere.URL)
			w.WriteHeader(code)
		})
		require.ErrorContains(t, caller(t, nil, leads).Call(t.Context(), hook, 1, s), "answered")
		require.EqualValues(t, 1, calls.Load(), "an answer is an answer")
	}
}

func TestHookIsRetriedWhileThePodRefusesConnections(t *testing.T) {
	s, hook := pod(t, func(http.ResponseWriter, *http.Request) {})
	tries := 0
	c := caller(t, func(ctx context.Context, network, address string) (net.Conn, error) {
		require.Equal(t, netip.AddrPortFrom(s.IP, uint16(hook.Port)).String(), address)
		if tries++; tries < 4 {
			return nil, &net.OpError{Op: "dial", Net: network, Err: io.ErrUnexpectedEOF}
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}, leads)
	require.NoError(t, c.Call(t.Context(), hook, 1, s))
	require.Equal(t, 4, tries)
}

func TestHookWithoutAnswerTimesOut(t *testing.T) {
	released := make(chan struct{})
	s, hook := pod(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-released:
		}
	})
	defer close(released)
	hook.TimeoutSeconds = 1
	began := time.Now()
	require.ErrorIs(t, caller(t, nil, leads).Call(t.Context(), hook, 1, s), context.DeadlineExceeded)
	require.GreaterOrEqual(t, time.Since(began), time.Second)
}

func TestNoHookIsCalledWithoutACertainLease(t *testing.T) {
	s, hook := pod(t, func(http.ResponseWriter, *http.Request) { t.Error("the pod of another sandbox was called") })
	var asked, dialed int
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		dialed++
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	for leadsFor := range 2 { // not any more: before it connects, and once it has connected
		asked, dialed = 0, 0
		ctx, end := context.WithCancel(t.Context()) // of the term
		c := caller(t, dial, func() bool {
			if asked++; asked == 4 {
				end()
			}
			return asked <= leadsFor
		})
		require.ErrorContains(t, c.Call(ctx, hook, 1, s), "may no longer hold the lease")
		require.Equal(t, leadsFor, dialed)
	}
}

func TestHookIsCalledOnceTheLeaseIsCertainAgain(t *testing.T) {
	for name, unsure := range map[string]func(asked int) bool{
		"before it connects":   func(asked int) bool { return asked <= 2 },
		"once it is connected": func(asked int) bool { return asked == 2 },
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int32
			s, hook := pod(t, func(http.ResponseWriter, *http.Request) { calls.Add(1) })
			asked := 0
			c := caller(t, nil, func() bool { asked++; return !unsure(asked) })
			require.NoError(t, c.Call(t.Context(), hook, 1, s))
			require.EqualValues(t, 1, calls.Load())
			require.Equal(t, 4, asked)
		})
	}
}

// rawPod is a peer that says what it likes: it is given the connection of each call, once
// the request has arrived, and a channel that is closed when the test ends.
func rawPod(t *testing.T, says func(conn net.Conn, ended <-chan struct{})) (core.Sandbox, v1alpha1.PostStartHook) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close()
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					says(conn, ended)
				}
			})
		}
	})
	t.Cleanup(func() {
		close(ended)
		l.Close()
		all.Wait()
	})
	at := l.Addr().(*net.TCPAddr).AddrPort()
	return core.Sandbox{Binding: core.Binding{ID: "k3x9"}, Pool: core.PoolKey{Name: "python"}, IP: at.Addr()},
		v1alpha1.PostStartHook{Port: int32(at.Port()), Path: "/start", TimeoutSeconds: 2}
}

// keeps says something and then nothing more, and keeps the connection.
func keeps(what string) func(net.Conn, <-chan struct{}) {
	return func(conn net.Conn, ended <-chan struct{}) {
		_, _ = io.WriteString(conn, what)
		<-ended
	}
}

// drips says first, and then the same again and again until the connection is gone.
func drips(first, again string, pause time.Duration) func(net.Conn, <-chan struct{}) {
	return func(conn net.Conn, ended <-chan struct{}) {
		_, err := io.WriteString(conn, first)
		for err == nil {
			select {
			case <-ended:
				return
			case <-time.After(pause):
			}
			_, err = io.WriteString(conn, again)
		}
	}
}

// Invariant: P11
func TestHookEndsAtItsTimeoutWhateverThePodDoes(t *testing.T) {
	const switches, early = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", "HTTP/1.1 103 Early Hints\r\n\r\n"
	for name, c := range map[string]struct {
		says func(net.Conn, <-chan struct{})
		want string // of the error; nothing: the hook has succeeded
	}{
		"nothing":                           {keeps(""), "deadline exceeded"},
		"half an answer":                    {keeps("HTTP/1.1 20"), "deadline exceeded"},
		"another protocol":                  {keeps(switches), "answered 101"},
		"another protocol, and talks on":    {drips(switches, "x", time.Millisecond), "answered 101"},
		"101 without a protocol":            {keeps("HTTP/1.1 101 Switching Protocols\r\n\r\n"), "answered 101"},
		"101, then success":                 {keeps(switches + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), "answered 101"},
		"early hints and no answer":         {keeps(early), "deadline exceeded"},
		"early hints for ever":              {drips("", early, 100*time.Millisecond), "deadline exceeded"},
		"as many early hints as it can":     {drips("", early, 0), "longer than"},
		"early hints, then success":         {keeps(early + "HTTP/1.1 204 No Content\r\n\r\n"), ""},
		"early hints, then failure":         {keeps(early + "HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"), "answered 500"},
		"headers for ever":                  {drips("HTTP/1.1 200 OK\r\n", "A: b\r\n", 100*time.Millisecond), "deadline exceeded"},
		"as many headers as it can":         {drips("HTTP/1.1 200 OK\r\n", "A: b\r\n", 0), "longer than"},
		"success, and keeps the connection": {keeps("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), ""},
		"success, and a body for ever":      {drips("HTTP/1.1 200 OK\r\n\r\n", "x", 10*time.Millisecond), ""},
		"success, and chunks for ever":      {drips("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "1\r\nx\r\n", 10*time.Millisecond), ""},
		"success, and a body without end":   {drips("HTTP/1.1 200 OK\r\n\r\n", strings.Repeat("x", 1<<16), 0), ""},
		"success, and half of its body":     {keeps("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxxx"), ""},
		"failure, and a body for ever":      {drips("HTTP/1.1 500 Oh\r\n\r\n", "x", 10*time.Millisecond), "answered 500"},
		"what is not HTTP":                  {keeps("SSH-2.0-x\r\n\r\n"), "the answer is not HTTP"},
		"a status that is none":             {keeps("HTTP/1.1 secret\r\n\r\n"), "the answer is not HTTP"},
		"a header that is none":             {keeps("HTTP/1.1 200 OK\r\nsecret\r\n\r\n"), "the answer is not HTTP"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, hook := rawPod(t, c.says)
			var connections sync.Map // those that were made, and whether they are open
			dial := func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
				if err != nil {
					return nil, err
				}
				connections.Store(conn, nil)
				return conn, nil
			}
			done := make(chan error, 1)
			go func() { done <- caller(t, dial, leads).Call(t.Context(), hook, 1, s) }()
			select {
			case err := <-done:
				if c.want == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, c.want)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("the pod holds the hook for longer than its time")
			}
			connections.Range(func(conn, _ any) bool {
				_, err := conn.(net.Conn).Write([]byte{0})
				require.ErrorIs(t, err, net.ErrClosed, "its connection is kept")
				return true
			})
		})
	}
}

// The sandbox is released, or the term ends.
func TestCancelledHookEndsAtOnce(t *testing.T) {
	for name, says := range map[string]func(net.Conn, <-chan struct{}){
		"nothing":          keeps(""),
		"half an answer":   keeps("HTTP/1.1 20"),
		"1xx for ever":     drips("", "HTTP/1.1 103 Early Hints\r\n\r\n", 10*time.Millisecond),
		"headers for ever": drips("HTTP/1.1 200 OK\r\n", "A: b\r\n", 10*time.Millisecond),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			asked := make(chan struct{}, 1)
			s, hook := rawPod(t, func(conn net.Conn, ended <-chan struct{}) {
				asked <- struct{}{}
				says(conn, ended)
			})
			hook.TimeoutSeconds = 3600
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- caller(t, nil, leads).Call(ctx, hook, 1, s) }()
			<-asked
			cancel()
			select {
			case err := <-done:
				require.ErrorIs(t, err, context.Canceled)
			case <-time.After(20 * time.Second):
				t.Fatal("the pod holds a hook that was called off")
			}
		})
	}
}

func caller(t *testing.T, dial func(context.Context, string, string) (net.Conn, error), leads func() bool) *poststart.Caller {
	c, err := poststart.New(poststart.Options{Dial: dial, Leads: leads})
	require.NoError(t, err)
	return c
}
