package envoy_test

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/envoy"
)

// hostile is a pod with scripted behaviour on each connection.
type hostile struct {
	addr     netip.AddrPort
	listener net.Listener
	serving  sync.WaitGroup

	mu    sync.Mutex
	conns []*net.TCPConn // all that it ever accepted
}

// startHostile calls speak for each connection to an address. speak returns when
// the connection ends.
func startHostile(t *testing.T, address string, speak func(*net.TCPConn)) *hostile {
	t.Helper()
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	h := &hostile{addr: netip.MustParseAddrPort(l.Addr().String()), listener: l}
	h.serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // leave was called
			}
			conn := c.(*net.TCPConn)
			h.mu.Lock()
			h.conns = append(h.conns, conn)
			h.mu.Unlock()
			h.serving.Go(func() { speak(conn) })
		}
	})
	t.Cleanup(func() {
		h.leave()
		h.each(reset)
		h.serving.Wait()
	})
	return h
}

// leave gives the address up. Connections stay.
func (h *hostile) leave() { h.listener.Close() }

// each does something to every connection.
func (h *hostile) each(do func(*net.TCPConn)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.conns {
		do(c)
	}
}

func (h *hostile) accepted() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.conns)
}

// reset ends a connection with RST, finish with FIN.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	c.Close()
}

func finish(c *net.TCPConn) { c.Close() }

// listens reads, and says nothing.
func listens(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) }

// settles begins HTTP/2 with a bound on the streams, which becomes later with the
// first request.
func settles(first, later uint32) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		framer := http2.NewFramer(c, c)
		bound := func(streams uint32) error {
			return framer.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: streams})
		}
		if _, err := io.CopyN(io.Discard, c, int64(len(http2.ClientPreface))); err != nil || bound(first) != nil {
			return
		}
		for {
			frame, err := framer.ReadFrame()
			if err != nil {
				return
			}
			switch f := frame.(type) {
			case *http2.SettingsFrame:
				if !f.IsAck() {
					err = framer.WriteSettingsAck()
				}
			case *http2.HeadersFrame:
				err = bound(later)
			}
			if err != nil {
				return
			}
		}
	}
}

// frames sends HTTP/2 frames and ends the connection.
func frames(send func(*http2.Framer)) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		send(http2.NewFramer(c, c))
		c.Close()
	}
}

// full fills the backlog of a listener without Accept, so that further connections time out.
func full(t *testing.T) *hostile {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	raw, err := l.(*net.TCPListener).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { err = syscall.Listen(int(fd), 0) }))
	require.NoError(t, err)
	for {
		c, err := net.DialTimeout("tcp", l.Addr().String(), 200*time.Millisecond)
		if err != nil {
			return &hostile{addr: netip.MustParseAddrPort(l.Addr().String()), listener: l}
		}
		t.Cleanup(func() { c.Close() })
	}
}

// waiting is how many requests a hostile pod keeps waiting. One HTTP/2 connection
// takes them all, unless the pod says otherwise.
const waiting = 80

// An admitted request that a pod keeps waiting ends with its connection. Envoy does not dial the
// address again for it, because another pod may have the address by then.
// Invariant: I1
func TestWaitingRequestNeverDialsAgain(t *testing.T) {
	type sender = func(*gateway) answer
	plain := func(contentType string) sender {
		return func(g *gateway) answer {
			return g.do(g.request(host, "/", http.Header{"Content-Type": {contentType}, "Te": {"trailers"}}))
		}
	}
	grpc, http1 := plain("application/grpc"), plain("text/plain")
	webSocket := func(g *gateway) answer {
		return g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YmVydGgtb3Zlci1odHRwMg==\r\nSec-WebSocket-Version: 13\r\n\r\n")
	}
	upload := func(g *gateway) answer { // of which a part is sent
		return g.answer("POST / HTTP/1.1\r\nHost: " + host + "\r\nContent-Length: 10\r\n\r\nhalf")
	}
	const forever = 1 << 30
	// end ends each connection when another pod has the address. Without it the pod
	// has ended them before.
	for name, c := range map[string]struct {
		speak func(*net.TCPConn) // nil: it does not even accept connections
		send  sender
		end   func(*net.TCPConn)
		// shared: the first request opens the connection on which the others wait.
		shared bool
	}{
		"HTTP/2, no streams allowed":                   {settles(0, 0), grpc, reset, false},
		"HTTP/2, no streams allowed, an orderly end":   {settles(0, 0), grpc, finish, false},
		"HTTP/2, one stream allowed, then none":        {settles(1, 0), grpc, reset, false},
		"HTTP/2, any streams allowed, then none":       {settles(forever, 0), grpc, reset, false},
		"HTTP/2, any streams allowed, then no word":    {settles(forever, forever), grpc, reset, true},
		"HTTP/2, no word":                              {listens, grpc, reset, false},
		"HTTP/2, no word, an orderly end":              {listens, grpc, finish, true},
		"HTTP/2, no word, and no streams in the end":   {listens, grpc, frames(func(f *http2.Framer) { _ = f.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams}) }), true},
		"HTTP/2, no word, then all streams in the end": {listens, grpc, frames(func(f *http2.Framer) { _ = f.WriteSettings() }), true},
		"HTTP/2, GOAWAY that has seen nothing":         {listens, grpc, frames(func(f *http2.Framer) { _ = f.WriteSettings(); _ = f.WriteGoAway(0, http2.ErrCodeNo, nil) }), true},
		"HTTP/2, GOAWAY with an error":                 {settles(forever, forever), grpc, frames(func(f *http2.Framer) { _ = f.WriteGoAway(0, http2.ErrCodeRefusedStream, nil) }), true},
		"HTTP/2, refused streams": {settles(forever, forever), grpc, frames(func(f *http2.Framer) {
			for stream := range uint32(waiting) {
				_ = f.WriteRSTStream(2*stream+1, http2.ErrCodeRefusedStream)
			}
		}), true},
		"HTTP/1.1, no word":                   {listens, http1, reset, false},
		"HTTP/1.1, no word, an orderly end":   {listens, http1, finish, false},
		"HTTP/1.1, half a body":               {listens, upload, reset, false},
		"WebSocket, no word":                  {listens, webSocket, reset, false},
		"HTTP/1.1, every connection is ended": {finish, http1, nil, false},
		"HTTP/1.1, every connection is reset": {reset, http1, nil, false},
		"HTTP/2, every connection is ended":   {finish, grpc, nil, false},
		"HTTP/2, every connection is reset":   {reset, grpc, nil, false},
		"HTTP/1.1, no connection is accepted": {nil, http1, nil, false},
		"HTTP/2, no connection is accepted":   {nil, grpc, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGateway(t)
			pods := func(stat string) int { return g.counter(`cluster\.pods_h[12]\.` + stat) }
			var h *hostile
			if c.speak == nil {
				h = full(t)
			} else {
				h = startHostile(t, "127.0.0.1:0", c.speak)
			}
			g.router.set(g.to(h.addr.String()))
			answers := make(chan answer, waiting)
			var asking sync.WaitGroup
			ask := func(n int) {
				for range n {
					asking.Go(func() { answers <- c.send(g) })
				}
			}
			waits := func(n int) {
				require.Eventually(t, func() bool { return pods("upstream_rq_active") == n && pods("upstream_rq_pending_active") == 0 },
					time.Minute, 10*time.Millisecond, "not every request is at the pod")
			}
			first := 0
			if c.shared {
				first = 1
				ask(first)
				waits(first)
			}
			ask(waiting - first)
			if c.end != nil {
				waits(waiting)
			} else {
				asking.Wait() // the answers come by themselves
				// The first failure answers all of them. The other connections are given up one by one.
				require.Eventually(t, func() bool { return pods("upstream_cx_active") == 0 }, time.Minute, 10*time.Millisecond)
			}
			if c.shared {
				require.Equal(t, 1, h.accepted())
			}

			h.leave()
			another := startHostile(t, h.addr.String(), func(c *net.TCPConn) {
				_, _ = c.Read(make([]byte, 1))
				_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
				c.Close()
			})
			if c.end != nil {
				h.each(c.end)
			}
			asking.Wait()
			for range waiting {
				a := <-answers
				if a.code == http.StatusOK {
					require.Equal(t, "14", a.header.Get("Grpc-Status"), "%+v", a)
				} else {
					require.Equal(t, http.StatusBadGateway, a.code, "%+v", a)
				}
			}
			require.Zero(t, pods("upstream_rq_active"))
			require.Zero(t, pods("upstream_rq_pending_active"))

			// The next request is the first that reaches the other pod.
			g.router.set(admit(map[string]*structpb.Value{envoy.MetadataDst: text(another.addr.String()), envoy.MetadataID: text("def")}))
			require.Equal(t, http.StatusNoContent, http1(g).code)
			require.Equal(t, 1, another.accepted(), "connections to the pod that has the address now")
		})
	}
}
