package h2

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/internal/wait"
)

// Handler answers the messages of one gRPC method.
type Handler interface {
	// Now answers a message if that needs no wait. Otherwise it returns what answers it. The goroutine
	// that calls it serves the whole connection. message is valid during the call only: what later
	// needs of it, later has copied. trace is the call's header traceparent (W3C Trace Context), "" for none.
	Now(message []byte, trace string) (reply Reply, later Later)
}

// Later answers a message. It runs in a goroutine of its own, and may wait until ctx ends, which it does
// when the stream or the server ends. send sends a message before the reply.
type Later func(ctx context.Context, send func(message []byte) error) Reply

// Reply is the answer to a message.
type Reply struct {
	// Message is sent unless it is nil. It must not change afterwards.
	Message []byte
	// Open, if set, keeps the stream open until the peer ends it. Otherwise the stream ends with Status.
	Open Open
	// Ending, if set, ends the stream that Open keeps.
	Ending *Ending
	// Next leaves the stream as it was before the message. Nothing is sent, and a further message is answered like the
	// first one. The call ends with OK when the peer half-closes it. It has an effect in what Now returns, without a Later.
	Next bool
	// Status and Text are the status of the call. Text is for errors.
	Status codes.Code
	Text   string
}

// Open is what remains of a call whose stream stays open.
type Open interface {
	// Ended is called once, when the stream is over. byPeer: the peer has ended it. Otherwise this
	// server has, in Stop. It must not block.
	Ended(byPeer bool)
}

// Server serves methods by their paths, such as "/package.Service/Method". Other calls are answered with
// UNIMPLEMENTED. All methods of a Server may be called concurrently.
type Server struct {
	methods map[string]Handler
	// ctx ends when Stop is called.
	ctx    context.Context
	cancel context.CancelFunc
	// running counts connections and the goroutines of Later.
	running sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener
	conns    map[*conn]struct{}
	stopping bool // no further connection is served
	forced   bool // Stop was called
}

// NewServer returns a Server that does not listen yet.
func NewServer(methods map[string]Handler) *Server {
	s := &Server{methods: methods, conns: map[*conn]struct{}{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// acceptPause is the pause after an error of Accept that may pass.
const acceptPause = 10 * time.Millisecond

// Serve serves the connections of l until GracefulStop or Stop, and then returns nil. It closes l. It is
// called once.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close() //nolint:errcheck // it may be closed already
	s.mu.Lock()
	s.listener = l
	stopping := s.stopping
	s.mu.Unlock()
	if stopping {
		return nil
	}
	for {
		accepted, err := l.Accept()
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) {
			wait.Sleep(s.ctx, acceptPause) // the process has too many files open for the moment
			continue
		}
		if err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.stopping && errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		s.start(accepted)
	}
}

// start serves a connection in a goroutine of its own.
func (s *Server) start(accepted net.Conn) {
	c := newConn(s, accepted)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		_ = accepted.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.running.Go(c.serve)
}

// ended forgets a connection.
func (s *Server) ended(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *Server) isForced() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.forced
}

// stop takes no further connection and returns the present ones.
func (s *Server) stop(forced bool) (conns []*conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping, s.forced = true, s.forced || forced
	if s.listener != nil {
		_ = s.listener.Close()
	}
	for c := range s.conns {
		conns = append(conns, c)
		if !forced {
			s.running.Go(c.drain) // under the lock: while c is in conns, its serve counts
		}
	}
	return conns
}

// GracefulStop takes no new connections, asks the peers to open no new streams, and returns when all
// streams have ended.
func (s *Server) GracefulStop() {
	s.stop(false)
	s.running.Wait()
	s.cancel()
}

// Stop closes all connections and returns when all goroutines have ended. The streams end without their
// peers, and without an answer. A client that gets none may ask another server.
func (s *Server) Stop() {
	for _, c := range s.stop(true) {
		_ = c.net.Close()
	}
	s.cancel()
	s.running.Wait()
}
