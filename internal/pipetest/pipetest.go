package pipetest

import (
	"net"
	"sync"
)

// Listener returns the server's ends of its connections from Accept.
type Listener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
	near   []net.Conn
}

// Listen returns a Listener that belongs to the current bubble.
func Listen() *Listener {
	return &Listener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Connect waits until a connection is accepted and returns the client's end. Connect and HangUp
// must be called from one goroutine.
func (l *Listener) Connect() net.Conn {
	near, far := net.Pipe()
	l.conns <- far
	l.near = append(l.near, near)
	return near
}

// HangUp closes the client's ends of all connections.
func (l *Listener) HangUp() {
	for _, c := range l.near {
		_ = c.Close() // a net.Pipe never fails to close
	}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It does not close connections.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }
