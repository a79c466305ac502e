package sockets_test

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/lastactive/sockets"
)

// find lists a connection. Another one can have the same remote end, so it is found by its
// cookie.
func find(t *testing.T, conn *net.TCPConn) (found []sockets.Socket) {
	t.Helper()
	all, err := sockets.Read()
	require.NoError(t, err)
	cookie := cookieOf(t, conn)
	for _, s := range all {
		if s.Cookie == cookie {
			found = append(found, s)
		}
	}
	return found
}

func cookieOf(t *testing.T, conn *net.TCPConn) (cookie uint64) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE) }))
	require.NoError(t, err)
	return cookie
}

func TestBytesOfBothDirectionsAreCounted(t *testing.T) {
	for name, address := range map[string]string{"IPv4": "127.0.0.1:0", "IPv6": "[::1]:0", "IPv4-mapped": "[::]:0"} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", address)
			require.NoError(t, err)
			defer l.Close()
			to := l.Addr().(*net.TCPAddr)
			if to.IP.IsUnspecified() {
				to = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: to.Port}
			}
			c, err := net.DialTCP("tcp", nil, to)
			require.NoError(t, err)
			defer c.Close()
			accepted, err := l.Accept()
			require.NoError(t, err)
			defer accepted.Close()
			s := accepted.(*net.TCPConn)

			before := find(t, s) // the server's end
			require.Len(t, before, 1)
			remote := netip.MustParseAddrPort(s.RemoteAddr().String())
			require.Equal(t, netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port()), before[0].Remote)
			_, err = c.Write(make([]byte, 1000))
			require.NoError(t, err)
			_, err = io.ReadFull(s, make([]byte, 1000))
			require.NoError(t, err)
			_, err = s.Write(make([]byte, 500))
			require.NoError(t, err)
			_, err = io.ReadFull(c, make([]byte, 500))
			require.NoError(t, err)
			require.Eventually(t, func() bool { // the kernel acknowledges late
				after := find(t, s)
				return len(after) == 1 && after[0].Bytes == before[0].Bytes+1500
			}, time.Minute, time.Millisecond)

			require.NotZero(t, before[0].Cookie)
			require.NoError(t, c.Close())
			_, err = s.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
			require.Empty(t, find(t, s), "not established")
		})
	}
}

func BenchmarkRead(b *testing.B) {
	for b.Loop() {
		if _, err := sockets.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
