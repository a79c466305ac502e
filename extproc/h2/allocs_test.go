package h2

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// script is a connection whose peer has sent everything already.
type script struct {
	net.Conn
	in *bytes.Reader
}

func (s script) Read(p []byte) (int, error)      { return s.in.Read(p) }
func (script) Write(p []byte) (int, error)       { return len(p), nil }
func (script) Close() error                      { return nil }
func (script) SetReadDeadline(_ time.Time) error { return nil }

// scripted is a peer that opens, asks and resets n calls, as Envoy does.
func scripted(t testing.TB, n int) script {
	t.Helper()
	var out bytes.Buffer
	p := &peer{Framer: http2.NewFramer(&out, nil), t: t}
	p.encoder = newEncoder(&p.block)
	_, _ = io.WriteString(&out, http2.ClientPreface)
	require.NoError(t, p.WriteSettings())
	for id := uint32(1); id < uint32(2*n); id += 2 {
		p.call(id, "keep")
		require.NoError(t, p.WriteRSTStream(id, http2.ErrCodeNo))
		if id%128 == 1 {
			require.NoError(t, p.WriteWindowUpdate(0, 1<<16))
		}
	}
	return script{in: bytes.NewReader(out.Bytes())}
}

// always keeps every call open, without memory of its own.
type always struct{ reply Reply }

func (a *always) Now([]byte, string) (Reply, Later) { return a.reply, nil }
func (a *always) Ended(bool)                        {}

func newAlways() *always {
	a := &always{}
	a.reply = Reply{Message: bytes.Repeat([]byte("x"), 200), Open: a}
	return a
}

// x/net's Framer allocates a value for HEADERS, and one for RST_STREAM.
func TestKeptCallAllocatesItsFramesOnly(t *testing.T) {
	server := NewServer(map[string]Handler{testMethod: newAlways()})
	const calls = 1000
	s := scripted(t, calls)
	perCall := testing.AllocsPerRun(5, func() {
		_, _ = s.in.Seek(0, io.SeekStart)
		newConn(server, s).serve()
	}) / calls
	require.Less(t, perCall, 2.2)
}

func BenchmarkKeptCall(b *testing.B) {
	server := NewServer(map[string]Handler{testMethod: newAlways()})
	const calls = 1000
	s := scripted(b, calls)
	b.ReportAllocs()
	for b.Loop() {
		_, _ = s.in.Seek(0, io.SeekStart)
		newConn(server, s).serve()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/calls, "ns/call")
}
