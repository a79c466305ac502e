package extproc

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/routecache"
)

// What is checked last is the route, so that it is the one of the answer.
func TestAnswerNamesTheRouteThatWasAdmitted(t *testing.T) {
	for host, c := range map[string]struct {
		answer routecache.Answer
		dst    string
	}{
		"9000-abc.sandbox.example.com":  {routeTo("10.1.2.3", 8080), "10.1.2.3:9000"},
		"abc.sandbox.example.com":       {routeTo("10.1.2.3", 8080), "10.1.2.3:8080"},
		"9000-abc.sandbox.example.com.": {routeTo("fd00::7", 0), "[fd00::7]:9000"},
		"9001-abc.sandbox.example.com":  {opening(routeTo("10.1.2.3", 8080), 8080, 9001), "10.1.2.3:9001"},
		"abc.sandbox.example.com.":      {opening(routeTo("10.1.2.3", 8080), 8080, 9001), "10.1.2.3:8080"},
	} {
		h := always(c.answer, nil)
		a, refusal := h.decider().decide(t.Context(), &request{authority: []byte(host), method: []byte("GET")}, unheld)
		require.Nil(t, refusal)
		dst := netip.MustParseAddrPort(c.dst)
		require.Equal(t, decision{id: key("abc"), dst: dst, admission: a.admission}, a)
		require.Equal(t, []tried{{dst, false}}, h.tried)
		require.Equal(t, []string{"lookup abc", "admit abc"}, h.events)
		require.Equal(t, 1, h.unread())
		require.Equal(t, 1, h.Unread())
		a.admission.Read()
		require.Zero(t, h.Unread())
	}
}

// Invariant: P1
func TestRefusalsNameReasonAndNoDestination(t *testing.T) {
	const host = "8080-abc.sandbox.example.com"
	longer := strings.Repeat("a", sandboxid.MaxLen)
	for name, c := range map[string]struct {
		request request
		answer  routecache.Answer
		err     error
		code    int
		reason  apierror.Reason
		id      string
		retry   bool
		asks    bool
	}{
		"connect":            {request: request{method: []byte("CONNECT"), authority: []byte(host)}, code: 405, reason: apierror.MethodRefused},
		"no host":            {request: request{method: []byte("GET")}, code: 400, reason: apierror.BadHost},
		"two hosts":          {request: request{method: []byte("GET"), authority: []byte(host + "," + host)}, code: 400, reason: apierror.BadHost},
		"foreign domain":     {request: request{method: []byte("GET"), authority: []byte("8080-abc.example.org")}, code: 400, reason: apierror.BadHost},
		"bare domain":        {request: request{method: []byte("GET"), authority: []byte(domain)}, code: 404, reason: apierror.NotFound},
		"the API's host":     {request: request{method: []byte("GET"), authority: []byte("api." + domain)}, code: 404, reason: apierror.NotFound},
		"port 0":             {request: request{method: []byte("GET"), authority: []byte("0-abc." + domain)}, code: 400, reason: apierror.BadPort},
		"gone":               {answer: routecache.Answer{Status: routecache.Gone}, code: 410, reason: apierror.SandboxGone, id: "abc", asks: true},
		"starting":           {answer: routecache.Answer{Status: routecache.Starting}, code: 503, reason: apierror.SandboxStarting, id: "abc", retry: true, asks: true},
		"unknown":            {answer: routecache.Answer{Status: routecache.Unknown}, code: 404, reason: apierror.SandboxNotFound, id: "abc", asks: true},
		"longer than any ID": {request: request{method: []byte("GET"), authority: []byte(longer + "." + domain)}, code: 404, reason: apierror.SandboxNotFound, id: longer},
		"not fresh":          {err: routecache.ErrNotFresh, code: 503, reason: apierror.RouterNotReady, id: "abc", retry: true, asks: true},
		"disconnected":       {err: routecache.ErrDisconnected, code: 503, reason: apierror.RouterNotReady, id: "abc", retry: true, asks: true},
		"too many questions": {err: routecache.ErrTooManyQuestions, code: 503, reason: apierror.RouterNotReady, id: "abc", retry: true, asks: true},
		"address of another": {answer: routeTo("10.2.0.1", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"loopback":           {answer: routeTo("127.0.0.1", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"zoned address":      {answer: routeTo("fd00::1%eth0", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"mapped address":     {answer: routeTo("::ffff:10.1.2.3", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"no address":         {answer: routecache.Answer{Status: routecache.Routable}, code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"private port":       {answer: opening(routeTo("10.1.2.3", 80), 80, 9000), code: 403, reason: apierror.PortPrivate, id: "abc", asks: true},
		"private default port": {
			request: request{method: []byte("GET"), authority: []byte("abc." + domain)}, answer: opening(routeTo("10.1.2.3", 80), 9000),
			code: 403, reason: apierror.PortPrivate, id: "abc", asks: true,
		},
		"private port of no address": {answer: opening(routeTo("10.2.0.1", 80), 80), code: 403, reason: apierror.PortPrivate, id: "abc", asks: true},
		"no default port, some ports open": {
			request: request{method: []byte("GET"), authority: []byte("abc." + domain)}, answer: opening(routeTo("10.1.2.3", 0), 80),
			code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true,
		},
		"no default port": {
			request: request{method: []byte("GET"), authority: []byte("abc." + domain)}, answer: routeTo("10.1.2.3", 0),
			code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if len(c.request.method) == 0 {
				c.request = request{method: []byte("GET"), authority: []byte(host)}
			}
			h := always(c.answer, c.err)
			h.joined = func(context.Context) error { return errors.New("there is no leader") }
			a, refusal := h.decider().decide(t.Context(), &c.request, unheld)
			require.Zero(t, a)
			require.Equal(t, c.code, refusal.Code)
			require.Equal(t, c.reason, refusal.Reason)
			require.Equal(t, c.id, refusal.SandboxID)
			require.NotEmpty(t, refusal.Message)
			require.Equal(t, c.retry, refusal.RetryAfter > 0)
			require.Equal(t, c.asks, slices.Contains(h.events, "lookup abc"))
			require.NotContains(t, h.events, "admit abc", "a refused request is no use")
			reply := refused(refusal, program, false)
			require.NotContains(t, reply.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields(), "dst")
			require.NotContains(t, reply.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields(), "id")
			require.EqualValues(t, c.code, reply.GetImmediateResponse().GetStatus().GetCode())
		})
	}
}

func TestPrivatePortRefusalNamesOpenPorts(t *testing.T) {
	const begin = "port 22 of this sandbox is not open to the outside; its pool opens "
	for want, open := range map[string][]uint16{
		"8080":                              {8080},
		"8080, 49983":                       {49983, 8080},
		"80, 443, 8080":                     {80, 443, 8080},
		"1, 2, 3, 4, 5, 6, 7, 8":            {1, 2, 3, 4, 5, 6, 7, 8},
		"1, 2, 3, 4, 5, 6, 7, 8 and 1 more": {1, 2, 3, 4, 5, 6, 7, 8, 9},
		"1, 2, 3, 4, 5, 6, 7, 8 and 3 more": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
	} {
		h := always(opening(routeTo("10.1.2.3", 8080), open...), nil)
		_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("22-abc." + domain), method: []byte("GET")}, unheld)
		require.Equal(t, begin+want, refusal.Message)
		reply := refused(refusal, grpcClient, false).GetImmediateResponse()
		require.EqualValues(t, codes.PermissionDenied, reply.GetGrpcStatus().GetStatus())
	}
}

func TestPrivatePortPageLinksAnOpenPort(t *testing.T) {
	for authority, want := range map[string][]string{
		"22-abc." + domain:            {"//8080-abc." + domain + "/"},
		"22-abc." + domain + ".:8443": {"//8080-abc." + domain + ":8443/"},
		"22-ABC-DEF." + domain:        {"//8080-abc." + domain + "/"},
		domain:                        nil, // a header names the sandbox
	} {
		h := always(opening(routeTo("10.1.2.3", 8080), 80, 8080), nil)
		r := &request{authority: []byte(authority), method: []byte("GET")}
		if authority == domain {
			r.id, r.port = one("abc"), one("22")
		}
		_, refusal := h.decider().decide(t.Context(), r, unheld)
		require.Equal(t, want, refusal.Links, authority)
	}
	h := always(opening(routeTo("10.1.2.3", 8080), 81, 90), nil)
	_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("22-abc." + domain), method: []byte("GET")}, unheld)
	require.Equal(t, []string{"//81-abc." + domain + "/"}, refusal.Links, "the default port is not open")
}

// A port that is closed after the lookup of a request is closed for that request too.
func TestPortClosedDuringDecisionIsRefused(t *testing.T) {
	answers := []routecache.Answer{routeTo("10.1.2.3", 8080), opening(routeTo("10.1.2.3", 8080), 8080)}
	h := &history{holds: func() bool { return false }}
	h.answer = func(context.Context, string) (routecache.Answer, error) {
		a := answers[0]
		answers = answers[1:]
		return a, nil
	}
	_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("22-abc." + domain), method: []byte("GET")}, unheld)
	require.Equal(t, apierror.PortPrivate, refusal.Reason)
}

func TestRepeatedHeadersAreAllRead(t *testing.T) {
	r := readHeaders(headersIn(t, headersOf(":authority", domain, ":method", "GET", ":path", "/x?y", "x-request-id", "r",
		"e2b-sandbox-id", "abc", "e2b-sandbox-port", "8080", "x-sandbox-id", "a", "x-sandbox-id", "b", "x-sandbox-port", "1", "x-sandbox-port", "",
		"accept", "text/html", "accept", "*/*", "sec-fetch-mode", "navigate", "content-type", "a/b",
		"host", "8080-abc."+domain, "x-forwarded-host", "8080-abc."+domain, "x-envoy-original-dst-host", "10.1.2.3:80")))
	require.Equal(t, request{
		authority: []byte(domain), method: []byte("GET"), path: []byte("/x?y"), requestID: []byte("r"),
		e2bID: one("abc"), e2bPort: one("8080"), id: several("a", "b"), port: several("1", ""),
		html: true, fetchMode: []byte("navigate"), contentType: []byte("a/b"),
	}, r)
}

// Envoy's list of open requests grows with the requested ports of a sandbox.
func TestTooManyPortsOfASandboxAreRefused(t *testing.T) {
	answer := routeTo("10.1.2.3", 8080)
	answer.Route.MinBytes = 1024
	h := always(answer, nil)
	d := h.decider()
	h.full = time.Now().Add(time.Hour)
	_, refusal := d.decide(t.Context(), &request{authority: []byte("9000-abc." + domain), method: []byte("GET")}, unheld)
	require.Equal(t, apierror.TooManyPorts, refusal.Reason)
	require.Equal(t, 429, refusal.Code)
	require.Equal(t, 1, refusal.RetryAfter)
	require.Equal(t, "abc", refusal.SandboxID)
	require.Zero(t, d.o.Sandboxes.Unread())
	require.Equal(t, []string{"lookup abc", "admit abc"}, h.events)
	require.Equal(t, []tried{{netip.MustParseAddrPort("10.1.2.3:9000"), false}}, h.tried)
}

func TestReleaseDuringDecisionLeavesNoActivity(t *testing.T) {
	answers := []routecache.Answer{{Status: routecache.Routable, Route: podRoute}, {Status: routecache.Gone}}
	h := &history{holds: func() bool { return false }}
	h.answer = func(context.Context, string) (routecache.Answer, error) {
		a := answers[0]
		answers = answers[1:]
		return a, nil
	}
	_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
	require.Equal(t, apierror.SandboxGone, refusal.Reason)
	require.Equal(t, []string{"lookup abc", "admit abc", "lookup abc"}, h.events)
	require.Zero(t, h.unread())
}

func TestEvictedRouteIsLookedUpAgain(t *testing.T) {
	moved := routeTo("10.1.9.9", 80)
	answers := []routecache.Answer{{Status: routecache.Routable, Route: podRoute}, moved}
	holds := []bool{false, true}
	h := &history{}
	h.holds = func() bool { held := holds[0]; holds = holds[1:]; return held }
	h.answer = func(context.Context, string) (routecache.Answer, error) {
		a := answers[0]
		answers = answers[1:]
		return a, nil
	}
	a, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
	require.Nil(t, refusal)
	require.Equal(t, netip.MustParseAddrPort("10.1.9.9:8080"), a.dst)
	require.Equal(t, 1, h.unread(), "the first attempt was not admitted")
}

// Every error of the cache gives the client the same answer: try again.
func TestInternalErrorsAreNotShownToClients(t *testing.T) {
	h := always(routecache.Answer{}, errors.New("secret"))
	_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
	require.NotContains(t, string(refusal.JSON()), "secret")
}

func TestQuiesceBetweenLookupAndAnswerCancelsTheUse(t *testing.T) {
	h := always(routeTo("10.1.2.3", 8080), nil)
	d := h.decider()
	holds := []bool{false, true}
	h.holds = func() bool {
		held := holds[0]
		holds = holds[1:]
		return held
	}
	a, refusal := d.decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
	require.Nil(t, refusal)
	require.Equal(t, 1, h.unread(), "the first use was cancelled")
	a.admission.Read()
	require.Zero(t, h.unread())
}
