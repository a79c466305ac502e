package h2

import (
	"strconv"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const protocolError = http2.ConnectionError(http2.ErrCodeProtocol)

// frame acts on a frame. An error ends the connection.
func (c *conn) frame(f http2.Frame) error {
	switch f := f.(type) {
	case *http2.DataFrame:
		return c.data(f)
	case *http2.HeadersFrame:
		c.block.begin(f.StreamID, f.StreamEnded())
		return c.fragment(f.HeaderBlockFragment(), f.HeadersEnded())
	case *http2.ContinuationFrame:
		return c.fragment(f.HeaderBlockFragment(), f.HeadersEnded())
	case *http2.RSTStreamFrame:
		return c.reset(f.StreamID)
	case *http2.WindowUpdateFrame:
		return c.moreWindow(f.StreamID, int64(f.Increment))
	case *http2.SettingsFrame:
		return c.newSettings(f)
	case *http2.PingFrame:
		c.pinged(f)
	case *http2.PushPromiseFrame:
		return protocolError
	}
	return nil // PRIORITY, GOAWAY and unknown frames
}

// block is the header block that is being read.
type block struct {
	stream        uint32
	ends          bool // the stream, in the direction of the peer
	bytes, frames int
	path          string
	post, grpc    bool
	pseudo        uint8 // the pseudo-header fields, as bits
	regular       bool  // it has a field that is none
	length        int64 // content-length, -1: none
	trace         string
	// malformed: it has a field that a request must not have (RFC 9113, sections 8.2 and 8.3).
	malformed bool
}

// Bits of block.pseudo. A request must have the first three.
const (
	pseudoMethod = 1 << iota
	pseudoScheme
	pseudoPath
	pseudoAuthority
	pseudoNeeded = pseudoMethod | pseudoScheme | pseudoPath
)

func (b *block) begin(stream uint32, ends bool) { *b = block{stream: stream, ends: ends, length: -1} }

// field receives the fields of the block.
func (b *block) field(f hpack.HeaderField) {
	if !validValue(f.Value) {
		b.malformed = true
	}
	switch f.Name {
	case ":path":
		b.pseudoField(pseudoPath)
		b.malformed = b.malformed || f.Value == ""
		b.path = f.Value
		return
	case ":method":
		b.pseudoField(pseudoMethod)
		b.post = f.Value == "POST"
		return
	case ":scheme":
		b.pseudoField(pseudoScheme)
		return
	case ":authority":
		b.pseudoField(pseudoAuthority)
		return
	case "content-type":
		rest, ok := strings.CutPrefix(f.Value, "application/grpc")
		b.grpc = ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
	case "content-length":
		n, err := strconv.ParseUint(f.Value, 10, 63)
		b.malformed = b.malformed || err != nil || b.ends && n > 0
		b.length = int64(n)
	case "traceparent":
		b.trace = f.Value
	case "te":
		b.malformed = b.malformed || f.Value != "trailers"
	case "connection", "transfer-encoding", "upgrade", "keep-alive", "proxy-connection":
		b.malformed = true
	default:
		b.malformed = b.malformed || !validName(f.Name)
	}
	b.regular = true
}

// pseudoField notes a pseudo-header field. Each comes once, before all other fields.
func (b *block) pseudoField(bit uint8) {
	b.malformed = b.malformed || b.regular || b.pseudo&bit != 0
	b.pseudo |= bit
}

// validName and validValue check what RFC 9113, section 8.2.1, asks for at least.
func validName(name string) bool {
	for i := range len(name) {
		if c := name[i]; c <= ' ' || c >= 0x7f || c == ':' || 'A' <= c && c <= 'Z' {
			return false
		}
	}
	return name != ""
}

func validValue(value string) bool {
	if value == "" {
		return true
	}
	for _, c := range [...]byte{value[0], value[len(value)-1]} {
		if c == ' ' || c == '\t' {
			return false
		}
	}
	return strings.IndexByte(value, 0) < 0 && strings.IndexByte(value, '\n') < 0 && strings.IndexByte(value, '\r') < 0
}

// fragment reads a part of a header block. Every block must be decoded, whatever becomes of its stream,
// because blocks share a table.
func (c *conn) fragment(fragment []byte, last bool) error {
	b := &c.block
	b.bytes += len(fragment)
	if b.frames++; b.bytes > maxBlock || b.frames > maxBlockFrames {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	if _, err := c.decoder.Write(fragment); err != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	if !last {
		return nil
	}
	if err := c.decoder.Close(); err != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	return c.headers()
}

// headers acts on a complete header block: the begin of a stream, or its trailers.
func (c *conn) headers() error {
	s, begins, err := c.streamOf(&c.block)
	switch {
	case s == nil || err != nil:
		return err
	case begins:
		c.open(s, &c.block)
	default:
		c.halfClose(s)
	}
	return nil
}

// streamOf returns the stream of a header block. It is nil if the block has no effect.
func (c *conn) streamOf(b *block) (s *stream, begins bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s = c.streams[b.stream]; s != nil {
		switch {
		case s.halfClosed:
			return nil, false, http2.ConnectionError(http2.ErrCodeStreamClosed)
		case !b.ends || b.malformed || b.pseudo != 0 || s.length > 0:
			return nil, false, protocolError // they are no trailers
		}
		return s, false, nil
	}
	switch {
	case b.stream%2 == 0:
		return nil, false, protocolError
	case b.stream <= c.last:
		if !b.ends || b.pseudo != 0 {
			return nil, false, http2.ConnectionError(http2.ErrCodeStreamClosed)
		}
		return nil, false, nil // trailers of a stream that has ended here
	case c.closing:
		return nil, false, nil // the peer learns of it from GOAWAY
	}
	c.last = b.stream
	switch {
	case len(c.streams) >= maxStreams || c.later >= maxStreams:
		c.out.addReset(b.stream, http2.ErrCodeRefusedStream)
		return nil, false, nil
	case b.malformed || b.pseudo&pseudoNeeded != pseudoNeeded:
		c.out.addReset(b.stream, http2.ErrCodeProtocol)
		return nil, false, nil
	}
	s = c.newStream(b)
	c.streams[s.id] = s
	return s, true, nil
}

// idle reports whether a stream was never opened. Those of the server never are.
func (c *conn) idle(id uint32) bool { return id%2 == 0 || id > c.last && !c.closing }

// reset ends a stream that the peer has reset.
func (c *conn) reset(id uint32) error {
	c.mu.Lock()
	s := c.streams[id]
	if s == nil {
		defer c.mu.Unlock()
		if c.idle(id) {
			return protocolError
		}
		return nil
	}
	c.remove(s)
	c.partial -= len(s.message)
	reusable := s.cancel == nil && !s.waits // no other goroutine refers to it
	c.mu.Unlock()
	s.end(true)
	if reusable && len(c.free) < maxFree {
		c.free = append(c.free, s)
	}
	return nil
}

// data reads a part of a stream's message.
func (c *conn) data(f *http2.DataFrame) error {
	size := int(f.Length)
	c.mu.Lock()
	s := c.streams[f.StreamID]
	idle := s == nil && c.idle(f.StreamID)
	if c.received += size; c.received > connWindow/2 {
		c.out.addWindowUpdate(0, uint32(c.received)) // what has arrived is dealt with
		c.received = 0
	}
	c.mu.Unlock()
	switch {
	case idle:
		return protocolError
	case s == nil:
		return nil // the stream has ended here
	case s.halfClosed:
		return http2.ConnectionError(http2.ErrCodeStreamClosed)
	}
	if s.room -= size; s.room < 0 {
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	if s.length >= 0 {
		s.length -= int64(len(f.Data()))
		if s.length < 0 || f.StreamEnded() && s.length > 0 {
			return protocolError
		}
	}
	if f.StreamEnded() {
		c.mu.Lock()
		s.halfClosed = true // its message is answered with that in mind
		c.mu.Unlock()
	}
	if err := c.take(s, f.Data()); err != nil {
		return err
	}
	if f.StreamEnded() {
		c.halfClose(s)
	}
	return nil
}

// moreWindow gives this server more room to send.
func (c *conn) moreWindow(id uint32, n int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if id == 0 {
		if c.out.window += n; c.out.window > maxWindow {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		c.resume()
		return nil
	}
	s := c.streams[id]
	switch {
	case s == nil && c.idle(id):
		return protocolError
	case s == nil:
		return nil
	}
	if s.window += n; s.window > maxWindow {
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.push(s)
	return nil
}

// newSettings takes over the peer's settings.
func (c *conn) newSettings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.out.firstWindow
	err := f.ForeachSetting(func(s http2.Setting) error {
		switch s.ID {
		case http2.SettingInitialWindowSize:
			c.out.firstWindow = int64(s.Val) // the last one of a frame counts
		case http2.SettingMaxFrameSize:
			c.out.maxFrame = int(s.Val)
		}
		return s.Valid() // HEADER_TABLE_SIZE has no effect: no table is used for sending
	})
	if err != nil {
		return err
	}
	c.out.addSettingsAck()
	if c.out.firstWindow == before {
		return nil
	}
	for _, s := range c.streams {
		if s.window += c.out.firstWindow - before; s.window > maxWindow {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
	}
	c.resume()
	return nil
}

// drainPing is the content of the ping that ends the first part of draining.
var drainPing = [8]byte{'d', 'r', 'a', 'i', 'n'}

// drain asks the peer to open no new streams. Streams that are on their way are served: they arrive
// before the answer to the ping. When that is here, the last stream is known.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ready {
		c.out.broken = true
		_ = c.net.Close()
		return
	}
	c.draining = true
	c.out.addGoAway(maxWindow, http2.ErrCodeNo)
	c.out.addPing(false, drainPing)
	c.out.flush()
}

func (c *conn) pinged(f *http2.PingFrame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !f.IsAck():
		c.out.addPing(true, f.Data)
	case f.Data == drainPing && c.draining && !c.closing:
		c.closing = true
		c.out.addGoAway(c.last, http2.ErrCodeNo)
		c.closeIfDone()
	}
}

// closeIfDone closes a drained connection.
func (c *conn) closeIfDone() {
	if c.closing && len(c.streams) == 0 && !c.out.broken {
		c.out.flush()
		c.out.broken = true
		_ = c.net.Close() // serve ends
	}
}
