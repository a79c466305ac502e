package cli

import (
	"bytes"
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/internal/wait"
)

// Deadlines of every connection for its client: to send the header of a request, to send all of
// it, to read the answer, and to start the next request. A handler that needs more time extends
// the deadlines of its call (http.ResponseController).
const (
	headerTimeout = 5 * time.Second
	readTimeout   = 10 * time.Second
	writeTimeout  = 30 * time.Second
	idleTimeout   = 2 * time.Minute
	// maxHeader bounds a header in bytes. Every connection may hold one.
	maxHeader = 16 << 10
)

// AdminConns is the limit of connections of a listener for operators, probes and metrics.
const AdminConns = 256

// HTTPServer is an HTTP server bound to its address.
type HTTPServer struct {
	name     string
	conns    *conns
	server   *http.Server
	listener net.Listener
}

// Listen binds an address for Serve, which accepts at most maxConns connections at one time.
// name is the flag of the address, for errors.
func Listen(name, address string, maxConns int) (*HTTPServer, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return serveOn(name, l, maxConns), nil
}

func serveOn(name string, l net.Listener, maxConns int) *HTTPServer {
	c := &conns{limit: maxConns, waiting: list.New(), all: map[net.Conn]*list.Element{}}
	return &HTTPServer{name: name, conns: c, listener: l, server: &http.Server{
		ReadHeaderTimeout: headerTimeout, ReadTimeout: readTimeout,
		WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ConnState: c.changed,
	}}
}

// conns bounds the connections of a listener. Above the limit it closes the connection that has
// been without a request for the longest time: it is idle, or has not sent a header. So clients
// that only connect cannot exclude others. A connection with a call in progress is never
// closed. If all have one, the new connection is closed.
type conns struct {
	limit int

	mu      sync.Mutex
	waiting *list.List                 // of net.Conn without a request, the longest waiting first
	all     map[net.Conn]*list.Element // element in waiting, nil for connections with a request
}

func (c *conns) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.all)
}

func (c *conns) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	elem, known := c.all[conn]
	if elem != nil {
		c.waiting.Remove(elem)
	}
	switch {
	case state == http.StateNew || state == http.StateIdle && known:
		c.all[conn] = c.waiting.PushBack(conn)
	case state == http.StateActive && known:
		c.all[conn] = nil
	default:
		delete(c.all, conn)
	}
	if len(c.all) > c.limit {
		oldest := c.waiting.Remove(c.waiting.Front()).(net.Conn)
		delete(c.all, oldest)
		_ = oldest.Close() // the server notices it
	}
}

// UseTLS makes Serve speak TLS. A client has the time for a header for its handshake. Failed
// handshakes are not logged, because every client can make any number of them.
func (s *HTTPServer) UseTLS(c *tls.Config) {
	s.listener = tls.NewListener(s.listener, c)
	s.server.ErrorLog = log.New(withoutHandshakes{os.Stderr}, "", log.LstdFlags)
}

type withoutHandshakes struct{ io.Writer }

func (w withoutHandshakes) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("TLS handshake error")) {
		return len(line), nil
	}
	return w.Writer.Write(line)
}

// Addr is the bound address.
func (s *HTTPServer) Addr() net.Addr { return s.listener.Addr() }

// Serve answers until Stop and then returns nil. Every answer tells browsers to believe its content type.
func (s *HTTPServer) Serve(h http.Handler) error {
	s.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		h.ServeHTTP(w, r)
	})
	if err := s.server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}

// Idle waits until no client is connected, or until ctx ends.
func (s *HTTPServer) Idle(ctx context.Context) {
	for s.conns.count() > 0 && wait.Sleep(ctx, idleEvery) {
	}
}

// idleEvery is the interval in which Idle looks.
const idleEvery = 10 * time.Millisecond

// Stop ends Serve. It completes calls in progress until ctx ends, and then cuts off the rest.
func (s *HTTPServer) Stop(ctx context.Context) {
	if s.server.Shutdown(ctx) != nil {
		_ = s.server.Close() // its errors need no handling at the end of a process
	}
}
