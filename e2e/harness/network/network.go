// Package network has relays for the connections of processes, so that a test can cut them. Bytes
// that are held back by a cut arrive when it ends, as with TCP.
package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Network has relays through which connections pass. The owner of a connection is the
// process that has opened it, by a name that the test gives it.
type Network struct {
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup

	mu      sync.Mutex
	cuts    map[string]Cut
	changed chan struct{} // closed and made anew when cuts changes
	open    map[net.Conn]string
}

// Cut says which direction of the connections of an owner is held back: From the owner, To
// the owner, or both.
type Cut struct{ From, To bool }

// New returns a network that is closed when the test is over.
func New(t testing.TB) *Network {
	n := &Network{cuts: map[string]Cut{}, changed: make(chan struct{}), open: map[net.Conn]string{}}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() {
		n.cancel()
		n.all.Wait()
	})
	return n
}

// Cut holds back what the connections of an owner carry. It arrives when Cut is called with
// nothing to cut.
func (n *Network) Cut(who string, c Cut) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cuts[who] = c
	close(n.changed)
	n.changed = make(chan struct{})
}

// Reset breaks the connections of an owner.
func (n *Network) Reset(who string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c, owner := range n.open {
		if owner == who {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}
}

// arrives waits while held says so of the owner's cut. It returns false when the network is
// closed.
func (n *Network) arrives(who string, held func(Cut) bool) bool {
	for {
		n.mu.Lock()
		c, changed := n.cuts[who], n.changed
		n.mu.Unlock()
		if !held(c) {
			return n.ctx.Err() == nil
		}
		select {
		case <-changed:
		case <-n.ctx.Done():
			return false
		}
	}
}

// Relay listens on loopback and connects each client to target. who names the owner of a
// connection, by the two ends of it.
func (n *Network) Relay(target string, who func(client, listener netip.AddrPort) string) (netip.AddrPort, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("relay: %w", err)
	}
	context.AfterFunc(n.ctx, func() { _ = listener.Close() })
	at := listener.Addr().(*net.TCPAddr).AddrPort()
	n.all.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return // closed
			}
			n.all.Go(func() { n.carry(c, who(c.RemoteAddr().(*net.TCPAddr).AddrPort(), at), target) })
		}
	})
	return at, nil
}

// carry takes care of one connection.
func (n *Network) carry(client net.Conn, who, target string) {
	defer n.keep(client, who)()
	// A handshake needs both directions.
	if !n.arrives(who, func(c Cut) bool { return c.From || c.To }) {
		return
	}
	server, err := net.DialTimeout("tcp", target, time.Second)
	if err != nil {
		return
	}
	defer n.keep(server, who)()
	var both sync.WaitGroup
	both.Go(func() { n.copy(server, client, who, func(c Cut) bool { return c.From }) })
	both.Go(func() { n.copy(client, server, who, func(c Cut) bool { return c.To }) })
	both.Wait()
}

// keep closes a connection when the network is closed or the result is called.
func (n *Network) keep(c net.Conn, who string) func() {
	n.mu.Lock()
	n.open[c] = who
	n.mu.Unlock()
	stop := context.AfterFunc(n.ctx, func() { _ = c.Close() })
	return func() {
		stop()
		_ = c.Close()
		n.mu.Lock()
		delete(n.open, c)
		n.mu.Unlock()
	}
}

// copy carries one direction. During a cut one buffer waits here, and the bytes after it wait in
// the kernel.
func (n *Network) copy(to, from net.Conn, who string, held func(Cut) bool) {
	buffer := make([]byte, 32<<10)
	for {
		count, err := from.Read(buffer)
		if !n.arrives(who, held) {
			return
		}
		if count > 0 {
			if _, err := to.Write(buffer[:count]); err != nil {
				_ = from.Close()
				return
			}
		}
		if errors.Is(err, io.EOF) {
			_ = to.(*net.TCPConn).CloseWrite()
			return
		}
		if err != nil {
			_ = to.Close()
			return
		}
	}
}

// Owner finds which of some processes, by name, has the client's end of a connection
// on this machine; "" if none. See proc_pid_net(5).
func Owner(client, listener netip.AddrPort, pids func() map[string][]int) string {
	raw, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return ""
	}
	inode := ""
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) > 9 && f[1] == kernelAddress(client) && f[2] == kernelAddress(listener) {
			inode = "socket:[" + f[9] + "]"
		}
	}
	for name, all := range pids() {
		for _, pid := range all {
			files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
			for _, file := range files {
				if to, err := os.Readlink(file); err == nil && to == inode {
					return name
				}
			}
		}
	}
	return ""
}

// kernelAddress is an IPv4 address and port as /proc/net/tcp has it on a little-endian
// machine, which all are that Envoy is built for.
func kernelAddress(a netip.AddrPort) string {
	b := a.Addr().As4()
	return fmt.Sprintf("%02X%02X%02X%02X:%04X", b[3], b[2], b[1], b[0], a.Port())
}
