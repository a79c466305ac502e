package envoy_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/envoy"
)

// spoof is a request by which a client tries to reach what its host does not
// name, or to be believed something. In request, host, other, domain, gateway,
// port and otherIP in braces are filled in.
type spoof struct {
	name, request string
	// code is what it gets. 200 comes from the pod of sandbox abc, or of to.
	code int
	to   string
}

// plain is a request for sandbox abc with these headers more.
func plain(headers ...string) string {
	return "GET /p?q HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n" + strings.Join(headers, "\r\n") + "\r\n\r\n"
}

// believed are headers that some program, Envoy among them, takes for a
// destination, an identity or an order.
func believed() []string {
	return []string{
		"X-Envoy-Original-Dst-Host: {otherIP}:{port}", "x-ENVOY-original-DST-host: {otherIP}:{port}", "X_Envoy_Original_Dst_Host: {otherIP}:{port}",
		"X-Envoy-Upstream-Rq-Timeout-Ms: 1", "x-envoy-UPSTREAM-rq-per-try-timeout-ms: 1", "X-Envoy-Upstream-Stream-Duration-Ms: 1", "X-Envoy-Expected-Rq-Timeout-Ms: 1",
		"X-Envoy-Retry-On: 5xx,reset", "X-Envoy-Retry-Grpc-On: unavailable", "X-Envoy-Max-Retries: 9", "X-Envoy-Retriable-Status-Codes: 200", "X-Envoy-Retriable-Header-Names: x", "X-Envoy-Hedge-On-Per-Try-Timeout: true",
		"X-Envoy-Internal: true", "X-Envoy-External-Address: 10.0.0.1", "X-Envoy-Force-Trace: 1", "X-Envoy-Original-Path: /x", "X-Envoy-Original-Host: {other}", "X-Envoy-Original-Method: PUT",
		"X-Envoy-Downstream-Service-Cluster: x", "X-Envoy-Downstream-Service-Node: x", "X-Envoy-Upstream-Alt-Stat-Name: x", "X-Envoy-Decorator-Operation: x", "X-Envoy-Ip-Tags: x",
		"X-Envoy-Peer-Metadata: x", "X-Envoy-Peer-Metadata-Id: x", "X-Envoy-Attempt-Count: 9", "X-Envoy-Is-Timeout-Retry: true", "X-Envoy-Degraded: true", "X-Envoy-Immediate-Health-Check-Fail: x", "X-Envoy-Whatever: x",
		"X-Berth-Dst: {otherIP}:{port}", "x-BERTH-id: def", "X_Berth_Reply: x", "X-Berth-Reason: sandbox_gone",
		"X-Forwarded-Host: {other}", "X_Forwarded_Host: {other}", "X-Forwarded-Server: {other}", "X-Forwarded-Proto: https", "X-Forwarded-Port: 443", "X-Forwarded-For: 10.0.0.1", "Forwarded: host={other};for=10.0.0.1", "X-Real-Ip: 10.0.0.1",
		"X-Forwarded-Client-Cert: By=x", "X-Request-Id: chosen",
		// Any sign in the place of "-" becomes the same variable of a CGI program.
		"X.Envoy.Original.Dst.Host: {otherIP}:{port}", "X~Berth!Dst: {otherIP}:{port}", "x'berth'reason: x", "X.Forwarded.Host: {other}", "X*Real+Ip: 10.0.0.1", "X.Request.Id: chosen",
	}
}

// harmless are headers that programs elsewhere believe and Berth does not look
// at: they are the sandbox's own business.
func harmless() []string {
	return []string{
		"X-Original-Host: {other}", "X-Host: {other}", "X-Http-Host-Override: {other}", "X-Original-Url: /sandboxes/def/{port}/", "X-Rewrite-Url: /sandboxes/def/{port}/", "X-Http-Method-Override: CONNECT",
		"E2b-Sandbox-Id: def", "E2B-SANDBOX-ID: def\r\nE2b-Sandbox-Id: def", "E2b-Sandbox-Port: 1", "X-Sandbox-Id: def\r\nX-Sandbox-Port: {port}", "Berth: {otherIP}:{port}", "Dst: {otherIP}:{port}", ":authority: {other}", "Proxy-Host: {other}", "Via: 1.1 {other}",
	}
}

func spoofs() []spoof {
	var all []spoof
	for _, h := range believed() {
		all = append(all, spoof{h, plain(h), 200, ""}, spoof{h + ", twice", plain(h, strings.ToUpper(h[:1])+h[1:]), 200, ""})
	}
	for _, h := range harmless() {
		code := 200
		if strings.HasPrefix(h, ":") {
			code = 400
		}
		all = append(all, spoof{h, plain(h), code, ""})
	}
	get := func(target, host string, headers ...string) string {
		return "GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n" + strings.Join(append(headers, ""), "\r\n") + "\r\n"
	}
	post := func(headers, body string) string {
		return "POST / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n" + headers + "\r\n" + body
	}
	const smuggled = "GET / HTTP/1.1\r\nHost: {other}\r\n\r\n"
	return append(all, []spoof{
		// Hosts.
		{"two hosts", get("/", "{host}", "Host: {other}"), 400, ""},
		{"the same host twice", get("/", "{host}", "Host: {host}"), 400, ""},
		{"two hosts, the other way round", get("/", "{other}", "Host: {host}"), 400, ""},
		{"two hosts with a comma", get("/", "{host},{other}"), 400, ""},
		{"two hosts with a comma and a space", get("/", "{host}, {other}"), 400, ""},
		{"a folded host", "GET / HTTP/1.1\r\nHost: {host}\r\n ,{other}\r\nConnection: close\r\n\r\n", 400, ""},
		{"a host before whose colon is a space", "GET / HTTP/1.1\r\nHost : {other}\r\nHost: {host}\r\nConnection: close\r\n\r\n", 400, ""},
		{"no host", "GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 400, ""},
		{"an empty host", get("/", ""), 400, ""},
		{"userinfo in the host", get("/", "{other}@{host}"), 400, ""},
		{"userinfo behind the host", get("/", "{host}@{other}"), 400, ""},
		{"a host with a slash", get("/", "{host}/{other}"), 400, ""},
		{"a host with a backslash", get("/", `{host}\{other}`), 400, ""},
		{"a host with a query", get("/", "{host}?{other}"), 400, ""},
		{"a host with a space", get("/", "{host} {other}"), 400, ""},
		{"a host with NUL", get("/", "{host}\x00{other}"), 400, ""},
		{"a host beyond ASCII", get("/", "{port}-äbc.{domain}"), 400, ""},
		{"the Kelvin sign", get("/", "{port}-\u212a.{domain}"), 400, ""},
		{"an IDN", get("/", "{port}-xn--abc-8ya.{domain}"), 400, ""},
		{"an encoded host", get("/", "{port}-%61bc.{domain}"), 400, ""},
		{"a huge label", get("/", strings.Repeat("a", 8000)+".{domain}"), 400, ""},
		{"a host of the length of a name too many", get("/", strings.Repeat("a.", 4000)+"{host}"), 400, ""},
		{"the pod's address", get("/", "{otherIP}:{port}"), 400, ""},
		{"an IPv6 address", get("/", "[::1]:{port}"), 400, ""},
		{"the bare domain", get("/", "{domain}"), 404, ""},
		{"a suffix of the host", get("/", "{host}.example.org"), 400, ""},
		{"a prefix of the host", get("/", "x{host}"), 400, ""},
		{"another domain", get("/", "{port}-abc.example.org"), 400, ""},
		{"port 0", get("/", "0-abc.{domain}"), 400, ""},
		{"a port above 65535", get("/", "65536-abc.{domain}"), 400, ""},
		{"a listener's port that is none", get("/", "{host}:x"), 400, ""},
		{"a listener's port twice", get("/", "{host}:80:80"), 400, ""},
		{"upper case", get("/", "{HOST}"), 200, ""},
		{"a trailing dot", get("/", "{host}."), 200, ""},
		{"two trailing dots", get("/", "{host}.."), 400, ""},
		{"the listener's port", get("/", "{host}:1"), 200, ""},
		{"a trailing dot and a port", get("/", "{host}.:65535"), 200, ""},
		{"a sandbox that is gone", get("/", "{port}-gone.{domain}", "X-Envoy-Original-Dst-Host: {otherIP}:{port}"), 410, ""},
		{"an unknown sandbox", get("/", "{port}-none.{domain}", "E2b-Sandbox-Id: def"), 502, ""},
		{"a sandbox outside the pod ranges", get("/", "{port}-out.{domain}"), 503, ""},
		{"a port that its pool does not open", get("/", "{port}-private.{domain}"), 403, ""},
		// Targets.
		{"an absolute target counts, not the host", get("http://{host}/x", "{other}"), 200, ""},
		{"an absolute target without a host", "GET http://{host}/x HTTP/1.1\r\nConnection: close\r\n\r\n", 200, ""},
		{"an absolute target with two hosts", get("http://{host}/x", "{other}", "Host: {other}"), 200, ""},
		{"an absolute target with userinfo", get("http://{other}@{host}/x", "{host}"), 200, ""},
		{"an absolute target without a path", get("http://{host}", "{host}"), 200, ""},
		{"an absolute target with a comma", get("http://{host},{other}/", "{host}"), 400, ""},
		{"an absolute target of another scheme", get("ftp://{host}/", "{host}"), 400, ""},
		{"an absolute target that is secure", get("https://{host}/", "{host}"), 403, ""},
		{"an authority as target", get("{other}", "{host}"), 400, ""},
		{"a target with a fragment", get("/#http://{other}/", "{host}"), 400, ""},
		{"traversal", get("/../../sandboxes/def/{port}/", "{host}"), 200, ""},
		{"encoded traversal", get("/%2e%2e/%2f..%2f;x", "{host}"), 200, ""},
		{"slashes", get("//{other}//x", "{host}"), 200, ""},
		{"a sandbox in the path, which is off for sandbox hosts", get("/sandboxes/def/{port}/", "{host}"), 200, ""},
		{"OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", 400, ""},
		// Methods and versions.
		{"CONNECT without a port", "CONNECT {other} HTTP/1.1\r\nHost: {other}\r\n\r\n", 400, ""},
		{"CONNECT to an address", "CONNECT {otherIP}:{port} HTTP/1.1\r\nHost: {host}\r\n\r\n", 405, ""},
		{"CONNECT and a host", "CONNECT {other}:80 HTTP/1.1\r\nHost: {host}\r\n\r\n", 405, ""},
		{"a method in lower case", "get / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", 400, ""},
		{"an unknown method", "FOO / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", 400, ""},
		{"HTTP/1.0", "GET / HTTP/1.0\r\nHost: {host}\r\n\r\n", 426, ""},
		{"HTTP/1.0 without a host", "GET / HTTP/1.0\r\n\r\n", 426, ""},
		{"HTTP/0.9", "GET /\r\n\r\n", 426, ""},
		{"HTTP/1.2", "GET / HTTP/1.2\r\nHost: {host}\r\nConnection: close\r\n\r\n", 426, ""},
		{"HTTP/2 in HTTP/1", "GET / HTTP/2.0\r\nHost: {host}\r\nConnection: close\r\n\r\n", 426, ""},
		// Bodies.
		{"chunked and a length", post("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", "0\r\n\r\n"+smuggled), 400, ""},
		{"a length and chunked", post("Content-Length: 100\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"+smuggled), 400, ""},
		{"two lengths", post("Content-Length: 0\r\nContent-Length: 40\r\n", smuggled), 400, ""},
		{"two lengths in one", post("Content-Length: 0, 40\r\n", smuggled), 400, ""},
		{"a length with a sign", post("Content-Length: +0\r\n", smuggled), 400, ""},
		{"a negative length", post("Content-Length: -1\r\n", smuggled), 400, ""},
		{"a length in hexadecimal", post("Content-Length: 0x0\r\n", smuggled), 400, ""},
		{"chunked, almost", post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"+smuggled), 501, ""},
		{"chunked after a tab", post("Transfer-Encoding:\tchunked\r\n", "0\r\n\r\n"), 200, ""},
		{"chunked with a vertical tab", post("Transfer-Encoding: \x0bchunked\r\n", "0\r\n\r\n"+smuggled), 400, ""},
		{"chunked twice", post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"+smuggled), 501, ""},
		{"identity and chunked", post("Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"+smuggled), 501, ""},
		{"folded chunked", post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"), 200, ""},
		{"a chunk size that is none", post("Transfer-Encoding: chunked\r\n", "x\r\n\r\n"+smuggled), 400, ""},
		{"a chunk size that overflows", post("Transfer-Encoding: chunked\r\n", "10000000000000000\r\n"+smuggled), 400, ""},
		// Headers.
		{"a folded header", plain("X-A: b", " X-Envoy-Original-Dst-Host: {otherIP}:{port}"), 200, ""},
		{"lines that end with LF", "GET / HTTP/1.1\nHost: {host}\nX-Berth-Dst: {otherIP}:{port}\nConnection: close\n\n", 200, ""},
		{"a line that ends with CR", "GET / HTTP/1.1\r\nHost: {host}\rHost: {other}\r\nConnection: close\r\n\r\n", 400, ""},
		{"a header with NUL", plain("X-A: \x00"), 400, ""},
		{"a header name with a space", plain("X-Envoy Original: x"), 400, ""},
		{"a header without a name", plain(": x"), 400, ""},
		{"the host is hop by hop", get("/", "{host}", "Connection: host"), 400, ""},
		{"our headers are hop by hop", get("/", "{host}", "Connection: x-request-id, e2b-sandbox-id"), 200, ""},
		{"an upgrade to h2c", get("/", "{host}", "Connection: upgrade, http2-settings", "Upgrade: h2c", "Http2-Settings: AAMAAABk"), 200, ""},
		{"an upgrade to something", get("/", "{host}", "Connection: upgrade", "Upgrade: berth"), 403, ""},
		// At a gateway host the request says which sandbox it is for, once.
		{"header at the gateway", get("/", "{gateway}", "E2b-Sandbox-Id: def", "E2b-Sandbox-Port: {port}"), 200, "def"},
		{"header at the bare domain", get("/sandboxes/abc/{port}/", "{domain}", "X-Sandbox-Id: def", "X-Sandbox-Port: {port}"), 200, "def"},
		{"two headers that differ", get("/", "{gateway}", "E2b-Sandbox-Id: def", "X-Sandbox-Id: abc"), 400, ""},
		{"one header twice", get("/", "{gateway}", "X-Sandbox-Id: def", "X-Sandbox-Id: abc"), 400, ""},
		{"one header twice, in one line", get("/", "{gateway}", "X-Sandbox-Id: def,abc"), 400, ""},
		{"a header with userinfo", get("/", "{gateway}", "X-Sandbox-Id: x@def"), 400, ""},
		{"a header with underscores", get("/", "{gateway}", "X_Sandbox_Id: def"), 404, ""},
		{"a sandbox outside the pod ranges, by header", get("/", "{gateway}", "X-Sandbox-Id: out"), 503, ""},
		{"path at the gateway", get("/sandboxes/def/{port}/p?q", "{gateway}"), 200, "def"},
		{"traversal to another sandbox", get("/sandboxes/abc/{port}/../../def/{port}/", "{gateway}"), 400, ""},
		{"encoded traversal to another sandbox", get("/sandboxes/abc/{port}/%2e%2e/%2E./def/{port}/", "{gateway}"), 400, ""},
		{"traversal with encoded slashes", get("/sandboxes/abc/{port}/..%2f..%2fdef/{port}/", "{gateway}"), 400, ""},
		{"traversal with backslashes", get(`/sandboxes/abc/{port}/..\..\def/{port}/`, "{gateway}"), 400, ""},
		{"two sandboxes in the path", get("/sandboxes/abc/{port}/sandboxes/def/{port}/", "{gateway}"), 200, ""},
		{"an absolute target at the gateway", get("http://{gateway}/sandboxes/abc/{port}/", "{other}"), 200, ""},
	}...)
}

// internal matches the headers that neither the router nor a pod may see.
var internal = regexp.MustCompile(`(?i)^(x[^a-z0-9](envoy|berth)[^a-z0-9]|x[^a-z0-9]forwarded[^a-z0-9](host|server|port|client)|forwarded$|x[^a-z0-9]real[^a-z0-9]ip$|x[^-a-z0-9]request[^a-z0-9]id$)`)

// routerReads are the headers that the router may see.
var routerReads = regexp.MustCompile(`^(:authority|:method|:path|x-request-id|e2b-sandbox-id|e2b-sandbox-port|x-sandbox-id|x-sandbox-port|e2b-traffic-access-token|x-access-token|x-berth-cookie|x-berth-link|x-berth-key|accept|origin|access-control-request-method|sec-fetch-site|sec-fetch-mode|sec-fetch-dest|content-type)$`)

// Invariant: P5
func TestRequestReachesOnlyThePodOfItsHost(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e := startEdgeIn(t, in, echoing)
		otherIP := e.def.addr.Addr().String()
		fill := strings.NewReplacer("{host}", e.host("abc"), "{HOST}", strings.ToUpper(e.host("abc")), "{other}", e.host("def"), "{domain}", sandboxDomain,
			"{gateway}", gatewayHost, "{port}", fmt.Sprint(e.port), "{otherIP}", otherIP)
		all := spoofs()
		require.GreaterOrEqual(t, len(all), 60)
		for _, s := range all {
			t.Run(s.name, func(t *testing.T) {
				if s.code == http.StatusOK && s.to == "" {
					s.to = "abc"
				}
				e.requireOnly(t, s.code, s.to, func() answer { return e.answer(fill.Replace(s.request)) })
			})
		}
	})
}

// requireOnly asks for something and requires this status, and that one request
// arrived at the pod named to and none anywhere else.
func (e *edge) requireOnly(t *testing.T, code int, to string, ask func() answer) {
	t.Helper()
	abc, def := e.abc.hits.Load(), e.def.hits.Load()
	a := ask()
	if e.in == behindEnvoyGateway {
		// That gateway refuses and redirects more, makes an authority of an absolute target, and resolves dots in paths.
		require.LessOrEqual(t, e.abc.hits.Load()+e.def.hits.Load(), abc+def+1)
		require.Zero(t, e.stranger.hits.Load(), "outside the pod ranges")
		var seen echo
		if a.code == http.StatusOK && !strings.Contains(t.Name(), "traversal") {
			require.NoError(t, json.Unmarshal([]byte(a.body), &seen), a.body)
			require.Equal(t, to, seen.Pod)
			for name := range seen.Header {
				require.NotRegexp(t, `(?i)^x[^a-z0-9](envoy|berth)[^a-z0-9]`, name)
			}
		}
		return
	}
	require.Equal(t, code, a.code, "%v: %s", a.header, a.body)
	require.Equal(t, to == "abc", e.abc.hits.Load() != abc)
	require.Equal(t, to == "def", e.def.hits.Load() != def)
	require.LessOrEqual(t, e.abc.hits.Load()+e.def.hits.Load(), abc+def+1)
	require.Zero(t, e.stranger.hits.Load(), "outside the pod ranges")
	for name := range e.router.take() {
		require.Regexp(t, routerReads, name)
	}
	switch code {
	case 0, http.StatusNoContent: // broken off, or a preflight
	case http.StatusOK:
		var seen echo
		require.NoError(t, json.Unmarshal([]byte(a.body), &seen), a.body)
		requireNothingInternal(t, seen)
		require.Equal(t, to, seen.Pod)
	default:
		require.NotEmpty(t, a.header.Get(envoy.ReasonHeader), "it is not Berth that answers")
	}
}

func requireNothingInternal(t *testing.T, seen echo) {
	t.Helper()
	for name := range seen.Header {
		require.NotRegexp(t, internal, name)
	}
	require.NotEqual(t, []string{"chosen"}, seen.Header["X-Request-Id"])
	require.Len(t, seen.Header["X-Request-Id"], 1)
	require.Len(t, seen.Header["X-Forwarded-For"], 1)
	require.NotContains(t, seen.Header["X-Forwarded-For"][0], "10.0.0.1")
	require.Equal(t, []string{"http"}, seen.Header["X-Forwarded-Proto"])
}

// Invariant: P5
func TestHTTP2RequestReachesOnlyThePodOfItsHost(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e := startEdgeIn(t, in, echoing)
		abc, def := e.host("abc"), e.host("def")
		otherDst := e.def.addr.String()
		for name, c := range map[string]struct {
			headers []string
			code    int // 0: the stream or the connection is broken off
			to      string
		}{
			"plain":                            {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc}, 200, "abc"},
			"authority and another host":       {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "host", def}, 200, "abc"},
			"host alone":                       {[]string{":method", "GET", ":scheme", "http", ":path", "/", "host", abc}, 200, "abc"},
			"two authorities":                  {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, ":authority", def}, 0, ""},
			"two hosts":                        {[]string{":method", "GET", ":scheme", "http", ":path", "/", "host", abc, "host", def}, 0, ""},
			"an authority with a comma":        {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc + "," + def}, 400, ""},
			"no authority":                     {[]string{":method", "GET", ":scheme", "http", ":path", "/"}, 0, ""},
			"an empty authority":               {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", ""}, 0, ""},
			"userinfo":                         {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", def + "@" + abc}, 0, ""},
			"the authority last":               {[]string{":method", "GET", ":scheme", "http", ":path", "/", "x-a", "b", ":authority", def}, 0, ""},
			"an unknown pseudo-header":         {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, ":dst", otherDst}, 0, ""},
			"an absolute path":                 {[]string{":method", "GET", ":scheme", "http", ":path", "http://" + def + "/", ":authority", abc}, 0, ""},
			"a path with an authority":         {[]string{":method", "GET", ":scheme", "http", ":path", "//" + def + "/", ":authority", abc}, 200, "abc"},
			"scheme https":                     {[]string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", abc}, 200, "abc"},
			"headers that are ours":            {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "x-envoy-original-dst-host", otherDst, "x-berth-dst", otherDst, "x_berth_id", "def", "x-forwarded-host", def, "x-forwarded-for", "10.0.0.1"}, 200, "abc"},
			"headers of a gateway":             {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "e2b-sandbox-id", "def", "x-sandbox-id", "def"}, 200, "abc"},
			"upper case header":                {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "X-Envoy-Original-Dst-Host", otherDst}, 0, ""},
			"connection header":                {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "connection", "x-request-id"}, 0, ""},
			"transfer-encoding":                {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "transfer-encoding", "chunked"}, 0, ""},
			"a line break in a value":          {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", abc, "x-a", "b\r\nhost: " + def}, 0, ""},
			"CONNECT":                          {[]string{":method", "CONNECT", ":authority", def}, 405, ""},
			"CONNECT to an address":            {[]string{":method", "CONNECT", ":authority", otherDst}, 405, ""},
			"extended CONNECT, no WebSocket":   {[]string{":method", "CONNECT", ":protocol", "connect-udp", ":scheme", "http", ":path", "/", ":authority", abc}, 400, ""},
			"a header at the gateway":          {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", gatewayHost, "e2b-sandbox-id", "def"}, 200, "def"},
			"the header twice at the gateway":  {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", gatewayHost, "x-sandbox-id", "def", "x-sandbox-id", "abc"}, 400, ""},
			"a sandbox outside the pod ranges": {[]string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", e.host("out")}, 503, ""},
		} {
			t.Run(name, func(t *testing.T) {
				e.requireOnly(t, c.code, c.to, func() answer { return e.h2(c.headers...) })
			})
		}
	})
}
