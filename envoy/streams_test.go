package envoy_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/protobuf/types/known/durationpb"
)

// tap records the frames of streams at the router's end of its socket, in the order in which the router
// receives and sends them. It can keep back what Envoy has sent.
type tap struct {
	net.Listener
	mu     sync.Mutex
	frames []string
	let    chan struct{} // closed: nothing is kept back
}

func (l *tap) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &tapped{Conn: c, tap: l, in: half{by: "Envoy", skip: len(http2.ClientPreface)}, out: half{by: "router"}}, nil
}

// keepBack keeps back what Envoy sends from now on, until let is called.
func (l *tap) keepBack() (let func()) {
	gate := make(chan struct{})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.let = gate
	return func() { close(gate) }
}

// take returns the frames since the last call, in one line.
func (l *tap) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := strings.Join(l.frames, ", ")
	l.frames = nil
	return all
}

// has reports whether such a frame was recorded since the last call of take.
func (l *tap) has(frame string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(strings.Join(l.frames, ", ")+",", frame+",")
}

type tapped struct {
	net.Conn
	tap     *tap
	in, out half
}

// half is one direction of a connection.
type half struct {
	by   string
	skip int // bytes before the first frame
	rest []byte
}

func (c *tapped) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.tap.mu.Lock()
	gate := c.tap.let
	c.tap.mu.Unlock()
	<-gate
	c.tap.saw(&c.in, b[:n])
	return n, err
}

func (c *tapped) Write(b []byte) (int, error) {
	c.tap.saw(&c.out, b)
	return c.Conn.Write(b)
}

// saw records the frames of streams, but WINDOW_UPDATE.
func (l *tap) saw(h *half, b []byte) {
	const header = 9
	l.mu.Lock()
	defer l.mu.Unlock()
	h.rest = append(h.rest, b...)
	n := min(h.skip, len(h.rest))
	h.skip, h.rest = h.skip-n, h.rest[n:]
	for len(h.rest) >= header {
		length := int(binary.BigEndian.Uint32(h.rest) >> 8)
		if len(h.rest) < header+length {
			return
		}
		kind, flags := http2.FrameType(h.rest[3]), http2.Flags(h.rest[4])
		frame := fmt.Sprintf("%s %v", h.by, kind)
		if kind == http2.FrameData && flags.Has(http2.FlagDataEndStream) {
			frame += fmt.Sprintf(" of %d bytes with END_STREAM", length)
		}
		if binary.BigEndian.Uint32(h.rest[5:]) != 0 && kind != http2.FrameWindowUpdate {
			l.frames = append(l.frames, frame)
		}
		h.rest = h.rest[header+length:]
	}
}

// An acknowledgement of a release rests on this: the router takes RST_STREAM, and nothing else, for the sign
// that Envoy has read an answer or wants none. docs/design/hop.md describes what this test has recorded.
// Invariant: I2
func TestEnvoyResetsEveryStreamThatItEnds(t *testing.T) {
	const (
		asked   = "Envoy HEADERS, Envoy DATA, "
		answers = "router HEADERS, router DATA, "
		leaves  = "Envoy DATA of 0 bytes with END_STREAM, "
		reset   = "Envoy RST_STREAM"
	)
	all := &tap{}
	all.keepBack()()
	g := startGatewayWith(t, config{
		tap:      func(l net.Listener) net.Listener { all.Listener = l; return all },
		mistaken: true, // the requests that are not answered in time
	})
	// The router does not end a stream that it has answered.
	keeping := func(answer play) play {
		return func(s extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
			err := answer(s, m)
			<-s.Context().Done()
			return err
		}
	}
	admitting := admit(g.admitted("abc"))
	waits, answerNow := make(chan struct{}, 1), make(chan struct{})
	waiting := func(s extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
		waits <- struct{}{}
		select {
		case <-answerNow:
			return admitting(s, m)
		case <-s.Context().Done():
			return nil
		}
	}
	dialled := func(lines ...string) net.Conn {
		c, err := net.Dial("tcp", g.addr)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		_, err = io.WriteString(c, strings.Join(append(lines, "Host: "+host, "", ""), "\r\n"))
		require.NoError(t, err)
		return c
	}
	overH2 := []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", host}
	for _, c := range []struct {
		name   string
		router play
		do     func()
		want   string
	}{
		{"a request without a body", admitting, func() { g.do(g.request(host, "/", nil)) }, asked + answers + reset},
		{"a request with a body", admitting, func() {
			r := g.request(host, "/", nil)
			r.Method, r.Body = http.MethodPost, io.NopCloser(strings.NewReader(strings.Repeat("x", 1<<20)))
			g.do(r)
		}, asked + answers + reset},
		{"HTTP/2", admitting, func() { g.h2(overH2...) }, asked + answers + reset},
		{"HTTP/2 with a body that comes later", admitting, func() {
			c := dialH2(t, g.addr)
			stream := c.open(false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", host)
			require.Eventually(t, func() bool { return all.has(reset) }, time.Minute, time.Millisecond)
			require.NoError(t, c.framer.WriteData(stream, true, []byte("x")))
			for !c.read().end {
			}
		}, asked + answers + reset},
		{"a WebSocket", admitting, func() {
			c := dialled("GET / HTTP/1.1", strings.TrimSpace(upgradeHeaders), strings.TrimSpace(webSocketKey))
			_, err := http.ReadResponse(bufio.NewReader(c), nil)
			require.NoError(t, err)
		}, asked + answers + reset},
		{"a WebSocket over HTTP/2", admitting, func() {
			c := dialH2(t, g.addr)
			c.open(false, ":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":path", "/", ":authority", host, "sec-websocket-version", "13")
			c.read()
		}, asked + answers + reset},
		{"a refused request", func(s extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return s.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
				ImmediateResponse: &extprocv3.ImmediateResponse{Details: "refused"},
			}})
		}, func() { g.do(g.request(host, "/", nil)) }, asked + answers + reset},
		{"a held request", func(s extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
			if err := s.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(10 * time.Second)}); err != nil {
				return err
			}
			return admitting(s, m)
		}, func() { g.do(g.request(host, "/", nil)) }, asked + answers + "router DATA, " + reset},
		{"a client that leaves", waiting, func() {
			c := dialled("GET / HTTP/1.1")
			<-waits
			c.Close()
		}, asked + leaves + reset},
		{"a client that resets its stream", waiting, func() {
			c := dialH2(t, g.addr)
			stream := c.open(true, overH2...)
			<-waits
			require.NoError(t, c.framer.WriteRSTStream(stream, http2.ErrCodeCancel))
		}, asked + leaves + reset},
		{"a client that leaves while the answer is on its way", waiting, func() {
			c := dialled("GET / HTTP/1.1")
			<-waits
			let, gone := all.keepBack(), g.counter(`http\.ingress\.downstream_cx_destroy`)
			c.Close()
			require.Eventually(t, func() bool { return g.counter(`http\.ingress\.downstream_cx_destroy`) > gone }, time.Minute, time.Millisecond)
			answerNow <- struct{}{}
			require.Eventually(t, func() bool { return all.has("router DATA") }, time.Minute, time.Millisecond)
			let()
		}, asked + answers + leaves + reset},
		{"a request that is not answered in time", waiting, func() {
			g.do(g.request(host, "/", nil))
			<-waits
		}, asked + leaves + reset},
		{"the end of Envoy", waiting, func() {
			dialled("GET / HTTP/1.1")
			<-waits
			require.NoError(t, g.envoy.Signal(syscall.SIGTERM))
		}, asked + leaves + reset},
	} {
		require.Empty(t, all.take())
		g.router.set(keeping(c.router))
		c.do()
		require.Eventually(t, func() bool { return all.has(reset) }, time.Minute, time.Millisecond, c.name)
		require.Equal(t, c.want, all.take(), c.name)
	}
}
