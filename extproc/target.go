package extproc

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// Target is what a host names.
type Target struct {
	ID string
	// Port is 0 when the host names none: the pool's default port is meant.
	Port uint16
}

// hostError says what is wrong with a host.
type hostError struct {
	port bool // the port label is wrong, the rest is not
	text string
}

func (e *hostError) Error() string { return e.text }

// parseHost reads <port>-<id>.<domain> or <id>.<domain>, in any case, with an
// optional trailing dot and an optional :port. domain is in lower case without
// either. Nothing else is accepted: in particular no comma, which is what two
// Host lines become, and nothing beyond ASCII, some of which turns into a-z in
// lower case.
func parseHost(authority, domain string) (Target, error) {
	host := lower(authority)
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		if !portNumber(host[i+1:]) {
			return Target{}, &hostError{text: fmt.Sprintf("host %q: what follows the colon is not a port", clip(authority))}
		}
		host = host[:i]
	}
	host = strings.TrimSuffix(host, ".")
	label, found := strings.CutSuffix(host, "."+domain)
	if !found {
		return Target{}, &hostError{text: fmt.Sprintf("host %q is not <port>-<sandbox id>.%s", clip(authority), domain)}
	}
	var t Target
	id := label
	if port, rest, found := strings.Cut(label, "-"); found {
		if !portNumber(port) {
			return Target{}, &hostError{port: true, text: fmt.Sprintf("port %q in host %q: must be 1 to 65535, in digits, without leading zeros", clip(port), clip(authority))}
		}
		n, _ := strconv.ParseUint(port, 10, 16) // portNumber has checked it
		t.Port, id = uint16(n), rest
	}
	if !sandboxid.Valid(id) {
		return Target{}, &hostError{text: fmt.Sprintf("sandbox ID %q in host %q: must be 1 to %d characters of a-z and 0-9", clip(id), clip(authority), sandboxid.MaxLen)}
	}
	t.ID = id
	return t, nil
}

// lower is s with A-Z in lower case and every other byte as it is.
func lower(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			r += 'a' - 'A'
		}
		return r
	}, s)
}

// portNumber reports whether s is a port, 1 to 65535, in digits only and without
// leading zeros.
func portNumber(s string) bool {
	if s == "" || len(s) > 5 || s[0] == '0' {
		return false
	}
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	_, err := strconv.ParseUint(s, 10, 16)
	return err == nil
}

// ValidDomain reports whether domain can be served: DNS labels in lower case,
// no trailing dot.
func ValidDomain(domain string) bool {
	if domain == "" || len(domain) > 189 { // 253 less the sandbox's label and a dot
		return false
	}
	for label := range strings.SplitSeq(domain, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return false
			}
		}
	}
	return true
}

// clip keeps a client's bytes in messages short.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
