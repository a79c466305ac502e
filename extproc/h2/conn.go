package h2

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	// maxStreams bounds the streams of a connection.
	maxStreams = 16 << 10
	// maxMessage bounds a message, with its prefix.
	maxMessage = 256 << 10
	// connWindow is how much DATA a connection may receive before the server makes room again.
	connWindow = 1 << 20
	// maxBlock and maxBlockFrames bound a header block.
	maxBlock, maxBlockFrames = 64 << 10, 16
	// maxPartial bounds the messages of a connection that are not complete.
	maxPartial = 16 << 20
	// maxFree bounds the streams that are kept to be used again.
	maxFree = 256
	// maxOutput is how much output is collected before it is written.
	maxOutput = 64 << 10
	// readBuffer is what one read takes at most. 32 KiB hold about 100 questions of Envoy.
	readBuffer = 32 << 10
	// prefaceWait bounds how long a new connection may take to send the preface of HTTP/2. No stream
	// exists before.
	prefaceWait = 2 * time.Minute

	// HTTP/2's own.
	firstWindow, maxWindow = 1<<16 - 1, 1<<31 - 1
	minFrame               = 1 << 14
	tableSize              = 1 << 12
)

// conn is a connection. One goroutine reads it, see serve.
type conn struct {
	server  *Server
	net     net.Conn
	reader  *bufio.Reader
	framer  *http2.Framer
	decoder *hpack.Decoder
	// Those of the reading goroutine alone.
	block    block
	over     bool      // nothing more can be read from the socket
	received int       // DATA since the last WINDOW_UPDATE of the connection
	partial  int       // bytes of messages that are not complete
	free     []*stream // to be used again

	mu      sync.Mutex
	streams map[uint32]*stream
	last    uint32 // the highest stream of the peer
	later   int    // goroutines of Later
	out     output
	// ready: the peer's preface was read.
	ready bool
	// draining: a ping is on its way whose answer makes the last stream known.
	draining bool
	// closing: the peer knows which streams are served. The ones after last are ignored, and the
	// connection is closed after the last stream.
	closing bool
}

func newConn(s *Server, accepted net.Conn) *conn {
	c := &conn{server: s, net: accepted, streams: map[uint32]*stream{}}
	c.out = output{conn: accepted, window: firstWindow, firstWindow: firstWindow, maxFrame: minFrame}
	c.reader = bufio.NewReaderSize(flushing{c}, readBuffer)
	c.framer = http2.NewFramer(nil, c.reader)
	c.framer.SetReuseFrames()
	c.framer.SetMaxReadFrameSize(minFrame)
	c.decoder = hpack.NewDecoder(tableSize, c.block.field)
	c.decoder.SetMaxStringLength(maxBlock)
	// The server's preface. It is written before the first read.
	c.out.addSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: maxStreams},
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxMessage},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: maxBlock})
	c.out.addWindowUpdate(0, connWindow-firstWindow)
	return c
}

// flushing reads from the connection after everything was written that is to be written: the answers to
// all messages of one read leave with one write.
type flushing struct{ c *conn }

func (f flushing) Read(p []byte) (int, error) {
	f.c.mu.Lock()
	f.c.out.flush()
	broken := f.c.out.broken
	f.c.mu.Unlock()
	if broken {
		return 0, errNotWritten
	}
	n, err := f.c.net.Read(p)
	f.c.over = err != nil
	return n, err
}

// errNotWritten ends a connection to which nothing can be written.
var errNotWritten = errors.New("the connection takes no output")

// serve serves the connection until it ends, and then ends its streams.
func (c *conn) serve() {
	err := c.handshake()
	for err == nil {
		var f http2.Frame
		if f, err = c.framer.ReadFrame(); err == nil {
			err = c.frame(f)
		}
	}
	if !c.over {
		c.quit(codeOf(err))
	}
	_ = c.net.Close()
	c.server.ended(c)
	byPeer := !c.server.isForced()
	c.mu.Lock()
	c.out.broken = true
	streams := c.streams
	c.streams = nil
	for _, s := range streams {
		s.gone = true
	}
	c.mu.Unlock()
	for _, s := range streams {
		s.end(byPeer)
	}
}

// codeOf returns the code of an error that ends the connection, but of those of the socket.
func codeOf(err error) http2.ErrCode {
	var connection http2.ConnectionError
	var stream http2.StreamError
	switch {
	case errors.As(err, &connection):
		return http2.ErrCode(connection)
	case errors.As(err, &stream):
		return stream.Code
	case errors.Is(err, http2.ErrFrameTooLarge), errors.Is(err, io.ErrUnexpectedEOF): // too short for its fields
		return http2.ErrCodeFrameSize
	}
	return http2.ErrCodeProtocol
}

// quit tells the peer why nothing more is answered, and waits until it closes the connection: until then
// it may read answers.
func (c *conn) quit(code http2.ErrCode) {
	c.mu.Lock()
	c.out.addGoAway(c.last, code)
	c.out.flush()
	c.out.broken = true // nothing more is written
	c.mu.Unlock()
	if half, ok := c.net.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c.net)
	}
}

// handshake reads the preface and the settings of the peer.
func (c *conn) handshake() error {
	if err := c.net.SetReadDeadline(time.Now().Add(prefaceWait)); err != nil {
		return err
	}
	var preface [len(http2.ClientPreface)]byte
	if _, err := io.ReadFull(c.reader, preface[:]); err != nil {
		return err
	}
	if string(preface[:]) != http2.ClientPreface {
		return fmt.Errorf("no preface of HTTP/2: %.24q", preface)
	}
	f, err := c.framer.ReadFrame()
	if err != nil {
		return err
	}
	if _, ok := f.(*http2.SettingsFrame); !ok {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if err := c.frame(f); err != nil {
		return err
	}
	c.mu.Lock()
	c.ready = true
	c.mu.Unlock()
	return c.net.SetReadDeadline(time.Time{})
}
