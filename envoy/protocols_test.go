package envoy_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcmetadata "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// versatile is a sandbox that speaks everything.
type versatile struct {
	grpc *grpc.Server
	// events: the client has read an event. arrived: how many requests wait.
	events  chan struct{}
	arrived chan struct{}
	release chan struct{}
	sent    counter // bytes of the last download
}

// counter counts what is written to it.
type counter struct{ atomic.Int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.Add(int64(len(b)))
	return len(b), nil
}

func newVersatile() *versatile {
	v := &versatile{grpc: grpc.NewServer(), events: make(chan struct{}), arrived: make(chan struct{}, 10_000), release: make(chan struct{})}
	v.grpc.RegisterService(&echoService, nil)
	return v
}

func (v *versatile) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/ws":
		serveEchoes(w, r)
	case "/upload":
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	case "/download":
		n, _ := strconv.ParseInt(r.FormValue("n"), 10, 64)
		v.sent.Store(0)
		_, _ = io.CopyN(io.MultiWriter(w, &v.sent), zeros{}, n)
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			<-v.events
		}
	case "/trailers":
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Sum")
		fmt.Fprintf(w, "%s %s", body, r.Trailer.Get("X-Of-Client"))
		w.Header().Set("X-Sum", "42")
	case "/wait":
		v.arrived <- struct{}{}
		<-v.release
	default:
		v.grpc.ServeHTTP(w, r)
	}
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

func serveEchoes(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer c.CloseNow()
	for {
		kind, message, err := c.Read(r.Context())
		if err != nil || c.Write(r.Context(), kind, message) != nil {
			return
		}
	}
}

// echoService has one method, which sends back what it receives, and trailers.
var echoService = grpc.ServiceDesc{
	ServiceName: "test.Echo", HandlerType: (*any)(nil),
	Streams: []grpc.StreamDesc{{StreamName: "Echo", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
		stream.SetTrailer(grpcmetadata.Pairs("x-sum", "42"))
		for {
			var m wrapperspb.StringValue
			switch err := stream.RecvMsg(&m); {
			case errors.Is(err, io.EOF):
				return status.Error(codes.AlreadyExists, "the end")
			case err != nil:
				return err
			}
			if err := stream.SendMsg(&m); err != nil {
				return err
			}
		}
	}}},
}

func startVersatile(t *testing.T) (*edge, *versatile) { return startVersatileIn(t, own) }

func startVersatileIn(t *testing.T, in inEnvoy) (*edge, *versatile) {
	v := newVersatile()
	return startEdgeIn(t, in, func(string) http.Handler { return v }), v
}

// clients are an HTTP/1.1 and an HTTP/2 client whose connections all go to Envoy.
func (e *edge) clients() map[string]*http.Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", e.addr)
	}
	all := map[string]*http.Client{}
	for name, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
		var p http.Protocols
		p.SetHTTP1(!h2)
		p.SetUnencryptedHTTP2(h2)
		transport := &http.Transport{DialContext: dial, Protocols: &p, DisableCompression: true, ExpectContinueTimeout: time.Minute}
		e.Cleanup(transport.CloseIdleConnections)
		all[name] = &http.Client{Transport: transport}
	}
	return all
}

func (e *edge) url(path string) string { return "http://" + e.host("abc") + path }

// flat requires that Envoy's memory grows by little while f runs. Buffers of a
// stream are 128 KiB; what was sent is much more.
func (e *edge) flat(f func()) {
	e.Helper()
	if e.in == inRealEnvoyGateway { // its Envoy is no process of the test
		f()
		return
	}
	const most = 32 << 20
	before, highest := e.rss(), int64(0)
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for {
			highest = max(highest, e.rss())
			select {
			case <-done:
				return
			case <-ticker.C:
			}
		}
	})
	f()
	close(done)
	watching.Wait()
	e.Logf("Envoy has %d MiB, at most %d MiB", before>>20, highest>>20)
	require.Less(e, highest-before, int64(most))
}

// stands waits until the counter has not changed for so many looks, 20 of them in a second, and returns it.
func (c *counter) stands(t *testing.T, looks int) int64 {
	t.Helper()
	last, still := int64(-1), 0
	require.Eventually(t, func() bool {
		if now := c.Load(); now != last {
			last, still = now, 0
		} else {
			still++
		}
		return still == looks
	}, 2*time.Minute, 50*time.Millisecond)
	return last
}

// stalls waits until the sandbox sends no more, because the client does not
// read, and requires that most of it is still to be sent.
func (e *edge) stalls(sent *counter, size int64) {
	e.Helper()
	last := sent.stands(e.T, 10)
	e.Logf("the sandbox has sent %d MiB to a client that does not read", last>>20)
	require.Less(e, last, size/2, "what is not read must wait at the sandbox")
}

func TestLargeBodiesPassWithFlatMemory(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e, v := startVersatileIn(t, in)
		const size = 100 << 20
		for name, client := range e.clients() {
			t.Run(name, func(t *testing.T) {
				e.flat(func() {
					r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.url("/upload"), io.LimitReader(zeros{}, size))
					require.NoError(t, err)
					r.Header.Set("Expect", "100-continue")
					response, err := client.Do(r)
					require.NoError(t, err)
					body, err := io.ReadAll(response.Body)
					require.NoError(t, err)
					response.Body.Close()
					require.Equal(t, strconv.Itoa(size), string(body))
				})
				e.flat(func() {
					r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, e.url(fmt.Sprintf("/download?n=%d", size)), http.NoBody)
					require.NoError(t, err)
					response, err := client.Do(r)
					require.NoError(t, err)
					defer response.Body.Close()
					n, err := io.CopyN(io.Discard, response.Body, 1<<20)
					require.NoError(t, err)
					e.stalls(&v.sent, size)
					m, err := io.Copy(io.Discard, response.Body)
					require.NoError(t, err)
					require.EqualValues(t, size, n+m)
				})
			})
		}
	})
}

func TestEventsArriveOneByOne(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e, v := startVersatileIn(t, in)
		for name, client := range e.clients() {
			t.Run(name, func(t *testing.T) {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, e.url("/events"), http.NoBody)
				require.NoError(t, err)
				response, err := client.Do(r)
				require.NoError(t, err)
				defer response.Body.Close()
				lines := bufio.NewReader(response.Body)
				for i := range 3 { // the next is sent when this one has been read
					line, err := lines.ReadString('\n')
					require.NoError(t, err)
					require.Equal(t, fmt.Sprintf("data: %d\n", i), line)
					_, err = lines.ReadString('\n')
					require.NoError(t, err)
					v.events <- struct{}{}
				}
			})
		}
	})
}

func TestTrailersPassBothWays(t *testing.T) {
	e, _ := startVersatile(t)
	for name, client := range e.clients() {
		t.Run(name, func(t *testing.T) {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.url("/trailers"), io.MultiReader(strings.NewReader("body"))) // of unknown length
			require.NoError(t, err)
			r.Trailer = http.Header{"X-Of-Client": {"7"}}
			response, err := client.Do(r)
			require.NoError(t, err)
			defer response.Body.Close()
			body, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.Equal(t, "body 7", string(body))
			require.Equal(t, "42", response.Trailer.Get("X-Sum"))
		})
	}
}

func TestContinuePrecedesTheBody(t *testing.T) {
	e, _ := startVersatile(t)
	c, err := net.Dial("tcp", e.addr)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(c, "POST /upload HTTP/1.1\r\nHost: "+e.host("abc")+"\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
	require.NoError(t, err)
	answers := bufio.NewReader(c)
	first, err := http.ReadResponse(answers, nil)
	require.NoError(t, err)
	first.Body.Close()
	require.Equal(t, http.StatusContinue, first.StatusCode)
	_, err = io.WriteString(c, "four")
	require.NoError(t, err)
	second, err := http.ReadResponse(answers, nil)
	require.NoError(t, err)
	defer second.Body.Close()
	body, err := io.ReadAll(second.Body)
	require.NoError(t, err)
	require.Equal(t, "4", string(body))
}

func TestGRPCStreamsBothWaysWithTrailers(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e, _ := startVersatileIn(t, in)
		conn, err := grpc.NewClient("passthrough:///"+e.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(e.host("abc")))
		require.NoError(t, err)
		defer conn.Close()
		stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test.Echo/Echo")
		require.NoError(t, err)
		for i := range 3 { // each answer is there before the next question
			sent, got := wrapperspb.String(fmt.Sprint(i)), new(wrapperspb.StringValue)
			require.NoError(t, stream.SendMsg(sent))
			require.NoError(t, stream.RecvMsg(got))
			require.Equal(t, sent.GetValue(), got.GetValue())
		}
		require.NoError(t, stream.CloseSend())
		err = stream.RecvMsg(new(wrapperspb.StringValue))
		require.Equal(t, codes.AlreadyExists, status.Code(err), "%v", err)
		require.Equal(t, "the end", status.Convert(err).Message())
		require.Equal(t, []string{"42"}, stream.Trailer().Get("x-sum"))

		// What is refused is refused in gRPC's own way.
		for host, want := range map[string]codes.Code{
			e.host("gone"): codes.NotFound, e.host("none"): codes.NotFound, e.host("private"): codes.PermissionDenied, e.host("out"): codes.Unavailable, "x.example.org": codes.InvalidArgument,
		} {
			other, err := grpc.NewClient("passthrough:///"+e.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(host))
			require.NoError(t, err)
			err = other.Invoke(t.Context(), "/test.Echo/Echo", wrapperspb.String(""), new(wrapperspb.StringValue))
			other.Close()
			require.Equal(t, want, status.Code(err), "%s: %v", host, err)
			require.NotEmpty(t, status.Convert(err).Message())
			require.NotContains(t, status.Convert(err).Message(), `{"code"`)
		}
	})
}

func TestAllStreamsOfOneConnectionAreServed(t *testing.T) {
	e, v := startVersatile(t)
	const streams = 128 // as Settings.MaxStreams says
	c := dialH2(t, e.addr)
	for range streams {
		c.open(true, ":method", "GET", ":scheme", "http", ":path", "/wait", ":authority", e.host("abc"))
	}
	answered := make(chan map[uint32]int, 1)
	go func() {
		codes := map[uint32]int{}
		for ended := 0; ended < streams; {
			p := c.read()
			if p.code != 0 {
				codes[p.stream] = p.code
			}
			if p.stream == 0 {
				break // the connection is gone
			}
			if p.end {
				ended++
			}
		}
		answered <- codes
	}()
	for range streams { // all of them are at the sandbox at one time
		select {
		case <-v.arrived:
		case <-time.After(time.Minute):
			t.Fatal("not every stream arrives")
		}
	}
	close(v.release)
	codes := <-answered
	require.Len(t, codes, streams)
	for stream, code := range codes {
		require.Equal(t, http.StatusOK, code, stream)
	}
}

func TestWebSocketsOverBothVersionsOfHTTP(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e, _ := startVersatileIn(t, in)
		require.Equal(t, http.StatusSwitchingProtocols, e.webSocket(t, e.host("abc"), "/ws", nil).code)
		if in == behindEnvoyGateway {
			return // it refuses WebSockets over HTTP/2
		}
		a := e.h2WebSocket(t, e.host("abc"), "/ws")
		require.Equal(t, http.StatusOK, a.code, "%v %s", a.header, a.body)
	})
}

// h2WebSocket opens a WebSocket over HTTP/2 (RFC 8441, section 5). If it opens, two messages are echoed.
func (g *gateway) h2WebSocket(t *testing.T, host, path string) answer {
	t.Helper()
	c := dialH2(t, g.addr)
	defer c.conn.Close()
	stream := c.open(false, ":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":path", path, ":authority", host, "sec-websocket-version", "13")
	opened := c.read()
	if opened.code != http.StatusOK {
		return opened.answer
	}
	for _, word := range []string{"hello", "again"} {
		frame := append([]byte{0x81, 0x80 | byte(len(word)), 0, 0, 0, 0}, word...) // text, masked with zeros (RFC 6455, section 5.2)
		require.NoError(t, c.framer.WriteData(stream, false, frame))
		got := ""
		for len(got) < 2+len(word) {
			p := c.read()
			require.False(t, p.end, p.body)
			got += p.body
		}
		require.Equal(t, string([]byte{0x81, byte(len(word))})+word, got)
	}
	require.NoError(t, c.framer.WriteRSTStream(stream, http2.ErrCodeCancel))
	return opened.answer
}

// A WebSocket costs two file descriptors here, and two in Envoy.
const descriptors = 2

var websocketsFlag = flag.Duration("envoy.websockets", 20*time.Second, "how long thousands of WebSockets are open")

// Longer than the time that a request may take to be answered (15 s, Envoy's default).
// What ends a WebSocket later than after 20 seconds is found by make test-long only, which
// keeps them open for five minutes.
func TestThousandsOfWebSocketsStayOpen(t *testing.T) {
	t.Parallel()
	e, _ := startVersatile(t)
	sockets, duration := 5000, *websocketsFlag
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	if limit.Cur < uint64(sockets*descriptors+1000) {
		sockets = 2000
	}
	t.Logf("%d WebSockets; this process may have %d files open", sockets, limit.Cur)
	require.GreaterOrEqual(t, limit.Cur, uint64(sockets*descriptors+200), "too few files may be open (ulimit -n)")

	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", e.addr)
	}}}
	all := make([]*websocket.Conn, sockets)
	dialing, ctx := errgroup.WithContext(t.Context())
	dialing.SetLimit(64)
	for i := range all {
		dialing.Go(func() error {
			c, _, err := websocket.Dial(ctx, "ws://"+e.host("abc")+"/ws", &websocket.DialOptions{HTTPClient: client})
			all[i] = c
			return err
		})
	}
	err := dialing.Wait()
	t.Cleanup(func() {
		for _, c := range all {
			if c != nil {
				c.CloseNow()
			}
		}
	})
	require.NoError(t, err)
	memory := e.rss()

	const pause = 5 * time.Second // between two echoes of one socket
	var echoes atomic.Int64
	end := time.Now().Add(duration)
	echoing, ctx := errgroup.WithContext(t.Context())
	for i, c := range all {
		echoing.Go(func() error {
			timer := time.NewTimer(rand.N(pause))
			defer timer.Stop()
			for round := 0; ; round++ {
				select {
				case <-timer.C:
				case <-ctx.Done():
					return nil
				}
				word := fmt.Sprintf("socket %d, round %d", i, round)
				if err := c.Write(ctx, websocket.MessageText, []byte(word)); err != nil {
					return fmt.Errorf("%s: %w", word, err)
				}
				_, got, err := c.Read(ctx)
				switch {
				case err != nil:
					return fmt.Errorf("%s: %w", word, err)
				case string(got) != word:
					return fmt.Errorf("%s: got %q", word, got)
				}
				echoes.Add(1)
				if time.Now().After(end) { // each has spoken after that time, too
					return nil
				}
				timer.Reset(pause)
			}
		})
	}
	require.NoError(t, echoing.Wait())
	require.GreaterOrEqual(t, echoes.Load(), int64(sockets*int(duration/pause)/2))
	t.Logf("%d echoes; Envoy has %d MiB, %.1f KiB for each", echoes.Load(), memory>>20, float64(memory)/float64(sockets)/1024)
	require.Zero(t, e.counter(`cluster\.pods_h1\.upstream_cx_overflow`), "a connection had to wait")
	require.Zero(t, e.counter(`cluster\.pods_h1\.upstream_rq_pending_overflow`))
}

// Names do not depend on case, but some programs look for "Host:".
func TestNamesOfHeadersReachSandboxesInProperCase(t *testing.T) {
	g := startGateway(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	heads := make(chan string, 16)
	var serving sync.WaitGroup
	defer func() { l.Close(); serving.Wait() }()
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			head := ""
			for lines := bufio.NewScanner(c); lines.Scan() && lines.Text() != ""; {
				head += lines.Text() + "\n"
			}
			_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n") // Envoy may have gone
			_ = c.Close()
			if head != "" { // else Envoy has closed a connection that it did not use
				heads <- head
			}
		}
	})
	g.router.set(g.to(l.Addr().String()))
	for protocol, ask := range map[string]func() answer{
		"HTTP/1.1": func() answer {
			return g.answer("GET / HTTP/1.1\r\nhost: " + host + "\r\nX-SOME-name: a\r\nConnection: close\r\n\r\n")
		},
		"HTTP/2": func() answer {
			return g.h2(":method", "GET", ":scheme", "http", ":path", "/", ":authority", host, "x-some-name", "a")
		},
	} {
		require.Equal(t, http.StatusNoContent, ask().code, protocol)
		head := <-heads
		require.Contains(t, head, "\nHost: "+host+"\n", protocol)
		require.Contains(t, head, "\nX-Some-Name: a\n", protocol)
		require.Contains(t, head, "\nX-Request-Id: ", protocol)
	}
}
