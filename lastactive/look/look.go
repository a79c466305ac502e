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

// MaxDuration bounds one look.
const MaxDuration = 2 * time.Second

// clusters are the prefixes of the lines about pods: the HTTP/1.1 and the HTTP/2 clusters, in turn.
var clusters = [...]string{"pods_h1::", "pods_h2::", "pods_h1_tls::", "pods_h2_tls::"}

// Host is an address and port in clusters of one protocol. Envoy can list several entries of one
// host, because each thread can create one, and each cluster.
type Host struct {
	netip.AddrPort
	HTTP2 bool
}

// Look is what Envoy held open.
type Look struct {
	// Gateway names this gateway in at most 128 characters. It is the same for all readers of
	// one socket path and for all Envoys that replace one another there.
	Gateway string
	// Hosts has, for each host that Envoy lists, how many requests are in progress or wait for a
	// connection. nil: Envoy has ended.
	Hosts map[Host]int
	// Entries is how many entries of pods Envoy's list has. It is at least len(Hosts). The duration
	// of a look grows with it.
	Entries int
}

// Reader looks at the Envoy behind one admin socket.
type Reader struct {
	socket      string
	connections func() int
	bootID      []byte
	lastEnvoy   unix.Stat_t // the process of the last look
}

// New returns a Reader of an admin socket that has not looked yet. connections returns how
// many connections Envoy has to the router.
func New(socket string, connections func() int) (*Reader, error) {
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("look: %w", err)
	}
	return &Reader{socket: socket, connections: connections, bootID: bytes.TrimSpace(bootID)}, nil
}

// Look asks Envoy. The error says in a few words why the look is not good. Look must not be
// called concurrently.
func (r *Reader) Look(ctx context.Context) (Look, error) {
	ctx, cancel := context.WithTimeout(ctx, MaxDuration)
	defer cancel()
	envoy, gateway, err := r.process()
	if err != nil {
		return Look{}, err
	}
	l, err := r.read(ctx)
	after, _, gone := r.process()
	switch {
	case gone != nil || after != envoy:
		return Look{}, errors.New("another Envoy began during the look")
	case errors.Is(err, syscall.ECONNREFUSED) && r.connections() == 0: // Envoy has ended
	case errors.Is(err, syscall.ECONNREFUSED):
		return Look{}, errors.New("the admin socket of Envoy refuses connections")
	case ctx.Err() != nil:
		return Look{}, errors.New("no answer from Envoy in time")
	case err != nil:
		return Look{}, err
	}
	if r.lastEnvoy != envoy {
		r.lastEnvoy = envoy
		return Look{}, errors.New("this was the first look at this Envoy")
	}
	l.Gateway = gateway
	return l, nil
}

// process identifies the Envoy that has bound the socket file, and the gateway by the
// directory of that file.
func (r *Reader) process() (envoy unix.Stat_t, gateway string, err error) {
	var dir unix.Stat_t
	if err = unix.Stat(r.socket, &envoy); err == nil {
		err = unix.Stat(filepath.Dir(r.socket), &dir)
	}
	if err != nil {
		return envoy, "", fmt.Errorf("no admin socket of Envoy: %w", err)
	}
	gateway = fmt.Sprintf("%s/%x/%x", r.bootID, dir.Dev, dir.Ino)
	return unix.Stat_t{Dev: envoy.Dev, Ino: envoy.Ino, Mtim: envoy.Mtim}, gateway, nil
}

func (r *Reader) read(ctx context.Context) (l Look, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envoy/clusters", http.NoBody)
	if err != nil {
		return Look{}, err
	}
	// A new connection reaches the process that has the socket now.
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
	}
	transport := http.Transport{DisableCompression: true, DisableKeepAlives: true, DialContext: dial}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return Look{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return Look{}, fmt.Errorf("an answer from Envoy with status %d", response.StatusCode)
	}
	if response.ContentLength < 0 && len(response.TransferEncoding) == 0 {
		// A truncated body would look complete.
		return Look{}, errors.New("the answer of Envoy has no length")
	}
	return parse(response.Body)
}

// parse reads the page. Its lines about hosts are cluster::address::statistic::value.
func parse(page io.Reader) (l Look, err error) {
	l.Hosts = map[Host]int{}
	var seen [len(clusters)]bool
	lines := bufio.NewScanner(page)
	for lines.Scan() {
		for i, cluster := range clusters {
			rest, ok := bytes.CutPrefix(lines.Bytes(), []byte(cluster))
			if !ok {
				continue
			}
			seen[i] = true
			for j, statistic := range [...]string{"::rq_active::", "::rq_pending_active::"} {
				name, value, is := bytes.Cut(rest, []byte(statistic))
				if !is {
					continue
				}
				at, err := netip.ParseAddrPort(string(name))
				n, err2 := strconv.ParseUint(string(value), 10, 32)
				if err != nil || err2 != nil {
					return Look{}, errors.New("the answer of Envoy has an invalid line")
				}
				if j == 0 {
					l.Entries++ // each entry has one such line
				}
				l.Hosts[Host{netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), i%2 == 1}] += int(n)
			}
		}
	}
	if err := lines.Err(); err != nil {
		return Look{}, errors.New("the answer of Envoy is not complete")
	}
	for i, cluster := range clusters {
		if !seen[i] {
			return Look{}, fmt.Errorf("the answer of Envoy has no %s", cluster)
		}
	}
	return l, nil
}
