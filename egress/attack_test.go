package egress_test

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
)

// attacked is a world in which the sandbox abc may reach few hosts, though every host has an address. In these tests,
// what may reach an origin has the path /ok, and what may not has /bad.
func attacked(t *testing.T) *world {
	w := newWorld(t, withManager(t, func(manager *hcmv3.HttpConnectionManager) {
		manager.DelayedCloseTimeout = durationpb.New(50 * time.Millisecond) // each test waits for the close
	}))
	for _, name := range []string{
		"evil.example.org", "other.example.com", "a.allowed.example.com", "allowed.example.com", "xallowed.example.com",
		"a.allowed.example.com.evil.example.org", "a.b.allowed.example.com", "xn--bcher-kva.example.com",
	} {
		w.resolver.set(name, "127.0.0.1")
	}
	require.NoError(t, w.set(sandbox(t, "abc", abcAddr, w.ports,
		"web.example.com", "*.allowed.example.com", "bücher.example.com", "127.0.0.1")))
	return w
}

// talk sends bytes over one connection, and returns the status of every answer until the gateway closes it. So the
// bytes must end in a request after which it does.
func (w *world) talk(t *testing.T, bytes string) (codes []int) {
	t.Helper()
	c := w.dial(abcAddr)
	defer c.Close()
	if _, err := io.WriteString(c, bytes); err != nil { // the gateway may close before it has read everything
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	for r := bufio.NewReader(c); ; {
		response, err := http.ReadResponse(r, nil)
		if err != nil {
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the gateway waits for more")
			ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
			require.True(t, ended, err)
			return codes
		}
		codes = append(codes, response.StatusCode)
		_, _ = io.Copy(io.Discard, response.Body) // the end shows at the next answer
	}
}

// leftOnlyWhatMay requires that the origins have got requests of the path /ok only, for these hosts, and that no other
// host was looked up.
func (w *world) leftOnlyWhatMay(t *testing.T, hosts ...string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.requests {
		require.Equal(t, "/ok", r.RequestURI, r.Host)
		host, _, _ := strings.Cut(r.Host, ":")
		require.Contains(t, hosts, strings.TrimSuffix(strings.ToLower(host), "."))
	}
	require.Zero(t, w.echo.bytes.Load())
	w.resolver.mu.Lock()
	defer w.resolver.mu.Unlock()
	for name := range w.resolver.asked {
		require.Contains(t, hosts, name, "it was looked up")
	}
}

// The bytes end in a request for /bad that has no credential, or in one that is to be read as a part of a body. If the
// gateway and an origin disagree where a request ends, it reaches the origin.
//
// Invariant: P35
func TestNoBytesReachAnOriginAsAnotherRequest(t *testing.T) {
	w := attacked(t)
	at := "http://web.example.com:" + w.webPort
	post := func(headers ...string) string { return head("POST "+at+"/ok", "abc", headers...) }
	hidden := "GET " + at + "/bad HTTP/1.1\r\nHost: web.example.com\r\nConnection: close\r\n\r\n"
	chunked := "Transfer-Encoding: chunked"
	length := fmt.Sprint("Content-Length: ", len(hidden))
	chunk := func(size, body string) string { return size + "\r\n" + body + "\r\n0\r\n\r\n" }
	one := func(s string) string { return fmt.Sprintf("%x%s", len(hidden), s) }
	no, maybe := []int{400, 501}, []int{200, 400, 501}
	for name, c := range map[string]struct {
		bytes string // before the hidden request
		codes []int  // of the first answer
	}{
		"length, then chunks":           {post(length, chunked) + "0\r\n\r\n", no},
		"chunks, then length":           {post(chunked, "Content-Length: 5") + "0\r\n\r\n", no},
		"two lengths":                   {post("Content-Length: 0", length), no},
		"two equal lengths":             {post("Content-Length: 0", "Content-Length: 0"), maybe},
		"two lengths in one":            {post(length + ", 0"), no},
		"a length with a sign":          {post("Content-Length: +0"), no},
		"a negative length":             {post("Content-Length: -1"), no},
		"a hexadecimal length":          {post("Content-Length: 0x10"), no},
		"a length of many digits":       {post("Content-Length: 18446744073709551616"), no},
		"a folded length":               {post("Content-Length:\r\n 0"), maybe},
		"a folded header":               {post("X-A: a\r\n Content-Length: 5", "Content-Length: 0"), maybe},
		"a folded encoding":             {post("Transfer-Encoding:\r\n chunked", "Content-Length: 0"), no},
		"an encoding with a tab":        {post("Transfer-Encoding:\tchunked", length) + "0\r\n\r\n", no},
		"an encoding in other letters":  {post("TRANSFER-ENCODING: CHUNKED", length) + "0\r\n\r\n", no},
		"an encoding after another":     {post("Transfer-Encoding: identity, chunked", length), no},
		"an encoding before another":    {post("Transfer-Encoding: chunked, identity") + "0\r\n\r\n", no},
		"two encodings":                 {post(chunked, chunked) + "0\r\n\r\n", maybe},
		"an encoding and something":     {post("Transfer-Encoding: xchunked", length), no},
		"an encoding with a space":      {post("Transfer-Encoding : chunked", length) + "0\r\n\r\n", no},
		"an underscore in the encoding": {post("Transfer_Encoding: chunked", length), maybe},
		"lines that end in LF":          {strings.ReplaceAll(post("Content-Length: 0"), "\r\n", "\n"), maybe},
		"one line that ends in LF":      {post("X-A: a\nContent-Length: 5", "Content-Length: 0"), no},
		"a CR in a header":              {post("X-A: a\rTransfer-Encoding: chunked", "Content-Length: 0"), maybe},
		"a NUL in a header":             {post("X-A: a\x00b", "Content-Length: 0"), no},
		"a chunk with an extension":     {post(chunked) + chunk(one(";a=b"), hidden), maybe},
		"a chunk with a broken one":     {post(chunked) + chunk(one(";\n0"), hidden), maybe},
		"a chunk after a sign":          {post(chunked) + chunk("+"+one(""), hidden), maybe},
		"a chunk after 0x":              {post(chunked) + chunk("0x"+one(""), hidden), maybe},
		"a chunk after spaces":          {post(chunked) + chunk("  "+one(""), hidden), maybe},
		"a chunk of many digits":        {post(chunked) + chunk("fffffffffffffffff", hidden), maybe},
		"a chunk that ends in LF":       {post(chunked) + one("\n") + hidden + "\n0\n\n", maybe},
		"a chunk that is too long":      {post(chunked) + chunk("1", hidden), maybe},
		"an encoding in the trailers":   {post(chunked) + "0\r\nTransfer-Encoding: chunked\r\n\r\n", maybe},
		"a credential in the trailers":  {post(chunked) + "0\r\nProxy-Authorization: " + own("abc") + "\r\n\r\n", maybe},
		"a length that is the proxy's":  {post("Connection: content-length", length), maybe},
		"an encoding that is the proxy's": {post("Connection: transfer-encoding, close", chunked) +
			chunk(one(""), hidden), maybe},
		"GET with a body": {head("GET "+at+"/ok", "abc", length), maybe},
	} {
		t.Run(name, func(t *testing.T) {
			codes := w.talk(t, c.bytes+hidden+hidden) // the last one ends the connection in any case
			require.NotEmpty(t, codes)
			require.Contains(t, c.codes, codes[0])
			for _, code := range codes[1:] {
				require.Contains(t, []int{400, 407}, code, "a request without a credential")
			}
		})
	}
	w.leftOnlyWhatMay(t, "web.example.com")
}

// Invariant: P35
func TestEveryRequestOfAConnectionIsDecidedAnew(t *testing.T) {
	w := attacked(t)
	get := func(host, path string, more ...string) string {
		return head("GET http://"+host+":"+w.webPort+path, "abc", more...)
	}
	connect := func(host string) string { return head("CONNECT "+host+":"+w.echoPort, "abc") }
	bare := func(host string) string {
		return fmt.Sprintf("GET http://%s:%s/bad HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", host, w.webPort)
	}
	end := get("evil.example.org", "/bad", "Connection: close")
	for name, c := range map[string]struct {
		bytes string
		codes []int // some may be missing at the end, where the gateway has closed
	}{
		"two hosts": {
			get("web.example.com", "/ok") + get("evil.example.org", "/bad") + get("a.allowed.example.com", "/ok") + end,
			[]int{200, 403, 200, 403}},
		"another sandbox": {
			get("web.example.com", "/ok") +
				head("GET http://web.example.com:"+w.webPort+"/bad", "def", "Connection: close"),
			[]int{200, 403}},
		"no credential": {get("web.example.com", "/ok") + bare("web.example.com"), []int{200, 407}},
		"a request after a CONNECT that was refused": {
			connect("evil.example.org") + get("web.example.com", "/ok") + bare("web.example.com"),
			[]int{403, 200, 407}},
		"bytes after a CONNECT that was refused": {
			connect("evil.example.org") + "\x16\x03\x01 no request\r\n\r\n", []int{403, 400}},
		"a CONNECT after a CONNECT that was refused": {
			connect("evil.example.org") + connect("evil.example.org") + end, []int{403, 403, 403}},
		"a CONNECT with a length": {
			head("CONNECT evil.example.org:"+w.echoPort, "abc", "Content-Length: 5") + "hello" + end, []int{403, 403}},
		"a CONNECT after a request": {
			get("web.example.com", "/ok") + connect("evil.example.org") + end, []int{200, 403, 403}},
	} {
		t.Run(name, func(t *testing.T) {
			codes := w.talk(t, c.bytes)
			require.NotEmpty(t, codes)
			for i, code := range codes {
				require.Less(t, i, len(c.codes), codes)
				require.Contains(t, []int{c.codes[i], 400}, code, codes)
			}
		})
	}
	w.leftOnlyWhatMay(t, "web.example.com", "a.allowed.example.com")
}

// Some programs read an allowed host, or the allowed address, in each of these. Berth refuses them.
//
// Invariant: P35
func TestNoSpellingOfAHostPassesTheRules(t *testing.T) {
	w := attacked(t)
	hosts := []string{
		// bounds of names and wildcards
		"allowed.example.com", "xallowed.example.com", ".allowed.example.com", "*.allowed.example.com",
		"a..allowed.example.com", "a.allowed.example.com.evil.example.org", "web.example.comx", "xweb.example.com",
		"a.web.example.com", "web.example.com.evil.example.org", "web.example", "web.example.com..",
		"-.allowed.example.com",
		// delimiters
		"web.example.com@evil.example.org", "evil.example.org#web.example.com", "evil.example.org?web.example.com",
		"evil.example.org/web.example.com", `evil.example.org\web.example.com`, "evil.example.org%2fweb.example.com",
		"web.example.com%2eevil.example.org", "web.example.com%00.evil.example.org", "evil.example.org,web.example.com",
		"evil.example.org;web.example.com", "evil.example.org web.example.com", "web.example.com:80:evil.example.org",
		"evil.example.org:80,web.example.com", "[web.example.com]", "web.example.com%2500", "web_example.com",
		// letters that look alike, or are folded to others
		"wеb.example.com", "web。example.com", "ｗｅｂ.example.com", "web.example.com\u200b",
		"b\u00fccher.example.com.evil.example.org",
		"xn--web-.example.com", "xn--bcher-kva.example.com.evil.example.org", "we\u212a.allowed.example.org",
		// IPv4 addresses in other forms: the address itself is allowed
		"127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0x7f.0.0.1", "0x7F.0x0.0x0.0x1", "0177.0.0.1",
		"017700000001", "0127.0.0.1", "127.0.0.01", "127.0.0.1.1", "127.0.0.256", "127.0.0.1.", "127.00.0.1",
		"127.0.0.1%00",
		"127.0.0.1.example.com", "[127.0.0.1]", "١٢٧.0.0.1", "①②⑦.0.0.1", "127.0.0.0x1", "0", "0.0.0.0", "localhost",
		"10.0.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255",
		// IPv6 addresses, of which none is allowed
		"::1", "[::1]", "[0:0:0:0:0:0:0:1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]",
		"[::7f00:1]",
		"[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[fe80::1%25lo]", "[::1%lo]", "[::1%25]", "[fd00::1]",
		"[v1.x]",
		"[::1", "::1]", "[[::1]]", "[::1]evil.example.org",
	}
	for _, host := range hosts {
		t.Run(host, func(t *testing.T) {
			for _, request := range []string{
				head("GET http://"+host+":"+w.webPort+"/bad", "abc", "Connection: close"),
				head("CONNECT "+host+":"+w.webPort, "abc", "Connection: close"),
			} {
				a := w.raw(abcAddr, request)
				require.Contains(t, []int{0, 400, 403}, a.code, a.body)
			}
		})
	}
	for _, host := range []string{
		"web.example.com", "WEB.Example.COM", "web.example.com.", "a.allowed.example.com", "A.B.ALLOWED.example.com",
		"xn--bcher-kva.example.com", "XN--BCHER-kva.example.com", "127.0.0.1",
	} {
		t.Run(host, func(t *testing.T) {
			require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", host+":"+w.webPort, "/ok").code)
		})
	}
	w.leftOnlyWhatMay(t, "web.example.com", "a.allowed.example.com", "a.b.allowed.example.com",
		"xn--bcher-kva.example.com", "127.0.0.1")
}

// Invariant: P35
func TestNothingButOneFormOfHTTPIsSpoken(t *testing.T) {
	w := attacked(t)
	at := "web.example.com:" + w.webPort
	ok := head("GET http://"+at+"/bad", "abc", "Connection: close")
	tunnel := head("CONNECT echo.example.com:"+w.echoPort, "abc", "Connection: close")
	get := func(headers ...string) string { return head("GET http://"+at+"/bad", "abc", headers...) }
	for name, c := range map[string]struct {
		request string
		codes   []int
	}{
		"PROXY protocol, version 1": {"PROXY TCP4 127.0.0.2 127.0.0.1 1000 80\r\n" + ok, []int{0, 400}},
		"PROXY protocol, version 2": {
			"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\x7f\x00\x00\x02\x7f\x00\x00\x01\x10\x00\x00\x50" + ok,
			[]int{0, 400}},
		"TLS":     {"\x16\x03\x01\x00\x05hello", []int{0, 400}},
		"SOCKS 5": {"\x05\x01\x00" + ok, []int{0, 400}},
		"SOCKS 4": {"\x04\x01\x00\x50\x7f\x00\x00\x01\x00" + ok, []int{0, 400}},
		"HTTP/2": {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00" + ok,
			[]int{0, 400, 426}},
		"HTTP/0.9":                   {"GET http://" + at + "/bad\r\n\r\n", []int{0, 400, 426}},
		"HTTP/1.2":                   {strings.Replace(ok, "HTTP/1.1", "HTTP/1.2", 1), []int{0, 400, 426, 505}},
		"HTTP/3":                     {strings.Replace(ok, "HTTP/1.1", "HTTP/3.0", 1), []int{0, 400, 426, 505}},
		"a method in small letters":  {strings.Replace(tunnel, "CONNECT", "connect", 1), []int{400, 403}},
		"a method of another name":   {strings.Replace(ok, "GET", "G@T", 1), []int{0, 400}},
		"TRACE":                      {strings.Replace(ok, "GET", "TRACE", 1), []int{400, 403, 405}},
		"TRACK by CONNECT's form":    {strings.Replace(tunnel, "CONNECT", "TRACK", 1), []int{0, 400, 403}},
		"GET in the form of CONNECT": {strings.Replace(tunnel, "CONNECT", "GET", 1), []int{0, 400, 403}},
		"CONNECT in absolute form":   {strings.Replace(ok, "GET", "CONNECT", 1), []int{400, 403}},
		"CONNECT in origin form":     {head("CONNECT /", "abc", "Connection: close"), []int{400, 403}},
		"an upgrade to anything":     {get("Connection: Upgrade", "Upgrade: raw"), []int{403}},
		"an upgrade to TLS":          {get("Connection: Upgrade", "Upgrade: TLS/1.0"), []int{403}},
		"an upgrade to a WebSocket": {
			get("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"), []int{403}},
		"an upgrade by CONNECT": {
			head("CONNECT evil.example.org:"+w.webPort, "abc", "Upgrade: websocket", "Connection: Upgrade"), []int{400, 403}},
		"the peer is the connection's": {
			get("Connection: close, x-berth-peer, x-berth-scheme, proxy-authorization"), []int{0, 400, 403, 407}},
		"two credentials in one header": {strings.Replace(ok, own("abc"), own("abc")+", "+own("def"), 1), []int{407}},
		"two credentials":               {get("proxy-authorization: "+own("abc"), "Connection: close"), []int{407}},
		"a credential of another name":  {strings.Replace(ok, "Proxy-Authorization", "Proxy_Authorization", 1), []int{407}},
	} {
		t.Run(name, func(t *testing.T) {
			a := w.raw(abcAddr, c.request)
			require.Contains(t, c.codes, a.code, a.body)
		})
	}
	w.leftOnlyWhatMay(t)
}

// One private address among several is never connected to, in whatever order they come.
//
// Invariant: P35
func TestPrivateAddressAmongOthersIsNeverConnectedTo(t *testing.T) {
	w := attacked(t)
	inside := newEcho(t, "127.9.9.9:0") // one of the addresses of the cluster
	_, port, _ := strings.Cut(inside.Addr().String(), ":")
	outside := newEcho(t, "127.0.0.1:"+port)
	number := uint16(0)
	_, err := fmt.Sscan(port, &number)
	require.NoError(t, err)
	require.NoError(t, w.set(sandbox(t, "abc", abcAddr, append(slices.Clone(w.ports), number), "*.example.net")))
	for name, answer := range map[string]string{
		"first.example.net": "127.9.9.9 127.0.0.1", "last.example.net": "127.0.0.1 127.9.9.9",
		"among.example.net":  "127.0.0.1 127.9.9.9 127.0.0.1 10.0.0.1",
		"mapped.example.net": "::ffff:127.9.9.9 127.0.0.1",
	} {
		w.resolver.set(name, answer)
		for range 20 {
			a := w.connect(abcAddr, "abc", name+":"+port)
			require.Equal(t, http.StatusOK, a.code, a.body)
		}
	}
	require.Zero(t, inside.accepted.Load())
	require.Positive(t, outside.accepted.Load())
}

// A tunnel goes to an address of the name in CONNECT, and TLS in it names whom it wants.
//
// Invariant: P35
func TestNameInTLSLeadsATunnelNowhereElse(t *testing.T) {
	w := attacked(t)
	elsewhere := newEcho(t, "127.0.0.9:"+w.tlsPort)
	w.resolver.set("evil.example.org", "127.0.0.9")
	c := w.dial(abcAddr)
	_, err := io.WriteString(c, head("CONNECT web.example.com:"+w.tlsPort, "abc"))
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	inside := tls.Client(c, &tls.Config{ServerName: "evil.example.org", InsecureSkipVerify: true})
	_, err = io.WriteString(inside, "GET /ok HTTP/1.1\r\nHost: evil.example.org\r\n\r\n")
	require.NoError(t, err)
	_, err = http.ReadResponse(bufio.NewReader(inside), nil)
	require.NoError(t, err)
	require.Equal(t, w.secure.Certificate(), inside.ConnectionState().PeerCertificates[0])
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Len(t, w.requests, 1)
	require.Equal(t, "evil.example.org", w.requests[0].TLS.ServerName)
	require.Zero(t, elsewhere.accepted.Load())
	require.Zero(t, w.resolver.times("evil.example.org"))
}
