package localhost

import (
	"net"
	"net/netip"
	"strings"
)

// Hostname returns the name or address in a Host header, in lower case, without port, brackets
// and trailing dot.
func Hostname(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// Is reports whether every browser resolves a Hostname to this machine: localhost, or a literal
// loopback address.
func Is(hostname string) bool {
	if hostname == "localhost" {
		return true
	}
	address, err := netip.ParseAddr(hostname)
	return err == nil && address.Unmap().IsLoopback()
}
