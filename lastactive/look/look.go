// Package look asks Envoy what it holds open: one read of the page /clusters on its admin
// socket. The page counts the requests that are in progress at each host, or wait for a
// connection to it.
//
// A look is trusted only if
//
//   - Envoy has answered 200 with a whole body within 2 s, and both clusters of pods are
//     in it;
//   - the same Envoy process was there before and after it. The process is named by the
//     socket file it has made: an Envoy removes the file that it finds and binds another,
//     and the one before has ended by then;
//   - it is not the first at that process. The one before may have been the last that
//     knew of other requests, so whoever looks learns of the change first.
//
// If the socket refuses connections and Envoy has no connection to the router any more,
// Envoy has ended, and nothing is open at it: that is a look, too. Envoy listens on the
// socket for as long as it lives.
package look

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Most is how long a look may take.
const Most = 2 * time.Second

// clusters are those whose hosts are pods, as their lines begin: HTTP/1.1 and 2.
var clusters = [2]string{"pods_h1::", "pods_h2::"}

// Host is an address and port in one of the clusters.
type Host struct {
	netip.AddrPort
	HTTP2 bool
}

// Counts are what Envoy says of a host, all its entries together: each of Envoy's threads
// can have made one.
type Counts struct {
	Open    int // requests in progress, or waiting for a connection
	Entries int
}

// Look is what Envoy held open.
type Look struct {
	// Gateway names the place of this Envoy, and of those that follow it there, by 128
	// characters at most, in the same way for all readers.
	Gateway string
	// Hosts are those that Envoy has listed; nil: it has ended.
	Hosts map[Host]Counts
}

// Reader looks at the Envoy behind one socket.
type Reader struct {
	socket      string
	connections func() int
	boot        []byte      // of the machine
	known       unix.Stat_t // of the process that was looked at last
}

// New returns a Reader of an admin socket that has not looked yet. connections is how many
// of Envoy's connections the router has.
func New(socket string, connections func() int) (*Reader, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("look: %w", err)
	}
	return &Reader{socket: socket, connections: connections, boot: bytes.TrimSpace(boot)}, nil
}

// Look asks Envoy. An error says in a few words why it cannot be told what is open. One
// look at a time.
func (r *Reader) Look(ctx context.Context) (Look, error) {
	ctx, cancel := context.WithTimeout(ctx, Most)
	defer cancel()
	envoy, gateway, err := r.process()
	if err != nil {
		return Look{}, err
	}
	hosts, err := r.read(ctx)
	after, _, gone := r.process()
	switch {
	case gone != nil || after != envoy:
		return Look{}, errors.New("another Envoy began during the look")
	case errors.Is(err, syscall.ECONNREFUSED) && r.connections() == 0: // Envoy has ended
	case errors.Is(err, syscall.ECONNREFUSED):
		return Look{}, errors.New("the admin socket of Envoy refuses connections")
	case ctx.Err() != nil:
		return Look{}, errors.New("no answer of Envoy in time")
	case err != nil:
		return Look{}, err
	}
	if r.known != envoy {
		r.known = envoy
		return Look{}, errors.New("this was the first look at this Envoy")
	}
	return Look{gateway, hosts}, nil
}

// process names the Envoy that has made the socket file, and the directory of that.
func (r *Reader) process() (envoy unix.Stat_t, gateway string, err error) {
	var dir unix.Stat_t
	if err = unix.Stat(r.socket, &envoy); err == nil {
		err = unix.Stat(filepath.Dir(r.socket), &dir)
	}
	if err != nil {
		return envoy, "", fmt.Errorf("no admin socket of Envoy: %w", err)
	}
	return unix.Stat_t{Dev: envoy.Dev, Ino: envoy.Ino, Mtim: envoy.Mtim}, fmt.Sprintf("%s/%x/%x", r.boot, dir.Dev, dir.Ino), nil
}

func (r *Reader) read(ctx context.Context) (map[Host]Counts, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envoy/clusters", http.NoBody)
	if err != nil {
		return nil, err
	}
	// A connection of its own, which leads to the process that is there now.
	transport := http.Transport{DisableCompression: true, DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
	}}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("an answer of Envoy with status %d", response.StatusCode)
	}
	if response.ContentLength < 0 && len(response.TransferEncoding) == 0 {
		return nil, errors.New("an answer of Envoy without end") // so one that was cut looks like a whole one
	}
	return parse(response.Body)
}

// parse reads the page, whose lines on hosts are cluster::address::statistic::value.
func parse(page io.Reader) (map[Host]Counts, error) {
	hosts := map[Host]Counts{}
	var seen [len(clusters)]bool
	lines := bufio.NewScanner(page)
	for lines.Scan() {
		for i, cluster := range clusters {
			rest, ok := bytes.CutPrefix(lines.Bytes(), []byte(cluster))
			seen[i] = seen[i] || ok
			for j, statistic := range [...]string{"::rq_active::", "::rq_pending_active::"} {
				name, value, is := bytes.Cut(rest, []byte(statistic))
				if !ok || !is {
					continue
				}
				at, err := netip.ParseAddrPort(string(name))
				n, err2 := strconv.ParseUint(string(value), 10, 32)
				if err != nil || err2 != nil {
					return nil, errors.New("an answer of Envoy that is not understood")
				}
				h := Host{netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), i == 1}
				// Each entry has each statistic once.
				hosts[h] = Counts{hosts[h].Open + int(n), hosts[h].Entries + 1 - j}
			}
		}
	}
	if err := lines.Err(); err != nil {
		return nil, errors.New("an answer of Envoy that is not complete")
	}
	for i, cluster := range clusters {
		if !seen[i] {
			return nil, fmt.Errorf("an answer of Envoy without %s", cluster)
		}
	}
	return hosts, nil
}
