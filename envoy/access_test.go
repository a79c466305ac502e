package envoy_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/routecache"
)

// private makes the sandbox "secret" in the pod def, which its token opens.
func (e *edge) private(t *testing.T) (token string, secret sandboxaccess.Secret) {
	t.Helper()
	key, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	e.terms("secret", routecache.Terms{Access: routecache.Token, Secret: key.Secret("secret")})
	return key.Token("secret"), key.Secret("secret")
}

// seen is what the pod saw of a request that it answered.
func (a answer) seen(t *testing.T) echo {
	t.Helper()
	require.Equal(t, http.StatusOK, a.code, a.body)
	var seen echo
	require.NoError(t, json.Unmarshal([]byte(a.body), &seen), a.body)
	return seen
}

// Invariant: P15
func TestTokenOpensASandboxAndReachesNoPod(t *testing.T) {
	e := startEdge(t, echoing)
	token, _ := e.private(t)
	host := e.host("secret")
	get := func(host string, headers ...string) string {
		return "GET /p HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n" + strings.Join(append(headers, ""), "\r\n") + "\r\n"
	}
	right := "E2B-Traffic-Access-Token: " + token
	for name, c := range map[string]struct {
		request string
		code    int
	}{
		"no token":                     {get(host), 403},
		"a wrong token":                {get(host, right+"0"), 403},
		"an empty token":               {get(host, "E2b-Traffic-Access-Token:"), 403},
		"the token":                    {get(host, right), 200},
		"in lower case":                {get(host, strings.ToLower(right)), 200},
		"twice":                        {get(host, right, right), 403},
		"twice, in two cases":          {get(host, right, strings.ToLower(right)), 403},
		"a wrong one first":            {get(host, "E2b-Traffic-Access-Token: x", right), 403},
		"with underscores":             {get(host, strings.ReplaceAll(right[:24], "-", "_")+right[24:]), 403},
		"folded":                       {get(host, "E2b-Traffic-Access-Token:\r\n "+token), 200},
		"as a trailer":                 {"POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nTrailer: E2b-Traffic-Access-Token\r\n\r\n0\r\n" + right + "\r\n\r\n", 403},
		"hop by hop":                   {get(host, right, "Connection: e2b-traffic-access-token"), 403},
		"in the header of Envoy":       {get(host, "X-Berth-Cookie: "+token, "X-Berth-Link: /.berth/access?x"), 403},
		"at a gateway host, by header": {get(gatewayHost, "X-Sandbox-Id: secret", right), 200},
		"by header, without the token": {get(gatewayHost, "X-Sandbox-Id: secret"), 403},
		"by path, without the token":   {strings.Replace(get(gatewayHost), "/p", fmt.Sprintf("/sandboxes/secret/%d/p", e.port), 1), 403},
		"by path":                      {strings.Replace(get(gatewayHost, right), "/p", fmt.Sprintf("/sandboxes/secret/%d/p", e.port), 1), 200},
		"a preflight":                  {strings.Replace(get(host, "Access-Control-Request-Method: GET"), "GET /p", "OPTIONS /p", 1), 403},
		"HEAD":                         {strings.Replace(get(host), "GET", "HEAD", 1), 403},
		"WebSocket":                    {get(host, upgradeHeaders+webSocketKey[:len(webSocketKey)-2]), 403},
		"a public sandbox":             {get(e.host("def"), right), 200},
	} {
		t.Run(name, func(t *testing.T) {
			to := ""
			if c.code == http.StatusOK {
				to = "def"
			}
			e.requireOnly(t, c.code, to, func() answer {
				a := e.answer(c.request)
				if a.code == http.StatusOK {
					require.NotContains(t, a.body, token, "the pod saw the token")
				} else {
					require.Equal(t, "access_denied", a.header.Get(envoy.ReasonHeader))
				}
				return a
			})
		})
	}
	t.Run("over HTTP/2", func(t *testing.T) {
		pseudo := []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", host}
		e.requireOnly(t, 403, "", func() answer { return e.h2(pseudo...) })
		e.requireOnly(t, 200, "def", func() answer { return e.h2(append(pseudo, sandboxaccess.TokenHeader, token)...) })
		a := e.h2(append(pseudo, "content-type", "application/grpc")...)
		require.Equal(t, "7", a.header.Get("Grpc-Status"), "permission denied")
	})
	t.Run("a page for browsers", func(t *testing.T) {
		a := e.answer(get(host, "Accept: text/html"))
		require.Equal(t, 403, a.code)
		require.Contains(t, a.body, "This sandbox is private")
	})
	require.Zero(t, e.counter(`http\.ingress\.ext_proc\.rejected_header_mutations`))
}

// Invariant: P15
func TestKeyOfTheTeamOpensItsSandboxesOnly(t *testing.T) {
	e := startEdge(t, echoing)
	const own, other = "e2b_0123456789012345678901234567890123456789", "e2b_ffffffffffffffffffffffffffffffffffffffff"
	e.terms("team", routecache.Terms{Access: routecache.Team, Team: "a"})
	e.terms("others", routecache.Terms{Access: routecache.Team, Team: "b"})
	e.terms("secret", routecache.Terms{Access: routecache.Token, Team: "a"})
	hashOf := func(key string) [][sha256.Size]byte { return [][sha256.Size]byte{sha256.Sum256([]byte(key))} }
	get := func(host string, headers ...string) string {
		return "GET /p HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n" + strings.Join(append(headers, ""), "\r\n") + "\r\n"
	}
	host, right := e.host("team"), "X-API-Key: "+own
	a := e.answer(get(host, right))
	require.Equal(t, http.StatusServiceUnavailable, a.code, "the keys have not been read: %s", a.body)
	e.keys.Replace(map[string][][sha256.Size]byte{"a": hashOf(own), "b": hashOf(other)})
	for name, c := range map[string]struct {
		request string
		code    int
		to      string
		// What the pod sees of X-API-Key, and of Authorization.
		sees, authorization []string
	}{
		"no key":                       {request: get(host), code: 403},
		"the key":                      {request: get(host, right), code: 200, to: "def"},
		"in lower case":                {request: get(host, strings.ToLower(right)), code: 200, to: "def"},
		"a key of another team":        {request: get(host, "X-API-Key: "+other), code: 403},
		"a longer one":                 {request: get(host, right+"0"), code: 403},
		"a key of the sandbox's own":   {request: get(host, "X-API-Key: own"), code: 403},
		"twice":                        {request: get(host, right, right), code: 403},
		"two in one line":              {request: get(host, right+","+own), code: 403},
		"after another one":            {request: get(host, "X-API-Key: own", right), code: 200, to: "def", sees: []string{"own"}},
		"with underscores":             {request: get(host, "X_API_Key: "+own), code: 403},
		"in the header of Envoy":       {request: get(host, "X-Berth-Key: "+own), code: 403},
		"as bearer token":              {request: get(host, "Authorization: Bearer "+own), code: 403},
		"as bearer, and the key":       {request: get(host, right, "Authorization: Bearer "+own), code: 200, to: "def"},
		"as bearer, public":            {request: get(e.host("def"), "Authorization: Bearer "+own), code: 200, to: "def"},
		"in lower case, with a tab":    {request: get(e.host("def"), "authorization: bearer\t "+own), code: 200, to: "def"},
		"as bearer, after another":     {request: get(e.host("def"), "Authorization: Basic YTpi", "Authorization: Bearer "+own), code: 200, to: "def"},
		"another bearer token":         {request: get(e.host("def"), "Authorization: Bearer eyJ.e2b_a"), code: 200, to: "def", authorization: []string{"Bearer eyJ.e2b_a"}},
		"an access token of E2B":       {request: get(e.host("def"), "Authorization: Bearer sk_e2b_a"), code: 200, to: "def", authorization: []string{"Bearer sk_e2b_a"}},
		"hop by hop":                   {request: get(host, right, "Connection: x-api-key"), code: 403},
		"at a gateway host, by header": {request: get(gatewayHost, "X-Sandbox-Id: team", right), code: 200, to: "def"},
		"by path":                      {request: strings.Replace(get(gatewayHost, right), "/p", fmt.Sprintf("/sandboxes/team/%d/p", e.port), 1), code: 200, to: "def"},
		"another team's sandbox":       {request: get(e.host("others"), right), code: 403},
		"a sandbox with a token":       {request: get(e.host("secret"), right), code: 403},
		"a public sandbox":             {request: get(e.host("abc"), right), code: 200, to: "abc"},
		"another key, and no of ours":  {request: get(e.host("abc"), "X-API-Key: own", "X-API-Key: e2b"), code: 200, to: "abc", sees: []string{"own", "e2b"}},
		"inside another key":           {request: get(e.host("abc"), "X-API-Key: own, "+own), code: 200, to: "abc"},
	} {
		t.Run(name, func(t *testing.T) {
			e.requireOnly(t, c.code, c.to, func() answer {
				a := e.answer(c.request)
				if a.code == http.StatusOK {
					require.Equal(t, c.sees, a.seen(t).Header["X-Api-Key"])
					require.Equal(t, c.authorization, a.seen(t).Header["Authorization"])
					if c.to == "def" || c.sees != nil {
						require.NotContains(t, a.body, own, "the pod saw the key")
					}
				}
				return a
			})
		})
	}
	e.keys.Replace(map[string][][sha256.Size]byte{"b": hashOf(other)})
	e.requireOnly(t, 403, "", func() answer { return e.answer(get(host, right)) })
	require.Zero(t, e.counter(`http\.ingress\.lua\.access\.errors`))
}

// Invariant: P15
func TestLinkOpensASandboxInABrowser(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e := startEdgeIn(t, in, echoing)
		_, secret := e.private(t)
		host, port := e.host("secret"), uint16(e.port)
		link := secret.Link("secret", port, time.Now().Add(time.Hour), "/a?b=c")
		e.requireOnly(t, 403, "", func() answer { return e.do(e.request(host, "/", nil)) })

		a := e.do(e.request(host, link, nil))
		require.Equal(t, http.StatusSeeOther, a.code, a.body)
		require.Equal(t, "/a?b=c", a.header.Get("Location"))
		require.Equal(t, "no-store", a.header.Get("Cache-Control"))
		require.Equal(t, []string{"nosniff"}, a.header["X-Content-Type-Options"])
		cookies := (&http.Response{Header: a.header}).Cookies()
		require.Len(t, cookies, 1)
		require.True(t, cookies[0].Secure && cookies[0].HttpOnly && cookies[0].Path == "/" && cookies[0].Domain == "", cookies[0])
		own := cookies[0].Name + "=" + cookies[0].Value
		require.True(t, strings.HasPrefix(own, "__Host-"))

		for name, c := range map[string]struct{ sent, seen string }{
			"alone":              {own, ""},
			"first":              {own + "; a=b", "a=b"},
			"last":               {"a=b; " + own, "a=b"},
			"in the middle":      {"a=b; " + own + "; c=d=e; f", "a=b; c=d=e; f"},
			"without spaces":     {"a=b;" + own + ";c", "a=b; c"},
			"with similar names": {"x" + own[:10] + "=1; " + own + "; __Host-berth-access2=2", "x" + own[:10] + "=1; __Host-berth-access2=2"},
			"with empty parts":   {";; " + own + " ;", ""},
		} {
			t.Run(name, func(t *testing.T) {
				seen := e.do(e.request(host, "/", http.Header{"Cookie": {c.sent}})).seen(t)
				require.Equal(t, "def", seen.Pod)
				require.Equal(t, c.seen, strings.Trim(seen.Header.Get("Cookie"), "; "))
			})
		}
		// A pattern that goes back would take hours, and meanwhile the worker of Envoy serves nothing.
		spaces := strings.Repeat(" ", 36<<10)
		for name, sent := range map[string]string{
			"spaces": own + ";" + spaces + ";b", "a name with spaces": own + ";a" + spaces + "b",
			"a value with spaces": own + "; k=a" + spaces + "b", "its name and spaces": own + ";" + cookies[0].Name + spaces + "x",
		} {
			t.Run(name+" of 36 KiB", func(t *testing.T) {
				e.do(e.request(host, "/", http.Header{"Cookie": {sent}})).seen(t)
			})
		}
		for name, sent := range map[string]string{
			"spaces": "a" + spaces + "e", "letters": strings.Repeat("a", 36<<10), "both": strings.Repeat("a ", 18<<10) + "e2b", "commas": strings.Repeat(",a", 18<<10),
		} {
			t.Run("Authorization with "+name+" of 36 KiB", func(t *testing.T) {
				seen := e.do(e.request(host, "/", http.Header{"Cookie": {own}, "Authorization": {sent}})).seen(t)
				require.Equal(t, sent, seen.Header.Get("Authorization"))
			})
		}
		t.Run("in one of two lines", func(t *testing.T) {
			seen := e.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nCookie: a=b\r\nCookie: " + own + "\r\n\r\n").seen(t)
			require.Equal(t, "a=b", seen.Header.Get("Cookie"))
		})
		t.Run("over HTTP/2, in crumbs", func(t *testing.T) {
			seen := e.h2(":method", "GET", ":scheme", "http", ":path", "/", ":authority", host, "cookie", "a=b", "cookie", own, "cookie", "c=d").seen(t)
			require.Equal(t, "a=b; c=d", seen.Header.Get("Cookie"))
		})
		t.Run("twice", func(t *testing.T) {
			e.requireOnly(t, 403, "", func() answer { return e.do(e.request(host, "/", http.Header{"Cookie": {own + "; " + own}})) })
		})
		t.Run("not at another sandbox", func(t *testing.T) {
			key, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
			require.NoError(t, err)
			e.terms("other", routecache.Terms{Access: routecache.Token, Secret: key.Secret("other")})
			e.requireOnly(t, 403, "", func() answer { return e.do(e.request(e.host("other"), "/", http.Header{"Cookie": {own}})) })
			e.requireOnly(t, 403, "", func() answer { return e.do(e.request(e.host("other"), link, nil)) })
		})
		t.Run("not by header", func(t *testing.T) {
			e.requireOnly(t, 403, "", func() answer {
				return e.do(e.request(gatewayHost, "/", http.Header{"Cookie": {own}, "X-Sandbox-Id": {"secret"}, "X-Sandbox-Port": {fmt.Sprint(port)}}))
			})
		})
		t.Run("not by path", func(t *testing.T) {
			e.requireOnly(t, 403, "", func() answer {
				return e.do(e.request(sandboxDomain, fmt.Sprintf("/sandboxes/secret/%d/", port), http.Header{"Cookie": {own}}))
			})
		})
		t.Run("not for the page of another sandbox", func(t *testing.T) {
			for _, r := range []struct {
				origin, site string
				code         int
				to           string
			}{
				{"https://" + host, "same-origin", 200, "def"}, {"https://1-secret." + sandboxDomain + ":1", "same-site", 200, "def"},
				{"https://" + e.host("def"), "same-site", 403, ""},
			} {
				e.requireOnly(t, r.code, r.to, func() answer {
					return e.do(e.request(host, "/", http.Header{
						"Cookie": {own}, "Origin": {r.origin}, "Sec-Fetch-Site": {r.site}, "Sec-Fetch-Mode": {"cors"}, "Sec-Fetch-Dest": {"empty"},
					}))
				})
				a := e.webSocket(t, host, "/", http.Header{"Cookie": {own}, "Origin": {r.origin}})
				require.Equal(t, r.code == 403, a.code == 403, "the handshake of a WebSocket: %d", a.code)
				if in == behindEnvoyGateway {
					continue // it refuses every WebSocket over HTTP/2
				}
				a = e.h2(":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":path", "/", ":authority", host,
					"sec-websocket-version", "13", "cookie", own, "origin", r.origin)
				require.Equal(t, r.code == 403, a.code == 403, "over HTTP/2: %d", a.code)
			}
		})
		t.Run("not seen by a public sandbox either", func(t *testing.T) {
			seen := e.do(e.request(e.host("def"), "/", http.Header{"Cookie": {"a=b; " + own}})).seen(t)
			require.Equal(t, "a=b", seen.Header.Get("Cookie"))
			require.Equal(t, link, e.do(e.request(e.host("def"), link, nil)).seen(t).Path, "a public sandbox has the path for itself")
		})
		for name, target := range map[string]string{
			"expired":        secret.Link("secret", port, time.Now().Add(-time.Second), "/"),
			"another port":   secret.Link("secret", port+1, time.Now().Add(time.Hour), "/"),
			"no signature":   sandboxaccess.LinkPath + "?expires=99999999999",
			"a longer path":  strings.Replace(link, "?", "/?", 1),
			"an encoded dot": strings.Replace(link, ".berth", "%2eberth", 1),
		} {
			t.Run(name, func(t *testing.T) {
				e.requireOnly(t, 403, "", func() answer { return e.do(e.request(host, target, nil)) })
			})
		}
		for _, to := range []string{"//evil.example", "https://evil.example/", `/\evil.example`, "/\t/evil.example", "/\r\nSet-Cookie: a=b"} {
			a := e.do(e.request(host, strings.Replace(link, url.QueryEscape("/a?b=c"), url.QueryEscape(to), 1), nil))
			require.Equal(t, http.StatusBadRequest, a.code, to)
			require.Empty(t, a.header.Get("Location"))
			require.Empty(t, a.header.Get("Set-Cookie"))
		}
		require.Zero(t, e.counter(`http\.ingress\.lua\.access\.errors`))
	})
}

// Invariant: P5
func TestMaskedHostIsThatOfTheClaim(t *testing.T) {
	e := startEdge(t, echoing)
	e.terms("masked", routecache.Terms{MaskHost: "localhost:${PORT}"})
	want := fmt.Sprint("localhost:", e.port)
	asked := strings.ToUpper(e.host("masked")) + ":8000"
	seen := e.do(e.request(asked, "/p?q", http.Header{"X-Forwarded-Host": {"evil.example"}})).seen(t)
	require.Equal(t, []string{want, "/p?q"}, []string{seen.Host, seen.Path})
	require.Equal(t, []string{asked}, seen.Header["X-Forwarded-Host"])
	seen = e.h2(":method", "GET", ":scheme", "http", ":path", "/", ":authority", e.host("masked"), "x-forwarded-host", "evil.example").seen(t)
	require.Equal(t, want, seen.Host)
	require.Equal(t, []string{e.host("masked")}, seen.Header["X-Forwarded-Host"])
	seen = e.do(e.request(gatewayHost, fmt.Sprintf("/sandboxes/masked/%d/x", e.port), nil)).seen(t)
	require.Equal(t, []string{want, "/x"}, []string{seen.Host, seen.Path})
	seen = e.do(e.request(e.host("def"), "/", nil)).seen(t)
	require.Equal(t, e.host("def"), seen.Host)
	require.Empty(t, seen.Header["X-Forwarded-Host"])
	require.Zero(t, e.counter(`http\.ingress\.ext_proc\.rejected_header_mutations`))
}

// tlsPod makes id a sandbox with a port to which Envoy speaks TLS, with a certificate of an unknown authority.
// A masked host is mask.
func (e *edge) tlsPod(t *testing.T, id, mask string) (port uint16) {
	t.Helper()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Server-Name", r.TLS.ServerName)
		w.Header().Set("X-Protocol", r.Proto)
		w.Header().Set("X-Host", r.Host)
		w.Header().Set("X-Path", r.URL.Path)
		if r.Header.Get("Upgrade") != "" {
			serveEchoes(w, r)
			return
		}
		echoing(id).ServeHTTP(w, r)
	}))
	var err error
	server.Listener, err = net.Listen("tcp", "127.1.0.3:0")
	require.NoError(t, err)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	at := netip.MustParseAddrPort(server.Listener.Addr().String())
	e.routes.mu.Lock()
	defer e.routes.mu.Unlock()
	e.routes.at[id] = routecache.Route{
		Addr: at.Addr(), Terms: &routecache.Terms{MaskHost: mask, HTTPSPorts: routecache.NewPorts([]uint16{at.Port()})},
	}
	return at.Port()
}

// Invariant: P5
func TestEnvoySpeaksTLSToThePortsOfTheClaim(t *testing.T) {
	e := startEdge(t, echoing)
	for id, mask := range map[string]string{"masked": "local.test:${PORT}", "plain": ""} {
		port := e.tlsPod(t, id, mask)
		own := fmt.Sprintf("%d-%s.%s", port, id, sandboxDomain)
		byHeader := http.Header{"X-Sandbox-Id": {id}, "X-Sandbox-Port": {fmt.Sprint(port)}}
		byPath := fmt.Sprintf("/sandboxes/%s/%d/p", id, port)
		h2 := func(host, path string, more ...string) answer {
			return e.h2(append([]string{":method", "GET", ":scheme", "http", ":path", path, ":authority", host}, more...)...)
		}
		const grpc = "application/grpc"
		for name, c := range map[string]struct {
			ask            func(t *testing.T) answer
			host, protocol string
		}{
			"by host":              {func(*testing.T) answer { return e.do(e.request(own, "/p", nil)) }, own, "HTTP/1.1"},
			"by header":            {func(*testing.T) answer { return e.do(e.request(gatewayHost, "/p", byHeader)) }, gatewayHost, "HTTP/1.1"},
			"by path":              {func(*testing.T) answer { return e.do(e.request(gatewayHost, byPath, nil)) }, gatewayHost, "HTTP/1.1"},
			"by host, HTTP/2":      {func(*testing.T) answer { return h2(own, "/p") }, own, "HTTP/1.1"},
			"by path, HTTP/2":      {func(*testing.T) answer { return h2(gatewayHost, byPath) }, gatewayHost, "HTTP/1.1"},
			"by host, gRPC":        {func(*testing.T) answer { return h2(own, "/p", "content-type", grpc) }, own, "HTTP/2.0"},
			"by path, gRPC":        {func(*testing.T) answer { return h2(gatewayHost, byPath, "content-type", grpc) }, gatewayHost, "HTTP/2.0"},
			"by host, WebSocket":   {func(t *testing.T) answer { return e.webSocket(t, own, "/p", nil) }, own, "HTTP/1.1"},
			"by header, WebSocket": {func(t *testing.T) answer { return e.webSocket(t, gatewayHost, "/p", byHeader) }, gatewayHost, "HTTP/1.1"},
			"by path, WebSocket":   {func(t *testing.T) answer { return e.webSocket(t, gatewayHost, byPath, nil) }, gatewayHost, "HTTP/1.1"},
			"by host, WebSocket over HTTP/2": {
				func(t *testing.T) answer { return e.h2WebSocket(t, own, "/p") }, own, "HTTP/1.1",
			},
			"by header, HTTP/2": {
				func(*testing.T) answer {
					return h2(gatewayHost, "/p", "x-sandbox-id", id, "x-sandbox-port", fmt.Sprint(port))
				},
				gatewayHost, "HTTP/1.1",
			},
		} {
			t.Run(id+", "+name, func(t *testing.T) {
				host := c.host
				if mask != "" {
					host = strings.ReplaceAll(mask, "${PORT}", fmt.Sprint(port))
				}
				serverName, _, _ := strings.Cut(host, ":") // servers choose their certificate by it
				a := c.ask(t)
				require.Equal(t, [4]string{serverName, c.protocol, host, "/p"}, [4]string{
					a.header.Get("X-Server-Name"), a.header.Get("X-Protocol"), a.header.Get("X-Host"), a.header.Get("X-Path"),
				}, "%d %s", a.code, a.body)
			})
		}
	}
	// The other port of a sandbox, and other sandboxes, are spoken to without TLS.
	require.Equal(t, "abc", e.do(e.request(e.host("abc"), "/", nil)).seen(t).Pod)
	require.Zero(t, e.counter(`cluster\.pods_h1_tls\.ssl\.fail_verify_error`))
}

// Invariant: P15
func TestPreflightsAtTheAgentsPortReachNoPod(t *testing.T) {
	e := startEdge(t, echoing)
	e.terms("secret", routecache.Terms{Access: routecache.Token, AgentPort: sandboxaccess.AgentPort})
	for _, id := range []string{"secret", "nobody"} {
		host := fmt.Sprintf("%d-%s.%s", sandboxaccess.AgentPort, id, sandboxDomain)
		for protocol, ask := range map[string]func() answer{
			"HTTP/1.1": func() answer {
				return e.answer("OPTIONS /process.Process/List HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nOrigin: https://page.example\r\n" +
					"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: x-access-token\r\nSec-Fetch-Mode: cors\r\n\r\n")
			},
			"HTTP/2": func() answer {
				return e.h2(":method", "OPTIONS", ":scheme", "http", ":path", "/files", ":authority", host, "origin", "null", "access-control-request-method", "POST")
			},
		} {
			e.requireOnly(t, http.StatusNoContent, "", func() answer {
				a := ask()
				require.Empty(t, a.body)
				require.Equal(t, [...]string{"*", "HEAD, GET, POST, PUT, PATCH, DELETE", "*, Authorization", "7200", ""}, [...]string{
					a.header.Get("Access-Control-Allow-Origin"), a.header.Get("Access-Control-Allow-Methods"), a.header.Get("Access-Control-Allow-Headers"),
					a.header.Get("Access-Control-Max-Age"), a.header.Get("Access-Control-Allow-Credentials"),
				}, "%s %s", id, protocol)
				return a
			})
		}
		refused := e.do(e.request(host, "/process.Process/List", http.Header{"Origin": {"https://page.example"}}))
		require.Contains(t, []int{http.StatusUnauthorized, http.StatusNotFound}, refused.code, refused.body)
		require.Equal(t, "*", refused.header.Get("Access-Control-Allow-Origin"))
		require.Contains(t, refused.header.Get("Access-Control-Expose-Headers"), "Grpc-Status")
	}
	require.Zero(t, e.counter(`http\.ingress\.ext_proc\.rejected_header_mutations`))
}

// webSocket opens a WebSocket, and has a message echoed.
func (g *gateway) webSocket(t *testing.T, host, path string, header http.Header) answer {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", g.addr)
	}}}
	defer client.CloseIdleConnections()
	c, response, err := websocket.Dial(t.Context(), "ws://"+host+path, &websocket.DialOptions{HTTPClient: client, HTTPHeader: header})
	if err != nil {
		require.NotNil(t, response, err)
		return answer{response.StatusCode, response.Header, err.Error()}
	}
	require.NoError(t, c.Write(t.Context(), websocket.MessageText, []byte("hello")))
	_, body, err := c.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, "hello", string(body))
	require.NoError(t, c.CloseNow())
	return answer{response.StatusCode, response.Header, "hello"}
}
