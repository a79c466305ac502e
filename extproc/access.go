package extproc

import (
	"bytes"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/routecache"
)

// redirect is the answer to a valid link.
type redirect struct {
	to, cookie string
}

// access checks whether a request may reach the port. It returns a redirect for a valid link, a
// refusal for a request that may not, and neither for one that may. The refusal is the same for a
// missing credential and for every wrong one.
func (d *decider) access(r *request, t Target, port uint16, terms *routecache.Terms) (*redirect, *apierror.Error) {
	switch {
	case terms == nil:
		return nil, nil
	case terms.AgentPort == port && !terms.AgentPublic && terms.Access < routecache.Closed:
		return nil, d.agentAccess(r, t, terms)
	case terms.Access == routecache.Public:
		return nil, nil
	}
	if terms.Access != routecache.Token && terms.Access != routecache.Team {
		return nil, t.denied()
	}
	secret := sandboxaccess.Secret(terms.Secret)
	if link := d.linkOf(r); link != "" {
		now := time.Now()
		path, expires, err := secret.OpenLink(t.ID.String(), port, link, now)
		switch {
		case errors.Is(err, sandboxaccess.ErrDenied):
			return nil, t.denied()
		case err != nil:
			return nil, t.refuse(apierror.BadPath, "parameter to of the link: "+err.Error())
		}
		return &redirect{path, cookie(secret.Cookie(t.ID.String(), port, expires), expires.Sub(now))}, nil
	}
	// A credential that is sent twice is refused, because other programs may read another one.
	switch {
	case r.token.n > 0:
		if terms.Access == routecache.Token && r.token.n == 1 && secret.IsToken(string(r.token.first)) {
			return nil, nil
		}
	case terms.Access == routecache.Team && r.key.n > 0:
		opens, known := d.o.TeamKeys.Opens(terms.Team, string(r.key.first))
		switch {
		case !known:
			return nil, t.refuse(apierror.RouterNotReady, "the allocator has not read the API keys yet; try again")
		case opens && r.key.n == 1:
			return nil, nil
		}
	case port == sandboxaccess.AgentPort && isAgentToken(secret, t, r):
		return nil, nil
	case r.cookie.n == 1 && !d.o.Hosts.shared(r) &&
		secret.IsCookie(t.ID.String(), port, string(r.cookie.first), time.Now()):
		if !d.o.Hosts.ownPage(r, t.ID) {
			return nil, t.refuse(apierror.AccessDenied, "this request comes from another page than the sandbox's own: a link opens "+
				"the sandbox for its own pages, and for a person who opens one of them")
		}
		return nil, nil
	}
	return nil, t.denied()
}

// denied is the refusal of a request without a valid credential.
func (t Target) denied() *apierror.Error {
	return t.refuse(apierror.AccessDenied, "this sandbox is private: send its token in the header "+
		sandboxaccess.TokenHeader+" or, if its access is team, an API key of its team in the header "+
		sandboxaccess.KeyHeader+", or open a link that was made for this port and has not expired")
}

// isAgentToken reports whether a request has the agent token of the sandbox, once.
func isAgentToken(secret sandboxaccess.Secret, t Target, r *request) bool {
	return r.agentToken.n == 1 && secret.IsAgentToken(t.ID.String(), string(r.agentToken.first))
}

// The paths that a request without the agent's token may have.
const pathFiles, pathHealth = "/files", "/health"

// pathAt returns the path and the query that the pod sees of a request, if the decision reads them.
func (r *request) pathAt(t Target) (path, query string) {
	path = t.Path
	if path == "" {
		path = string(r.path)
	}
	path, query, _ = strings.Cut(path, "?")
	return path, query
}

// agentAccess checks whether a request may reach the agent. No other credential of the sandbox opens its
// port: the agent accepts the agent token only. It checks signatures itself.
func (d *decider) agentAccess(r *request, t Target, terms *routecache.Terms) *apierror.Error {
	secret := sandboxaccess.Secret(terms.Secret)
	path, query := r.pathAt(t)
	switch {
	case r.agentToken.n > 0:
		if isAgentToken(secret, t, r) {
			return nil
		}
	case path == pathFiles:
		if q, err := url.ParseQuery(query); err == nil && len(q["signature"]) == 1 {
			return nil
		}
	case path == pathHealth && terms.Access == routecache.Public && string(r.method) == http.MethodGet:
		return nil
	}
	return t.refuse(apierror.AgentToken, "the agent of this sandbox serves requests with its token: send envdAccessToken of the "+
		"answer to the claim in the header "+sandboxaccess.AgentHeader)
}

// shared reports whether the host of a request is that of all sandboxes. It has no links and no cookies of them:
// pages of all sandboxes would be of one origin.
func (h *Hosts) shared(r *request) bool {
	host, _ := hostName(r.authority)
	return h.gateway(host)
}

// ownPage reports whether a request that only the cookie opens comes from a page of the sandbox, at any of its ports,
// from no page at all, or from a person who follows a link. A browser sends the cookie with requests of other sandboxes'
// pages too, because all sandboxes are of one site to it (SameSite). No page can choose these headers.
func (h *Hosts) ownPage(r *request, id sandboxid.Key) bool {
	if len(r.fetchSite) == 0 || string(r.fetchMode) == "websocket" { // browsers send Origin with every WebSocket
		return len(r.origin) == 0 || h.originOf(r, id)
	}
	if site := string(r.fetchSite); site == "same-origin" || site == "none" || h.originOf(r, id) {
		return true
	}
	return (string(r.method) == http.MethodGet || string(r.method) == http.MethodHead) &&
		string(r.fetchMode) == "navigate" && string(r.fetchDest) == "document"
}

// originOf reports whether Origin names a host of the sandbox.
func (h *Hosts) originOf(r *request, id sandboxid.Key) bool {
	_, authority, found := bytes.Cut(r.origin, []byte("://"))
	host, ok := hostName(authority)
	if !found || !ok {
		return false
	}
	t, refusal := h.byHost(host, authority)
	return refusal == nil && t.foreign == "" && t.ID == id
}

// linkOf returns the path and query of a request for a link, or "".
func (d *decider) linkOf(r *request) string {
	if path, _, _ := bytes.Cut(r.link, []byte("?")); string(path) != sandboxaccess.LinkPath ||
		string(r.method) != http.MethodGet && string(r.method) != http.MethodHead {
		return ""
	}
	if d.o.Hosts.shared(r) {
		return ""
	}
	return string(r.link)
}

// cookie returns the Set-Cookie of a value. Lax lets a link from another site open the sandbox, and
// keeps the cookie from other requests of that site.
func cookie(value string, age time.Duration) string {
	return sandboxaccess.CookieName + "=" + value + "; Path=/; Max-Age=" + strconv.Itoa(int(age.Seconds())) +
		"; Secure; HttpOnly; SameSite=Lax"
}

// maskedHost returns the host that the pod sees at a port, "" for that of the request.
func maskedHost(terms *routecache.Terms, port uint16) string {
	if terms == nil || terms.MaskHost == "" {
		return ""
	}
	return strings.ReplaceAll(terms.MaskHost, "${PORT}", strconv.Itoa(int(port)))
}

// overTLS reports whether Envoy speaks TLS to a port.
func overTLS(terms *routecache.Terms, port uint16) bool {
	return terms != nil && terms.HTTPSPorts.Has(port)
}
