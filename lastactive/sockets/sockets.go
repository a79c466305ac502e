package sockets

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Socket is one end of an established TCP connection.
type Socket struct {
	Remote netip.AddrPort // never an IPv4-mapped IPv6 address
	// Cookie identifies the socket. The kernel does not reuse it until the machine restarts.
	Cookie uint64
	// Bytes is the sum of the bytes that the peer has acknowledged and the bytes received.
	Bytes uint64
}

// Read lists the established connections.
func Read() ([]Socket, error) {
	var all []Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		found, err := netlink.SocketDiagTCPInfo(family)
		if err != nil {
			return nil, fmt.Errorf("sockets: %w", err)
		}
		for _, s := range found {
			if s.InetDiagMsg.State != netlink.TCP_ESTABLISHED {
				continue
			}
			id := s.InetDiagMsg.ID
			addr, ok := netip.AddrFromSlice(id.Destination)
			if !ok || s.TCPInfo == nil {
				return nil, errors.New("sockets: the kernel lists one without address or statistics")
			}
			all = append(all, Socket{
				Remote: netip.AddrPortFrom(addr.Unmap(), id.DestinationPort),
				Cookie: uint64(id.Cookie[1])<<32 | uint64(id.Cookie[0]),
				Bytes:  s.TCPInfo.Bytes_acked + s.TCPInfo.Bytes_received,
			})
		}
	}
	return all, nil
}
