package socket

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
)

// MaxConnections bounds the open connections. Envoy has one for each of its workers, and the chart allows 1,024 of
// these.
const MaxConnections = 1024

// Connections counts the open connections of a server.
type Connections struct {
	log  *zap.Logger
	open atomic.Int64
}

// NewConnections returns a count of no connections. The log, which should be limited, gets those that are refused.
func NewConnections(log *zap.Logger) *Connections { return &Connections{log: log} }

// Open returns how many connections are open.
func (n *Connections) Open() int { return int(n.open.Load()) }

// Limit counts the connections of a listener, and closes those above MaxConnections at once.
func (n *Connections) Limit(l net.Listener) net.Listener { return limited{l, n} }

type limited struct {
	net.Listener
	all *Connections
}

func (l limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.all.open.Add(1) <= MaxConnections {
			return &counted{Conn: c, all: l.all}, nil
		}
		l.all.open.Add(-1)
		_ = c.Close()
		l.all.log.Warn("a connection to the router's socket was closed: too many are open", zap.Int("open", MaxConnections))
	}
}

type counted struct {
	net.Conn
	all  *Connections
	once sync.Once
}

func (c *counted) Close() error {
	c.once.Do(func() { c.all.open.Add(-1) })
	return c.Conn.Close()
}

// CloseWrite ends the direction to the peer.
func (c *counted) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}
