package extproc

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/routecache"
)

// Hosts are the host names that the router serves. Names are in lower case, without a port
// and without a trailing dot; see ValidDomain.
type Hosts struct {
	// Domain is the parent of all sandbox host names: <port>-<id>.<domain>,
	// <port>-<id>-<client id>.<domain> and <id>.<domain>. Nothing else in a request can
	// override a sandbox host name.
	Domain string
	// Gateways are hosts at which headers, or the path, name the sandbox. Domain is always
	// one of them.
	Gateways []string
	// Paths allows the path to name the sandbox, as /sandboxes/<id>/<port>/rest, if no header
	// does.
	Paths bool
}

// Target is the sandbox and port that a request names.
type Target struct {
	// ID is zero if no sandbox can have the ID that the request names.
	ID sandboxid.Key
	// foreign is that ID then.
	foreign string
	// Port is 0 if the request names none. The pool's default port then applies.
	Port uint16
	// Path replaces the request's path. Empty: the path stays.
	Path string
}

// refuse returns the refusal of a request for this target.
func (t Target) refuse(reason apierror.Reason, message string) *apierror.Error {
	e := apierror.New(reason, "%s", message)
	e.SandboxID, e.AnyOrigin = t.name(), t.Port == sandboxaccess.AgentPort
	return e
}

// name is the ID that the request names.
func (t Target) name() string { return cmp.Or(t.foreign, t.ID.String()) }

// The headers that name a sandbox at a gateway host: those of the E2B SDKs, and the same
// without the brand.
const (
	headerE2BID   = "e2b-sandbox-id"
	headerE2BPort = "e2b-sandbox-port"
	headerID      = "x-sandbox-id"
	headerPort    = "x-sandbox-port"
)

// pathPrefix is the prefix of a path that names a sandbox.
const pathPrefix = "/sandboxes/"

// target returns the sandbox and port that a request is for. No other code selects them.
func (h *Hosts) target(r *request) (Target, *apierror.Error) {
	host, ok := hostName(r.authority)
	if !ok {
		return Target{}, apierror.New(apierror.BadHost, "host %q: what follows the colon is not a port", clip(r.authority))
	}
	switch {
	case !h.gateway(host):
		return h.byHost(host, r.authority)
	case r.namesTarget():
		return byHeaders(r)
	case h.Paths && string(r.path) != "/":
		return byPath(string(r.path))
	}
	home := apierror.New(apierror.NotFound, "nothing is served at host %q itself: a sandbox is at <port>-<sandbox id>.%s, "+
		"or the header E2b-Sandbox-Id or X-Sandbox-Id names it; the API is at %s if the operator serves it there",
		clip(r.authority), h.Domain, h.api())
	home.Home = h.Domain
	return Target{}, home
}

// readsPath reports whether a decision about a request reads its path: to find the sandbox, or because some paths open
// the agent's port without its token.
func (h *Hosts) readsPath(r *request) bool {
	return h.Paths && h.shared(r) && !r.namesTarget() ||
		bytes.HasPrefix(r.path, []byte(pathFiles)) || bytes.HasPrefix(r.path, []byte(pathHealth))
}

// gateway reports whether headers name the sandbox at this host. A host is in the form of hostName.
func (h *Hosts) gateway(host []byte) bool {
	return string(host) == h.Domain || slices.ContainsFunc(h.Gateways, func(g string) bool { return string(host) == g })
}

// api returns the host of the API. Envoy sends its requests to the API and does not ask the router.
func (h *Hosts) api() string { return sandboxid.Reserved + "." + h.Domain }

// hostName returns an authority in lower case, without its port and without one trailing
// dot. It returns false if the text after the last colon is not a port.
func hostName(authority []byte) ([]byte, bool) {
	host := lower(authority)
	if i := bytes.LastIndexByte(host, ':'); i >= 0 {
		if _, ok := portNumber(host[i+1:]); !ok {
			return nil, false
		}
		host = host[:i]
	}
	if n := len(host); n > 0 && host[n-1] == '.' {
		host = host[:n-1]
	}
	return host, true
}

// cutDomain returns what precedes ".<domain>" in a host in the form of hostName.
func (h *Hosts) cutDomain(host []byte) (label []byte, found bool) {
	end := len(host) - len(h.Domain) - 1
	if end < 0 || host[end] != '.' || string(host[end+1:]) != h.Domain {
		return nil, false
	}
	return host[:end], true
}

// byHost reads <port>-<id>.<domain> or <id>.<domain>. It refuses everything else, in
// particular a comma, which results from two Host lines, and any character beyond ASCII,
// because some of them become a-z in lower case.
func (h *Hosts) byHost(host, authority []byte) (Target, *apierror.Error) {
	label, found := h.cutDomain(host)
	if !found {
		return Target{}, apierror.New(apierror.BadHost,
			"host %q is not <port>-<sandbox id>.%s, and not a gateway host (the router's --gateway-hosts), at which a header names the sandbox",
			clip(authority), h.Domain)
	}
	if string(label) == sandboxid.Reserved {
		return Target{}, apierror.New(apierror.NotFound,
			"the API is not served at host %q; ask the operator for its address (E2B_API_URL, BERTH_API_URL)", clip(authority))
	}
	var t Target
	id := label
	// A client ID requires a port: <id>-<client id> alone could be a port and an ID.
	if port, rest, found := bytes.Cut(label, dash); found {
		if t.Port, found = portNumber(port); !found {
			return Target{}, badPort("in host", port)
		}
		id = rest
	}
	if !t.setID(id) {
		return Target{}, apierror.New(apierror.BadHost, "sandbox ID %q in host %q: %s", clip(id), clip(authority), idRule)
	}
	return t, nil
}

// links returns the URL of a port of the sandbox that is open, for a request whose host named the
// sandbox. It has the scheme and the listener's port of the request.
func (h *Hosts) links(r *request, id sandboxid.Key, route routecache.Route) []string {
	host, _ := hostName(r.authority)
	if _, named := h.cutDomain(host); !named || h.gateway(host) {
		return nil
	}
	open := route.Ports.List()
	if route.Ports.Allows(route.DefaultPort) {
		open = []uint16{route.DefaultPort}
	}
	if len(open) == 0 || open[0] == 0 {
		return nil
	}
	listener := ""
	if i := bytes.LastIndexByte(r.authority, ':'); i >= 0 { // hostName has checked that it is a port
		listener = string(r.authority[i:])
	}
	return []string{fmt.Sprintf("//%d-%s.%s%s/", open[0], id, h.Domain, listener)}
}

// byHeaders reads the headers of both families. If a request has both, they must agree.
func byHeaders(r *request) (Target, *apierror.Error) {
	id, err := only(headerE2BID, r.e2bID, headerID, r.id)
	if err != nil {
		return Target{}, apierror.New(apierror.BadTarget, "%v", err)
	}
	port, err := only(headerE2BPort, r.e2bPort, headerPort, r.port)
	if err != nil {
		return Target{}, apierror.New(apierror.BadTarget, "%v", err)
	}
	if r.e2bID.n+r.id.n == 0 {
		return Target{}, apierror.New(apierror.BadTarget,
			"a header names a port, but neither E2b-Sandbox-Id nor X-Sandbox-Id names a sandbox")
	}
	var t Target
	if !t.setID(lower(id)) {
		return Target{}, apierror.New(apierror.BadTarget, "sandbox ID %q in a header: %s", clip(id), idRule)
	}
	if r.e2bPort.n+r.port.n > 0 {
		var ok bool
		if t.Port, ok = portNumber(port); !ok {
			return Target{}, badPort("in a header", port)
		}
	}
	return t, nil
}

// setID reads the sandbox ID of a request. A dash and a client ID may follow, which
// version 1 of the E2B SDKs appends. The client ID has no meaning here.
func (t *Target) setID(s []byte) (valid bool) {
	id, client, found := bytes.Cut(s, dash)
	if !sandboxid.Valid(id) || found && !sandboxid.Valid(client) {
		return false
	}
	var ok bool
	if t.ID, ok = sandboxid.KeyOf(id); !ok {
		t.foreign = string(id)
	}
	return true
}

var dash = []byte("-")

// only returns the one value of two headers that must agree, or nil if neither was sent.
func only(name1 string, values1 values, name2 string, values2 values) ([]byte, error) {
	switch {
	case values1.n > 1:
		return nil, fmt.Errorf("the header %s is sent more than once", name1)
	case values2.n > 1:
		return nil, fmt.Errorf("the header %s is sent more than once", name2)
	case values1.n == 1 && values2.n == 1 && !bytes.Equal(values1.first, values2.first):
		return nil, fmt.Errorf("the headers %s and %s contradict each other", name1, name2)
	case values1.n == 1:
		return values1.first, nil
	}
	return values2.first, nil
}

// byPath reads /sandboxes/<id>/<port>/rest. The sandbox gets /rest and the query.
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
	if !t.setID(lower([]byte(id))) {
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

// dotSegment refuses a path that a proxy might shorten, because the result could name
// another sandbox or leave the part of the path that is the sandbox's own. It splits at
// every character that some program treats as a separator.
func dotSegment(path string) error {
	plain := encodedPath.Replace(path)
	for segment := range strings.FieldsFuncSeq(plain, func(r rune) bool { return r == '/' || r == '\\' }) {
		segment, _, _ = strings.Cut(segment, ";") // cut a parameter, as in "..;x"
		if segment == "." || segment == ".." {
			return errDotSegment
		}
	}
	return nil
}

// encodedPath decodes the characters that dotSegment compares.
var encodedPath = strings.NewReplacer("%2e", ".", "%2E", ".", "%2f", "/", "%2F", "/",
	"%5c", `\`, "%5C", `\`, "%3b", ";", "%3B", ";")

var idRule = fmt.Sprintf("must be 1 to %d characters of a-z and 0-9, and not %q", sandboxid.MaxLen, sandboxid.Reserved)

func badPort[T string | []byte](where string, port T) *apierror.Error {
	return apierror.New(apierror.BadPort,
		"port %q %s: must be 1 to 65535, in digits, without leading zeros", clip(port), where)
}

// lower returns s with A-Z in lower case and every other byte unchanged. It returns s itself, and does
// not allocate, if it has no A-Z. It never changes s, because refusals show the client's own spelling.
func lower(s []byte) []byte {
	upper := func(c byte) bool { return 'A' <= c && c <= 'Z' }
	for i, c := range s {
		if !upper(c) {
			continue
		}
		s = slices.Clone(s)
		for ; i < len(s); i++ {
			if upper(s[i]) {
				s[i] += 'a' - 'A'
			}
		}
		return s
	}
	return s
}

// portNumber reads a port: 1 to 65535, only digits, no leading zeros.
func portNumber[T string | []byte](s T) (uint16, bool) {
	if len(s) == 0 || len(s) > len("65535") || s[0] == '0' {
		return 0, false
	}
	n := 0
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		n = 10*n + int(s[i]-'0')
	}
	return uint16(n), n <= 65535
}

// Check returns an error for the first invalid name.
func (h *Hosts) Check() error {
	if !ValidDomain(h.Domain) {
		return fmt.Errorf("domain %q: must be a DNS name in lower case without a trailing dot", h.Domain)
	}
	for _, g := range h.Gateways {
		if !ValidDomain(g) {
			return fmt.Errorf("gateway host %q: must be a DNS name in lower case without a trailing dot", g)
		}
		if g == h.api() {
			return fmt.Errorf("gateway host %q: is the host of the API; choose another", g)
		}
		t, refusal := h.byHost([]byte(g), []byte(g))
		if refusal == nil && (t.Port != 0 || len(t.ID.String()) == sandboxid.Len) {
			return fmt.Errorf("gateway host %q: could also be the host name of a sandbox; choose another", g)
		}
	}
	return nil
}

// domainName matches DNS labels in lower case with dots between them.
var domainName = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ValidDomain reports whether domain consists of DNS labels in lower case, without a
// trailing dot, and leaves room for the label of a sandbox: 253 characters less the longest label of
// DNS and a dot.
func ValidDomain(domain string) bool { return len(domain) <= 189 && domainName.MatchString(domain) }

// clip shortens a client's text for a message, and copies it.
func clip[T string | []byte](s T) string {
	if len(s) > 80 {
		return string(s[:80]) + "..."
	}
	return string(s)
}
