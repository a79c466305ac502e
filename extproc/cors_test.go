package extproc

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/routecache"
)

// withAgents returns a server that knows a sandbox with an agent ("agent"), one with an agent for everyone ("open"), one
// without an agent ("bare"), and one that was released ("gone"), and what an answer to its question has of it.
func withAgents(tb testing.TB) (ask func(keysAndValues ...string) (code int, headers map[string]string, admitted bool), uses func() int) {
	var admits tallied
	server, sandboxes := hitServer(tb, func(o *Options) { admits.Sandboxes, o.Sandboxes = o.Sandboxes, &admits })
	for id, terms := range map[string]*routecache.Terms{
		"agent": {AgentPort: sandboxaccess.AgentPort}, "open": {AgentPort: sandboxaccess.AgentPort, AgentPublic: true},
		"private": {AgentPort: sandboxaccess.AgentPort, Access: routecache.Token}, "bare": nil, "gone": {AgentPort: sandboxaccess.AgentPort},
	} {
		route := podRoute
		route.DefaultPort, route.Terms = sandboxaccess.AgentPort, terms
		sandboxes.Put(id, route)
	}
	sandboxes.Release("gone", routecache.End{})
	server.held.fill() // no request waits
	return func(keysAndValues ...string) (int, map[string]string, bool) {
		answer, err := server.ask(encoded(tb, headersOf(keysAndValues...)))
		require.NoError(tb, err)
		m := decoded(tb, answer)
		headers := map[string]string{}
		for _, h := range m.GetImmediateResponse().GetHeaders().GetSetHeaders() {
			headers[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
		}
		return int(m.GetImmediateResponse().GetStatus().GetCode()), headers, m.GetImmediateResponse() == nil
	}, func() int { return admits.n }
}

// tallied counts what begins a use.
type tallied struct {
	Sandboxes
	n int
}

func (c *tallied) Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (admission.Admission, admission.Why, time.Duration) {
	c.n++
	return c.Sandboxes.Admit(id, route, port, http2)
}

// Invariant: P15
func TestPreflightsAtTheAgentsPortAreAnsweredAlike(t *testing.T) {
	ask, uses := withAgents(t)
	long := "a123456789012345678901234567890"
	for _, host := range []string{"49983-agent", "agent", "49983-open", "49983-private", "49983-gone", "49983-nobody", "49983-" + long} {
		code, headers, _ := ask(":authority", host+"."+domain, ":method", "OPTIONS", "origin", "https://page.example", "access-control-request-method", "POST")
		require.Equal(t, 204, code, host)
		require.Equal(t, map[string]string{
			"access-control-allow-origin": "*", "access-control-allow-methods": "HEAD, GET, POST, PUT, PATCH, DELETE",
			"access-control-allow-headers": "*, Authorization", "access-control-max-age": "7200", "x-content-type-options": "nosniff",
		}, headers, host)
	}
	require.Zero(t, uses(), "a preflight is no use")
}

// Invariant: P15
func TestOtherRequestsAreNoPreflightsForTheRouter(t *testing.T) {
	ask, uses := withAgents(t)
	admissions := 0
	for _, c := range []struct {
		host, method, origin, wants string
		admitted                    bool
	}{
		{"49983-bare", "OPTIONS", "https://page.example", "POST", true}, // the pod decides
		{"8080-agent", "OPTIONS", "https://page.example", "POST", true}, // another port
		{"8080-nobody", "OPTIONS", "https://page.example", "POST", false},
		{"49983-open", "POST", "https://page.example", "POST", true},
		{"49983-open", "OPTIONS", "", "POST", true},
		{"49983-open", "OPTIONS", "https://page.example", "", true},
		{"49983-agent", "OPTIONS", "https://page.example", "", false},
		{"49983-private", "OPTIONS", "", "POST", false},
	} {
		of := []string{":authority", c.host + "." + domain, ":method", c.method}
		if c.origin != "" {
			of = append(of, "origin", c.origin)
		}
		if c.wants != "" {
			of = append(of, "access-control-request-method", c.wants)
		}
		code, _, admitted := ask(of...)
		require.NotEqual(t, 204, code, c)
		require.Equal(t, c.admitted, admitted, c)
		if c.admitted {
			admissions++
		}
		require.Equal(t, admissions, uses(), c)
	}
}

// Invariant: P15
func TestRefusalsAtTheAgentsPortAreForPagesOfEveryOrigin(t *testing.T) {
	ask, _ := withAgents(t)
	for host, code := range map[string]int{"49983-agent": 401, "agent": 401, "49983-private": 401, "49983-gone": 410, "49983-nobody": 503} {
		got, headers, _ := ask(":authority", host+"."+domain, ":method", "POST", "origin", "https://page.example")
		require.Equal(t, code, got, host)
		require.Equal(t, "*", headers["access-control-allow-origin"], host)
		require.Equal(t, sandboxaccess.AgentExposedHeaders, headers["access-control-expose-headers"], host)
	}
	for _, port := range []int{8080, 49982, 49999} {
		code, headers, _ := ask(":authority", fmt.Sprintf("%d-gone.%s", port, domain), ":method", "POST", "origin", "https://page.example")
		require.Equal(t, 410, code)
		require.NotContains(t, headers, "access-control-allow-origin", port)
	}
}
