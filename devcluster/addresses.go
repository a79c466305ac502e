package devcluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// Clusters on one machine do not share addresses. Each has a block of its own, a
// /16 in 127.64.0.0/10. The first /20 of the block is for servers (the control plane
// is on .0.1). Each of the next seven is for one process node. The upper half is for
// pods without processes.
//
//	127.B.0.0/20  127.B.16.0/20 ... 127.B.112.0/20  127.B.128.0/17
const (
	firstBlock, blocks = 64, 64
	// MaxNodes is the largest number of process nodes of one cluster.
	MaxNodes = 7
)

// Ports from firstOwnPort to lastOwnPort lie below the range from which the kernel
// takes ports for outgoing connections and for listeners on port 0. So no other
// program gets one by chance between freeAddr and the caller's bind.
const firstOwnPort, lastOwnPort = 20000, 32767

// block is an address block that this process owns until free is called or the
// process dies.
type block struct {
	prefix netip.Prefix
	// hold is the lock of the block, a socket in the abstract namespace. The kernel
	// frees it when this process dies, it leaves no file behind, and its scope is
	// the network namespace, which is the scope of the addresses.
	hold net.Listener

	mu   sync.Mutex
	next uint16
}

func reserveBlock() (*block, error) {
	for i := range blocks {
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{127, byte(firstBlock + i), 0, 0}), 16)
		hold, err := net.Listen("unix", "@berth-addresses-"+prefix.String())
		if errors.Is(err, unix.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reserve addresses %s: %w", prefix, err)
		}
		return &block{prefix: prefix, hold: hold, next: firstOwnPort}, nil
	}
	return nil, fmt.Errorf("reserve addresses: all %d blocks of 127.64.0.0/10 are taken, stop a cluster", blocks)
}

func (b *block) free() error { return b.hold.Close() }

// server is the address of the cluster's servers.
func (b *block) server() netip.Addr { return b.prefix.Addr().Next() }

// node is the range of process node i, counted from 0.
func (b *block) node(i int) netip.Prefix {
	a := b.prefix.Addr().As4()
	a[2] = byte(16 * (i + 1))
	return netip.PrefixFrom(netip.AddrFrom4(a), 20)
}

// fake is the range of pods without processes.
func (b *block) fake() netip.Prefix {
	a := b.prefix.Addr().As4()
	a[2] = 128
	return netip.PrefixFrom(netip.AddrFrom4(a), 17)
}

// freeAddr returns the server address with a free port: preferred if that is free,
// else a port that it has not returned before.
func (b *block) freeAddr(preferred uint16) (netip.AddrPort, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var err error
	for port := preferred; b.next <= lastOwnPort; port, b.next = b.next, b.next+1 {
		if port == 0 {
			continue
		}
		a := netip.AddrPortFrom(b.server(), port)
		var l net.Listener
		if l, err = net.Listen("tcp", a.String()); err == nil {
			return a, l.Close()
		}
	}
	return netip.AddrPort{}, fmt.Errorf("no free port left on %s: %w", b.server(), err)
}
