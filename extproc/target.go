package extproc

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

// Hosts says which host names mean what. Names are in lower case, without a
// port and without a trailing dot; see ValidDomain.
type Hosts struct {
	// Domain is what follows the label of a sandbox. Under it stand the names
	// <port>-<id>.<domain>, <port>-<id>-<client id>.<domain> and <id>.<domain>, which
	// nothing else in a request can override.
	Domain string
	// Gateways are names under which the request itself says which sandbox it
	// is for. Domain is always one.
	Gateways []string
	// Paths lets the path say it, as /sandboxes/<id>/<port>/rest, where no
	// header does.
	Paths bool
}

// Target is what a request names.
type Target struct {
	ID string
	// Port is 0 when none is named: the pool's default port is meant.
	Port uint16
	// Path replaces the request's path. Empty: the path stays.
	Path string
}

// The headers that name a sandbox at a gateway: those of the E2B SDKs, and the
// same without the brand.
const (
	headerE2BID   = "e2b-sandbox-id"
	headerE2BPort = "e2b-sandbox-port"
	headerID      = "x-sandbox-id"
	headerPort    = "x-sandbox-port"
)

// pathPrefix begins a path that names a sandbox.
const pathPrefix = "/sandboxes/"

// target says which sandbox and port a request is for. It is the only place
// where that is decided.
func (h *Hosts) target(r *request) (Target, *apierror.Error) {
	host, ok := hostName(r.authority)
	if !ok {
		return Target{}, apierror.New(apierror.BadHost, "host %q: what follows the colon is not a port", clip(r.authority))
	}
	switch {
	case host != h.Domain && !slices.Contains(h.Gateways, host):
		return h.byHost(host, r.authority)
	case r.namesTarget():
		return byHeaders(r)
	case h.Paths:
		return byPath(r.path)
	}
	return Target{}, apierror.New(apierror.BadTarget, "at host %q the header E2b-Sandbox-Id or X-Sandbox-Id must name the sandbox; or use the host <port>-<sandbox id>.%s", clip(r.authority), h.Domain)
}

// hostName is an authority in lower case, without its port and one trailing dot.
// It is false if what follows a colon is not a port.
func hostName(authority string) (string, bool) {
	host := lower(authority)
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		if _, ok := portNumber(host[i+1:]); !ok {
			return "", false
		}
		host = host[:i]
	}
	return strings.TrimSuffix(host, "."), true
}

// byHost reads <port>-<id>.<domain> or <id>.<domain>. Nothing else is accepted:
// in particular no comma, which is what two Host lines become, and nothing
// beyond ASCII, some of which turns into a-z in lower case.
func (h *Hosts) byHost(host, authority string) (Target, *apierror.Error) {
	label, found := strings.CutSuffix(host, "."+h.Domain)
	if !found {
		return Target{}, apierror.New(apierror.BadHost, "host %q is not <port>-<sandbox id>.%s", clip(authority), h.Domain)
	}
	var t Target
	id := label
	// A client ID needs a port before it: <id>-<client id> could be a port and an ID.
	if port, rest, found := strings.Cut(label, "-"); found {
		if t.Port, found = portNumber(port); !found {
			return Target{}, badPort("in host", port)
		}
		id = rest
	}
	var ok bool
	if t.ID, ok = sandboxID(id); !ok {
		return Target{}, apierror.New(apierror.BadHost, "sandbox ID %q in host %q: %s", clip(id), clip(authority), idRule)
	}
	return t, nil
}

// byHeaders reads the headers of both families. Where both are sent they must
// say the same.
func byHeaders(r *request) (Target, *apierror.Error) {
	id, err := only(headerE2BID, r.e2bID, headerID, r.id)
	if err != nil {
		return Target{}, apierror.New(apierror.BadTarget, "%v", err)
	}
	port, err := only(headerE2BPort, r.e2bPort, headerPort, r.port)
	if err != nil {
		return Target{}, apierror.New(apierror.BadTarget, "%v", err)
	}
	if len(r.e2bID)+len(r.id) == 0 {
		return Target{}, apierror.New(apierror.BadTarget, "a header names a port, but neither E2b-Sandbox-Id nor X-Sandbox-Id names a sandbox")
	}
	var t Target
	var ok bool
	if t.ID, ok = sandboxID(lower(id)); !ok {
		return Target{}, apierror.New(apierror.BadTarget, "sandbox ID %q in a header: %s", clip(id), idRule)
	}
	if len(r.e2bPort)+len(r.port) > 0 {
		if t.Port, ok = portNumber(port); !ok {
			return Target{}, badPort("in a header", port)
		}
	}
	return t, nil
}

// sandboxID reads an ID as it is named in a request. It may be followed by a dash and
// a client ID, which the E2B SDKs of version 1 append and which names nothing.
func sandboxID(s string) (string, bool) {
	id, client, found := strings.Cut(s, "-")
	if !sandboxid.Valid(id) || found && !sandboxid.Valid(client) {
		return "", false
	}
	return id, true
}

// only returns the one value that two headers agree on, "" if there is none.
func only(name1 string, values1 []string, name2 string, values2 []string) (string, error) {
	switch {
	case len(values1) > 1:
		return "", fmt.Errorf("the header %s is sent more than once", name1)
	case len(values2) > 1:
		return "", fmt.Errorf("the header %s is sent more than once", name2)
	case len(values1) == 1 && len(values2) == 1 && values1[0] != values2[0]:
		return "", fmt.Errorf("the headers %s and %s contradict each other", name1, name2)
	}
	for _, value := range slices.Concat(values1, values2) {
		return value, nil
	}
	return "", nil
}

// byPath reads /sandboxes/<id>/<port>/rest, which becomes /rest. The query stays.
func byPath(path string) (Target, *apierror.Error) {
	bad := func(format string, args ...any) (Target, *apierror.Error) {
		return Target{}, apierror.New(apierror.BadPath, "path %q: "+format, append([]any{clip(path)}, args...)...)
	}
	path, query, asked := strings.Cut(path, "?")
	rest, found := strings.CutPrefix(path, pathPrefix)
	if !found {
		return bad("must be /sandboxes/<sandbox id>/<port>/..., or a header must name the sandbox")
	}
	if err := dotSegment(path); err != nil {
		return bad("%v", err)
	}
	id, rest, found := strings.Cut(rest, "/")
	if !found {
		return bad("must be /sandboxes/<sandbox id>/<port>/...")
	}
	port, rest, _ := strings.Cut(rest, "/")
	t := Target{Path: "/" + rest}
	if t.ID, found = sandboxID(lower(id)); !found {
		return bad("sandbox ID %q: %s", clip(id), idRule)
	}
	if t.Port, found = portNumber(port); !found {
		return Target{}, badPort("in path", port)
	}
	if asked {
		t.Path += "?" + query
	}
	return t, nil
}

var errDotSegment = errors.New(`must not have "." or ".." as a segment, also not encoded`)

// dotSegment refuses a path that somebody on the way may shorten: by then
// another sandbox might be named, or a prefix that the sandbox does not know.
// What separates segments is what some program takes for a separator.
func dotSegment(path string) error {
	plain := encodedPath.Replace(path)
	for segment := range strings.FieldsFuncSeq(plain, func(r rune) bool { return r == '/' || r == '\\' }) {
		segment, _, _ = strings.Cut(segment, ";") // a parameter, as "..;x"
		if segment == "." || segment == ".." {
			return errDotSegment
		}
	}
	return nil
}

// encodedPath decodes what matters to dotSegment.
var encodedPath = strings.NewReplacer("%2e", ".", "%2E", ".", "%2f", "/", "%2F", "/", "%5c", `\`, "%5C", `\`, "%3b", ";", "%3B", ";")

var idRule = fmt.Sprintf("must be 1 to %d characters of a-z and 0-9", sandboxid.MaxLen)

func badPort(where, port string) *apierror.Error {
	return apierror.New(apierror.BadPort, "port %q %s: must be 1 to 65535, in digits, without leading zeros", clip(port), where)
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

// portNumber reads a port, 1 to 65535, in digits only and without leading zeros.
func portNumber(s string) (uint16, bool) {
	if s == "" || s[0] < '1' || s[0] > '9' { // ParseUint takes leading zeros
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil
}

// Check says what is wrong with the names.
func (h *Hosts) Check() error {
	if !ValidDomain(h.Domain) {
		return fmt.Errorf("domain %q: must be a DNS name in lower case without a trailing dot", h.Domain)
	}
	for _, g := range h.Gateways {
		if !ValidDomain(g) {
			return fmt.Errorf("gateway host %q: must be a DNS name in lower case without a trailing dot", g)
		}
		if t, refusal := h.byHost(g, g); refusal == nil && (t.Port != 0 || len(t.ID) == sandboxid.Len) {
			return fmt.Errorf("gateway host %q: could be the host of a sandbox; choose another", g)
		}
	}
	return nil
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
