package egress

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
)

// sockets returns how many connections to a port of this network namespace each address has that a process has
// accepted. Envoy and its router share the namespace of their pod.
func sockets(port uint16) (map[netip.Addr]int, error) {
	found := map[netip.Addr]int{}
	for _, path := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) && path == "/proc/self/net/tcp6" {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, fmt.Errorf("count connections: %w", err)
		}
		err = count(f, port, found)
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("count connections: %s: %w", path, err)
		}
	}
	return found, nil
}

// count adds the sockets of one table of the kernel (proc_net_tcp(5)). One that no process has, or no longer, has no
// inode.
func count(table io.Reader, port uint16, found map[netip.Addr]int) error {
	const local, remote, state, inode, columns = 1, 2, 3, 9, 10
	const timeWait = "06"
	suffix := fmt.Appendf(nil, ":%04X", port)
	lines := bufio.NewScanner(table)
	lines.Scan() // the names of the columns
	for lines.Scan() {
		fields := [columns][]byte{}
		n := 0
		for field := range bytes.FieldsSeq(lines.Bytes()) {
			fields[n] = field
			if n == local && !bytes.HasSuffix(field, suffix) || n == state && string(field) == timeWait {
				break
			}
			if n++; n == columns {
				break
			}
		}
		if n < columns || string(fields[inode]) == "0" {
			continue
		}
		peer, err := peerOf(fields[remote])
		if err != nil {
			return err
		}
		if peer.Port() != 0 { // 0: the socket that listens
			found[peer.Addr()]++
		}
	}
	return lines.Err()
}

// peerOf reads an address as the kernel writes it: words of 32 bits in the order of the machine, and the port.
func peerOf(text []byte) (netip.AddrPort, error) {
	var raw [16]byte
	address, portText, _ := bytes.Cut(text, []byte(":"))
	port, err := strconv.ParseUint(string(portText), 16, 16)
	if err != nil || len(address) != 8 && len(address) != 32 {
		return netip.AddrPort{}, fmt.Errorf("%q is no address", text)
	}
	n, err := hex.Decode(raw[:], address)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is no address", text)
	}
	for i := 0; i < n; i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, _ := netip.AddrFromSlice(raw[:n])
	return netip.AddrPortFrom(addr.Unmap(), uint16(port)), nil
}
