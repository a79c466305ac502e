package h2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// peer is a client that may send anything.
type peer struct {
	*http2.Framer
	t       testing.TB
	conn    *net.UnixConn
	encoder *hpack.Encoder
	block   bytes.Buffer
	streams map[uint32]*seen
	// goAways are the codes of GOAWAY, in order, with the last stream.
	goAways []string
	pings   int // acknowledgements
	acks    int // of settings
	credit  int // what WINDOW_UPDATE has granted for the connection
	closed  bool
}

// seen is what a peer has seen of a stream.
type seen struct {
	header   []string // fields of all header blocks but content-type
	data     []byte
	ended    bool
	reset    http2.ErrCode
	wasReset bool
	credit   int // what WINDOW_UPDATE has granted
}

// connect connects and exchanges settings.
func connect(t testing.TB, socket string, settings ...http2.Setting) *peer {
	t.Helper()
	p := connectRaw(t, socket)
	_, err := io.WriteString(p.conn, http2.ClientPreface)
	require.NoError(t, err)
	require.NoError(t, p.WriteSettings(settings...))
	p.until(func() bool { return p.acks == 1 })
	return p
}

// connectRaw connects and sends nothing.
func connectRaw(t testing.TB, socket string) *peer {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	p := &peer{Framer: http2.NewFramer(conn, conn), t: t, conn: conn, streams: map[uint32]*seen{}}
	p.AllowIllegalWrites = true
	p.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.encoder = newEncoder(&p.block)
	return p
}

func newEncoder(to *bytes.Buffer) *hpack.Encoder { return hpack.NewEncoder(to) }

// of returns what was seen of a stream.
func (p *peer) of(id uint32) *seen {
	if p.streams[id] == nil {
		p.streams[id] = &seen{}
	}
	return p.streams[id]
}

// read reads one frame.
func (p *peer) read() error {
	f, err := p.ReadFrame()
	if err != nil {
		return err
	}
	switch f := f.(type) {
	case *http2.MetaHeadersFrame:
		s := p.of(f.StreamID)
		for _, h := range f.Fields {
			if h.Name != "content-type" && h.Value != "" { // grpc-go says that there is no grpc-message
				s.header = append(s.header, h.Name+" "+h.Value)
			}
		}
		s.ended = f.StreamEnded()
	case *http2.DataFrame:
		s := p.of(f.StreamID)
		s.data = append(s.data, f.Data()...)
		s.ended = f.StreamEnded()
	case *http2.RSTStreamFrame:
		s := p.of(f.StreamID)
		s.wasReset, s.reset = true, f.ErrCode
	case *http2.GoAwayFrame:
		p.goAways = append(p.goAways, fmt.Sprintf("%v after %d", f.ErrCode, f.LastStreamID))
	case *http2.PingFrame:
		if f.IsAck() {
			p.pings++
		} else {
			return p.WritePing(true, f.Data)
		}
	case *http2.WindowUpdateFrame:
		if f.StreamID == 0 {
			p.credit += int(f.Increment)
		} else {
			p.of(f.StreamID).credit += int(f.Increment)
		}
	case *http2.SettingsFrame:
		if f.IsAck() {
			p.acks++
		} else {
			return p.WriteSettingsAck()
		}
	}
	return nil
}

// until reads until done.
func (p *peer) until(done func() bool) {
	p.t.Helper()
	require.NoError(p.t, p.conn.SetReadDeadline(time.Now().Add(soon)))
	for !done() {
		require.NoError(p.t, p.read())
	}
}

// untilClosed reads until the server closes its direction.
func (p *peer) untilClosed() {
	p.t.Helper()
	require.NoError(p.t, p.conn.SetReadDeadline(time.Now().Add(soon)))
	for {
		if err := p.read(); err != nil {
			var timeout net.Error
			require.False(p.t, errors.As(err, &timeout) && timeout.Timeout(), "the connection stays open")
			p.closed = true
			return
		}
	}
}

// sync returns when the server has read everything so far.
func (p *peer) sync() {
	p.t.Helper()
	want := p.pings + 1
	require.NoError(p.t, p.WritePing(false, [8]byte{'s', 'y', 'n', 'c'}))
	p.until(func() bool { return p.pings >= want })
}

// fields encodes a header block. Fields come in pairs.
func (p *peer) fields(pairs ...string) []byte {
	p.block.Reset()
	for i := 0; i < len(pairs); i += 2 {
		require.NoError(p.t, p.encoder.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]}))
	}
	return slices.Clone(p.block.Bytes())
}

// request is the header block of a call.
func (p *peer) request(more ...string) []byte {
	return p.fields(append([]string{":method", "POST", ":scheme", "http", ":path", testMethod, ":authority", "test",
		"te", "trailers", "content-type", "application/grpc"}, more...)...)
}

// begin opens a stream.
func (p *peer) begin(id uint32) {
	p.t.Helper()
	p.headers(id, p.request(), false)
}

func (p *peer) headers(id uint32, block []byte, end bool) {
	p.t.Helper()
	require.NoError(p.t, p.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndHeaders: true, EndStream: end}))
}

// message is a message with its prefix.
func message(text string) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(text)))
	return append(b, text...)
}

// call opens a stream and sends its message.
func (p *peer) call(id uint32, text string) {
	p.t.Helper()
	p.begin(id)
	require.NoError(p.t, p.WriteData(id, false, message(text)))
}

// messages are those that have arrived on a stream.
func (s *seen) messages() (all []string) {
	rest := s.data
	for len(rest) >= prefixLength {
		n := int(binary.BigEndian.Uint32(rest[1:prefixLength]))
		if len(rest) < prefixLength+n {
			break
		}
		text := string(rest[prefixLength : prefixLength+n])
		if n > 100 {
			text = fmt.Sprintf("%d bytes", n)
		}
		all = append(all, text)
		rest = rest[prefixLength+n:]
	}
	if len(rest) > 0 {
		all = append(all, fmt.Sprintf("a part of %d bytes", len(rest)))
	}
	return all
}

// String is what was seen, in one line.
func (s *seen) String() string {
	if s == nil {
		return "nothing"
	}
	parts := append(slices.Clone(s.header), s.messages()...)
	switch {
	case s.wasReset && s.reset != http2.ErrCodeNo:
		parts = append(parts, "reset "+s.reset.String())
	case s.ended:
		parts = append(parts, "ended")
	}
	return strings.Join(parts, ", ")
}

// over reports whether the server has ended a stream.
func (s *seen) over() bool { return s.ended || s.wasReset }
