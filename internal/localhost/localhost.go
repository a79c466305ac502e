// Package localhost judges the Host of requests to a listener that only loopback
// protects. A page in a browser can have the name that it came from resolve to 127.0.0.1
// (DNS rebinding): such requests are of the page's own origin for the browser, and what
// shows them is the name in Host.
package localhost

import (
	"net"
	"net/netip"
	"strings"
)

// Hostname returns the name or address in the Host of a request, in lower case, without
// port, brackets and trailing dot.
func Hostname(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// Is reports whether a Hostname is this machine's for every browser: localhost, or a
// loopback address as a literal.
func Is(hostname string) bool {
	if hostname == "localhost" {
		return true
	}
	address, err := netip.ParseAddr(hostname)
	return err == nil && address.Unmap().IsLoopback()
}
