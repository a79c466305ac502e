package extproc

import (
	"cmp"
	"net/http"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/routecache"
)

// Pages of every origin may use the port of agents, because a page has to know the agent token: a browser has no
// credential of its own for that port, and is never told to send one. A preflight has no token. So the router answers it
// for every ID alike, without a question to the allocator. Only a pod that is known to have no agent gets its own
// preflights.

// isPreflight reports whether a request is a CORS preflight (Fetch, section 4.8).
func (r *request) isPreflight() bool {
	return len(r.preflight) > 0 && len(r.origin) > 0 && string(r.method) == http.MethodOptions
}

// preflightAt reports whether the target of a preflight is the agent of the sandbox at a known route.
func preflightAt(t Target, route routecache.Route) bool {
	return route.Terms != nil && route.Terms.AgentPort == sandboxaccess.AgentPort && cmp.Or(t.Port, route.DefaultPort) == sandboxaccess.AgentPort
}

// answersPreflight reports whether the router answers a request as a preflight for the port of agents.
func (d *decider) answersPreflight(r *request, t Target) bool {
	if !r.isPreflight() {
		return false
	}
	route, found := d.o.Routes.Find(t.ID)
	return found && preflightAt(t, route) || !found && t.Port == sandboxaccess.AgentPort
}

// preflightReason marks the answer to a CORS preflight.
const preflightReason = "preflight"

// preflighted is the answer to a CORS preflight for the port of agents. It allows what E2B's agent allows. "*" does not
// include Authorization, and never credentials of the browser (Fetch, section 3.3.4).
func preflighted() *extprocv3.ProcessingResponse {
	return immediate(preflightReason, http.StatusNoContent, codes.OK, nil,
		anyOrigin,
		setHeader("access-control-allow-methods", "HEAD, GET, POST, PUT, PATCH, DELETE"),
		setHeader("access-control-allow-headers", "*, Authorization"),
		setHeader("access-control-max-age", "7200"),
		setHeader("x-content-type-options", "nosniff"))
}

// The headers of an answer that pages of every origin may read.
var (
	anyOrigin = setHeader("access-control-allow-origin", "*")
	exposed   = setHeader("access-control-expose-headers", sandboxaccess.AgentExposedHeaders)
)
