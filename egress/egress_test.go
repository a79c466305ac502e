package egress_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/envoy"
)

func TestClientsWithAProxyURLReachTheOrigins(t *testing.T) {
	w := newWorld(t)
	proxy := &url.URL{Scheme: "http", Host: w.addr, User: url.UserPassword("abc", "token-abc")}
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(abcAddr)}}
	client := &http.Client{Timeout: soon, Transport: &http.Transport{
		Proxy: http.ProxyURL(proxy), DialContext: dialer.DialContext,
		TLSClientConfig: &tls.Config{RootCAs: w.secure.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs},
	}}
	defer client.CloseIdleConnections()
	for _, target := range []string{
		"http://web.example.com:" + w.webPort, "http://127.0.0.1:" + w.webPort, "https://example.com:" + w.tlsPort,
	} {
		for range 3 {
			response, err := client.Get(target + "/a//b/../c?d=%2e")
			require.NoError(t, err)
			require.Equal(t, "hello", readAll(t, response.Body))
			require.NoError(t, response.Body.Close())
		}
	}
	client.CloseIdleConnections()
	require.Eventually(t, func() bool {
		return strings.Contains(w.page("/stats?filter=cluster.origins.upstream_cx_active"), "upstream_cx_active: 0")
	}, 2*time.Second, 10*time.Millisecond, "a connection to an origin ends with its request")
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Len(t, w.requests, 9)
	for _, r := range w.requests {
		require.Equal(t, "/a//b/../c?d=%2e", r.RequestURI, "path and query are the client's own")
		require.Subset(t, []string{"User-Agent", "Accept-Encoding"}, keys(r.Header), "nothing was added")
	}
	counts, ok := w.router.Counts("abc")
	require.True(t, ok)
	require.Positive(t, counts.Admitted)
	require.Zero(t, counts.Refused)
}

func keys(h http.Header) (all []string) {
	for name := range h {
		all = append(all, name)
	}
	return all
}

func TestNothingForTheProxyReachesTheOrigin(t *testing.T) {
	w := newWorld(t)
	a := w.raw(abcAddr, head("POST http://web.example.com:"+w.webPort+"/", "abc",
		"Proxy-Connection: keep-alive", "proxy-x: a", "X-Berth-Peer: 127.0.0.3", "x_berth_peer: 127.0.0.3",
		"X-Berth-Scheme: https",
		"X-Envoy-Original-Dst-Host: 127.0.0.3:1", "x-envoy-upstream-rq-timeout-ms: 1", "X-Forwarded-For: 127.0.0.3",
		"x-forwarded-proto: https", "X_Forwarded_Host: a",
		"Via: 1.1 own", "X-Request-Id: own", "Authorization: Bearer own", "Content-Length: 2")+"hi")
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.ElementsMatch(t, []string{"Content-Length", "Content-Type", "Date"}, keys(a.header), "something was added")
	require.Len(t, w.requests, 1)
	r := w.requests[0]
	require.Equal(t, "web.example.com:"+w.webPort, r.Host, "the absolute form wins")
	require.Equal(t, http.Header{
		"Via": {"1.1 own"}, "X-Request-Id": {"own"}, "Authorization": {"Bearer own"}, "Content-Length": {"2"},
	}, r.Header)
}

func TestUpgradeToHTTP2IsNotPassedOn(t *testing.T) {
	w := newWorld(t)
	a := w.raw(abcAddr, head("GET http://web.example.com:"+w.webPort+"/", "abc",
		"Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"))
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.Len(t, w.requests, 1)
	require.Empty(t, w.requests[0].Header)
}

// Envoy looks at the value of Upgrade, whatever the method is.
func TestUpgradeToATunnelIsRefused(t *testing.T) {
	w := newWorld(t)
	for _, method := range []string{"GET", "POST"} {
		a := w.raw(abcAddr, head(method+" http://echo.example.com:"+w.echoPort+"/", "abc",
			"Connection: Upgrade", "Upgrade: CONNECT"))
		require.Equal(t, http.StatusForbidden, a.code, a.body)
	}
	require.Zero(t, w.echo.bytes.Load())
}

// Invariant: P35
func TestOnlyTheOwnCredentialFromTheOwnAddressCounts(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.set(sandbox(t, "one", "127.0.0.4", w.ports)))
	require.NoError(t, w.set(sandbox(t, "two", "127.0.0.4", w.ports)))
	target := "web.example.com:" + w.webPort
	for name, c := range map[string]struct {
		from, headers string
		code          int
		reason        string
	}{
		"its own":                {abcAddr, own("abc"), 200, ""},
		"in other letters":       {abcAddr, "bAsIc  " + strings.TrimPrefix(own("abc"), "Basic "), 200, ""},
		"none":                   {abcAddr, "", 407, "egress_credential"},
		"another scheme":         {abcAddr, "Bearer token-abc", 407, "egress_credential"},
		"no base64":              {abcAddr, "Basic !", 407, "egress_credential"},
		"no password":            {abcAddr, credential("abc", ""), 407, "egress_credential"},
		"no user":                {abcAddr, credential("", "token-abc"), 407, "egress_credential"},
		"a long one":             {abcAddr, credential("abc", strings.Repeat("x", 1000)), 407, "egress_credential"},
		"two":                    {abcAddr, own("abc") + "\r\nProxy-Authorization: " + own("abc"), 407, "egress_credential"},
		"a wrong token":          {abcAddr, credential("abc", "token-ab"), 403, "egress_refused"},
		"that of another":        {abcAddr, own("def"), 403, "egress_refused"},
		"its own from elsewhere": {defAddr, own("abc"), 403, "egress_refused"},
		"an unknown address":     {"127.0.0.9", own("abc"), 403, "egress_refused"},
		"an address of two":      {"127.0.0.4", own("one"), 403, "egress_refused"},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(w.requests)
			line := ""
			if c.headers != "" {
				line = "Proxy-Authorization: " + c.headers + "\r\n"
			}
			for _, head := range []string{
				"GET http://" + target + "/ HTTP/1.1\r\nHost: x\r\nX-Berth-Peer: 127.0.0.2\r\n",
				"CONNECT " + target + " HTTP/1.1\r\nHost: x\r\n",
			} {
				a := w.raw(c.from, head+line+"\r\n")
				require.Equal(t, c.code, a.code, a.body)
				require.Equal(t, c.reason, a.reason())
				challenge := ""
				if c.code == 407 {
					challenge = `Basic realm="berth"`
				}
				require.Equal(t, challenge, a.header.Get("Proxy-Authenticate"))
			}
			if c.code != 200 {
				require.Len(t, w.requests, before, "it reached the origin")
			}
		})
	}
}

func TestRequestsOfNoProxyFormAreRefused(t *testing.T) {
	w := newWorld(t)
	auth := "Proxy-Authorization: " + own("abc") + "\r\n"
	at := "web.example.com:" + w.webPort
	with := func(headers ...string) string { return head("POST http://"+at+"/", "abc", headers...) }
	for name, c := range map[string]struct {
		request string
		codes   []int
	}{
		"origin form":            {head("GET /", "abc"), []int{403}},
		"origin form, two hosts": {head("GET /", "abc", "Host: "+at), []int{400, 403}},
		"asterisk form":          {head("OPTIONS *", "abc"), []int{400, 403}},
		"https in absolute form": {head("GET https://"+at+"/", "abc"), []int{403}},
		"ftp":                    {head("GET ftp://"+at+"/", "abc"), []int{400}},
		"TRACE":                  {head("TRACE http://"+at+"/", "abc"), []int{403}},
		"a WebSocket":            {with("Connection: Upgrade", "Upgrade: websocket"), []int{403}},
		"HTTP/1.0":               {"GET http://" + at + "/ HTTP/1.0\r\n" + auth + "\r\n", []int{426}},
		"HTTP/2":                 {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []int{0, 400, 426}},
		"length and chunks":      {with("Content-Length: 3", "Transfer-Encoding: chunked") + "0\r\n\r\n", []int{400}},
		"two lengths":            {with("Content-Length: 3", "Content-Length: 4") + "abcd", []int{400}},
		"an odd encoding":        {with("Transfer-Encoding: x, chunked") + "0\r\n\r\n", []int{400, 501}},
		"a space before a colon": {with("X-A : a"), []int{400}},
		"CONNECT without a port": {head("CONNECT web.example.com", "abc"), []int{400, 403}},
		"CONNECT with a path":    {head("CONNECT http://"+at+"/", "abc"), []int{400, 403}},
		"an authority of two":    {head("GET http://a,b.example.com/", "abc"), []int{400, 403}},
		"too large headers":      {with("X: " + strings.Repeat("x", 70<<10)), []int{431}},
	} {
		t.Run(name, func(t *testing.T) {
			a := w.raw(abcAddr, c.request)
			require.Contains(t, c.codes, a.code, a.body)
			if a.code != 0 {
				require.NotEmpty(t, a.reason())
				require.Contains(t, a.body, `"reason":"`+a.reason()+`"`)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			require.Empty(t, w.requests, "it reached the origin")
		})
	}
}

func TestBytesBehindARequestAreTheNextOne(t *testing.T) {
	w := newWorld(t)
	c := w.dial(abcAddr)
	first := head("POST http://web.example.com:"+w.webPort+"/first", "abc", "Content-Length: 0")
	second := fmt.Sprintf("GET http://web.example.com:%s/second HTTP/1.1\r\nHost: a\r\n\r\n", w.webPort)
	_, err := io.WriteString(c, first+second)
	require.NoError(t, err)
	r := bufio.NewReader(c)
	for _, code := range []int{200, 407} {
		response, err := http.ReadResponse(r, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.Equal(t, code, response.StatusCode, "each request needs its own credential")
	}
	require.Len(t, w.requests, 1)
}

// Invariant: P35
func TestRefusedNamesAreNeverLookedUp(t *testing.T) {
	w := newWorld(t)
	abc := sandbox(t, "abc", abcAddr, w.ports, "web.example.com", "*.allowed.example.com")
	require.NoError(t, w.set(abc))
	for _, host := range []string{
		"example.com", "x.web.example.com", "allowed.example.com", "secret.attacker.example.org", "web.example.com:1",
		"localhost", "web",
	} {
		if !strings.Contains(host, ":") {
			host += ":" + w.webPort
		}
		a := w.get(abcAddr, "abc", host, "/")
		require.Equal(t, http.StatusForbidden, a.code, host)
		require.Equal(t, http.StatusForbidden, w.connect(abcAddr, "abc", host).code, host)
	}
	require.Empty(t, w.resolver.asked)
	require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", "WEB.Example.com.:"+w.webPort, "/").code)
	require.Equal(t, http.StatusBadGateway, w.get(abcAddr, "abc", "missing.allowed.example.com:"+w.webPort, "/").code)
	other := w.get(defAddr, "def", "example.com:"+w.webPort, "/")
	require.Equal(t, http.StatusOK, other.code, "another sandbox has other rules")
}

// Invariant: P35
func TestOnlyPermittedAddressesAreConnectedTo(t *testing.T) {
	w := newWorld(t)
	w.resolver.set("mixed.example.com", "127.9.9.9 10.0.0.1 127.0.0.1 ::ffff:10.0.0.2 ::1")
	w.resolver.set("inside.example.com", "127.9.9.9 10.0.0.1 169.254.169.254 fe80::1")
	w.resolver.set("mapped.example.com", "::ffff:127.0.0.1")
	w.resolver.set("nothing.example.com")
	for range 10 {
		require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", "mixed.example.com:"+w.webPort, "/").code)
	}
	require.Equal(t, 1, w.resolver.times("mixed.example.com"), "an answer is used again for a moment")
	// The answer does not tell whether a name is known inside.
	for _, name := range []string{"inside.example.com", "nothing.example.com"} {
		a := w.get(abcAddr, "abc", name+":"+w.webPort, "/")
		require.Equal(t, http.StatusBadGateway, a.code)
		require.Contains(t, a.body, name+" has no address outside the cluster")
	}
	require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", "mapped.example.com:"+w.webPort, "/").code)
	for _, literal := range []string{
		"10.0.0.1", "127.9.9.9", "169.254.169.254", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1",
		"[::ffff:127.0.0.1]", "[::1%25lo]", "[fe80::1]",
	} {
		a := w.connect(abcAddr, "abc", literal+":"+w.echoPort)
		require.Contains(t, []int{400, 403}, a.code, literal)
	}
	require.Zero(t, w.echo.open.Load())
}

func TestReboundNamesAreCheckedAtEachLookUp(t *testing.T) {
	w := newWorld(t)
	w.resolver.set("rebound.example.com", "127.0.0.1", "127.9.9.9")
	require.Equal(t, http.StatusOK, w.get(abcAddr, "abc", "rebound.example.com:"+w.webPort, "/").code)
	require.Eventually(t, func() bool {
		return w.get(abcAddr, "abc", "rebound.example.com:"+w.webPort, "/").code == http.StatusBadGateway
	}, soon, 100*time.Millisecond)
	require.Equal(t, 2, w.resolver.times("rebound.example.com"))
}

// Invariant: P35, P36
func TestForgottenSandboxLosesItsTunnelsAtOnce(t *testing.T) {
	w := newWorld(t)
	target := "echo.example.com:" + w.echoPort
	idle, busy, other := w.open(abcAddr, "abc", target), w.open(abcAddr, "abc", target), w.open(defAddr, "def", target)
	var sending sync.WaitGroup
	sending.Go(func() {
		block := make([]byte, 64<<10)
		for {
			if _, err := busy.Write(block); err != nil {
				return
			}
		}
	})
	sending.Go(func() { _, _ = io.Copy(io.Discard, busy.r) })
	defer sending.Wait()
	sending.Go(func() {
		w.get(abcAddr, "abc", "web.example.com:"+w.webPort, "/hold")
	})
	eventually(t, "the request arrives", func() bool { return w.holding.Load() == 1 && w.echo.bytes.Load() > 1<<20 })

	began := time.Now()
	require.NoError(t, w.forget("abc"))
	require.Less(t, time.Since(began), 5*time.Second)
	require.Equal(t, http.StatusForbidden, w.connect(abcAddr, "abc", target).code)
	eventually(t, "the origins see the end", func() bool { return w.echo.open.Load() == 1 && w.holding.Load() == 0 })
	idle.isCut()
	other.works()
	_, ok := w.router.Counts("abc")
	require.False(t, ok)
	require.NoError(t, w.forget("abc"))

	next := sandbox(t, "next", abcAddr, w.ports)
	require.NoError(t, w.set(next))
	require.Equal(t, http.StatusForbidden, w.connect(abcAddr, "abc", target).code, "another sandbox has the address")
	w.open(abcAddr, "next", target)
}

// Invariant: P36
func TestNothingPassesATunnelAfterForgetHasReturned(t *testing.T) {
	w := newWorld(t)
	for range 20 {
		require.NoError(t, w.set(sandbox(t, "abc", abcAddr, w.ports)))
		var all []*tunnel
		for range 5 {
			all = append(all, w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort))
		}
		before := w.echo.bytes.Load()
		require.NoError(t, w.forget("abc"))
		for _, c := range all {
			_, _ = io.WriteString(c, "after\n") // fails if the end is here already
		}
		eventually(t, "the origin sees the end", func() bool { return w.echo.open.Load() == 0 })
		require.Equal(t, before, w.echo.bytes.Load())
	}
}

// Invariant: P36
func TestNarrowingCutsOnlyWhatItRefuses(t *testing.T) {
	w := newWorld(t)
	w.resolver.set("kept.example.com", "127.0.0.1")
	gone := w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	kept := w.open(abcAddr, "abc", "kept.example.com:"+w.echoPort)
	literal := w.open(abcAddr, "abc", "127.0.0.1:"+w.echoPort)
	narrow := sandbox(t, "abc", abcAddr, w.ports, "kept.example.com")
	require.NoError(t, w.set(narrow))
	require.Equal(t, http.StatusForbidden, w.connect(abcAddr, "abc", "echo.example.com:"+w.echoPort).code)
	gone.isCut()
	literal.isCut()
	kept.works()
	require.NoError(t, w.replace([]egress.Sandbox{narrow, sandbox(t, "def", defAddr, w.ports)}))
	kept.works()
	narrow.Incarnation++
	require.NoError(t, w.set(narrow))
	kept.isCut()
	w.open(abcAddr, "abc", "kept.example.com:"+w.echoPort)
	require.NoError(t, w.replace(nil))
	eventually(t, "nothing is open", func() bool { return w.echo.open.Load() == 0 })
}

// Invariant: P35, P36
func TestStaleRouterRefusesAndCutsEverything(t *testing.T) {
	w := newWorld(t)
	open := w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	began := time.Now()
	w.stale.Store(true)
	a := w.connect(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	require.Equal(t, http.StatusServiceUnavailable, a.code)
	require.Equal(t, "router_not_ready", a.reason())
	open.isCut()
	require.Less(t, time.Since(began), 3*time.Second, "the client sees the end up to a second later")
	w.stale.Store(false)
	w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
}

// The router is stopped with SIGSTOP, and killed.
// Invariant: P36
func TestNoTunnelOutlivesTheRouterThatAdmittedIt(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"stopped": syscall.SIGSTOP, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			origin := newEcho(t, "127.0.0.1:0")
			target := origin.Addr().String()
			_, port, err := net.SplitHostPort(target)
			require.NoError(t, err)
			socket := filepath.Join(socketDir(t), "router.sock")
			supervisor, err := proc.New()
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, supervisor.Close()) })
			self, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.Command(self)
			cmd.Env = append(os.Environ(), routerSocket+"="+socket, routerPort+"="+port)
			router, err := supervisor.Start(cmd)
			require.NoError(t, err)
			eventually(t, "the router listens", func() bool { _, err := os.Stat(socket); return err == nil })
			secure := httptest.NewTLSServer(http.NotFoundHandler())
			defer secure.Close()
			g := startEnvoy(t, socket, caFile(t, secure))
			open := g.open(abcAddr, "abc", target)
			// A connection that is open already gets an answer. New ones are closed.
			earlier := g.dial(abcAddr)
			ask := func(request string) *http.Response {
				_, err := io.WriteString(earlier, request)
				require.NoError(t, err)
				response, err := http.ReadResponse(bufio.NewReader(earlier), nil)
				require.NoError(t, err)
				_, err = io.Copy(io.Discard, response.Body)
				require.NoError(t, err)
				return response
			}
			const get = "GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n"
			require.Equal(t, http.StatusProxyAuthRequired, ask(get).StatusCode)
			began := time.Now()
			require.NoError(t, syscall.Kill(router.Pid(), signal))
			open.isCut()
			require.Less(t, time.Since(began), envoy.EgressRouterLoss+3*time.Second)
			eventually(t, "the origin sees the end", func() bool { return origin.open.Load() == 0 })
			require.Zero(t, g.raw(abcAddr, head("CONNECT "+target, "abc")).code)
			response := ask(get)
			require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
			require.Equal(t, "router_unavailable", response.Header.Get(envoy.ReasonHeader))
			require.Zero(t, origin.open.Load())
			if signal == syscall.SIGSTOP {
				require.NoError(t, syscall.Kill(router.Pid(), syscall.SIGCONT))
			}
		})
	}
}

func TestNoUpstreamConnectionServesTwoSandboxes(t *testing.T) {
	// The clusters have the same pools. Here that of origins without TLS keeps its connections, too.
	w := newWorld(t, func(config *bootstrapv3.Bootstrap) {
		for _, packed := range config.GetStaticResources().GetClusters()[0].GetTypedExtensionProtocolOptions() {
			var options httpv3.HttpProtocolOptions
			require.NoError(t, packed.UnmarshalTo(&options))
			require.EqualValues(t, 1, options.GetCommonHttpProtocolOptions().GetMaxRequestsPerConnection().GetValue())
			options.CommonHttpProtocolOptions.MaxRequestsPerConnection = nil
			require.NoError(t, packed.MarshalFrom(&options))
		}
	})
	used := map[string]string{} // the sandbox of each connection
	for i := range 12 {
		id, from := "abc", abcAddr
		if i%2 == 1 {
			id, from = "def", defAddr
		}
		if i == 6 {
			again := sandbox(t, "abc", abcAddr, w.ports)
			again.Incarnation = 1
			require.NoError(t, w.set(again))
		}
		require.Equal(t, http.StatusOK, w.get(from, id, "web.example.com:"+w.webPort, "/").code)
		w.mu.Lock()
		peer := w.peers[len(w.peers)-1]
		w.mu.Unlock()
		of := id
		if id == "abc" && i >= 6 {
			of = "abc again"
		}
		require.Contains(t, []string{"", of}, used[peer])
		used[peer] = of
	}
	// Until Envoy's main thread has told its workers of a new address, each request to it gets a connection of its own.
	eventually(t, "a connection is used again", func() bool {
		require.Equal(t, http.StatusOK, w.get(defAddr, "def", "web.example.com:"+w.webPort, "/").code)
		w.mu.Lock()
		defer w.mu.Unlock()
		return used[w.peers[len(w.peers)-1]] == "def"
	})
}

func TestLimitsTouchOnlyTheirOwnSandbox(t *testing.T) {
	w := newWorld(t)
	target := "echo.example.com:" + w.echoPort
	var all []*tunnel
	for range 12 {
		all = append(all, w.open(abcAddr, "abc", target))
	}
	a := w.connect(abcAddr, "abc", target)
	require.Equal(t, http.StatusTooManyRequests, a.code)
	require.Equal(t, "too_many_open", a.reason())
	w.open(defAddr, "def", target)
	all[0].Close()
	eventually(t, "there is room again", func() bool { return w.connect(abcAddr, "abc", target).code == http.StatusOK })

	w.resolver.mu.Lock()
	w.resolver.gate = make(chan struct{})
	w.resolver.mu.Unlock()
	require.NoError(t, w.forget("abc"))
	require.NoError(t, w.set(sandbox(t, "abc", abcAddr, w.ports)))
	var asking sync.WaitGroup
	codes := make(chan int, 12)
	for i := range 12 { // more than a sandbox may look up at one time
		asking.Go(func() { codes <- w.get(abcAddr, "abc", fmt.Sprintf("n%d.example.com:%s", i, w.webPort), "/").code })
	}
	eventually(t, "all wait", func() bool { c, _ := w.router.Counts("abc"); return c.Open == 12 })
	require.Equal(t, http.StatusOK, w.get(defAddr, "def", "127.0.0.1:"+w.webPort, "/").code)
	asked := make(chan int, 1)
	asking.Go(func() { asked <- w.get(defAddr, "def", "web.example.com:"+w.webPort, "/").code })
	close(w.resolver.gate)
	require.Equal(t, http.StatusOK, <-asked)
	asking.Wait()
	close(codes)
	for code := range codes {
		require.Equal(t, http.StatusBadGateway, code, "those that wait get a place")
	}
}

// Invariant: P35
func TestRulesAreReadAgainAfterALookUp(t *testing.T) {
	for name, change := range map[string]func(w *world) error{
		"forgotten": func(w *world) error { return w.forget("abc") },
		"narrowed": func(w *world) error {
			return w.set(sandbox(w, "abc", abcAddr, w.ports, "other.example.com"))
		},
		"another pod": func(w *world) error {
			next := sandbox(w, "abc", abcAddr, w.ports)
			next.Incarnation = 1
			return w.set(next)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.resolver.mu.Lock()
			w.resolver.gate = make(chan struct{})
			w.resolver.mu.Unlock()
			var asking sync.WaitGroup
			asking.Go(func() {
				a := w.get(abcAddr, "abc", "web.example.com:"+w.webPort, "/")
				if a.code != http.StatusForbidden {
					t.Errorf("%d %s", a.code, a.body)
				}
			})
			eventually(t, "it waits", func() bool { c, _ := w.router.Counts("abc"); return c.Open == 1 })
			require.NoError(t, change(w))
			close(w.resolver.gate)
			asking.Wait()
			require.Empty(t, w.requests)
		})
	}
}

func TestFailuresOfOriginsHaveBerthsForm(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := l.Addr().(*net.TCPAddr)
	require.NoError(t, l.Close())
	s := sandbox(t, "abc", abcAddr, append(w.ports, uint16(closed.Port)))
	require.NoError(t, w.set(s))
	for _, a := range []answer{
		w.get(abcAddr, "abc", closed.String(), "/"), w.connect(abcAddr, "abc", closed.String()),
	} {
		require.Equal(t, http.StatusBadGateway, a.code, a.body)
		require.Equal(t, "egress_unreachable", a.reason())
		require.Contains(t, a.body, `"code":502`)
	}
	w.echo.Close() // a listener that accepts nothing more; what speaks no HTTP follows
	breaking, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer breaking.Close()
	go func() {
		for {
			c, err := breaking.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "no HTTP\r\n\r\n")
			c.Close()
		}
	}()
	s.Policy.Ports = append(s.Policy.Ports, netip.MustParseAddrPort(breaking.Addr().String()).Port())
	require.NoError(t, w.set(s))
	a := w.get(abcAddr, "abc", breaking.Addr().String(), "/")
	require.Equal(t, http.StatusBadGateway, a.code, a.body)
	require.Equal(t, "egress_reset", a.reason())
}

func TestLogHasEachDestinationOnceAndNoSecrets(t *testing.T) {
	w := newWorld(t)
	for range 3 {
		w.raw(abcAddr, head("GET http://web.example.com:"+w.webPort+"/path-secret?query-secret", "abc", "X-A: header-secret"))
		w.connect(abcAddr, "abc", "web.example.com:1")
		w.connect(abcAddr, "abc", credential("user-secret", "x"))
	}
	var lines bytes.Buffer
	for _, e := range w.log.All() {
		fmt.Fprintln(&lines, e.Message, e.ContextMap())
	}
	require.Equal(t, 1, strings.Count(lines.String(), "egress: admitted"), lines.String())
	require.Equal(t, 1, strings.Count(lines.String(), "egress: refused"), lines.String())
	require.Contains(t, lines.String(), "web.example.com:1")
	require.NotContains(t, lines.String(), "secret")
	require.NotContains(t, lines.String(), "token")
	for i := range 300 {
		w.connect(abcAddr, "abc", fmt.Sprintf("web.example.com:%d", i+1))
	}
	require.LessOrEqual(t, w.log.Len(), 1+256+1, "one admitted, those refused, and that others are not logged")
}

// Invariant: P36
func TestForgetSaysWhatHasNotEndedInTime(t *testing.T) {
	w := newWorld(t)
	open := w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	require.NoError(t, syscall.Kill(w.process.Pid(), syscall.SIGSTOP))
	eventually(t, "Envoy stands still", func() bool { return stopped(t, w.process.Pid()) })
	for range 2 { // the second call must not take the first one's word
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		w.router.Forget("abc")
		err := w.ended(ctx)
		cancel()
		require.ErrorContains(t, err, "1 requests")
		require.True(t, errors.Is(err, context.DeadlineExceeded))
	}
	require.NoError(t, syscall.Kill(w.process.Pid(), syscall.SIGCONT))
	require.NoError(t, w.forget("abc"))
	open.isCut()
}

func TestSilentTunnelEndsAfterTheIdleTime(t *testing.T) {
	w := newWorld(t, withManager(t, func(manager *hcmv3.HttpConnectionManager) {
		require.Equal(t, envoy.EgressIdle, manager.StreamIdleTimeout.AsDuration())
		manager.StreamIdleTimeout = durationpb.New(2 * time.Second) // an hour is too long for a test
	}))
	silent := w.open(abcAddr, "abc", "echo.example.com:"+w.echoPort)
	silent.isCut()
	eventually(t, "the origin sees the end, too", func() bool { return w.echo.open.Load() == 0 })
	eventually(t, "the router knows", func() bool { c, _ := w.router.Counts("abc"); return c.Open == 0 })
}

func TestLargeBodiesPassInBothDirections(t *testing.T) {
	w := newWorld(t)
	var got atomic.Int64
	body := bytes.Repeat([]byte("x"), 8<<20)
	w.web.Config.Handler = http.HandlerFunc(func(a http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		got.Store(n)
		_, _ = a.Write(body)
	})
	request := head("POST http://web.example.com:"+w.webPort+"/", "abc", fmt.Sprint("Content-Length: ", len(body)))
	a := w.raw(abcAddr, request+string(body))
	require.Equal(t, http.StatusOK, a.code)
	require.Len(t, a.body, len(body))
	require.EqualValues(t, len(body), got.Load())
}

func TestSandboxesAndOriginsMayHaveIPv6(t *testing.T) {
	for name, listen := range map[string]string{"of IPv6 only": "::1", "of both": "::"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, func(b *bootstrapv3.Bootstrap) {
				at := b.GetStaticResources().GetListeners()[0].GetAddress().GetSocketAddress()
				at.Address, at.Ipv4Compat = listen, listen == "::"
			})
			port := netip.MustParseAddrPort(w.addr).Port()
			w.addr = netip.AddrPortFrom(netip.IPv6Loopback(), port).String()
			origin := newEcho(t, "[::1]:0")
			_, originPort, err := net.SplitHostPort(origin.Addr().String())
			require.NoError(t, err)
			w.resolver.set("six.example.com", "::1")
			ports := append(slices.Clone(w.ports), netip.MustParseAddrPort(origin.Addr().String()).Port())
			require.NoError(t, w.set(sandbox(t, "abc", "::1", ports)))
			six := w.open("::1", "abc", "six.example.com:"+originPort)
			w.open("::1", "abc", "[::1]:"+originPort)
			require.Equal(t, http.StatusForbidden, w.connect("::1", "def", "six.example.com:"+originPort).code)
			if listen == "::" {
				w.addr = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String()
				w.open(defAddr, "def", "echo.example.com:"+w.echoPort)
			}
			require.NoError(t, w.forget("abc"))
			six.isCut()
		})
	}
}

// stopped reports whether all threads of a process are stopped (proc(5)).
func stopped(t *testing.T, pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	require.NoError(t, err)
	for _, thread := range threads {
		raw, err := os.ReadFile(thread)
		require.NoError(t, err)
		if _, rest, _ := strings.Cut(string(raw), ") "); !strings.HasPrefix(rest, "T") {
			return false
		}
	}
	return len(threads) > 0
}
