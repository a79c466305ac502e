// Package pipetest has connections for tests of servers: net.Pipe has no buffer at all,
// and its deadlines are of the synctest bubble that it is made in.
package pipetest

import (
	"net"
	"sync"
)

// Listener hands the far ends of its connections to whoever accepts.
type Listener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
	near   []net.Conn
}

// Listen returns a Listener. It belongs to the bubble that it is made in.
func Listen() *Listener {
	return &Listener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Connect returns the client's end of a connection that was accepted. Like HangUp it is
// called from one goroutine.
func (l *Listener) Connect() net.Conn {
	near, far := net.Pipe()
	l.conns <- far
	l.near = append(l.near, near)
	return near
}

// HangUp closes the clients' ends of all connections.
func (l *Listener) HangUp() {
	for _, c := range l.near {
		_ = c.Close() // it never fails
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

// Close implements net.Listener. It leaves connections alone.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }
