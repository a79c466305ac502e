package stack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"regexp"

	"golang.org/x/sys/unix"
)

// mistake matches the lines of Envoy's statistics that count what neither the router nor the bootstrap may cause:
// answers of the router that Envoy does not obey, and scripts that fail. It does not match zero.
var mistake = regexp.MustCompile(`^envoy_http_(ext_proc_(clear_route_cache_\w*(ignored|disabled)\w*|` +
	`rejected_header_mutations|override_message_timeout_ignored|spurious_msgs_received|http_not_ok_resp_received)|` +
	`lua_\w*errors)\{.*\} [^0]`)

// Mistakes returns an error that lists what an Envoy counts of mistakes of its router and its bootstrap. An Envoy
// that does not answer has none.
func Mistakes(ctx context.Context, admin *http.Client) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envoy/stats/prometheus", http.NoBody)
	if err != nil {
		return err
	}
	response, err := admin.Do(r)
	if err != nil {
		return nil //nolint:nilerr // killed, paused, or not started
	}
	defer response.Body.Close()
	var all []error
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if mistake.Match(lines.Bytes()) {
			all = append(all, fmt.Errorf("a mistake that Envoy counts: %s", lines.Text()))
		}
	}
	return errors.Join(append(all, lines.Err())...)
}

// reserve finds a free port of 127.0.0.1. Until free is called, only sockets with
// SO_REUSEPORT can bind it. Envoy sets that option. The kernel does not choose the
// port for a listener on port 0.
func reserve() (addr netip.AddrPort, free func() error, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return addr, nil, fmt.Errorf("reserve a port: %w", os.NewSyscallError("socket", err))
	}
	free = func() error { return unix.Close(fd) }
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	var bound unix.Sockaddr
	if err == nil {
		bound, err = unix.Getsockname(fd)
	}
	if err != nil {
		_ = free()
		return addr, nil, fmt.Errorf("reserve a port of 127.0.0.1: %w", err)
	}
	at := bound.(*unix.SockaddrInet4)
	return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port)), free, nil
}
