package h2

import (
	"encoding/binary"
	"encoding/xml"
	"flag"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

var h2spec = flag.String("h2spec", "", "the program h2spec, see make h2spec")

// accepted are the cases that fail, and why. h2spec judges by RFC 7540.
var accepted = func() map[string]string {
	const (
		discarded = "the call was answered or reset, and RFC 9113, section 5.1, lets a server discard what arrives for a closed stream"
		obsolete  = "RFC 9113, section 5.3, has no dependencies of streams"
	)
	return map[string]string{
		"http2/5.1: half closed (remote): Sends a DATA frame":                                                             discarded,
		"http2/5.1: closed: Sends a DATA frame after sending RST_STREAM frame":                                            discarded,
		"http2/5.1: closed: Sends a DATA frame":                                                                           discarded,
		"http2/6.1: Sends a DATA frame on the stream that is not in \"open\" or \"half-closed (local)\" state":            discarded,
		"http2/5.3.1: Sends HEADERS frame that depend on itself":                                                          obsolete,
		"http2/5.3.1: Sends PRIORITY frame that depend on itself":                                                         obsolete,
		"http2/6.9.1: Sends multiple WINDOW_UPDATE frames increasing the flow control window to above 2^31-1 on a stream": "the whole connection ends with FLOW_CONTROL_ERROR, as section 5.4.1 allows",
	}
}()

// pages is a client of pages, such as h2spec, made a client of calls: a request that ends with its header block
// ends with a message instead. It changes no other frame.
type pages struct {
	*net.TCPConn
	preface bool
	last    uint32 // the highest stream
	ends    bool   // the header block that is being read is the whole request
	out     []byte
}

func (p *pages) Read(b []byte) (int, error) {
	if len(p.out) == 0 {
		if err := p.next(); len(p.out) == 0 {
			return 0, err
		}
	}
	n := copy(b, p.out)
	p.out = p.out[n:]
	return n, nil
}

// next reads the preface or a frame.
func (p *pages) next() error {
	if !p.preface {
		p.preface = true
		p.out = make([]byte, len(http2.ClientPreface))
		n, err := io.ReadFull(p.TCPConn, p.out)
		p.out = p.out[:n]
		return err
	}
	header := make([]byte, 9)
	n, err := io.ReadFull(p.TCPConn, header)
	if err != nil {
		p.out = header[:n]
		return err
	}
	kind, flags, id := http2.FrameType(header[3]), &header[4], binary.BigEndian.Uint32(header[5:])
	if kind == http2.FrameHeaders && id > p.last {
		p.last = id
		p.ends = *flags&byte(http2.FlagHeadersEndStream) != 0
		*flags &^= byte(http2.FlagHeadersEndStream)
	}
	payload := make([]byte, int(header[0])<<16|int(header[1])<<8|int(header[2]))
	n, err = io.ReadFull(p.TCPConn, payload)
	p.out = slices.Concat(header, payload[:n])
	if p.ends && (kind == http2.FrameHeaders || kind == http2.FrameContinuation) && *flags&byte(http2.FlagHeadersEndHeaders) != 0 {
		p.ends = false
		p.out = append(p.out, 0, 0, prefixLength, byte(http2.FrameData), byte(http2.FlagDataEndStream))
		p.out = append(p.out, header[5:9]...)
		p.out = append(p.out, make([]byte, prefixLength)...)
	}
	return err
}

// page answers each message with a page.
type page struct{}

func (page) Now([]byte, string) (Reply, Later) { return Reply{Message: make([]byte, 100)}, nil }

// startPages serves a client of pages. Each method and content type counts as that of a call.
func startPages(s *Server, accepted *net.TCPConn) {
	c := newConn(s, &pages{TCPConn: accepted})
	c.decoder = hpack.NewDecoder(tableSize, func(f hpack.HeaderField) {
		c.block.field(f)
		c.block.post, c.block.grpc = true, true
	})
	c.decoder.SetMaxStringLength(maxBlock)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[c] = struct{}{}
	s.running.Go(c.serve)
}

// Not part of CI. h2spec judges by RFC 7540, and by its own suite "generic".
func TestH2specFindsNoMoreThanIsAccepted(t *testing.T) {
	if *h2spec == "" {
		t.Skip("make h2spec runs it, with the program")
	}
	server := NewServer(map[string]Handler{"/": page{}})
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			accepted, err := l.AcceptTCP()
			if err != nil {
				return // closed below
			}
			startPages(server, accepted)
		}
	}()
	defer func() { l.Close(); <-done; server.Stop() }()
	report := filepath.Join(t.TempDir(), "report.xml")
	out, _ := exec.CommandContext(t.Context(), *h2spec, "-h", "127.0.0.1", "-p", strconv.Itoa(l.Addr().(*net.TCPAddr).Port),
		"--strict", "--timeout", "5", "--junit-report", report).CombinedOutput() // it fails if a case does
	t.Logf("%s", out)
	written, err := os.ReadFile(report)
	require.NoError(t, err, "it did not end")
	var suites struct {
		Suites []struct {
			Cases []struct {
				Package string    `xml:"package,attr"`
				Name    string    `xml:"classname,attr"`
				Error   *struct{} `xml:"error"` // h2spec names failures so
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	require.NoError(t, xml.Unmarshal(written, &suites))
	ran, failed := 0, []string{}
	for _, s := range suites.Suites {
		for _, c := range s.Cases {
			ran++
			if c.Error != nil {
				failed = append(failed, c.Package+": "+c.Name)
			}
		}
	}
	require.Positive(t, ran)
	require.ElementsMatch(t, slices.Collect(maps.Keys(accepted)), failed)
}
