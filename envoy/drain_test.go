package envoy_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/coder/websocket"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/berth-sandbox/berth/envoy"
)

// keptAlive is a connection on which a client sends one request after the other.
type keptAlive struct {
	*testing.T
	net.Conn
	answers *bufio.Reader
}

func (g *gateway) dial() keptAlive {
	g.Helper()
	c, err := net.Dial("tcp", g.addr)
	require.NoError(g, err)
	g.Cleanup(func() { c.Close() })
	require.NoError(g, c.SetDeadline(time.Now().Add(time.Minute)))
	return keptAlive{g.T, c, bufio.NewReader(c)}
}

func (c keptAlive) ask() {
	c.Helper()
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: "+host+"\r\nContent-Length: 1\r\n\r\nx")
	require.NoError(c, err)
}

// isServed reads an answer of the pod, and reports whether it is the last one of the connection.
func (c keptAlive) isServed() (last bool) {
	c.Helper()
	response, err := http.ReadResponse(c.answers, nil)
	require.NoError(c, err)
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(c, err)
	require.Equal(c, http.StatusOK, response.StatusCode)
	return response.Close
}

// Invariant: P23
func TestDrainServesOnAndSendsClientsElsewhere(t *testing.T) {
	g := startGateway(t)
	g.router.set(admit(g.admitted("abc")))
	health := func() (int, string) { return g.raw(g.health, http.MethodGet, "/ready", "health", "") }
	before, stays := g.dial(), g.dial()
	for _, c := range []keptAlive{before, stays} {
		c.ask()
		require.False(t, c.isServed())
	}
	over2 := dialH2(t, g.addr)
	request := []string{":method", http.MethodGet, ":scheme", "http", ":authority", host, ":path", "/"}
	over2.open(true, request...)
	for !over2.read().end {
	}
	// One request is in progress.
	asked, decide := make(chan struct{}), make(chan struct{})
	g.router.set(func(stream extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
		close(asked)
		<-decide
		return admit(g.admitted("abc"))(stream, m)
	})
	held := g.dial()
	held.ask()
	<-asked
	g.router.set(admit(g.admitted("abc")))

	require.NoError(t, envoy.Drain(t.Context(), g.admin))
	code, body := health()
	require.Equal(t, http.StatusServiceUnavailable, code, body)
	before.ask()
	require.True(t, before.isServed())
	after := g.dial()
	after.ask()
	require.True(t, after.isServed(), "a new connection is served too")
	over2.open(true, request...)
	require.NoError(t, over2.awaits(func(f http2.Frame) bool {
		goAway, ok := f.(*http2.GoAwayFrame)
		return ok && goAway.ErrCode == http2.ErrCodeNo
	}))
	close(decide)
	require.True(t, held.isServed())

	require.NoError(t, envoy.Resume(t.Context(), g.admin))
	code, body = health()
	require.Equal(t, http.StatusOK, code, body)
	stays.ask()
	require.False(t, stays.isServed())
}

// awaits reads frames until one is as wanted.
func (c *h2) awaits(wanted func(http2.Frame) bool) error {
	for {
		f, err := c.framer.ReadFrame()
		if err != nil || wanted(f) {
			return err
		}
	}
}

// Envoy passes WebSockets on as bytes. So a close frame of the sandbox arrives, and the end of Envoy has none.
func TestOnlyTheSandboxSendsCloseFramesOfWebSockets(t *testing.T) {
	g := startGateway(t)
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, message, err := c.Read(r.Context())
			switch {
			case err != nil:
				return
			case string(message) == "leave":
				_ = c.Close(websocket.StatusGoingAway, "")
			default:
				_ = c.Write(r.Context(), kind, message)
			}
		}
	}))
	g.router.set(g.to(p.addr.String()))
	open := func() *websocket.Conn {
		c, _, err := websocket.Dial(t.Context(), "ws://"+g.addr+"/", &websocket.DialOptions{Host: host})
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.CloseNow() })
		return c
	}
	says := func(c *websocket.Conn, message string) error {
		require.NoError(t, c.Write(t.Context(), websocket.MessageText, []byte(message)))
		_, _, err := c.Read(t.Context())
		return err
	}
	left, stays := open(), open()
	require.NoError(t, envoy.Drain(t.Context(), g.admin))
	require.NoError(t, says(stays, "ahoy"), "a drain leaves it open")
	require.Equal(t, websocket.StatusGoingAway, websocket.CloseStatus(says(left, "leave")))

	require.NoError(t, g.envoy.Stop(t.Context(), 30*time.Second))
	_, _, err := stays.Read(t.Context())
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, websocket.StatusCode(-1), websocket.CloseStatus(err), "no close frame")
}

func TestDrainWithoutAnEnvoyIsAnError(t *testing.T) {
	require.ErrorContains(t, envoy.Drain(t.Context(), envoy.AdminClient(t.TempDir()+"/none.sock")), "admin socket of Envoy")
}
