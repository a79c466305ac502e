package busy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func addressOf(t *testing.T, s *httptest.Server) netip.AddrPort {
	t.Helper()
	addr, err := netip.ParseAddrPort(s.Listener.Addr().String())
	require.NoError(t, err)
	return addr
}

func TestAnswerStatusIsTheResult(t *testing.T) {
	for name, c := range map[string]struct {
		handle http.HandlerFunc
		want   int
	}{
		"200":             {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }, 200},
		"200 with a body": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "idle") }, 200},
		"204":             {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, 204},
		"404":             {http.NotFound, 404},
		"103, then 200":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusEarlyHints) }, 200},
		"it breaks off":   {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0},
		"a broken-off body": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			fmt.Fprint(w, "x")
		}, 200},
		"302":      {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/busy", http.StatusFound) }, 302},
		"101":      {says("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"), 101},
		"HTTP/1.0": {says("HTTP/1.0 200 OK\r\n\r\n"), 200},
		"no HTTP":  {says("200 OK\r\n\r\n"), 0},
		"half":     {says("HTTP/1.1 200 OK"), 0},
		"too long": {says("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n"), 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(c.handle)
			defer s.Close()
			require.Equal(t, c.want, status(t.Context(), addressOf(t, s), "/"))
		})
	}
}

func TestThreeFailuresMeanNotBusy(t *testing.T) {
	for name, c := range map[string]struct {
		answers []int
		busy    bool
	}{
		"busy": {[]int{200}, true}, "not busy": {[]int{204}, false}, "busy after all": {[]int{500, 302, 200}, true},
		"not busy after all": {[]int{500, 204}, false}, "failures": {[]int{500, 404, 101}, false},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				asked++
				if status := c.answers[min(asked, len(c.answers))-1]; status == http.StatusSwitchingProtocols {
					says("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")(w, r)
				} else {
					w.WriteHeader(status)
				}
			}))
			defer s.Close()
			require.Equal(t, c.busy, Ask(t.Context(), addressOf(t, s), "/"))
			require.Len(t, c.answers, asked)
		})
	}
}

// says answers with these bytes, and closes the connection.
func says(answer string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(conn, answer)
		_ = conn.Close()
	}
}

func TestEachAttemptHasItsOwnConnection(t *testing.T) {
	type asked struct{ method, target, host, connection, agent, from string }
	var requests []asked
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests = append(requests, asked{r.Method, r.RequestURI, r.Host, r.Header.Get("Connection"), r.UserAgent(), r.RemoteAddr})
		http.Redirect(w, r, "/other", http.StatusTemporaryRedirect)
	}))
	for range 2 {
		require.Equal(t, http.StatusTemporaryRedirect, status(t.Context(), addressOf(t, s), "/busy/now?deep=1"))
	}
	s.Close() // the handlers have returned
	require.Len(t, requests, 2, "a redirect was followed")
	require.NotEqual(t, requests[0].from, requests[1].from, "two questions shared a connection")
	requests[0].from = ""
	require.Equal(t, asked{"GET", "/busy/now?deep=1", s.Listener.Addr().String(), "close", "berth", ""}, requests[0])
}

func TestInvalidPathSendsNoRequest(t *testing.T) {
	var asked atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer s.Close()
	for _, path := range []string{"busy", "@example.com/", "http://example.com/", "*", "/a b\r\nX: y", "/%zz"} {
		require.Zero(t, status(t.Context(), addressOf(t, s), path), path)
	}
	require.Zero(t, asked.Load())
	// A second slash makes no host of what follows.
	require.Equal(t, http.StatusOK, status(t.Context(), addressOf(t, s), "//example.com/busy"))
}

func TestConnectionRefusedIsAFailure(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := netip.MustParseAddrPort(l.Addr().String())
	require.NoError(t, l.Close())
	require.Zero(t, status(t.Context(), addr, "/"))
}

// peer is a sandbox that takes one connection and plays it.
func peer(t *testing.T, play func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	played := make(chan struct{})
	go func() {
		defer close(played)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		play(conn)
	}()
	t.Cleanup(func() {
		l.Close()
		<-played
	})
	return netip.MustParseAddrPort(l.Addr().String())
}

// untilClosed returns once the other side has closed the connection.
func untilClosed(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }

func TestSlowAnswerIsGivenUp(t *testing.T) {
	for name, said := range map[string]string{"nothing": "", "half a status line": "HTTP/1.1 200"} {
		t.Run(name, func(t *testing.T) {
			addr := peer(t, func(conn net.Conn) {
				_, _ = io.WriteString(conn, said)
				untilClosed(conn)
			})
			require.Zero(t, status(t.Context(), addr, "/")) // hangs if there is no bound
		})
	}
}

func TestAskEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	addr := peer(t, func(conn net.Conn) {
		cancel()
		untilClosed(conn)
	})
	require.False(t, Ask(ctx, addr, "/"))
}
