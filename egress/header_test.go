package egress_test

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
)

// secured is a world in which requests of the sandbox abc to example.com get headers. That of httptest is the
// certificate.
func secured(t testing.TB, headers ...egress.Header) *world {
	w := newWorld(t)
	port, err := strconv.ParseUint(w.tlsPort, 10, 16)
	require.NoError(t, err)
	for i := range headers {
		headers[i].Host, headers[i].Port = "example.com", uint16(port)
	}
	abc := sandbox(t, "abc", abcAddr, w.ports)
	abc.Headers = headers
	require.NoError(t, w.set(abc))
	return w
}

// seen returns the requests that an origin has got since the last call.
func (w *world) seen() []*http.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.requests
	w.requests = nil
	return all
}

// Invariant: P38
func TestHeaderOfTheGatewayReplacesThatOfTheClient(t *testing.T) {
	w := secured(t, egress.Header{Name: "authorization", Value: "pool"}, egress.Header{Name: "x-key", Value: "k"},
		egress.Header{Name: "authorization", Value: "Bearer own"})
	for _, host := range []string{"example.com", "EXAMPLE.Com", "example.com."} {
		a := w.raw(abcAddr, head("GET http://"+host+":"+w.tlsPort+"/a?b", "abc",
			"Authorization: one", "authorization: two", "X-Key: three", "X-Other: mine"))
		require.Equal(t, http.StatusOK, a.code, a.body)
		all := w.seen()
		require.Len(t, all, 1)
		r := all[0]
		require.NotNil(t, r.TLS)
		require.Equal(t, "example.com", r.TLS.ServerName)
		require.Equal(t, "example.com:"+w.tlsPort, r.Host)
		require.Equal(t, "/a?b", r.RequestURI)
		require.Equal(t, http.Header{"Authorization": {"Bearer own"}, "X-Key": {"k"}, "X-Other": {"mine"}}, r.Header)
		for _, values := range a.header {
			require.NotContains(t, strings.Join(values, " "), "Bearer own")
		}
	}
}

// Invariant: P38
func TestHeadersGoToTheirHostAndPortOnly(t *testing.T) {
	w := secured(t, egress.Header{Name: "authorization", Value: "secret"})
	port, err := strconv.ParseUint(w.webPort, 10, 16)
	require.NoError(t, err)
	for name, get := range map[string]func() answer{
		"another name of the address": func() answer { return w.get(abcAddr, "abc", "web.example.com:"+w.webPort, "/") },
		"another port":                func() answer { return w.get(abcAddr, "abc", "example.com:"+w.webPort, "/") },
		"the address":                 func() answer { return w.get(abcAddr, "abc", "127.0.0.1:"+w.webPort, "/") },
		"another sandbox":             func() answer { return w.get(defAddr, "def", "example.com:"+w.webPort, "/") },
	} {
		require.Equal(t, http.StatusOK, get().code, name)
		for _, r := range w.seen() {
			require.Empty(t, r.Header["Authorization"], name)
		}
	}
	plain := w.get(defAddr, "def", "example.com:"+w.tlsPort, "/")
	require.Equal(t, http.StatusBadRequest, plain.code, "plain HTTP to a port of TLS")
	require.Equal(t, http.StatusOK, w.connect(abcAddr, "abc", "example.com:"+w.tlsPort).code)
	require.Empty(t, w.seen(), "a tunnel stays the client's own")

	// The certificate must be valid for the host. That of httptest is valid for example.com and the names below it.
	w.resolver.set("host.example.org", "127.0.0.1")
	abc := sandbox(t, "abc", abcAddr, w.ports)
	for _, header := range []egress.Header{
		{Host: "web.example.com", Port: uint16(port), Name: "authorization", Value: "secret"}, // no TLS there
		{Host: "host.example.org", Port: w.ports[0], Name: "authorization", Value: "secret"},
		{Host: "host.example.org", Port: w.ports[1], Name: "authorization", Value: "secret"},
		{Host: "host.example.org", Port: w.ports[2], Name: "authorization", Value: "secret"},
	} {
		abc.Headers = []egress.Header{header}
		require.NoError(t, w.set(abc))
		a := w.get(abcAddr, "abc", header.Host+":"+strconv.Itoa(int(header.Port)), "/")
		require.Equal(t, http.StatusBadGateway, a.code, "%v %s", header.Host, a.body)
		require.Empty(t, w.seen())
	}
}

// Invariant: P38
func TestRequestNeverGoesWithoutTheHeaderItNeeds(t *testing.T) {
	w := secured(t,
		egress.Header{Name: "authorization", Credential: "openai/key"}, egress.Header{Name: "x-key", Value: "k"})
	refused := func(why string) {
		t.Helper()
		a := w.get(abcAddr, "abc", "example.com:"+w.tlsPort, "/")
		require.Equal(t, http.StatusServiceUnavailable, a.code, why)
		require.Equal(t, string(apierror.EgressNoCredential), a.reason(), why)
		require.Empty(t, w.seen(), why)
	}
	refused("the values are not known")
	w.router.SetCredentials(map[string]string{"openai/other": "o"})
	refused("this one is not there")
	for _, value := range []string{"one", "two"} {
		w.router.SetCredentials(map[string]string{"openai/key": value})
		require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", "example.com:"+w.tlsPort, "/").code)
		require.Equal(t, []string{value}, w.seen()[0].Header["Authorization"])
	}
	w.router.SetCredentials(nil)
	refused("they are not known any more")
	abc := sandbox(t, "abc", abcAddr, w.ports)
	abc.HeadersUnknown = true
	require.NoError(t, w.set(abc))
	for _, host := range []string{"example.com:" + w.tlsPort, "web.example.com:" + w.webPort} {
		require.Equal(t, string(apierror.EgressNoCredential), w.get(abcAddr, "abc", host, "/").reason(), host)
	}
	require.Empty(t, w.seen())
	require.Equal(t, http.StatusOK, w.connect(abcAddr, "abc", "example.com:"+w.tlsPort).code, "a tunnel needs none")
}

// What is taken as the name of a header is what reaches the host.
//
// Invariant: P38
func TestEveryNameThatIsTakenReachesTheHost(t *testing.T) {
	w := secured(t)
	abc := sandbox(t, "abc", abcAddr, w.ports)
	port, err := strconv.ParseUint(w.tlsPort, 10, 16)
	require.NoError(t, err)
	taken := 0
	for _, name := range []string{
		"Authorization", "X-Api-Key", "x_api_key", "x.api.key", "Cookie", "proxyless", "X-Berthold", "xx-forwarded-for",
		"forwarded", "via", "User-Agent", "accept", "content-type", "x-request-id", "x-client-trace-id", "te", "proxy",
		"proxy_key", "x-forwarded", "x_envoy", "grpc-timeout", "x-b3-traceid", "traceparent", "priority", "x-real-ip",
		"range", "cache-control", "origin", "referer", "alt-used", "x-scheme",
	} {
		header, err := policy.CredentialHeader(name)
		if err != nil {
			continue
		}
		taken++
		abc.Headers = []egress.Header{{Host: "example.com", Port: uint16(port), Name: header, Value: "v"}}
		require.NoError(t, w.set(abc))
		require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", "example.com:"+w.tlsPort, "/").code, name)
		all := w.seen()
		require.Len(t, all, 1)
		require.Equal(t, []string{"v"}, all[0].Header.Values(name), name)
	}
	require.Greater(t, taken, 20)
}

// Invariant: P38
func TestHeadersOpenNoHostAndNoMethod(t *testing.T) {
	w := secured(t, egress.Header{Name: "authorization", Value: "secret"})
	for _, line := range []string{"TRACE http://example.com:" + w.tlsPort + "/", "CONNECT example.com:1"} {
		require.Equal(t, string(apierror.EgressRefused), w.raw(abcAddr, head(line, "abc")).reason(), line)
	}
	upgrade := head("GET http://example.com:"+w.tlsPort+"/", "abc", "Connection: upgrade", "Upgrade: websocket")
	require.Equal(t, http.StatusForbidden, w.raw(abcAddr, upgrade).code)
	denied := sandbox(t, "abc", abcAddr, w.ports, "web.example.com")
	denied.Headers = []egress.Header{{Host: "example.com", Port: w.ports[1], Name: "authorization", Value: "secret"}}
	for _, port := range w.ports {
		denied.Headers[0].Port = port
		require.NoError(t, w.set(denied))
		a := w.get(abcAddr, "abc", "example.com:"+strconv.Itoa(int(port)), "/")
		require.Equal(t, string(apierror.EgressRefused), a.reason())
	}
	require.Empty(t, w.seen())
}

// Invariant: P35
func TestConnectionWithHeadersServesOneSandbox(t *testing.T) {
	w := secured(t, egress.Header{Name: "authorization", Value: "abc"})
	def := sandbox(t, "def", defAddr, w.ports)
	def.Headers = []egress.Header{{Host: "example.com", Name: "authorization", Value: "def"}}
	for _, port := range w.ports {
		if strconv.Itoa(int(port)) == w.tlsPort {
			def.Headers[0].Port = port
		}
	}
	require.NoError(t, w.set(def))
	from := map[string]string{}
	for range 5 {
		for id, addr := range map[string]string{"abc": abcAddr, "def": defAddr} {
			require.Equal(t, http.StatusOK, w.get(addr, id, "example.com:"+w.tlsPort, "/").code)
			r := w.seen()[0]
			require.Equal(t, []string{id}, r.Header["Authorization"])
			if before, known := from[r.RemoteAddr]; known {
				require.Equal(t, before, id)
			}
			from[r.RemoteAddr] = id
		}
	}
}
