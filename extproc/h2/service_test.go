package h2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// soon bounds how long a test waits for what must happen.
const soon = 20 * time.Second

const testMethod = "/berth.test.Test/Call"

// service is what both servers serve. The message says what becomes of a call: its words are
//
//	keep   the answer is sent, and the stream stays open until the peer ends it
//	later  the answer needs a goroutine, and waits for let
//	more   another message is sent before the answer
//	big    the answer has 100,000 bytes
//	fail   the call ends with FAILED_PRECONDITION
//
// The answer repeats the message.
type service struct {
	let     chan struct{} // closed: calls with "later" go on
	blocked chan struct{} // receives when such a call begins to wait
	// deaf: calls with "later" do not end with their stream.
	deaf bool

	mu    sync.Mutex
	opens int
	ends  map[string]int // by who has ended the stream: "peer", "server"
}

func newService() *service {
	return &service{let: make(chan struct{}), blocked: make(chan struct{}, 1<<20), ends: map[string]int{}}
}

func (s *service) Now(message []byte, _ string) (Reply, Later) {
	if bytes.Contains(message, []byte("later")) || bytes.Contains(message, []byte("more")) {
		message := bytes.Clone(message)
		return Reply{}, func(ctx context.Context, send func([]byte) error) Reply { return s.later(ctx, message, send) }
	}
	return s.reply(string(message)), nil
}

func (s *service) later(ctx context.Context, message []byte, send func([]byte) error) Reply {
	if bytes.Contains(message, []byte("more")) {
		if err := send([]byte("more")); err != nil {
			return Reply{Status: codes.Canceled}
		}
	}
	if bytes.Contains(message, []byte("later")) {
		s.blocked <- struct{}{}
		if s.deaf {
			<-s.let
		}
		select {
		case <-s.let:
		case <-ctx.Done():
		}
	}
	return s.reply(string(message))
}

func (s *service) reply(message string) Reply {
	if strings.Contains(message, "fail") {
		return Reply{Status: codes.FailedPrecondition, Text: "100 % wrong\n"}
	}
	r := Reply{Message: []byte(message)}
	if strings.Contains(message, "big") {
		r.Message = bytes.Repeat([]byte("x"), 100_000)
	}
	if strings.Contains(message, "keep") {
		s.mu.Lock()
		s.opens++
		s.mu.Unlock()
		r.Open = &kept{service: s}
	}
	return r
}

// kept is a call that stays open.
type kept struct {
	service *service
	once    bool
}

func (k *kept) Ended(byPeer bool) {
	k.service.mu.Lock()
	defer k.service.mu.Unlock()
	if k.once {
		panic("ended twice")
	}
	k.once = true
	k.service.ends[map[bool]string{true: "peer", false: "server"}[byPeer]]++
}

// open returns how many calls are open, and how many each side has ended.
func (s *service) open() (open, byPeer, byServer int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opens - s.ends["peer"] - s.ends["server"], s.ends["peer"], s.ends["server"]
}

// awaitOpen waits until so many calls are open.
func (s *service) awaitOpen(t testing.TB, n int) {
	t.Helper()
	require.Eventually(t, func() bool { open, _, _ := s.open(); return open == n }, soon, time.Millisecond)
}

// remainOpen requires that n calls are open, after a goroutine that was to end one has had time to.
func (s *service) remainOpen(t testing.TB, n int) {
	t.Helper()
	for range 1000 {
		open, _, _ := s.open()
		require.Equal(t, n, open)
		runtime.Gosched()
	}
}

// The service behind grpc-go.

type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }
func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}
func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func (s *service) stream(_ any, stream grpc.ServerStream) error {
	var message []byte
	if err := stream.RecvMsg(&message); err != nil {
		return nil
	}
	r := s.later(stream.Context(), message, func(m []byte) error { return stream.SendMsg(m) })
	if r.Message == nil {
		return status.Error(r.Status, r.Text)
	}
	_ = stream.SendMsg(r.Message) // fails if the peer has left
	if r.Open != nil {
		<-stream.Context().Done()
		r.Open.Ended(true)
	}
	return nil
}

// server is one of the two.
type server interface {
	Serve(net.Listener) error
	GracefulStop()
	Stop()
}

func (s *service) own() server { return NewServer(map[string]Handler{testMethod: s}) }

func (s *service) reference() server {
	g := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.MaxRecvMsgSize(maxMessage-prefixLength),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: math.MaxInt64}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 1, PermitWithoutStream: true})) // any pings
	g.RegisterService(&grpc.ServiceDesc{
		ServiceName: "berth.test.Test", HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Call", Handler: s.stream, ServerStreams: true, ClientStreams: true}},
	}, s)
	return g
}

// serve serves on a socket of its own until the test ends.
func serve(t testing.TB, s server) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) { // Stop came before Serve
			t.Error(fmt.Errorf("serve: %w", err))
		}
	})
	return socket
}
