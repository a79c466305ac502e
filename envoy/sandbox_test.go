package envoy_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/berth-sandbox/berth/envoy"
)

const (
	upgradeHeaders = "Connection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
	webSocketKey   = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)

// toProxies are headers by which a server talks to the proxies before it.
var toProxies = []string{
	"X-Envoy-Immediate-Health-Check-Fail", "x-ENVOY-degraded", "X-Envoy-Overloaded", "X-Envoy-Ratelimited", "X-Envoy-Upstream-Canary", "X-Envoy-Decorator-Operation", "X_Envoy_Whatever",
	"X-Accel-Redirect", "X-Sendfile", "Proxy-Authenticate", "Proxy-Authentication-Info", "Proxy-Status", "Set-Cookie2", "X-Berth-Reason",
}

// onlyOwn requires that of toProxies nothing is there, and what is the sandbox's own is.
func onlyOwn(t *testing.T, header http.Header) {
	t.Helper()
	all := http.Header{}
	for name, values := range header { // of HTTP/2 in lower case
		all[http.CanonicalHeaderKey(name)] = values
	}
	for _, name := range toProxies {
		require.NotContains(t, all, http.CanonicalHeaderKey(name))
	}
	require.Equal(t, []string{"kept"}, all["X-Own"])
	require.Equal(t, []string{"kept"}, all["X-Envoyish"])
}

func TestSandboxCannotInstructProxiesInFront(t *testing.T) {
	g := startGateway(t)
	lines := "X-Own: kept\r\nX-Envoyish: kept\r\n"
	for _, name := range toProxies {
		lines += name + ": yes\r\n"
	}
	for _, status := range []string{"200 OK", "302 Found", "404 Not Found", "503 Service Unavailable"} {
		for name, headers := range map[string]string{"plain": "Connection: close\r\n", "WebSocket": upgradeHeaders + webSocketKey, "WebSocket without a key": upgradeHeaders} {
			t.Run(name+" "+status, func(t *testing.T) {
				g.router.set(g.to(breaking(t, "HTTP/1.1 "+status+"\r\n"+lines+"Content-Length: 0\r\n\r\n")))
				a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + headers + "\r\n")
				require.Equal(t, status[:3], fmt.Sprint(a.code), a.body)
				onlyOwn(t, a.header)
			})
		}
	}
	t.Run("101", func(t *testing.T) {
		g.router.set(g.to(breaking(t, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+lines+"\r\n")))
		a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + upgradeHeaders + webSocketKey + "\r\n")
		require.Equal(t, http.StatusSwitchingProtocols, a.code)
		onlyOwn(t, a.header)
	})
	sends := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		set := func(prefix string) {
			for _, name := range append([]string{"X-Own", "X-Envoyish"}, toProxies...) {
				if prefix == "" || !strings.HasPrefix(name, "Proxy-Auth") { // which net/http does not send
					w.Header().Set(prefix+name, "kept")
				}
			}
		}
		set("")
		_, _ = io.WriteString(w, "body")
		_ = http.NewResponseController(w).Flush() // of unknown length
		set(http.TrailerPrefix)
		w.Header().Set(http.TrailerPrefix+"Set-Cookie", "a=b")
	}))
	g.router.set(g.to(sends.addr.String()))
	// With this content type the sandbox is spoken to in HTTP/2.
	for _, contentType := range []string{"text/plain", "application/grpc"} {
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("in headers and trailers, %s, HTTP/2 %v", contentType, h2), func(t *testing.T) {
				var protocols http.Protocols
				protocols.SetHTTP1(!h2)
				protocols.SetUnencryptedHTTP2(h2)
				client := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
				defer client.CloseIdleConnections()
				response, err := client.Do(g.request(host, "/", http.Header{"Content-Type": {contentType}}))
				require.NoError(t, err)
				defer response.Body.Close()
				_, err = io.Copy(io.Discard, response.Body)
				require.NoError(t, err)
				onlyOwn(t, response.Header)
				onlyOwn(t, response.Trailer)
				require.NotContains(t, response.Trailer, "Set-Cookie")
			})
		}
	}
	g.router.set(unavailable)
	require.Equal(t, "router_unavailable", g.do(g.request(host, "/", nil)).header.Get(envoy.ReasonHeader), "what is Berth's stays")
}

func TestSandboxCookiesStayOnItsHost(t *testing.T) {
	g := startGateway(t)
	for _, c := range []struct{ set, want string }{
		{"a=b", "a=b"},
		{"a=b; Path=/; HttpOnly; SameSite=Lax; Expires=Wed, 21 Oct 2099 07:28:00 GMT", "a=b; Path=/; HttpOnly; SameSite=Lax; Expires=Wed, 21 Oct 2099 07:28:00 GMT"},
		{"a=b; Domain=sandbox.example.com", "a=b"},
		{"a=b; Domain=sandbox.example.com; Path=/", "a=b; Path=/"},
		{"a=b;DOMAIN=.sandbox.example.com;Secure", "a=b;Secure"},
		{"a=b; domain = sandbox.example.com ;Path=/", "a=b;Path=/"},
		{"a=b; \t domain\t=\tsandbox.example.com", "a=b"},
		{`a=b; Domain="sandbox.example.com"; Path=/`, "a=b; Path=/"},
		{"a=b; Domain=" + host + "; Path=/; Domain=example.com", "a=b; Path=/"},
		{"a=b; Domain=; Domain; Max-Age=1", "a=b; Max-Age=1"},
		{"a=b; \"Domain\"=sandbox.example.com", "a=b"},
		{"a=b=c; x-domain=kept; domains=kept; Path=/?domain=kept", "a=b=c; x-domain=kept; domains=kept; Path=/?domain=kept"},
		{"Domain=x; Path=/", "Domain=x; Path=/"}, // the name of a cookie
		{"a=Domain=x", "a=Domain=x"},
		{"__Host-a=%41 % ;; Path=/", "__Host-a=%41 % ;; Path=/"},
		{strings.Repeat("a", 4000) + "=b; domain=example.com" + strings.Repeat(";", 1000), strings.Repeat("a", 4000) + "=b" + strings.Repeat(";", 1000)},
	} {
		g.router.set(g.to(breaking(t, "HTTP/1.1 200 OK\r\nSet-Cookie: first=1\r\nset-cookie: "+c.set+"\r\nSET-COOKIE: last=1; domain=example.com\r\nX-Own: Domain=x; Domain=y\r\nContent-Length: 5\r\n\r\nhello")))
		a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")
		require.Equal(t, []string{"first=1", c.want, "last=1"}, a.header.Values("Set-Cookie"))
		require.Equal(t, "Domain=x; Domain=y", a.header.Get("X-Own"))
		require.Equal(t, "hello", a.body)
	}
	t.Run("also in an answer to an upgrade", func(t *testing.T) {
		for _, status := range []string{"101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket", "200 OK", "403 Forbidden"} {
			g.router.set(g.to(breaking(t, "HTTP/1.1 "+status+"\r\nSet-Cookie: a=b; Domain=example.com\r\n\r\n")))
			a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + upgradeHeaders + webSocketKey + "\r\n")
			require.Equal(t, status[:3], fmt.Sprint(a.code))
			require.Equal(t, []string{"a=b"}, a.header.Values("Set-Cookie"))
		}
	})
	require.Zero(t, g.counter(`http\.ingress\.lua\.errors`))
	require.Positive(t, g.counter(`http\.ingress\.lua\.executions`))
	executions := g.counter(`http\.ingress\.lua\.executions`)
	g.serves(t)
	require.Equal(t, executions, g.counter(`http\.ingress\.lua\.executions`), "an answer without a cookie runs no script")
}

// A sandbox need not agree to become a WebSocket: a page that says why it does not, a part of a
// file and a redirection are answers as any other.
func TestRefusalOfAWebSocketArrivesWhole(t *testing.T) {
	g := startGateway(t)
	for name, headers := range map[string]string{"with a key": upgradeHeaders + webSocketKey, "without a key": upgradeHeaders} {
		for _, status := range []string{"200 OK", "201 Created", "206 Partial Content", "302 Found", "404 Not Found", "426 Upgrade Required", "503 Service Unavailable"} {
			for framing, body := range map[string]string{
				"length": "Content-Length: 5\r\n\r\nhello", "chunks": "Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", "end": "\r\nhello",
			} {
				t.Run(name+" "+status+" "+framing, func(t *testing.T) {
					g.router.set(g.to(breaking(t, "HTTP/1.1 "+status+"\r\nX-Own: kept\r\n"+body)))
					a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + headers + "\r\n")
					require.Equal(t, status[:3], fmt.Sprint(a.code), a.body)
					require.Equal(t, "kept", a.header.Get("X-Own"))
					require.Equal(t, "hello", a.body)
				})
			}
		}
	}
	t.Run("and is asked for in words that servers know", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		got := make(chan string, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				got <- err.Error()
				return
			}
			defer c.Close()
			var head strings.Builder
			for line := bufio.NewScanner(c); line.Scan() && line.Text() != ""; {
				head.WriteString(strings.ToLower(line.Text()) + "\n")
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			got <- head.String()
		}()
		g.router.set(g.to(l.Addr().String()))
		g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + upgradeHeaders + webSocketKey + "\r\n")
		require.Regexp(t, `(?m)^upgrade: {1,2}websocket$`, <-got, "white space before a value is none of it; behind it some servers keep it")
	})
}

// Envoy does not wait for the 101 with what follows the request. What a client sends behind
// a request that is then answered like any other must not become the next request on a
// connection that other clients get.
func TestBytesAfterAWebSocketRequestReachNoOtherSandbox(t *testing.T) {
	g := startGateway(t)
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.Path) }))
	g.router.set(g.to(p.addr.String()))
	for range 20 {
		a := g.answer("GET /first HTTP/1.1\r\nHost: " + host + "\r\n" + upgradeHeaders + webSocketKey + "\r\nGET /smuggled HTTP/1.1\r\nHost: " + host + "\r\n\r\n")
		require.Equal(t, "/first", a.body)
		for range 3 {
			require.Equal(t, "/own", g.do(g.request(host, "/own", nil)).body)
		}
	}
}

// Invariant: P5
func TestOnlyOneSpellingOfTrustedHeadersPasses(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.TrustedHops = 1 }})
	g.router.set(admit(g.admitted("abc")))
	trusted := http.Header{
		"X-Forwarded-For": {"198.51.100.7"}, "X-Forwarded-Proto": {"https"}, "X-Forwarded-Host": {"x"}, "X-Real-Ip": {"198.51.100.7"}, "Forwarded": {"for=198.51.100.7"},
		"X-Own": {"kept"}, "X-Forwardedness_x": {"kept"}, "X-Real-Ips_x": {"kept"},
	}
	sent := trusted.Clone()
	for _, name := range []string{
		"X_Forwarded_For", "x_forwarded-for", "x-forwarded_for", "X.Forwarded.Host", "x_FORWARDED", "X~Forwarded-Proto", "X_Real_Ip", "x-real_ip", "x_real-ip",
	} {
		sent[name] = []string{"10.0.0.1"}
	}
	code, body := g.get(sent)
	require.Equal(t, http.StatusOK, code, body)
	var seen http.Header
	require.NoError(t, json.Unmarshal([]byte(body), &seen))
	for name, values := range trusted {
		require.Contains(t, strings.Join(seen[name], " "), values[0], name)
	}
	for name, values := range seen {
		require.NotContains(t, values, "10.0.0.1", name)
	}
}

// A client over HTTP/2 may say anything there.
func TestSchemeIsThatOfTheListener(t *testing.T) {
	g := startGateway(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	got := make(chan string, 1)
	var serving sync.WaitGroup
	serving.Go(func() { // a pod that says which scheme it was asked for
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { defer c.Close(); got <- schemeOf(c) })
		}
	})
	defer serving.Wait()
	defer l.Close()
	g.router.set(g.to(l.Addr().String()))
	for _, scheme := range []string{"http", "https", "ftp"} {
		a := g.h2(":method", "GET", ":scheme", scheme, ":path", "/", ":authority", host, "content-type", "application/grpc")
		require.Equal(t, http.StatusOK, a.code, a.body)
		require.Equal(t, "http", <-got, scheme)
	}
	g.router.set(admit(g.admitted("abc")))
	for _, scheme := range []string{"http", "https", "ftp"} {
		a := g.h2(":method", "GET", ":scheme", scheme, ":path", "/", ":authority", host)
		require.Contains(t, a.body, `"X-Forwarded-Proto":["http"]`, scheme)
	}
}

// schemeOf answers a request over HTTP/2 with 200 and returns its :scheme.
func schemeOf(c net.Conn) string {
	if _, err := io.CopyN(io.Discard, c, int64(len(http2.ClientPreface))); err != nil {
		return err.Error()
	}
	framer := http2.NewFramer(c, c)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := framer.WriteSettings(); err != nil {
		return err.Error()
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return err.Error()
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				err = framer.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			err = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: f.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true, EndStream: true}) // :status: 200
			if err == nil {
				return f.PseudoValue("scheme")
			}
		}
		if err != nil {
			return err.Error()
		}
	}
}
