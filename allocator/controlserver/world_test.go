package controlserver

import (
	"context"
	"crypto/sha256"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
)

const (
	testRouter = "router-0123456789abcdef"
	maxStale   = 15 * time.Minute
)

// fakeLeader records the events. react, if set, answers them like the core.
type fakeLeader struct {
	deposed  atomic.Bool
	restored atomic.Uint64 // the term
	react    func(core.Event)

	mu     sync.Mutex
	events []core.Event
}

func (l *fakeLeader) Submit(ev core.Event) {
	l.mu.Lock()
	l.events = append(l.events, ev)
	l.mu.Unlock()
	if l.react != nil {
		l.react(ev)
	}
}

func (l *fakeLeader) Valid() bool { return !l.deposed.Load() }

func (l *fakeLeader) Term() uint64 { return 7 }

func (l *fakeLeader) Journal() string { return "j" }

func (l *fakeLeader) Began() uint64 { return 100 }

func (l *fakeLeader) Position() uint64 { return 110 }

func (l *fakeLeader) Restored(term uint64) { l.restored.Store(term) }

// seen returns the events since the last call.
func (l *fakeLeader) seen() []core.Event {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	events := l.events
	l.events = nil
	return events
}

// world is a control server in a synctest bubble, and routers that connect to it.
type world struct {
	*Server
	t      *testing.T
	leader *fakeLeader
	client controlv1.ControlClient
}

func newServer(t *testing.T, log *zap.Logger) *Server {
	t.Helper()
	s, err := New(Options{MaxStale: maxStale, LeaderAddress: func() string { return "10.0.0.9:9090" }, Log: log})
	require.NoError(t, err)
	return s
}

type router = grpc.BidiStreamingClient[controlv1.RouterMessage, controlv1.AllocatorMessage]

func run(t *testing.T, f func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// The timers of the connection keep the bubble's time going even when all goroutines
		// of the test wait, so a deadlock would not be noticed.
		defer time.AfterFunc(time.Hour, func() { panic("what the test waits for does not happen") }).Stop()
		w := &world{t: t, leader: &fakeLeader{}, Server: newServer(t, zap.NewNop())}
		w.Lead(w.leader)
		listener := bufconn.Listen(1 << 16)
		server := grpc.NewServer()
		controlv1.RegisterControlServer(server, w.Server)
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		conn, err := grpc.NewClient("passthrough:///allocator", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
		require.NoError(t, err)
		w.client = controlv1.NewControlClient(conn)
		defer func() {
			server.Stop()
			conn.Close()
			require.NoError(t, <-served)
		}()
		f(w)
	})
}

// fakeKeys are API keys. Before set they have not been read.
type fakeKeys struct {
	mu      sync.Mutex
	byTeam  map[string][][sha256.Size]byte
	changed chan struct{}
}

func (k *fakeKeys) ByTeam() (map[string][][sha256.Size]byte, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.byTeam, k.changed
}

func (k *fakeKeys) set(byTeam map[string][][sha256.Size]byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.byTeam = byTeam
	close(k.changed)
	k.changed = make(chan struct{})
}

// receiver returns what returns the next message of a stream, which must have been sent.
func receiver(t *testing.T, stream router) func() *controlv1.AllocatorMessage {
	received := make(chan *controlv1.AllocatorMessage, 100)
	go func() {
		for m, err := stream.Recv(); err == nil; m, err = stream.Recv() {
			received <- m
		}
	}()
	return func() *controlv1.AllocatorMessage {
		t.Helper()
		synctest.Wait()
		require.NotEmpty(t, received, "nothing was sent")
		return <-received
	}
}

// open opens a stream.
func (w *world) open() router {
	w.t.Helper()
	stream, err := w.client.Session(w.t.Context())
	require.NoError(w.t, err)
	return stream
}

func join(id string, term uint64) *controlv1.RouterMessage {
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Join{Join: &controlv1.Join{RouterId: id, HighestTerm: term, MaxStaleNanos: uint64(maxStale)}}}
}

func ping(nonce uint64) *controlv1.RouterMessage {
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ping{Ping: &controlv1.Ping{Nonce: nonce}}}
}

// joined opens a stream that has joined, and returns its number.
func (w *world) joined() (router, uint64) {
	w.t.Helper()
	stream := w.open()
	require.NoError(w.t, stream.Send(join(testRouter, 0)))
	events := w.leader.seen()
	require.NotEmpty(w.t, events)
	joined, ok := events[len(events)-1].(core.SessionJoined)
	require.True(w.t, ok, "%#v", events)
	require.Equal(w.t, testRouter, joined.Session)
	return stream, joined.Stream
}

// fails reads up to the end of the stream and requires its status.
func fails(t *testing.T, stream router, code codes.Code, says string) {
	t.Helper()
	for {
		if _, err := stream.Recv(); err != nil {
			require.Equal(t, code, status.Code(err), err)
			require.Contains(t, err.Error(), says)
			return
		}
	}
}

func sandbox(id string) core.Sandbox {
	return core.Sandbox{Binding: core.Binding{ID: id}, IP: netip.MustParseAddr("10.0.0.1"), DefaultPort: 8080}
}

func goodbye() *controlv1.RouterMessage {
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{}}}
}

// joinedAfter is like joined, but allows the end of an earlier stream among the events.
func (w *world) joinedAfter() (router, uint64) {
	w.t.Helper()
	stream := w.open()
	require.NoError(w.t, stream.Send(join(testRouter, 0)))
	for _, ev := range w.leader.seen() {
		if joined, ok := ev.(core.SessionJoined); ok {
			return stream, joined.Stream
		}
	}
	w.t.Fatal("the stream did not join")
	return nil, 0
}
