// Package table names the sandboxes of the benchmark and their addresses.
package table

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"strings"
)

// Domain is the domain of the sandboxes.
const Domain = "sandbox.example.com"

// Max is the largest number of sandboxes.
const Max = 1 << 22

// ID is the ID of sandbox i, of 20 characters like a real one. Neighbours differ in many characters.
func ID(i int) string {
	return fmt.Sprintf("%020x", uint64(i)*0x9E3779B97F4A7C15)
}

// Addr is the address of sandbox i. All lie in 127.64.0.0/10, where a wildcard listener answers.
func Addr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{127, 64 | byte(i>>16), byte(i >> 8), byte(i)})
}

// Host is the host name of a port of sandbox i.
func Host(i int, port uint16) string { return fmt.Sprintf("%d-%s.%s", port, ID(i), Domain) }

// Dst is a port of sandbox i, as ip:port.
func Dst(i int, port uint16) string { return netip.AddrPortFrom(Addr(i), port).String() }

// Write writes n sandboxes to a file, a line each: host and destination.
func Write(file string, n int, port uint16) error {
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "%s %s\n", Host(i, port), Dst(i, port))
	}
	return os.WriteFile(file, []byte(text.String()), 0o600)
}

// Read returns the destinations by host, and that of the first line.
func Read(file string) (all map[string]string, first string, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	all = map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		host, dst, ok := strings.Cut(lines.Text(), " ")
		if !ok {
			return nil, "", fmt.Errorf("%s: a line without a destination: %q", file, lines.Text())
		}
		if first == "" {
			first = dst
		}
		all[host] = dst
	}
	return all, first, lines.Err()
}
