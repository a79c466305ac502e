package envoy_test

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// h2 is an HTTP/2 connection without TLS that sends what a well-behaved client
// would not.
type h2 struct {
	t      *testing.T
	conn   net.Conn
	framer *http2.Framer
	next   uint32
}

func dialH2(t *testing.T, address string) *h2 {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(2*time.Minute)))
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(t, err)
	c := &h2{t: t, conn: conn, framer: http2.NewFramer(conn, conn), next: 1}
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	require.NoError(t, c.framer.WriteSettings())
	return c
}

// open sends the headers of a request, given as name, value, name, value...
func (c *h2) open(end bool, headers ...string) (stream uint32) {
	c.t.Helper()
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for i := 0; i < len(headers); i += 2 {
		require.NoError(c.t, encoder.WriteField(hpack.HeaderField{Name: headers[i], Value: headers[i+1]}))
	}
	stream, c.next = c.next, c.next+2
	require.NoError(c.t, c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block.Bytes(), EndStream: end, EndHeaders: true}))
	return stream
}

// read returns the next answer, or part of one. A stream or connection that was
// broken off has code 0 and ends it.
type h2part struct {
	stream uint32
	answer
	end bool
}

func (c *h2) read() h2part {
	c.t.Helper()
	for {
		frame, err := c.framer.ReadFrame()
		if err != nil {
			return h2part{end: true, answer: answer{body: err.Error()}}
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				require.NoError(c.t, c.framer.WriteSettingsAck())
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				require.NoError(c.t, c.framer.WritePing(true, f.Data))
			}
		case *http2.GoAwayFrame:
			if f.ErrCode != http2.ErrCodeNo {
				return h2part{end: true, answer: answer{body: f.ErrCode.String()}}
			}
		case *http2.RSTStreamFrame:
			return h2part{stream: f.StreamID, end: true, answer: answer{body: f.ErrCode.String()}}
		case *http2.MetaHeadersFrame:
			p := h2part{stream: f.StreamID, end: f.StreamEnded(), answer: answer{header: http.Header{}}}
			for _, h := range f.Fields {
				if h.Name == ":status" {
					p.code, _ = strconv.Atoi(h.Value)
				}
				p.header.Add(h.Name, h.Value)
			}
			return p
		case *http2.DataFrame:
			p := h2part{stream: f.StreamID, end: f.StreamEnded(), answer: answer{body: string(f.Data())}}
			if n := uint32(len(f.Data())); n > 0 {
				require.NoError(c.t, c.framer.WriteWindowUpdate(0, n))
				if !p.end {
					require.NoError(c.t, c.framer.WriteWindowUpdate(f.StreamID, n))
				}
			}
			return p
		}
	}
}

// whole is one request on a connection of its own, and its whole answer.
func (g *gateway) h2(headers ...string) answer {
	g.Helper()
	c := dialH2(g.T, g.addr)
	defer c.conn.Close()
	c.open(true, headers...)
	var a answer
	for {
		p := c.read()
		switch {
		case p.header != nil:
			a.code, a.header = p.code, p.header
		default:
			a.body += p.body
		}
		if p.end {
			return a
		}
	}
}

// A client sends at most one window in each round trip. More would be more memory than an upload over HTTP/1.1 takes.
// Invariant: P8
func TestUploadsOverHTTP2NeedFewRoundTrips(t *testing.T) {
	g := startGateway(t)
	c := dialH2(t, g.addr)
	const perDefault = 65_535 // RFC 9113, section 6.9.2
	stream, connection := uint32(0), uint32(perDefault)
	for stream == 0 || connection == perDefault {
		frame, err := c.framer.ReadFrame()
		require.NoError(t, err)
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if window, ok := f.Value(http2.SettingInitialWindowSize); ok {
				stream = window
			}
		case *http2.WindowUpdateFrame:
			connection += f.Increment
		}
	}
	require.EqualValues(t, 128<<10, stream)
	require.EqualValues(t, 16*stream, connection, "uploads that stand still must leave room for others")
}
