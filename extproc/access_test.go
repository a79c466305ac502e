package extproc

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/routecache"
)

func accessKey(t *testing.T) *sandboxaccess.Key {
	t.Helper()
	k, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	return k
}

// private returns an answer with a route of this access for the sandbox abc.
func private(t *testing.T, access routecache.Access) routecache.Answer {
	a := routeTo("10.1.2.3", 8080)
	a.Route.Terms = &routecache.Terms{Access: access, Secret: accessKey(t).Secret("abc"), Team: "a"}
	return a
}

// withKeys reads the API keys "e2b_a1" and "e2b_a2" of team a, and "e2b_b" of team b.
func (h *history) withKeys() *history {
	h.keys.Replace(map[string][][sha256.Size]byte{
		"a": {sha256.Sum256([]byte("e2b_a1")), sha256.Sum256([]byte("e2b_a2"))}, "b": {sha256.Sum256([]byte("e2b_b"))}, "": {sha256.Sum256([]byte("e2b_none"))},
	})
	return h
}

// Invariant: P15
func TestOnlyACredentialOfTheSandboxOpensIt(t *testing.T) {
	k := accessKey(t)
	secret, later := k.Secret("abc"), time.Now().Add(time.Hour)
	token, other := k.Token("abc"), k.Token("abd")
	cookie := secret.Cookie("abc", 8080, later)
	agent := secret.AgentToken("abc")
	const open, denied = apierror.Reason(""), apierror.AccessDenied
	for name, c := range map[string]struct {
		request                     request
		token, team, public, closed apierror.Reason
	}{
		"nothing":                     {request{}, denied, denied, open, denied},
		"the token":                   {request{token: one(token)}, open, denied, open, denied},
		"a wrong token":               {request{token: one(other)}, denied, denied, open, denied},
		"an empty token":              {request{token: one("")}, denied, denied, open, denied},
		"the token, then another":     {request{token: several(token, other)}, denied, denied, open, denied},
		"the token twice":             {request{token: several(token, token)}, denied, denied, open, denied},
		"two tokens in one":           {request{token: one(token + "," + token)}, denied, denied, open, denied},
		"a wrong token and a cookie":  {request{token: one(other), cookie: one(cookie)}, denied, denied, open, denied},
		"the cookie":                  {request{cookie: one(cookie)}, open, open, open, denied},
		"the token as cookie":         {request{cookie: one(token)}, denied, denied, open, denied},
		"the cookie as token":         {request{token: one(cookie)}, denied, denied, open, denied},
		"two cookies":                 {request{cookie: several(cookie, cookie)}, denied, denied, open, denied},
		"a cookie of another sandbox": {request{cookie: one(k.Secret("abd").Cookie("abd", 8080, later))}, denied, denied, open, denied},
		"a cookie of another port":    {request{cookie: one(secret.Cookie("abc", 8081, later))}, denied, denied, open, denied},
		"a cookie that has expired":   {request{cookie: one(secret.Cookie("abc", 8080, time.Now()))}, denied, denied, open, denied},
		"the agent's token":           {request{agentToken: one(agent)}, denied, denied, open, denied},
		"the agent's, at its port":    {request{authority: []byte("49983-abc." + domain), agentToken: one(agent)}, open, open, open, denied},
		"another one, at its port":    {request{authority: []byte("49983-abc." + domain), agentToken: one(k.Secret("abd").AgentToken("abd"))}, denied, denied, open, denied},
		"the agent's, twice":          {request{authority: []byte("49983-abc." + domain), agentToken: several(agent, agent)}, denied, denied, open, denied},
		"a key of the team":           {request{key: one("e2b_a1")}, denied, open, open, denied},
		"its other key":               {request{key: one("e2b_a2")}, denied, open, open, denied},
		"a key of another team":       {request{key: one("e2b_b")}, denied, denied, open, denied},
		"a key of no team":            {request{key: one("e2b_none")}, denied, denied, open, denied},
		"an unknown key":              {request{key: one("e2b_c")}, denied, denied, open, denied},
		"an empty key":                {request{key: one("")}, denied, denied, open, denied},
		"the hash of a key":           {request{key: one(fmt.Sprintf("%x", sha256.Sum256([]byte("e2b_a1"))))}, denied, denied, open, denied},
		"the key twice":               {request{key: several("e2b_a1", "e2b_a1")}, denied, denied, open, denied},
		"a wrong key and a cookie":    {request{key: one("e2b_b"), cookie: one(cookie)}, open, denied, open, denied},
		"the key and a wrong token":   {request{key: one("e2b_a1"), token: one(other)}, denied, denied, open, denied},
		"by header, with the key":     {request{authority: []byte(domain), e2bID: one("abc"), e2bPort: one("8080"), key: one("e2b_a1")}, denied, open, open, denied},
		"a preflight":                 {request{method: []byte("OPTIONS")}, denied, denied, open, denied},
		"by header, without":          {request{authority: []byte(domain), e2bID: one("abc"), e2bPort: one("8080")}, denied, denied, open, denied},
		"by header, with the token":   {request{authority: []byte(domain), e2bID: one("abc"), e2bPort: one("8080"), token: one(token)}, open, denied, open, denied},
		"the default port":            {request{authority: []byte("abc." + domain), cookie: one(cookie)}, open, open, open, denied},
		"by header, with the cookie":  {request{authority: []byte(domain), e2bID: one("abc"), e2bPort: one("8080"), cookie: one(cookie)}, denied, denied, open, denied},
	} {
		t.Run(name, func(t *testing.T) {
			if len(c.request.authority) == 0 {
				c.request.authority = []byte("8080-abc." + domain)
			}
			if len(c.request.method) == 0 {
				c.request.method = []byte("GET")
			}
			for access, want := range map[routecache.Access]apierror.Reason{
				routecache.Token: c.token, routecache.Team: c.team, routecache.Public: c.public, routecache.Closed: c.closed, routecache.Closed + 1: c.closed,
			} {
				h := always(private(t, access), nil).withKeys()
				a, refusal := h.decider().decide(t.Context(), &c.request, unheld)
				if want == open {
					require.Nil(t, refusal, access)
					require.Equal(t, key("abc"), a.id)
					continue
				}
				require.Zero(t, a)
				require.Equal(t, denied, refusal.Reason, access)
				require.Equal(t, 403, refusal.Code)
				require.NotContains(t, h.events, "begin abc", "a refused request is no activity")
				bare := request{authority: c.request.authority, e2bID: c.request.e2bID, e2bPort: c.request.e2bPort, method: []byte("GET")}
				_, missing := always(private(t, access), nil).withKeys().decider().decide(t.Context(), &bare, unheld)
				require.Equal(t, missing, refusal, "the answer does not tell a wrong credential from none")
			}
		})
	}
	t.Run("without a secret", func(t *testing.T) {
		a := private(t, routecache.Token)
		a.Route.Terms.Secret = [32]byte{}
		for _, r := range []request{
			{token: one(token)}, {token: one("")}, {cookie: one(sandboxaccess.Secret{}.Cookie("abc", 8080, later))},
			{link: []byte(sandboxaccess.Secret{}.Link("abc", 8080, later, "/"))},
		} {
			r.authority, r.method = []byte("8080-abc."+domain), []byte("GET")
			_, refusal := always(a, nil).decider().decide(t.Context(), &r, unheld)
			require.Equal(t, denied, refusal.Reason)
		}
	})
}

// Browsers send the cookie with requests that pages of other sandboxes make, because all are of one site.
//
// Invariant: P15
func TestCookieOpensASandboxForItsOwnPagesOnly(t *testing.T) {
	k := accessKey(t)
	cookie := k.Secret("abc").Cookie("abc", 8080, time.Now().Add(time.Hour))
	const own, sibling, elsewhere = "https://8080-abc." + domain, "https://8080-abd." + domain, "https://evil.example"
	for name, c := range map[string]struct {
		method, site, mode, dest, origin string
		opens                            bool
	}{
		"a program":                            {opens: true},
		"typed":                                {site: "none", mode: "navigate", dest: "document", opens: true},
		"typed, a POST that is loaded again":   {method: "POST", site: "none", mode: "navigate", dest: "document", origin: "null", opens: true},
		"a script of the page":                 {site: "same-origin", mode: "cors", dest: "empty", opens: true},
		"its POST":                             {method: "POST", site: "same-origin", mode: "cors", dest: "empty", origin: own, opens: true},
		"its POST under no-referrer":           {method: "POST", site: "same-origin", mode: "navigate", dest: "document", origin: "null", opens: true},
		"its frame":                            {site: "same-origin", mode: "navigate", dest: "iframe", opens: true},
		"a script of another port":             {site: "same-site", mode: "cors", dest: "empty", origin: "https://3000-abc." + domain, opens: true},
		"its POST, at another listener":        {method: "POST", site: "same-site", mode: "cors", dest: "empty", origin: "http://3000-ABC." + domain + ":8443", opens: true},
		"a script of the default port":         {site: "same-site", mode: "cors", dest: "empty", origin: "https://abc." + domain, opens: true},
		"a script with a client ID":            {site: "same-site", mode: "cors", dest: "empty", origin: "https://8080-abc-6532622b." + domain, opens: true},
		"an image of another port":             {site: "same-site", mode: "no-cors", dest: "image"},
		"a link of a sibling":                  {site: "same-site", mode: "navigate", dest: "document", opens: true},
		"a link of another site":               {site: "cross-site", mode: "navigate", dest: "document", opens: true},
		"HEAD of a link":                       {method: "HEAD", site: "same-site", mode: "navigate", dest: "document", opens: true},
		"a script of a sibling":                {site: "same-site", mode: "cors", dest: "empty", origin: sibling},
		"its POST without CORS":                {method: "POST", site: "same-site", mode: "no-cors", dest: "empty", origin: sibling},
		"its GET without CORS":                 {site: "same-site", mode: "no-cors", dest: "empty"},
		"a form of a sibling":                  {method: "POST", site: "same-site", mode: "navigate", dest: "document", origin: sibling},
		"its form under no-referrer":           {method: "POST", site: "same-site", mode: "navigate", dest: "document", origin: "null"},
		"a frame of a sibling":                 {site: "same-site", mode: "navigate", dest: "iframe"},
		"an object of a sibling":               {site: "same-site", mode: "navigate", dest: "object"},
		"an image of a sibling":                {site: "same-site", mode: "no-cors", dest: "image"},
		"a document that is not navigated to":  {site: "same-site", mode: "no-cors", dest: "document"},
		"a script of another site":             {site: "cross-site", mode: "cors", dest: "empty", origin: elsewhere},
		"a site that no browser names":         {site: "own", mode: "cors", dest: "empty"},
		"an older browser, of the page":        {method: "POST", origin: own, opens: true},
		"an older browser, of a sibling":       {method: "POST", origin: sibling},
		"an older browser, of another site":    {method: "POST", origin: elsewhere},
		"an older browser, of no origin":       {method: "POST", origin: "null"},
		"a WebSocket of the page":              {origin: own, opens: true},
		"a WebSocket of another port":          {origin: "https://3000-abc." + domain, opens: true},
		"a WebSocket of a sibling":             {origin: sibling},
		"a WebSocket of a program":             {mode: "websocket", opens: true},
		"a WebSocket, told so, of the page":    {site: "same-origin", mode: "websocket", dest: "websocket", origin: own, opens: true},
		"a WebSocket, told so, of a sibling":   {site: "same-site", mode: "websocket", dest: "websocket", origin: sibling},
		"a WebSocket, told so, of nobody":      {site: "same-origin", mode: "websocket", dest: "websocket", origin: "null"},
		"an origin at the domain":              {origin: "https://" + domain},
		"an origin below the sandbox":          {origin: "https://x.8080-abc." + domain},
		"an origin that begins like it":        {origin: own + ".evil.example"},
		"an origin that ends like it":          {origin: "https://evil8080-abc." + domain},
		"an origin with credentials":           {origin: "https://8080-abc." + domain + "@evil.example"},
		"an origin with its name as user":      {origin: "https://evil.example@8080-abc." + domain},
		"two origins":                          {origin: own + " " + sibling},
		"an origin without a scheme":           {origin: "8080-abc." + domain},
		"an origin with a path":                {origin: own + "/"},
		"an origin of an ID that is none":      {origin: "https://8080-UPPER_." + domain},
		"an origin of a sandbox of no such ID": {origin: "https://8080-" + strings.Repeat("a", 57) + "." + domain},
		"an origin with a port that is none":   {origin: own + ":x"},
		"an origin of a port that is none":     {origin: "https://99999-abc." + domain},
		"an extension of the browser":          {origin: "chrome-extension://abcdefghijklmnop"},
		"an empty origin":                      {origin: "https://"},
	} {
		t.Run(name, func(t *testing.T) {
			r := request{
				authority: []byte("8080-abc." + domain), method: []byte(cmp.Or(c.method, "GET")), cookie: one(cookie),
				fetchSite: []byte(c.site), fetchMode: []byte(c.mode), fetchDest: []byte(c.dest), origin: []byte(c.origin),
			}
			decide := func(r request) *apierror.Error {
				_, refusal := always(private(t, routecache.Token), nil).withKeys().decider().decide(t.Context(), &r, unheld)
				return refusal
			}
			if refusal := decide(r); c.opens {
				require.Nil(t, refusal)
			} else {
				require.Equal(t, apierror.AccessDenied, refusal.Reason)
				require.Contains(t, refusal.Message, "another page")
			}
			// A page does not know the token. Who sends it may send anything.
			r.token = one(k.Token("abc"))
			require.Nil(t, decide(r))
			r.token, r.cookie = values{}, one("wrong")
			require.Equal(t, decide(request{authority: r.authority, method: r.method}), decide(r), "a wrong cookie is told apart")
		})
	}
}

// Invariant: P16
func TestAgentServesRequestsWithItsTokenOnly(t *testing.T) {
	k := accessKey(t)
	agent, token := k.Secret("abc").AgentToken("abc"), k.Token("abc")
	cookie := k.Secret("abc").Cookie("abc", 49983, time.Now().Add(time.Hour))
	const open, refused, denied = apierror.Reason(""), apierror.AgentToken, apierror.AccessDenied
	for name, c := range map[string]struct {
		request                      request
		public, token, agentIsPublic apierror.Reason
	}{
		"nothing":                     {request{}, refused, refused, open},
		"its token":                   {request{agentToken: one(agent)}, open, open, open},
		"an empty token":              {request{agentToken: one("")}, refused, refused, open},
		"that of another sandbox":     {request{agentToken: one(k.Secret("abd").AgentToken("abd"))}, refused, refused, open},
		"its token twice":             {request{agentToken: several(agent, agent)}, refused, refused, open},
		"the sandbox's token":         {request{token: one(token)}, refused, refused, open},
		"both":                        {request{token: one(token), agentToken: one(agent)}, open, open, open},
		"the cookie of a link":        {request{cookie: one(cookie)}, refused, refused, open},
		"a signature":                 {request{path: []byte("/files?path=a&signature=v1_x")}, open, open, open},
		"two signatures":              {request{path: []byte("/files?signature=a&signature=b")}, refused, refused, open},
		"a signature, a wrong token":  {request{path: []byte("/files?signature=v1_x"), agentToken: one("x")}, refused, refused, open},
		"no signature":                {request{path: []byte("/files?path=a")}, refused, refused, open},
		"a malformed query":           {request{path: []byte("/files?signature=a&%zz")}, refused, refused, open},
		"a signature elsewhere":       {request{path: []byte("/process.Process/Start?signature=a")}, refused, refused, open},
		"below files":                 {request{path: []byte("/files/../init?signature=a")}, refused, refused, open},
		"health":                      {request{path: []byte("/health")}, open, refused, open},
		"health with a body":          {request{path: []byte("/health"), method: []byte("POST")}, refused, refused, open},
		"the configuration":           {request{path: []byte("/init")}, refused, refused, open},
		"by header":                   {request{authority: []byte(domain), e2bID: one("abc"), e2bPort: one("49983")}, refused, refused, open},
		"by header, with its token":   {request{authority: []byte(domain), e2bID: one("abc"), e2bPort: one("49983"), agentToken: one(agent)}, open, open, open},
		"another port":                {request{authority: []byte("8080-abc." + domain)}, open, denied, open},
		"another port with its token": {request{authority: []byte("8080-abc." + domain), agentToken: one(agent)}, open, denied, open},
	} {
		t.Run(name, func(t *testing.T) {
			if len(c.request.authority) == 0 {
				c.request.authority = []byte("49983-abc." + domain)
			}
			if len(c.request.method) == 0 {
				c.request.method = []byte("GET")
			}
			for i, want := range []apierror.Reason{c.public, c.token, c.agentIsPublic} {
				answer := private(t, []routecache.Access{routecache.Public, routecache.Token, routecache.Public}[i])
				answer.Route.Terms.AgentPort, answer.Route.Terms.AgentPublic = 49983, i == 2
				a, refusal := always(answer, nil).decider().decide(t.Context(), &c.request, unheld)
				if want == open {
					require.Nil(t, refusal, i)
					require.Equal(t, key("abc"), a.id)
					continue
				}
				require.Zero(t, a, i)
				require.Equal(t, want, refusal.Reason, i)
			}
		})
	}
	closed := private(t, routecache.Closed)
	closed.Route.Terms.AgentPort = 49983
	_, refusal := always(closed, nil).decider().decide(t.Context(), &request{authority: []byte("49983-abc." + domain), method: []byte("GET"), agentToken: one(agent)}, unheld)
	require.Equal(t, denied, refusal.Reason)
}

// Invariant: P15
func TestKeyIsJudgedByTheKeysOfItsMoment(t *testing.T) {
	h := always(private(t, routecache.Team), nil)
	reason := func() apierror.Reason {
		_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET"), key: one("e2b_a1")}, unheld)
		if refusal == nil {
			return ""
		}
		return refusal.Reason
	}
	require.Equal(t, apierror.RouterNotReady, reason(), "the keys have not been read")
	h.withKeys()
	require.Empty(t, reason())
	h.keys.Replace(map[string][][sha256.Size]byte{"a": {sha256.Sum256([]byte("e2b_a2"))}})
	require.Equal(t, apierror.AccessDenied, reason(), "it was revoked")
	h.withKeys()
	h.keys.Replace(nil)
	require.Equal(t, apierror.RouterNotReady, reason(), "the next leader has not read them")
	without := private(t, routecache.Team)
	without.Route.Terms.Team = ""
	h = always(without, nil).withKeys()
	for _, key := range []string{"e2b_a1", "e2b_none"} {
		_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET"), key: one(key)}, unheld)
		require.Equal(t, apierror.AccessDenied, refusal.Reason, "no key opens a sandbox without a team")
	}
}

// A client without access must not learn which ports are open.
func TestAccessIsCheckedBeforePorts(t *testing.T) {
	a := opening(private(t, routecache.Token), 9000)
	_, refusal := always(a, nil).decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
	require.Equal(t, apierror.AccessDenied, refusal.Reason)
	require.NotContains(t, refusal.Message, "9000")
}

func TestLinkIsAnsweredWithACookieForItsPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		secret := accessKey(t).Secret("abc")
		link := secret.Link("abc", 8080, time.Now().Add(time.Hour), "/a?b")
		decide := func(r request) (decision, *apierror.Error) {
			return always(private(t, routecache.Token), nil).decider().decide(t.Context(), &r, unheld)
		}
		a, refusal := decide(request{authority: []byte("8080-abc." + domain), method: []byte("GET"), link: []byte(link)})
		require.Nil(t, refusal)
		require.Equal(t, "/a?b", a.redirect.to)
		value, attributes, _ := strings.Cut(strings.TrimPrefix(a.redirect.cookie, sandboxaccess.CookieName+"="), ";")
		require.Equal(t, " Path=/; Max-Age=3600; Secure; HttpOnly; SameSite=Lax", attributes)
		reply := redirected(a.redirect)
		require.EqualValues(t, 303, reply.GetImmediateResponse().GetStatus().GetCode())
		require.Equal(t, map[string]string{"location": "/a?b", "set-cookie": a.redirect.cookie, "cache-control": "no-store", "x-content-type-options": "nosniff"},
			headersSet(reply.GetImmediateResponse()))
		require.NotContains(t, reply.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields(), "dst")

		a, refusal = decide(request{authority: []byte("8080-abc." + domain), method: []byte("GET"), cookie: one(value)})
		require.Nil(t, refusal)
		require.Nil(t, a.redirect)

		for name, r := range map[string]request{
			"another port":                  {authority: []byte("8081-abc." + domain), link: []byte(link)},
			"at a gateway host":             {authority: []byte(domain), e2bID: one("abc"), e2bPort: one("8080"), link: []byte(link)},
			"POST":                          {method: []byte("POST"), link: []byte(link)},
			"a longer path":                 {link: []byte(strings.Replace(link, "?", "/x?", 1))},
			"a wrong link, and the cookie":  {link: []byte(strings.Replace(link, "signature=", "signature=x", 1)), cookie: one(value)},
			"a link of another path":        {link: []byte(strings.Replace(link, "access", "acces", 1))},
			"a signature of another moment": {link: []byte(strings.Replace(link, "expires=", "expires=1", 1))},
		} {
			if len(r.authority) == 0 {
				r.authority = []byte("8080-abc." + domain)
			}
			if len(r.method) == 0 {
				r.method = []byte("GET")
			}
			_, refusal := decide(r)
			require.NotNil(t, refusal, name)
			require.Equal(t, apierror.AccessDenied, refusal.Reason, name)
		}
		_, refusal = decide(request{authority: []byte("8080-abc." + domain), method: []byte("GET"), link: []byte(strings.Replace(link, "to=%2Fa", "to=%2F%2Fa", 1))})
		require.Equal(t, apierror.BadPath, refusal.Reason, "an open redirect")

		time.Sleep(time.Hour)
		for _, r := range []request{{link: []byte(link)}, {cookie: one(value)}} {
			r.authority, r.method = []byte("8080-abc."+domain), []byte("GET")
			_, refusal := decide(r)
			require.Equal(t, apierror.AccessDenied, refusal.Reason, "it has expired")
		}
	})
}

// Invariant: P5
func TestOnlyTheClaimMasksTheHostAndChoosesTLS(t *testing.T) {
	route := routeTo("10.1.2.3", 8080)
	route.Route.Terms = &routecache.Terms{MaskHost: "localhost:${PORT}", HTTPSPorts: routecache.NewPorts([]uint16{8443})}
	for port, tls := range map[string]bool{"8443": true, "8080": false} {
		asked := port + "-ABC." + domain + ":443"
		a, refusal := always(route, nil).decider().decide(t.Context(), &request{authority: []byte(asked), method: []byte("GET")}, unheld)
		require.Nil(t, refusal)
		reply := admitted(t, &a)
		response := reply.GetRequestHeaders().GetResponse()
		set := response.GetHeaderMutation().GetSetHeaders()
		require.Equal(t, ":authority localhost:"+port, text(set[0]))
		require.Equal(t, "x-forwarded-host "+asked, text(set[1]))
		require.Equal(t, corev3.HeaderValueOption_ADD_IF_ABSENT, set[1].GetAppendAction(), "a trusted proxy knows better")
		require.Len(t, set, 2)
		_, named := reply.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields()["tls"]
		require.Equal(t, tls, named)
		require.Equal(t, tls, response.GetClearRouteCache())
	}
	a, refusal := always(routeTo("10.1.2.3", 8080), nil).decider().decide(t.Context(), &request{authority: []byte("8443-abc." + domain), method: []byte("GET")}, unheld)
	require.Nil(t, refusal)
	require.Nil(t, admitted(t, &a).GetRequestHeaders().GetResponse(), "the request was changed")
}

func text(h *corev3.HeaderValueOption) string {
	return fmt.Sprint(h.GetHeader().GetKey(), " ", string(h.GetHeader().GetRawValue()))
}

// BenchmarkDecide measures one decision for each kind of sandbox.
func BenchmarkDecide(b *testing.B) {
	k, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(b, err)
	secret := k.Secret("abc")
	public, private, team := routeTo("10.1.2.3", 8080), routeTo("10.1.2.3", 8080), routeTo("10.1.2.3", 8080)
	team.Route.Terms = &routecache.Terms{Access: routecache.Team, Team: "a"}
	private.Route.Terms = &routecache.Terms{Access: routecache.Token, Secret: secret}
	for name, c := range map[string]struct {
		route   routecache.Answer
		request request
	}{
		"public": {public, request{}},
		"token":  {private, request{token: one(k.Token("abc"))}},
		"cookie": {private, request{cookie: one(secret.Cookie("abc", 8080, time.Now().Add(time.Hour)))}},
		"key":    {team, request{key: one("e2b_a1")}},
	} {
		b.Run(name, func(b *testing.B) {
			h := always(c.route, nil).withKeys()
			d := h.decider()
			c.request.authority, c.request.method = []byte("8080-abc."+domain), []byte("GET")
			b.ReportAllocs()
			for b.Loop() {
				h.events, h.tried = h.events[:0], h.tried[:0]
				a, refusal := d.decide(b.Context(), &c.request, unheld)
				if refusal != nil {
					b.Fatal(refusal)
				}
				a.admission.Read()
				_ = a.appendAnswer(nil)
			}
		})
	}
}
