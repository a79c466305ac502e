package soak

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

	"github.com/stretchr/testify/require"
)

// network is what connections pass that may be cut. They are told apart by who has
// opened them.
type network struct {
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup

	mu      sync.Mutex
	cuts    map[string]cut
	changed chan struct{} // closed and made anew when cuts changes
	open    map[net.Conn]string
}

// cut says what of somebody's connections does not arrive: what is sent by him, to
// him, or both.
type cut struct{ from, to bool }

func (c cut) String() string {
	switch c {
	case cut{from: true}:
		return "outgoing"
	case cut{to: true}:
		return "incoming"
	}
	return "both ways"
}

// newNetwork is closed when the test is over.
func newNetwork(t *testing.T) *network {
	n := &network{cuts: map[string]cut{}, changed: make(chan struct{}), open: map[net.Conn]string{}}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() {
		n.cancel()
		n.all.Wait()
	})
	return n
}

// cut holds back what somebody's connections carry, until it is called with nothing
// to cut: then it arrives.
func (n *network) cut(who string, c cut) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cuts[who] = c
	close(n.changed)
	n.changed = make(chan struct{})
}

// reset breaks somebody's connections.
func (n *network) reset(who string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c, owner := range n.open {
		if owner == who {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}
}

// arrives waits until what is held back for a reason does not apply any more. It
// returns false when the network is closed.
func (n *network) arrives(who string, held func(cut) bool) bool {
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

// relay listens on loopback and connects whoever comes to target. who says whose a
// connection is, by the two ends of it.
func (n *network) relay(target string, who func(client, listener netip.AddrPort) string) (netip.AddrPort, error) {
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
func (n *network) carry(client net.Conn, who, target string) {
	defer n.keep(client, who)()
	// A handshake needs both directions.
	if !n.arrives(who, func(c cut) bool { return c.from || c.to }) {
		return
	}
	server, err := net.DialTimeout("tcp", target, time.Second)
	if err != nil {
		return
	}
	defer n.keep(server, who)()
	var both sync.WaitGroup
	both.Go(func() { n.copy(server, client, who, func(c cut) bool { return c.from }) })
	both.Go(func() { n.copy(client, server, who, func(c cut) bool { return c.to }) })
	both.Wait()
}

// keep closes a connection when the network is closed or the result is called.
func (n *network) keep(c net.Conn, who string) func() {
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

// copy carries one direction. What it has read and may not deliver waits here, what
// comes after that in the kernel.
func (n *network) copy(to, from net.Conn, who string, held func(cut) bool) {
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

// owner finds which of some processes, by name, has the client's end of a connection
// on this machine; "" if none. See proc_pid_net(5).
func owner(client, listener netip.AddrPort, pids func() map[string][]int) string {
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

// What is cut off does not arrive, in the direction that is cut, and later it does.
func TestWhatIsCutArrivesLater(t *testing.T) {
	n := newNetwork(t)
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	received := make(chan string, 10)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				buffer := make([]byte, 10)
				for {
					count, err := c.Read(buffer)
					if err != nil {
						return
					}
					received <- string(buffer[:count])
					_, _ = c.Write(buffer[:count])
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = echo.Close()
		n.cancel()
		serving.Wait()
	})
	self := func() map[string][]int { return map[string][]int{"other": {1 << 30}, "self": {os.Getpid()}} }
	at, err := n.relay(echo.Addr().String(), func(client, listener netip.AddrPort) string { return owner(client, listener, self) })
	require.NoError(t, err)
	c, err := net.Dial("tcp", at.String())
	require.NoError(t, err)
	defer c.Close()
	answers := make(chan string, 10)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		buffer := make([]byte, 10)
		for {
			count, err := c.Read(buffer)
			if err != nil {
				return
			}
			answers <- string(buffer[:count])
		}
	}()
	send := func(text string) {
		t.Helper()
		_, err := c.Write([]byte(text))
		require.NoError(t, err)
	}
	send("one")
	require.Equal(t, "one", <-received)
	require.Equal(t, "one", <-answers)

	n.cut("other", cut{from: true, to: true}) // is nothing to us
	n.cut("self", cut{to: true})
	send("two")
	require.Equal(t, "two", <-received)
	require.Empty(t, answers)
	n.cut("self", cut{from: true})
	require.Equal(t, "two", <-answers)
	send("three")
	require.Empty(t, received)
	n.cut("self", cut{})
	require.Equal(t, "three", <-received)
	require.Equal(t, "three", <-answers)

	n.reset("self")
	<-reading
}
