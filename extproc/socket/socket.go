package socket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// maxPath is what fits into a unix socket address (sockaddr_un).
const maxPath = 107

// Listen binds the socket at a temporary path and renames it over path, so that Envoy changes from a predecessor to
// this process without a gap. If ctx has ended it returns ctx's error and replaces nothing, because the path may belong
// to a successor.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	temporary := Temporary(path)
	if len(temporary) > maxPath {
		return nil, fmt.Errorf(
			"router socket: the temporary path %q has %d bytes, at most %d are possible: choose a shorter path",
			temporary, len(temporary), maxPath)
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("router socket: %w", err)
	}
	l, err := listenUnix(ctx, temporary)
	if err != nil {
		return nil, fmt.Errorf("router socket: %w", err)
	}
	l.SetUnlinkOnClose(false)        // the path may belong to a successor by then
	if err = ctx.Err(); err == nil { // checked as late as possible
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("router socket: %w", err), l.Close(), os.Remove(temporary))
	}
	return l, nil
}

// mode lets the user and the group of the router connect, as Envoy's admin socket does.
const mode = 0o660

// listenUnix listens at a path, with mode whatever the umask is. The mode is set before the socket listens: until
// then no process can connect.
func listenUnix(ctx context.Context, path string) (*net.UnixListener, error) {
	// bind(2) gives the file of a socket the mode of the socket itself, less the umask.
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		controlErr := c.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), mode) })
		return cmp.Or(controlErr, err)
	}}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	unix := l.(*net.UnixListener)
	// The umask may have made it narrower. No other process knows this path.
	if err := os.Chmod(path, mode); err != nil {
		unix.SetUnlinkOnClose(true)
		return nil, errors.Join(err, unix.Close())
	}
	return unix, nil
}

// Temporary is the path at which this process binds its socket before the rename.
func Temporary(path string) string { return fmt.Sprintf("%s.%d", path, os.Getpid()) }
