package h2

import (
	"encoding/binary"
	"fmt"
	"net"
	"strconv"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
)

// output is what a connection has to send. All its methods need the connection's lock. Those named add... write
// only when the buffer is full.
type output struct {
	conn   net.Conn
	buffer []byte
	// broken: nothing is written any more.
	broken bool
	begun  bool // a header block was sent

	window      int64 // of the connection
	firstWindow int64 // of a new stream
	maxFrame    int
	// waiting are the streams whose DATA waits for a window, in the order of their messages.
	waiting []*stream
}

// flush writes the output. A peer that does not read makes it wait.
func (o *output) flush() {
	if len(o.buffer) > 0 && !o.broken {
		if _, err := o.conn.Write(o.buffer); err != nil {
			o.broken = true // the reader finds out why
		}
	}
	if o.buffer = o.buffer[:0]; cap(o.buffer) > 2*maxOutput {
		o.buffer = nil
	}
}

// addFrame appends the header of a frame.
func (o *output) addFrame(kind http2.FrameType, flags http2.Flags, stream uint32, length int) {
	if len(o.buffer) > maxOutput {
		o.flush()
	}
	o.buffer = append(o.buffer, byte(length>>16), byte(length>>8), byte(length), byte(kind), byte(flags))
	o.buffer = binary.BigEndian.AppendUint32(o.buffer, stream)
}

func (o *output) addSettings(all ...http2.Setting) {
	o.addFrame(http2.FrameSettings, 0, 0, 6*len(all))
	for _, s := range all {
		o.buffer = binary.BigEndian.AppendUint16(o.buffer, uint16(s.ID))
		o.buffer = binary.BigEndian.AppendUint32(o.buffer, s.Val)
	}
}

func (o *output) addSettingsAck() { o.addFrame(http2.FrameSettings, http2.FlagSettingsAck, 0, 0) }

func (o *output) addWindowUpdate(stream, n uint32) {
	o.addFrame(http2.FrameWindowUpdate, 0, stream, 4)
	o.buffer = binary.BigEndian.AppendUint32(o.buffer, n)
}

func (o *output) addReset(stream uint32, code http2.ErrCode) {
	o.addFrame(http2.FrameRSTStream, 0, stream, 4)
	o.buffer = binary.BigEndian.AppendUint32(o.buffer, uint32(code))
}

func (o *output) addPing(ack bool, data [8]byte) {
	flags := http2.Flags(0)
	if ack {
		flags = http2.FlagPingAck
	}
	o.addFrame(http2.FramePing, flags, 0, len(data))
	o.buffer = append(o.buffer, data[:]...)
}

func (o *output) addGoAway(last uint32, code http2.ErrCode) {
	o.addFrame(http2.FrameGoAway, 0, 0, 8)
	o.buffer = binary.BigEndian.AppendUint32(o.buffer, last)
	o.buffer = binary.BigEndian.AppendUint32(o.buffer, uint32(code))
}

// addHeaders appends a header block, which fits into one frame.
func (o *output) addHeaders(stream uint32, flags http2.Flags, block []byte) {
	if !o.begun {
		// The first block says that no table is used. So the peer may change the size of the table
		// without an answer (RFC 7541, section 4.2).
		o.begun = true
		o.addFrame(http2.FrameHeaders, flags|http2.FlagHeadersEndHeaders, stream, len(block)+1)
		o.buffer = append(o.buffer, 0x20)
	} else {
		o.addFrame(http2.FrameHeaders, flags|http2.FlagHeadersEndHeaders, stream, len(block))
	}
	o.buffer = append(o.buffer, block...)
}

// send sends a message, or has it wait for a window.
func (c *conn) send(s *stream, message []byte) {
	if !s.begun {
		s.begun = true
		c.out.addHeaders(s.id, 0, answerHeaders)
	}
	var prefix [prefixLength]byte
	binary.BigEndian.PutUint32(prefix[1:], uint32(len(message)))
	length := prefixLength + len(message)
	if len(s.pending) == 0 && int64(length) <= min(c.out.window, s.window) && length <= c.out.maxFrame {
		c.out.addData(s, length)
		c.out.buffer = append(append(c.out.buffer, prefix[:]...), message...)
		return
	}
	s.pending = append(append(s.pending, prefix[:]...), message...)
	if !s.waits {
		s.waits = true
		if c.out.waiting = append(c.out.waiting, s); len(c.out.waiting) > 2*len(c.streams)+maxFree {
			c.resume() // drops those that wait no longer
		}
	}
	c.push(s)
}

// addData appends the header of a DATA frame and takes its length from the windows.
func (o *output) addData(s *stream, length int) {
	o.window -= int64(length)
	s.window -= int64(length)
	o.addFrame(http2.FrameData, 0, s.id, length)
}

// endWith ends a stream with a header block, after its DATA.
func (c *conn) endWith(s *stream, block []byte) {
	if len(s.pending) > 0 {
		s.trailers = block
		return
	}
	c.out.addHeaders(s.id, http2.FlagHeadersEndStream, block)
	if s.ending {
		return // until the peer ends it
	}
	if !s.halfClosed {
		c.out.addReset(s.id, http2.ErrCodeNo) // the peer need not end it
	}
	c.remove(s)
}

// push sends DATA of a stream that has waited, as far as the windows allow.
func (c *conn) push(s *stream) {
	if len(s.pending) == 0 {
		return
	}
	for len(s.pending) > 0 {
		n := int(min(int64(len(s.pending)), int64(c.out.maxFrame), c.out.window, s.window))
		if n <= 0 {
			return
		}
		c.out.addData(s, n)
		c.out.buffer = append(c.out.buffer, s.pending[:n]...)
		s.pending = s.pending[n:]
	}
	s.pending = nil
	if s.trailers != nil {
		c.endWith(s, s.trailers)
	}
}

// resume sends DATA of all streams that have waited, as far as the windows allow.
func (c *conn) resume() {
	left := c.out.waiting[:0]
	for _, s := range c.out.waiting {
		if !s.gone && c.out.window > 0 {
			c.push(s)
		}
		if s.gone || len(s.pending) == 0 {
			s.waits = false
		} else {
			left = append(left, s)
		}
	}
	clear(c.out.waiting[len(left):])
	c.out.waiting = left
}

// Header blocks: fields of the static table, and literals that enter no table.
var (
	answerHeaders = append([]byte{0x88}, literal(31, "application/grpc")...) // :status 200, content-type
	// notGRPC is the answer to what is no gRPC call: :status 415.
	notGRPC = literal(8, "415")
)

// literal encodes a field whose name is in the static table.
func literal(name byte, value string) []byte {
	b := []byte{name}
	if name >= 15 { // more than fits into the prefix
		b = []byte{15, name - 15}
	}
	return appendText(b, value)
}

// newLiteral encodes a field whose name is in no table.
func newLiteral(b []byte, name, value string) []byte {
	return appendText(appendText(append(b, 0), name), value)
}

// appendText appends a text without Huffman's code.
func appendText(b []byte, text string) []byte {
	n := len(text)
	if n < 127 {
		return append(append(b, byte(n)), text...)
	}
	b = append(b, 127)
	for n -= 127; n >= 128; n >>= 7 {
		b = append(b, byte(n)|128)
	}
	return append(append(b, byte(n)), text...)
}

var trailersOK = newLiteral(nil, "grpc-status", "0")

// statusBlock returns the header block that ends a call. begun: the call has sent one before.
func statusBlock(begun bool, code codes.Code, text string) []byte {
	if begun && code == codes.OK {
		return trailersOK
	}
	var b []byte
	if !begun {
		b = append(b, answerHeaders...)
	}
	b = newLiteral(b, "grpc-status", strconv.Itoa(int(code)))
	if text != "" {
		b = newLiteral(b, "grpc-message", percent(text))
	}
	return b
}

// maxText bounds the text of a status. It keeps a header block within one frame.
const maxText = 1 << 10

// percent encodes a text as gRPC asks for.
func percent(text string) string {
	b := make([]byte, 0, len(text))
	for _, c := range []byte(text[:min(len(text), maxText)]) {
		if c < ' ' || c > '~' || c == '%' {
			b = fmt.Appendf(b, "%%%02X", c)
		} else {
			b = append(b, c)
		}
	}
	return string(b)
}
