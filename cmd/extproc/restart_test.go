package main

import (
	"context"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/extproc/lockfile"
)

type recordingLeader struct {
	server *controlserver.Server
	joined chan string
	ended  chan string
	pinged chan string
	// gateways are what routers have shown, by session.
	gateways sync.Map
	banned   atomic.Bool // every router that joins counts as declared dead
}

func (l *recordingLeader) Submit(ev core.Event) {
	switch ev := ev.(type) {
	case core.SessionJoined:
		if l.banned.Load() {
			l.server.Deliver(1, core.CloseStream{Stream: ev.Stream, Banned: true})
			return
		}
		l.server.Deliver(1, core.SendSnapshot{Stream: ev.Stream, Sequence: 1, Routes: []core.Sandbox{{
			Binding: core.Binding{ID: "abcdefghij0123456789"}, IP: netip.MustParseAddr("10.1.0.1"), DefaultPort: 80,
		}}})
		l.gateways.Store(ev.Session, ev.Gateway)
		l.joined <- ev.Session
	case core.SessionPing:
		l.server.Deliver(1, core.SendPong{Stream: ev.Stream, Nonce: ev.Nonce})
		select {
		case l.pinged <- ev.Session:
		default:
		}
	case core.SessionGoodbye:
		goodbye := "Goodbye of " + ev.Session
		if ev.Looked {
			goodbye += " after a look"
		}
		l.ended <- goodbye
		l.server.Deliver(1, core.CloseStream{Stream: ev.Stream, Left: true})
	case core.Resolve:
		l.server.Deliver(1, core.SendResolved{Stream: ev.Stream, ID: ev.ID, Starting: true, Hold: 30 * time.Second})
	case core.SessionDead:
		l.gateways.Store("of the report of "+ev.Session, ev.Gateway)
		l.ended <- "Dead " + ev.Session
	}
}

// serveLeader serves a leader that records, until the test ends, and returns its address.
func serveLeader(t *testing.T) (l *recordingLeader, address string) {
	t.Helper()
	l = &recordingLeader{
		server: newControlServer(t),
		joined: make(chan string, 10), ended: make(chan string, 10), pinged: make(chan string),
	}
	l.server.Lead(l)
	s := grpc.NewServer()
	controlv1.RegisterControlServer(s, l.server)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = s.Serve(listener) }()
	t.Cleanup(s.Stop)
	return l, listener.Addr().String()
}

func (l *recordingLeader) Valid() bool  { return true }
func (l *recordingLeader) Term() uint64 { return 1 }

func (*recordingLeader) Journal() string { return "j" }

func (*recordingLeader) Began() uint64 { return 1 }

func (*recordingLeader) Position() uint64 { return 1 }

func (*recordingLeader) Restored(uint64) {}

// Envoy is paused with an unread answer of the first router. That router ends without a Goodbye.
// Its successor must not report its death, because Envoy may continue later, read the answer and
// connect.
func TestRouterWithUnreadAnswersIsNotReportedDead(t *testing.T) {
	l, allocator := serveLeader(t)
	socket := filepath.Join(t.TempDir(), "s")
	args := []string{"--socket=" + socket, "--allocator=" + allocator, "--shutdown-after=50ms", "--pod-cidrs=10.0.0.0/8", "--domain=sb.test"}
	one := start(t, args...)
	first := soon(t, l.joined)
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.Eventually(t, func() bool { // from the first pong on
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
			{Key: ":method", RawValue: []byte("GET")}, {Key: ":authority", RawValue: []byte("80-abcdefghij0123456789.sb.test")}, {Key: "x-request-id", RawValue: []byte("r")},
		}}}}}))
		answer, err := stream.Recv()
		require.NoError(t, err)
		return answer.GetRequestHeaders() != nil // admitted, and its stream stays open: Envoy is stopped
	}, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, one.stop())
	require.Empty(t, l.ended, "no Goodbye: that is right")
	start(t, args...)
	soon(t, l.joined)
	for range 3 { // pings, before each of which the dead are reported
		soon(t, l.pinged)
	}
	require.Empty(t, l.ended, "Envoy may not have read an answer of %s", first)
}

// Two gateways report to one leader. Each can prove the deaths of its own routers only.
// Invariant: I3
func TestDeathIsReportedWithTheSecretOfItsGateway(t *testing.T) {
	l, allocator := serveLeader(t)
	gateway := func(session string) any {
		shown, _ := l.gateways.Load(session)
		return shown
	}
	socket := filepath.Join(t.TempDir(), "s")
	start(t, "--allocator="+allocator, "--socket="+socket)
	first := soon(t, l.joined)
	start(t, "--allocator="+allocator)
	other := soon(t, l.joined)
	dead, err := lockfile.New(filepath.Dir(socket)) // beside the first router
	require.NoError(t, err)
	require.NoError(t, dead.Close(true))
	require.Equal(t, "Dead "+dead.ID(), soon(t, l.ended))
	require.NotZero(t, gateway(first))
	require.NotEqual(t, gateway(first), gateway(other))
	require.Equal(t, gateway(first), gateway("of the report of "+dead.ID()))
}

// The operator was wrong, and the allocator has not waited for this router.
func TestDeclaredDeadRouterEndsWithAnError(t *testing.T) {
	l, allocator := serveLeader(t)
	l.banned.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := run(ctx, enough("--socket="+filepath.Join(t.TempDir(), "s"), "--admin-listen=127.0.0.1:0", "--allocator="+allocator), io.Discard, io.Discard)
	require.ErrorIs(t, err, controlclient.ErrDeclaredDead)
	require.NoError(t, ctx.Err())
	require.Empty(t, l.ended, "it says no Goodbye")
}

// While the router answers requests, the allocator must wait for it.
func TestGoodbyeFollowsTheEndOfTheServer(t *testing.T) {
	l, allocator := serveLeader(t)
	p := start(t, "--allocator="+allocator, "--shutdown-after=1m")
	session := soon(t, l.joined)
	conn, err := grpc.NewClient("unix:"+p.listening.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	// Envoy has begun to ask.
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	require.NoError(t, err)
	serving := make(chan struct{})
	go func() {
		defer close(serving)
		_, _ = stream.Header() // comes with the answer
	}()
	watch, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)
	stopped := make(chan error, 1)
	go func() { stopped <- p.stop() }()
	answer, err := watch.Recv() // it stops
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, answer.GetStatus())
	for range 3 { // it pings, and has not left
		soon(t, l.pinged)
		require.Empty(t, l.ended, "Goodbye, and a request is not answered")
	}
	require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		{Key: ":method", RawValue: []byte("GET")}, {Key: ":authority", RawValue: []byte("80-abcdefghij0123456789.sb.test")}, {Key: "x-request-id", RawValue: []byte("r")},
	}}}}}))
	_, err = stream.Recv()
	require.NoError(t, err)
	cancel() // Envoy has read the answer
	<-serving
	require.NoError(t, <-stopped)
	require.Equal(t, "Goodbye of "+session, soon(t, l.ended))
}

// A request may be held for longer than a shutdown takes. Without a Goodbye every fence would wait
// until this router has expired.
func TestGoodbyeIsSentWhileARequestIsHeld(t *testing.T) {
	l, allocator := serveLeader(t)
	p := start(t, "--allocator="+allocator, "--shutdown-after=4s")
	session := soon(t, l.joined)
	require.Eventually(t, func() bool {
		code, _ := get(t, p.listening.Admin, "/readyz")
		return code == 200
	}, time.Minute, 10*time.Millisecond)
	conn, err := grpc.NewClient("unix:"+p.listening.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		{Key: ":method", RawValue: []byte("GET")}, {Key: ":authority", RawValue: []byte("80-starting000000000000.sandbox.example.com")}, {Key: "x-request-id", RawValue: []byte("r")},
	}}}}}))
	answer, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, answer.GetOverrideMessageTimeout(), "it is not held: %v", answer)
	require.NoError(t, p.stop())
	require.Len(t, l.ended, 1, "it has ended without a Goodbye")
	require.Equal(t, "Goodbye of "+session, <-l.ended)
}

// A successor that takes the socket without routes would refuse requests that its predecessor can
// serve.
func TestRouterTakesTheSocketWhenItHasRoutes(t *testing.T) {
	l, allocator := serveLeader(t)
	admin := filepath.Join(t.TempDir(), "a")
	envoyAt(t, admin)
	for range 20 {
		p := start(t, "--allocator="+allocator, "--envoy-admin="+admin)
		code, body := get(t, p.listening.Admin, "/readyz")
		require.Equal(t, 200, code, body)
		session := soon(t, l.joined)
		require.NoError(t, p.stop())
		require.Equal(t, "Goodbye of "+session+" after a look", soon(t, l.ended))
	}
}
