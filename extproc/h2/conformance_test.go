package h2

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// overServers runs a test with the server of this package and with grpc-go, which is the reference.
func overServers(t *testing.T, test func(t *testing.T, s *service, server server, socket string)) {
	t.Helper()
	for name, of := range map[string]func(*service) server{"own": (*service).own, "grpc-go": (*service).reference} {
		t.Run(name, func(t *testing.T) {
			s := newService()
			server := of(s)
			test(t, s, server, serve(t, server))
		})
	}
}

func overBoth(t *testing.T, test func(t *testing.T, s *service, socket string)) {
	t.Helper()
	overServers(t, func(t *testing.T, s *service, _ server, socket string) { test(t, s, socket) })
}

func TestCallsAreAnsweredAsGRPCAsks(t *testing.T) {
	for name, c := range map[string]struct {
		send func(p *peer)
		want string
	}{
		"answer":                {func(p *peer) { p.call(1, "hello") }, ":status 200, grpc-status 0, hello, ended"},
		"empty message":         {func(p *peer) { p.call(1, "") }, ":status 200, grpc-status 0, , ended"},
		"more than one message": {func(p *peer) { p.call(1, "more") }, ":status 200, grpc-status 0, more, more, ended"},
		"error":                 {func(p *peer) { p.call(1, "fail") }, ":status 200, grpc-status 9, grpc-message 100 %25 wrong%0A, ended"},
		"long answer": {func(p *peer) {
			require.NoError(p.t, p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20}))
			require.NoError(p.t, p.WriteWindowUpdate(0, 1<<20))
			p.call(1, "big")
		}, ":status 200, grpc-status 0, 100000 bytes, ended"},
		"half-closed with the message": {func(p *peer) {
			p.begin(1)
			require.NoError(p.t, p.WriteData(1, true, message("hello")))
		}, ":status 200, grpc-status 0, hello, ended"},
		"no message": {func(p *peer) { p.headers(1, p.request(), true) }, ":status 200, grpc-status 0, ended"},
		"message in pieces": {func(p *peer) {
			p.begin(1)
			for _, b := range message("hello") {
				require.NoError(p.t, p.WriteData(1, false, []byte{b}))
			}
		}, ":status 200, grpc-status 0, hello, ended"},
		"message with padding": {func(p *peer) {
			p.begin(1)
			require.NoError(p.t, p.WriteDataPadded(1, false, nil, make([]byte, 9)))
			require.NoError(p.t, p.WriteDataPadded(1, false, message("hello"), make([]byte, 99)))
		}, ":status 200, grpc-status 0, hello, ended"},
		"long message": {func(p *peer) {
			p.begin(1)
			m := message(strings.Repeat("x", 50_000))
			for len(m) > 0 {
				n := min(len(m), minFrame)
				require.NoError(p.t, p.WriteData(1, false, m[:n]))
				m = m[n:]
			}
		}, ":status 200, grpc-status 0, 50000 bytes, ended"},
		"further message": {func(p *peer) {
			p.begin(1)
			require.NoError(p.t, p.WriteData(1, false, append(message("hello"), message("second")...)))
		}, ":status 200, grpc-status 0, hello, ended"},
		"headers in pieces": {func(p *peer) {
			block := p.request()
			n := len(block) / 3
			require.NoError(p.t, p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:n]}))
			require.NoError(p.t, p.WriteContinuation(1, false, block[n:2*n]))
			require.NoError(p.t, p.WriteContinuation(1, true, block[2*n:]))
			require.NoError(p.t, p.WriteData(1, false, message("hello")))
		}, ":status 200, grpc-status 0, hello, ended"},
		"headers with padding and priority": {func(p *peer) {
			require.NoError(p.t, p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.request(), EndHeaders: true,
				PadLength: 20, Priority: http2.PriorityParam{StreamDep: 0, Weight: 5, Exclusive: true}}))
			require.NoError(p.t, p.WriteData(1, false, message("hello")))
		}, ":status 200, grpc-status 0, hello, ended"},
		"frames without effect": {func(p *peer) {
			p.begin(1)
			require.NoError(p.t, p.WritePriority(1, http2.PriorityParam{Weight: 7}))
			require.NoError(p.t, p.WriteRawFrame(0xfa, 0, 1, []byte("unknown")))
			require.NoError(p.t, p.WritePing(false, [8]byte{1}))
			require.NoError(p.t, p.WriteSettings())
			require.NoError(p.t, p.WriteData(1, false, message("hello")))
		}, ":status 200, grpc-status 0, hello, ended"},
		"another stream was reset before it asked": {func(p *peer) {
			p.begin(1)
			require.NoError(p.t, p.WriteRSTStream(1, http2.ErrCodeCancel))
			require.NoError(p.t, p.WriteWindowUpdate(1, 1))
			p.streams = map[uint32]*seen{}
			p.call(3, "hello")
			p.until(func() bool { return p.of(3).over() })
			p.streams[1] = p.streams[3]
		}, ":status 200, grpc-status 0, hello, ended"},
		"unknown method": {func(p *peer) {
			p.headers(1, p.fields(":method", "POST", ":scheme", "http", ":path", "/berth.test.Test/Other", ":authority", "t",
				"content-type", "application/grpc", "te", "trailers"), false)
		}, ":status 200, grpc-status 12, ended"},
		"compressed message": {func(p *peer) {
			p.begin(1)
			m := message("hello")
			m[0] = 1
			require.NoError(p.t, p.WriteData(1, false, m))
		}, ":status 200, grpc-status *, ended"},
		"too long message": {func(p *peer) {
			p.begin(1)
			require.NoError(p.t, p.WriteData(1, false, binary.BigEndian.AppendUint32([]byte{0}, maxMessage)))
		}, ":status 200, grpc-status *, ended"},
		"no gRPC": {func(p *peer) {
			p.headers(1, p.fields(":method", "POST", ":scheme", "http", ":path", testMethod, ":authority", "t", "content-type", "text/plain"), false)
		}, ":status 415, ended"},
	} {
		t.Run(name, func(t *testing.T) {
			overBoth(t, func(t *testing.T, s *service, socket string) {
				p := connect(t, socket)
				c.send(p)
				p.until(func() bool { return p.of(1).over() })
				got := p.of(1)
				if !strings.Contains(c.want, "grpc-message") { // its words differ
					got.header = dropPrefix(got.header, "grpc-message ")
				}
				if strings.Contains(c.want, "415") { // grpc-go adds gRPC's status
					got.header = dropPrefix(got.header, "grpc-status ")
				}
				if strings.Contains(c.want, "grpc-status *") { // another error
					require.NotContains(t, got.header, "grpc-status 0")
					got.header = append(dropPrefix(got.header, "grpc-status "), "grpc-status *")
				}
				require.Equal(t, c.want, got.String())
				open, _, byServer := s.open()
				require.Zero(t, byServer)
				require.LessOrEqual(t, open, 1)
				s.awaitOpen(t, 0)
				p.streams = map[uint32]*seen{}
				p.call(101, "hello") // the connection is as good as before
				p.until(func() bool { return p.of(101).over() })
				require.Equal(t, ":status 200, grpc-status 0, hello, ended", p.of(101).String())
			})
		})
	}
}

func dropPrefix(all []string, prefix string) (kept []string) {
	for _, s := range all {
		if !strings.HasPrefix(s, prefix) {
			kept = append(kept, s)
		}
	}
	return kept
}

// grpc-go ends the connection.
func TestTrailersOfThePeerHalfCloseTheCall(t *testing.T) {
	s := newService()
	p := connect(t, serve(t, s.own()))
	p.call(1, "keep")
	p.headers(1, p.fields("some", "trailer"), true)
	p.until(func() bool { return len(p.of(1).messages()) == 1 })
	p.begin(3)
	p.headers(3, p.fields("some", "trailer"), true) // before it asks
	p.until(func() bool { return p.of(3).over() })
	require.Equal(t, ":status 200, grpc-status 0, ended", p.of(3).String())
	s.awaitOpen(t, 1)
	require.NoError(t, p.WriteData(1, false, nil))
	p.untilClosed()
	require.Equal(t, []string{"STREAM_CLOSED after 3"}, p.goAways)
}

// What follows the message of a call is dropped, while the call is open and after.
func TestFurtherMessagesOfACallAreDropped(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket)
		p.begin(1)
		require.NoError(t, p.WriteData(1, false, append(message("keep"), message("second")...)))
		p.until(func() bool { return len(p.of(1).messages()) == 1 })
		require.NoError(t, p.WriteData(1, false, message("third")))
		p.sync()
		require.Equal(t, []string{"keep"}, p.of(1).messages())
		s.awaitOpen(t, 1)
	})
}

func TestConnectionBeginsWithPrefaceAndSettings(t *testing.T) {
	for name, first := range map[string]string{
		"HTTP/1":      "GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n",
		"no settings": http2.ClientPreface + "\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678",
	} {
		t.Run(name, func(t *testing.T) {
			overBoth(t, func(t *testing.T, _ *service, socket string) {
				p := connectRaw(t, socket)
				_, err := p.conn.Write([]byte(first))
				require.NoError(t, err)
				p.untilClosed()
			})
		})
	}
}

// Flow control: DATA waits for a window of the stream, of the connection, and for both.
func TestAnswersWaitForTheirWindows(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 3})
		p.call(1, "hello")
		p.until(func() bool { return len(p.of(1).data) == 3 })
		p.call(3, "keep")
		p.until(func() bool { return len(p.of(3).data) == 3 })
		p.sync()
		require.Len(t, p.of(1).data, 3)
		require.NoError(t, p.WriteWindowUpdate(3, 100))
		p.until(func() bool { return len(p.of(3).messages()) == 1 && p.of(3).messages()[0] == "keep" })
		require.False(t, p.of(1).over())
		// All windows grow at once.
		require.NoError(t, p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100}))
		p.until(func() bool { return p.of(1).over() })
		require.Equal(t, ":status 200, grpc-status 0, hello, ended", p.of(1).String())
		s.awaitOpen(t, 1)
		// The window of the connection: 65,535 bytes in all.
		require.NoError(t, p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20}))
		before := len(p.of(1).data) + len(p.of(3).data)
		p.call(5, "big")
		p.until(func() bool { return before+len(p.of(5).data) == firstWindow })
		p.call(7, "small")
		p.until(func() bool { return len(p.of(7).header) > 0 })
		p.sync()
		require.Empty(t, p.of(7).data, "it is behind the other in the connection's window")
		require.NoError(t, p.WriteRSTStream(3, http2.ErrCodeCancel))
		s.awaitOpen(t, 0)
		require.NoError(t, p.WriteWindowUpdate(0, 1<<20))
		p.until(func() bool { return p.of(5).over() && p.of(7).over() })
		require.Equal(t, ":status 200, grpc-status 0, 100000 bytes, ended", p.of(5).String())
		require.Equal(t, ":status 200, grpc-status 0, small, ended", p.of(7).String())
	})
}

func TestResetEndsAnAnswerThatWaitsForAWindow(t *testing.T) {
	overBoth(t, func(t *testing.T, s *service, socket string) {
		p := connect(t, socket, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		for id := uint32(1); id < 21; id += 2 {
			p.call(id, "keep")
			p.until(func() bool { return len(p.of(id).header) > 0 })
		}
		for id := uint32(1); id < 19; id += 2 {
			require.NoError(t, p.WriteRSTStream(id, http2.ErrCodeCancel))
		}
		require.NoError(t, p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100}))
		p.until(func() bool { return len(p.of(19).messages()) == 1 })
		for id := uint32(1); id < 19; id += 2 {
			require.Empty(t, p.of(id).data)
		}
		s.awaitOpen(t, 1)
	})
}

// The peer may send many messages over one connection, and long ones, because the server makes room again.
func TestServerMakesRoomForFurtherMessages(t *testing.T) {
	overBoth(t, func(t *testing.T, _ *service, socket string) {
		p := connect(t, socket)
		sent, id := 0, uint32(1)
		long := message(strings.Repeat("x", minFrame-prefixLength))
		require.NoError(t, p.WriteWindowUpdate(0, 1<<30))
		for ; sent < 4*connWindow; id += 2 {
			p.begin(id)
			require.NoError(t, p.WriteData(id, true, long))
			sent += len(long)
			p.until(func() bool { return p.of(id).over() })
			require.Equal(t, fmt.Sprintf(":status 200, grpc-status 0, %d bytes, ended", minFrame-prefixLength), p.of(id).String())
			delete(p.streams, id)
		}
	})
}
