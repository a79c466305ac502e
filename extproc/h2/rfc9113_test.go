package h2

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// What becomes of a case.
const (
	answered    = "answered" // as every other call
	ignored     = "ignored"
	malformed   = "stream PROTOCOL_ERROR" // RST_STREAM with this code
	half        = "stream STREAM_CLOSED"
	protocol    = "connection PROTOCOL_ERROR" // GOAWAY with this code, and the end of the connection
	frameSize   = "connection FRAME_SIZE_ERROR"
	flowControl = "connection FLOW_CONTROL_ERROR"
	compression = "connection COMPRESSION_ERROR"
	calm        = "connection ENHANCE_YOUR_CALM"
	closed      = "connection STREAM_CLOSED"
)

// deviation is what the server does instead of what RFC 9113 names, and why.
type deviation struct{ own, why string }

var same deviation

// whole: section 5.4.1 lets an endpoint treat the error of a stream as one of the connection. RST_STREAM would
// end a call whose answer the peer may still read, so that the call would end neither by the peer nor by Stop.
func whole(code string) deviation {
	return deviation{"connection " + code, "section 5.4.1 allows it, and the answer of the stream may be on its way"}
}

// rfcCase is a case of RFC 9113. Stream 1 is open when it begins. What it is about is on stream 7.
type rfcCase struct {
	section, name string
	send          []func(*peer)
	rfc           string // from the RFC, not from what the server does
	but           deviation
}

// raw sends a frame.
func raw(kind http2.FrameType, flags http2.Flags, id uint32, payload ...byte) func(*peer) {
	return func(p *peer) { _ = p.WriteRawFrame(kind, flags, id, payload) }
}

// begins sends a header block of stream 7.
func begins(pairs ...string) func(*peer) {
	return func(p *peer) {
		_ = p.WriteHeaders(http2.HeadersFrameParam{StreamID: 7, BlockFragment: p.fields(pairs...), EndHeaders: true})
	}
}

// ends sends a header block of stream 7 that half-closes it.
func ends(pairs ...string) func(*peer) {
	return func(p *peer) {
		_ = p.WriteHeaders(http2.HeadersFrameParam{StreamID: 7, BlockFragment: p.fields(pairs...), EndHeaders: true, EndStream: true})
	}
}

// call is the header fields of a call, with further ones behind.
func call(more ...string) []string {
	return append([]string{":method", "POST", ":scheme", "http", ":path", testMethod, ":authority", "test",
		"te", "trailers", "content-type", "application/grpc"}, more...)
}

// calls opens stream 7, with further fields.
func calls(more ...string) func(*peer) { return begins(call(more...)...) }

// requests sends the header block of a call on any stream.
func requests(id uint32) func(*peer) {
	return func(p *peer) {
		_ = p.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: p.request(), EndHeaders: true})
	}
}

// says sends a message on stream 7.
func says(text string) func(*peer) { return func(p *peer) { _ = p.WriteData(7, false, message(text)) } }

// block7 sends a header block as it is.
func block7(block ...byte) func(*peer) {
	return raw(http2.FrameHeaders, http2.FlagHeadersEndHeaders, 7, block...)
}

// split sends the header block of a call on stream 7 in parts, with something in between.
func split(between func(*peer)) func(*peer) {
	return func(p *peer) {
		b := p.request()
		_ = p.WriteHeaders(http2.HeadersFrameParam{StreamID: 7, BlockFragment: b[:5]})
		between(p)
		_ = p.WriteContinuation(7, true, b[5:])
	}
}

// padded sends a padded frame on stream 7.
func padded(kind http2.FrameType, padding byte, payload []byte) func(*peer) {
	return func(p *peer) {
		_ = p.WriteRawFrame(kind, http2.FlagDataPadded|http2.FlagHeadersEndHeaders, 7, append([]byte{padding}, payload...))
	}
}

func grants(id, n uint32) func(*peer) { return func(p *peer) { _ = p.WriteWindowUpdate(id, n) } }

func sets(id http2.SettingID, value uint32) func(*peer) {
	return func(p *peer) { _ = p.WriteSettings(http2.Setting{ID: id, Val: value}) }
}

// closes half-closes stream 7. resets resets it.
func closes(p *peer) { _ = p.WriteData(7, true, nil) }
func resets(p *peer) { _ = p.WriteRSTStream(7, http2.ErrCodeCancel) }

func steps(all ...func(*peer)) []func(*peer) { return all }

// around has the parts of a call that is answered, around what a case adds.
func around(middle ...func(*peer)) []func(*peer) {
	return slices.Concat(steps(calls()), middle, steps(says("hello")))
}

// rfc9113 has the cases of RFC 9113 that concern a server which does not push, in the RFC's order. Longer ones
// are tests of their own: the preface (3.4), the number of streams (5.1.2), windows (6.9), a graceful stop (6.8).
var rfc9113 = []rfcCase{
	{"4.1", "frame of an unknown kind", around(raw(0xfa, 0xff, 7, 1, 2, 3)), answered, same},
	{"4.1", "unknown flags of PING", around(raw(http2.FramePing, 0xfe, 0, make([]byte, 8)...)), answered, same},
	{"4.1", "unknown flags of DATA", steps(calls(), raw(http2.FrameData, 0xf6, 7, message("hello")...)), answered, same},
	{"4.1", "reserved bit of the stream is set", steps(calls(), raw(http2.FrameData, 0, 1<<31|7, message("hello")...)), answered, same},

	{"4.2", "DATA of 16,384 bytes", steps(calls(), raw(http2.FrameData, 0, 7, append(message("hello"), make([]byte, minFrame-prefixLength-5)...)...)), answered, same},
	{"4.2", "DATA of 16,385 bytes", steps(calls(), raw(http2.FrameData, 0, 7, make([]byte, minFrame+1)...)), "stream FRAME_SIZE_ERROR", whole("FRAME_SIZE_ERROR")},
	{"4.2", "HEADERS of 16,385 bytes", steps(block7(make([]byte, minFrame+1)...)), frameSize, same},
	{"4.2", "SETTINGS of 16,386 bytes", steps(raw(http2.FrameSettings, 0, 0, make([]byte, minFrame+2)...)), frameSize, same},
	{"4.2", "too long a frame of an unknown kind", steps(raw(0xfa, 0, 0, make([]byte, minFrame+1)...)), frameSize, same},
	{"4.2", "DATA without its length of padding", steps(calls(), raw(http2.FrameData, http2.FlagDataPadded, 7)), "stream FRAME_SIZE_ERROR", whole("FRAME_SIZE_ERROR")},
	{"4.2", "HEADERS without its length of padding", steps(raw(http2.FrameHeaders, http2.FlagHeadersPadded|http2.FlagHeadersEndHeaders, 7)), frameSize, same},
	{"4.2", "HEADERS without all of its priority", steps(raw(http2.FrameHeaders, http2.FlagHeadersPriority|http2.FlagHeadersEndHeaders, 7, 1, 2)), frameSize, same},

	{"4.3", "index of no field", steps(block7(0xff, 0x20)), compression, same},
	{"4.3", "header block cut short", steps(block7(0x40, 5, 'a')), compression, same},
	{"4.3", "wrong code of Huffman", steps(block7(0x00, 0x84, 0xff, 0xff, 0xff, 0xff, 0x00)), compression, same},
	{"4.3", "trailers that cannot be decoded", steps(calls(), says("keep"), raw(http2.FrameHeaders, http2.FlagHeadersEndHeaders|http2.FlagHeadersEndStream, 7, 0x80)), compression, same},
	{"4.3", "undecodable block of a closed stream", steps(calls(), resets, block7(0x80)), compression, same},
	{"4.3.1", "table beyond its size", steps(block7(0x3f, 0xe2, 0x1f)), compression, same},
	{"4.3.1", "change of the table behind a field", steps(block7(0x83, 0x20)), compression, same},
	{"4.3.1", "no table at all", steps(sets(http2.SettingHeaderTableSize, 0), calls(), says("hello")), answered, same},

	{"5.1", "DATA on an idle stream", steps(says("hello")), protocol, same},
	{"5.1", "RST_STREAM on an idle stream", steps(resets), protocol, same},
	{"5.1", "WINDOW_UPDATE on an idle stream", steps(grants(7, 1)), protocol, same},
	{"5.1", "PRIORITY on an idle stream", slices.Concat(steps(raw(http2.FramePriority, 0, 9, 0, 0, 0, 0, 16)), around()), answered, same},
	{"5.1", "unknown frame on an idle stream", slices.Concat(steps(raw(0xfa, 0, 9, 1)), around()), answered, same},
	{"5.1", "DATA on a stream of the server", steps(calls(), raw(http2.FrameData, 0, 2, 1)), protocol, same},
	{"5.1", "RST_STREAM on a stream of the server", steps(calls(), raw(http2.FrameRSTStream, 0, 2, 0, 0, 0, 8)), protocol, same},
	{"5.1", "WINDOW_UPDATE on a stream of the server", steps(calls(), grants(2, 1)), protocol, same},
	{"5.1", "DATA on a half-closed stream", steps(calls(), says("keep more later"), closes, says("x")), half, whole("STREAM_CLOSED")},
	{"5.1", "HEADERS on a half-closed stream", steps(calls(), says("keep more later"), closes, calls()), half, whole("STREAM_CLOSED")},
	{"5.1", "trailers on a half-closed stream", steps(calls(), says("keep more later"), closes, ends("a", "b")), half, whole("STREAM_CLOSED")},
	{"5.1", "WINDOW_UPDATE on a half-closed stream", steps(calls(), says("hello"), closes, grants(7, 1)), answered, same},
	{"5.1", "PRIORITY on a half-closed stream", steps(calls(), says("hello"), closes, raw(http2.FramePriority, 0, 7, 0, 0, 0, 0, 1)), answered, same},
	{"5.1", "RST_STREAM on a half-closed stream", steps(calls(), says("later"), closes, resets), ignored, same},
	{"5.1", "DATA on a stream that the peer has reset", steps(calls(), resets, says("x")), ignored, same},
	{"5.1", "RST_STREAM on a closed stream", steps(calls(), resets, resets), ignored, same},
	{"5.1", "WINDOW_UPDATE on a closed stream", steps(calls(), resets, grants(7, 1)), ignored, same},
	{"5.1", "PRIORITY on a closed stream", steps(calls(), resets, raw(http2.FramePriority, 0, 7, 0, 0, 0, 0, 1)), ignored, same},
	{"5.1", "request on a stream that the peer has reset", steps(calls(), resets, calls()), closed, same},
	{"5.1", "DATA behind the server's end", steps(calls(), says("hello"), says("x"), closes), answered, same},
	{"5.1", "trailers behind the server's end", steps(calls(), says("hello"), ends("a", "b")), answered, same},

	{"5.1.1", "request on stream 0", steps(requests(0)), protocol, same},
	{"5.1.1", "request on a stream of the server", steps(requests(8)), protocol, same},
	{"5.1.1", "request below the highest stream", steps(requests(9), calls()), protocol, deviation{closed, forgotten}},
	{"5.1.1", "whole request below the highest stream", steps(requests(9), ends(call()...)), protocol, deviation{closed, forgotten}},
	{"5.1.1", "numbers that are left out", around(), answered, same},
	{"5.3", "stream that depends on itself", slices.Concat(steps(raw(http2.FramePriority, 0, 7, 0, 0, 0, 7, 16)), around()), answered, same},
	{"5.4.2", "RST_STREAM of an unknown code", steps(calls(), says("keep"), func(p *peer) { _ = p.WriteRSTStream(7, 0xfff) }), ignored, same},
	{"5.5", "unknown setting", slices.Concat(steps(sets(0xfa, 7)), around()), answered, same},
	{"5.5", "unknown frame within a header block", steps(split(raw(0xfa, 0, 7))), protocol, same},

	{"6.1", "DATA on stream 0", steps(raw(http2.FrameData, 0, 0, 1)), protocol, same},
	{"6.1", "padding is all of DATA", steps(calls(), padded(http2.FrameData, 9, make([]byte, 9)), says("hello")), answered, same},
	{"6.1", "padding beyond DATA", steps(calls(), padded(http2.FrameData, 10, make([]byte, 9))), protocol, same},
	{"6.2", "padding beyond HEADERS", steps(padded(http2.FrameHeaders, 200, []byte{0x82})), protocol, same},
	{"6.2", "HEADERS with a priority", steps(raw(http2.FrameHeaders, http2.FlagHeadersPriority, 7, 0, 0, 0, 0, 9), rest, says("hello")), answered, same},
	{"6.3", "PRIORITY on stream 0", steps(raw(http2.FramePriority, 0, 0, 0, 0, 0, 1, 1)), protocol, same},
	{"6.3", "PRIORITY of 4 bytes", steps(calls(), raw(http2.FramePriority, 0, 7, 0, 0, 0, 1)), "stream FRAME_SIZE_ERROR", whole("FRAME_SIZE_ERROR")},
	{"6.4", "RST_STREAM on stream 0", steps(raw(http2.FrameRSTStream, 0, 0, 0, 0, 0, 8)), protocol, same},
	{"6.4", "RST_STREAM of 3 bytes", steps(calls(), raw(http2.FrameRSTStream, 0, 7, 0, 0, 8)), frameSize, same},
	{"6.5", "acknowledgement with content", steps(raw(http2.FrameSettings, http2.FlagSettingsAck, 0, 0, 1, 0, 0, 0, 1)), frameSize, same},
	{"6.5", "SETTINGS of a stream", steps(raw(http2.FrameSettings, 0, 1)), protocol, same},
	{"6.5", "SETTINGS cut short", steps(raw(http2.FrameSettings, 0, 0, 1, 2, 3)), frameSize, same},
	{"6.5.2", "ENABLE_PUSH of 1", slices.Concat(steps(sets(http2.SettingEnablePush, 1)), around()), answered, same},
	{"6.5.2", "ENABLE_PUSH of 2", steps(sets(http2.SettingEnablePush, 2)), protocol, same},
	{"6.5.2", "INITIAL_WINDOW_SIZE at its limit", slices.Concat(steps(sets(http2.SettingInitialWindowSize, maxWindow)), around()), answered, same},
	{"6.5.2", "INITIAL_WINDOW_SIZE beyond its limit", steps(sets(http2.SettingInitialWindowSize, maxWindow+1)), flowControl, same},
	{"6.5.2", "MAX_FRAME_SIZE at its limits", slices.Concat(steps(sets(http2.SettingMaxFrameSize, 1<<24-1), sets(http2.SettingMaxFrameSize, minFrame)), around()), answered, same},
	{"6.5.2", "MAX_FRAME_SIZE below its limit", steps(sets(http2.SettingMaxFrameSize, minFrame-1)), protocol, same},
	{"6.5.2", "MAX_FRAME_SIZE beyond its limit", steps(sets(http2.SettingMaxFrameSize, 1<<24)), protocol, same},
	{"6.6", "PUSH_PROMISE", steps(calls(), raw(http2.FramePushPromise, http2.FlagPushPromiseEndHeaders, 7, 0, 0, 0, 8, 0x82)), protocol, same},
	{"6.7", "acknowledgement of no PING", slices.Concat(steps(raw(http2.FramePing, http2.FlagPingAck, 0, make([]byte, 8)...)), around()), answered, same},
	{"6.7", "PING of a stream", steps(raw(http2.FramePing, 0, 1, make([]byte, 8)...)), protocol, same},
	{"6.7", "PING of 7 bytes", steps(raw(http2.FramePing, 0, 0, make([]byte, 7)...)), frameSize, same},
	{"6.8", "GOAWAY of a stream", steps(raw(http2.FrameGoAway, 0, 1, make([]byte, 8)...)), protocol, same},
	{"6.8", "GOAWAY of 7 bytes", steps(raw(http2.FrameGoAway, 0, 0, make([]byte, 7)...)), frameSize, same},
	{"6.8", "GOAWAY before the message", around(func(p *peer) { _ = p.WriteGoAway(0, 0xfff, nil) }), answered, same},
	{"6.9", "WINDOW_UPDATE of 0", steps(grants(0, 0)), protocol, same},
	{"6.9", "WINDOW_UPDATE of 0 for a stream", steps(calls(), grants(7, 0)), malformed, whole("PROTOCOL_ERROR")},
	{"6.9", "WINDOW_UPDATE of 3 bytes", steps(raw(http2.FrameWindowUpdate, 0, 0, 0, 0, 1)), frameSize, same},
	{"6.9.1", "window at its limit", slices.Concat(steps(grants(0, maxWindow-firstWindow-100)), around()), answered, same},
	{"6.9.1", "window beyond its limit", steps(grants(0, maxWindow)), flowControl, same},
	{"6.9.1", "window of a stream beyond its limit", steps(calls(), grants(7, maxWindow)), "stream FLOW_CONTROL_ERROR", whole("FLOW_CONTROL_ERROR")},
	{"6.9.2", "window beyond its limit by a setting", steps(calls(), grants(7, maxWindow-firstWindow), sets(http2.SettingInitialWindowSize, firstWindow+1)), flowControl, same},
	{"6.10", "CONTINUATION without a header block", steps(raw(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 7, 0x82)), protocol, same},
	{"6.10", "CONTINUATION behind the end of a block", steps(calls(), raw(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 7, 0x82)), protocol, same},
	{"6.10", "CONTINUATION of another stream", steps(split(raw(http2.FrameContinuation, 0, 9, 0x82))), protocol, same},
	{"6.10", "CONTINUATION on stream 0", steps(split(raw(http2.FrameContinuation, 0, 0, 0x82))), protocol, same},
	{"6.10", "DATA within a header block", steps(split(raw(http2.FrameData, 0, 1))), protocol, same},
	{"6.10", "PRIORITY within a header block", steps(split(raw(http2.FramePriority, 0, 1, 0, 0, 0, 0, 1))), protocol, same},
	{"6.10", "empty CONTINUATION", steps(split(raw(http2.FrameContinuation, 0, 7)), says("hello")), answered, same},

	{"8.1", "header block of a call twice", steps(calls(), calls()), malformed, whole("PROTOCOL_ERROR")},
	{"8.1", "trailers", steps(calls(), says("hello"), ends("some", "trailer")), answered, same},
	{"8.1", "pseudo-header field in trailers", steps(calls(), says("keep later"), ends(":path", "/")), malformed, whole("PROTOCOL_ERROR")},
	{"8.1.1", "content shorter than content-length", steps(calls("content-length", "99"), says("keep later"), closes), malformed, whole("PROTOCOL_ERROR")},
	{"8.1.1", "content longer than content-length", steps(calls("content-length", "2"), says("keep later"), closes), malformed, whole("PROTOCOL_ERROR")},
	{"8.1.1", "content as long as content-length", steps(calls("content-length", "10"), func(p *peer) { _ = p.WriteData(7, true, message("hello")) }), answered, same},
	{"8.1.1", "content-length without content", steps(ends(call("content-length", "1")...)), malformed, same},
	{"8.1.1", "content-length that is no number", steps(calls("content-length", "-1")), malformed, same},
	{"8.2.1", "upper case in a name", steps(calls("X-Upper", "a")), malformed, same},
	{"8.2.1", "space in a name", steps(calls("x y", "a")), malformed, same},
	{"8.2.1", "byte beyond ASCII in a name", steps(calls("x\xe4", "a")), malformed, same},
	{"8.2.1", "colon in a name", steps(calls("x:y", "a")), malformed, same},
	{"8.2.1", "empty name", steps(calls("", "a")), malformed, same},
	{"8.2.1", "NUL in a value", steps(calls("x", "a\x00b")), malformed, same},
	{"8.2.1", "CR in a value", steps(calls("x", "a\rb")), malformed, same},
	{"8.2.1", "LF in a value", steps(calls("x", "a\nb")), malformed, same},
	{"8.2.1", "space before a value", steps(calls("x", " a")), malformed, same},
	{"8.2.1", "tab behind a value", steps(calls("x", "a\t")), malformed, same},
	{"8.2.1", "space within a value", steps(calls("x", "a b"), says("hello")), answered, same},
	{"8.2.2", "connection", steps(calls("connection", "close")), malformed, same},
	{"8.2.2", "proxy-connection", steps(calls("proxy-connection", "close")), malformed, same},
	{"8.2.2", "keep-alive", steps(calls("keep-alive", "1")), malformed, same},
	{"8.2.2", "transfer-encoding", steps(calls("transfer-encoding", "chunked")), malformed, same},
	{"8.2.2", "upgrade", steps(calls("upgrade", "h2c")), malformed, same},
	{"8.2.2", "te that is not trailers", steps(calls("te", "gzip")), malformed, same},
	{"8.2.3", "cookies in several fields", steps(calls("cookie", "a=b", "cookie", "c=d; e=f"), says("hello")), answered, same},
	{"8.3", "undefined pseudo-header field", steps(begins(append([]string{":some", "x"}, call()...)...)), malformed, same},
	{"8.3", "pseudo-header field of answers", steps(begins(append([]string{":status", "200"}, call()...)...)), malformed, same},
	{"8.3", "pseudo-header field behind another field", steps(begins(":method", "POST", ":scheme", "http", ":path", testMethod, "te", "trailers", ":authority", "test")), malformed, same},
	{"8.3", ":method twice", steps(begins(append([]string{":method", "POST"}, call()...)...)), malformed, same},
	{"8.3", ":scheme twice", steps(begins(append([]string{":scheme", "http"}, call()...)...)), malformed, same},
	{"8.3", ":path twice", steps(begins(append([]string{":path", testMethod}, call()...)...)), malformed, same},
	{"8.3", ":authority twice", steps(begins(append([]string{":authority", "test"}, call()...)...)), malformed, same},
	{"8.3.1", "no :method", steps(begins(":scheme", "http", ":path", testMethod)), malformed, same},
	{"8.3.1", "no :scheme", steps(begins(":method", "POST", ":path", testMethod)), malformed, same},
	{"8.3.1", "no :path", steps(begins(":method", "POST", ":scheme", "http")), malformed, same},
	{"8.3.1", "empty :path", steps(begins(":method", "POST", ":scheme", "http", ":path", "")), malformed, same},
	{"8.3.1", "no :authority", steps(begins(":method", "POST", ":scheme", "http", ":path", testMethod, "te", "trailers", "content-type", "application/grpc"), says("hello")), answered, same},
	{"8.3.1", "host that is not the authority", steps(calls("host", "other"), says("hello")), malformed, deviation{answered, "a recommendation (SHOULD). The server has one name"}},
	{"8.5", "CONNECT", steps(begins(":method", "CONNECT", ":authority", "test:1")), "an error of HTTP", deviation{malformed, "the server is no proxy. It refuses CONNECT as a request without a path"}},
	{"10.5.1", "header block of 17 frames", steps(block17), calm, same},
	{"10.5.1", "header block of 80 KiB", steps(longBlock), calm, same},
}

const forgotten = "the server keeps no list of streams, so it cannot tell those that were never opened from those that have ended"

// rest ends the header block that HEADERS has begun.
func rest(p *peer) { _ = p.WriteContinuation(7, true, p.request()) }

func block17(p *peer) {
	raw(http2.FrameHeaders, 0, 7)(p)
	for range maxBlockFrames {
		_ = p.WriteContinuation(7, false, nil)
	}
}

// Section 5.1 allows nothing but PRIORITY on a stream that is closed.
func TestRefusalOfAHalfClosedCallResetsNothing(t *testing.T) {
	p := connect(t, serve(t, newService().own()))
	p.headers(1, p.fields(":method", "GET", ":scheme", "http", ":path", "/"), true)
	p.sync()
	require.Equal(t, ":status 415, ended", p.of(1).String())
	require.False(t, p.of(1).wasReset)
}

func longBlock(p *peer) {
	raw(http2.FrameHeaders, 0, 7)(p)
	for range maxBlock/minFrame + 1 {
		_ = p.WriteContinuation(7, false, bytes.Repeat([]byte{0x82}, minFrame))
	}
}

// TestServerTreatsFramesAsRFC9113Says is the table rfc9113. An error of the connection ends no call before the peer closes.
// Invariant: I2
func TestServerTreatsFramesAsRFC9113Says(t *testing.T) {
	for _, c := range rfc9113 {
		t.Run(c.section+" "+c.name, func(t *testing.T) {
			s := newService()
			p := connect(t, serve(t, s.own()))
			p.call(1, "keep")
			p.until(func() bool { return len(p.of(1).messages()) == 1 })
			for _, send := range c.send {
				send(p)
			}
			want := c.rfc
			if c.but != same {
				require.NotEmpty(t, c.but.why)
				require.NotEqual(t, want, c.but.own)
				want = c.but.own
			}
			if code, ok := strings.CutPrefix(want, "connection "); ok {
				p.untilClosed()
				require.Len(t, p.goAways, 1)
				require.True(t, strings.HasPrefix(p.goAways[0], code+" after "), p.goAways[0])
				open, _, _ := s.open()
				require.Positive(t, open, "the peer may not have read the answers")
			} else {
				p.sync()
				if want != ignored {
					p.until(func() bool { return p.of(7).over() })
				}
				seven := p.of(7)
				switch want {
				case answered:
					require.Equal(t, ":status 200, grpc-status 0, hello, ended", seven.String())
				case ignored:
					require.False(t, seven.wasReset && seven.reset != http2.ErrCodeNo, seven)
				default:
					require.Equal(t, strings.Replace(want, "stream", "reset", 1), seven.String())
				}
				p.call(101, "hello") // the connection is as good as before
				p.until(func() bool { return p.of(101).over() })
				require.Equal(t, ":status 200, grpc-status 0, hello, ended", p.of(101).String())
				require.Empty(t, p.goAways)
				s.awaitOpen(t, 1) // stream 1
			}
			p.conn.Close()
			s.awaitOpen(t, 0)
			_, _, byServer := s.open()
			require.Zero(t, byServer)
		})
	}
}
