package envoy_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
)

// browserAccept is what browsers send when a person opens a page.
const browserAccept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"

// breaking listens and closes every connection as soon as something arrives.
func breaking(t *testing.T, answer string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				_, _ = c.Read(make([]byte, 1))
				_, _ = io.WriteString(c, answer)
				if answer == "" {
					_ = c.(*net.TCPConn).SetLinger(0) // with RST
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); serving.Wait() })
	return l.Addr().String()
}

// closed is an address where nothing listens.
func closed(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

func (g *gateway) to(dst string) play {
	return admit(map[string]*structpb.Value{envoy.MetadataDst: text(dst), envoy.MetadataID: text("abc")})
}

func unavailable(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error {
	return status.Error(codes.Internal, "boom")
}

// portClosed is E2B's answer if nothing listens on the port.
const portClosed = `{"sandboxId":"abc","message":"The sandbox is running but port is not open","code":502}`

func TestE2BStatusesAreForEveryClient(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.E2BStatuses = true }})
	g.router.set(g.to(closed(t)))
	a := g.do(g.request(host, "/", nil))
	require.Equal(t, http.StatusBadGateway, a.code)
	require.Equal(t, "application/json", a.header.Get("Content-Type"))
	require.JSONEq(t, portClosed, a.body)
	a = g.do(g.request(host, "/", http.Header{"Accept": {browserAccept}}))
	require.Contains(t, a.body, "Nothing answers in this sandbox")
}

func TestEnvoysOwnAnswersHaveBerthsForm(t *testing.T) {
	g := startGateway(t)
	for name, c := range map[string]struct {
		play    play
		request string // the first line and headers; empty: GET /
		reason  apierror.Reason
		// admitted: the answer names the sandbox.
		admitted bool
		// early: before the request got an ID. unread: before its headers were, so
		// that the kind of client is unknown.
		early, unread bool
	}{
		"the sandbox refuses the connection":  {play: g.to(closed(t)), reason: apierror.SandboxUnreachable, admitted: true},
		"the sandbox breaks the connection":   {play: g.to(breaking(t, "")), reason: apierror.SandboxReset, admitted: true},
		"the sandbox does not speak HTTP":     {play: g.to(breaking(t, "220 smtp ready\r\n")), reason: apierror.SandboxReset, admitted: true},
		"the router fails":                    {play: unavailable, reason: apierror.RouterUnavailable},
		"the router lets pass without a word": {play: admit(nil), reason: apierror.RouterUnavailable},
		"an unknown upgrade":                  {play: admit(g.admitted("abc")), request: "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: upgrade, close\r\nUpgrade: foo\r\n", reason: apierror.Forbidden},
		"a scheme that is not spoken here":    {play: admit(g.admitted("abc")), request: "GET https://" + host + "/ HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n", reason: apierror.Forbidden, early: true, unread: true},
		"HTTP/1.0":                            {play: admit(g.admitted("abc")), request: "GET / HTTP/1.0\r\nHost: " + host + "\r\n", reason: apierror.HTTPVersion, early: true, unread: true},
		"no host":                             {play: admit(g.admitted("abc")), request: "GET / HTTP/1.1\r\nConnection: close\r\n", reason: apierror.BadRequest, early: true},
		"headers of 80 kB":                    {play: admit(g.admitted("abc")), request: "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nX-Long: " + strings.Repeat("x", 80<<10) + "\r\n", reason: apierror.HeadersTooLarge, early: true, unread: true},
		"an unknown transfer encoding":        {play: admit(g.admitted("abc")), request: "POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nTransfer-Encoding: gzip, chunked\r\n", reason: apierror.NotImplemented, early: true, unread: true},
	} {
		t.Run(name, func(t *testing.T) {
			g.router.set(c.play)
			before := g.hits.Load()
			if c.request == "" {
				c.request = "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n"
			}
			kind := apierror.KindOf(c.reason)
			ask := func(headers string) answer {
				a := g.answer(c.request + headers + "\r\n")
				require.Equal(t, kind.Code, a.code, a.body)
				require.Equal(t, string(c.reason), a.header.Get(envoy.ReasonHeader))
				require.Equal(t, "no-store", a.header.Get("Cache-Control"))
				require.Equal(t, "nosniff", a.header.Get("X-Content-Type-Options"))
				require.Equal(t, kind.RetryAfter > 0, a.header.Get("Retry-After") != "")
				return a
			}
			program := func(headers, message string) {
				a := ask(headers)
				require.Equal(t, "application/json", a.header.Get("Content-Type"))
				var e apierror.Error
				require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
				require.Equal(t, kind.Code, e.Code)
				require.Equal(t, c.reason, e.Reason)
				require.Contains(t, e.Message, message)
				require.Equal(t, c.admitted, e.SandboxID == "abc")
				if !c.early {
					require.NotEmpty(t, e.RequestID)
				}
			}
			program("", "")
			program("Accept: application/json\r\n", "")
			program("Accept: "+browserAccept+"\r\nSec-Fetch-Mode: cors\r\n", "")
			if e2b := "E2b-Sandbox-Id: abc\r\nAccept: " + browserAccept + "\r\n"; c.reason == apierror.SandboxUnreachable {
				require.JSONEq(t, portClosed, ask(e2b).body)
			} else {
				program(e2b, "")
			}
			for _, headers := range []string{"Accept: " + browserAccept + "\r\nSec-Fetch-Mode: navigate\r\nX-Request-Id: <i>\r\n", "Accept: " + browserAccept + "\r\n"} {
				if c.unread {
					program(headers, "")
					continue
				}
				a := ask(headers)
				require.Equal(t, "text/html; charset=utf-8", a.header.Get("Content-Type"))
				require.Equal(t, apierror.PageCSP, a.header.Get("Content-Security-Policy"))
				require.Contains(t, a.body, "<!doctype html>")
				require.Contains(t, a.body, string(c.reason))
				require.Equal(t, kind.RetryAfter > 0, strings.Contains(a.body, `http-equiv="refresh"`))
				require.NotContains(t, a.body, "%")
				require.NotContains(t, a.body, "<i>", "a page shows nothing of the client's")
			}
			require.Equal(t, before, g.hits.Load())
		})
	}
}

func TestGRPCClientsGetGRPCAnswers(t *testing.T) {
	g := startGateway(t)
	conn, err := grpc.NewClient("passthrough:///"+g.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(host))
	require.NoError(t, err)
	defer conn.Close()
	for name, c := range map[string]struct {
		play    play
		want    codes.Code
		message string
	}{
		"refused by the sandbox":    {g.to(closed(t)), codes.Unavailable, "listen on that port"},
		"the router fails":          {unavailable, codes.Unavailable, "try again"},
		"the router has no mercy":   {admit(nil), codes.Unavailable, "try again"},
		"the sandbox is not HTTP/2": {admit(g.admitted("abc")), codes.Unavailable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			g.router.set(c.play)
			err := conn.Invoke(t.Context(), "/test.Test/Call", &emptypb.Empty{}, &emptypb.Empty{})
			require.Equal(t, c.want, status.Code(err), "%v", err)
			require.Contains(t, status.Convert(err).Message(), c.message)
			require.NotContains(t, status.Convert(err).Message(), "{", "the message is for people")
		})
	}
}

// A sandbox cannot make its answers look like Berth's.
func TestSandboxCannotSpeakForBerth(t *testing.T) {
	g := startGateway(t)
	const upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
	const key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
	for name, headers := range map[string]string{"plain": "Connection: close\r\n", "WebSocket": upgrade + key, "WebSocket without a key": upgrade} {
		t.Run(name, func(t *testing.T) {
			for _, status := range []string{"200 OK", "201 Created", "302 Found", "304 Not Modified", "404 Not Found", "410 Gone", "503 Service Unavailable"} {
				g.router.set(g.to(breaking(t, "HTTP/1.1 "+status+"\r\nX-Berth-Reason: sandbox_gone\r\nX-Berth-Kept: sandbox_gone\r\nX-Own: kept\r\nContent-Length: 0\r\n\r\n")))
				a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + headers + "\r\n")
				require.Equal(t, status[:3], strconv.Itoa(a.code), a.body)
				require.Equal(t, "kept", a.header.Get("X-Own"))
				require.Empty(t, a.header.Values("X-Berth-Reason"), status)
			}
			// Headers of Berth's own answers stay.
			g.router.set(g.to(closed(t)))
			a := g.answer("GET / HTTP/1.1\r\nHost: " + host + "\r\n" + headers + "\r\n")
			require.Equal(t, http.StatusBadGateway, a.code)
			require.Equal(t, []string{"sandbox_unreachable"}, a.header.Values("X-Berth-Reason"))
		})
	}
	t.Run("in trailers", func(t *testing.T) {
		p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "body")
			_ = http.NewResponseController(w).Flush() // of unknown length
			w.Header().Set(http.TrailerPrefix+"X-Berth-Reason", "sandbox_gone")
			w.Header().Set(http.TrailerPrefix+"X-Own", "kept")
		}))
		g.router.set(g.to(p.addr.String()))
		response, err := http.DefaultClient.Do(g.request(host, "/", nil))
		require.NoError(t, err)
		defer http.DefaultClient.CloseIdleConnections()
		defer response.Body.Close()
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.Equal(t, http.Header{"X-Own": {"kept"}}, response.Trailer)
	})
}

// Trailers of a client are not trusted, like its headers.
func TestClientTrailersAreNotHeaders(t *testing.T) {
	g := startGateway(t)
	got := make(chan http.Header, 1)
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		got <- r.Trailer
	}))
	g.router.set(g.to(p.addr.String()))
	trailers := "X-Own: kept\r\nContext: kept\r\n"
	for _, name := range []string{
		"X-Envoy-Original-Dst-Host", "x_envoy_attempt_count", "X-Berth-Dst", "X-Forwarded-For", "X-Forwarded-Host", "Forwarded", "X-Real-Ip", "X-Request-Id",
		"Host", "Content-Length", "Content-Type", "Transfer-Encoding", "Trailer", "Connection", "Upgrade", "Authorization", "Cookie", "Proxy-Authorization", "Sec-WebSocket-Key", "Expect",
	} {
		trailers += name + ": 7\r\n"
	}
	a := g.answer("POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n" + trailers + "\r\n")
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.Equal(t, http.Header{"X-Own": {"kept"}, "Context": {"kept"}}, <-got)
}

// At a second attempt the address may belong to another sandbox.
// Invariant: I1
func TestRequestReadByASandboxIsNotRetried(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		g := startGatewayWith(t, config{in: in})
		p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
		g.router.set(g.to(p.addr.String()))
		for _, method := range []string{"GET", "HEAD", "PUT", "POST"} {
			before := p.hits.Load()
			a := g.answer(method + " / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
			require.Equal(t, string(apierror.SandboxReset), a.header.Get(envoy.ReasonHeader))
			require.EqualValues(t, 1, p.hits.Load()-before, method)
		}
	})
}

// During the second connection attempt Envoy buffers little of a body. More of it must not change
// the answer.
func TestUploadToAClosedPortIsAnswered(t *testing.T) {
	g := startGateway(t)
	g.router.set(g.to(closed(t)))
	for range 12 {
		c, err := net.Dial("tcp", g.addr)
		require.NoError(t, err)
		require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
		var sending sync.WaitGroup
		sending.Go(func() {
			_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: "+host+"\r\nE2b-Sandbox-Id: abc\r\nContent-Length: 1000000\r\n\r\n")
			for range 200 {
				if _, err := c.Write(make([]byte, 5000)); err != nil {
					return // it was answered
				}
				time.Sleep(200 * time.Microsecond) // so that some of it comes between the two attempts
			}
		})
		response, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		var e apierror.Error
		require.NoError(t, json.NewDecoder(response.Body).Decode(&e))
		response.Body.Close()
		c.Close()
		sending.Wait()
		require.Equal(t, string(apierror.SandboxUnreachable), response.Header.Get("X-Berth-Reason"))
		require.Equal(t, http.StatusBadGateway, response.StatusCode)
		require.Contains(t, e.Message, "port is not open")
	}
}

// The router's own answers pass Envoy as they are, for each kind of client.
func TestRouterAnswersPassUnchanged(t *testing.T) {
	e := startEdge(t, echoing)
	page := http.Header{"Accept": {browserAccept}, "Sec-Fetch-Mode": {"navigate"}}
	for name, c := range map[string]struct {
		host   string
		header http.Header
		code   int
		reason apierror.Reason
		html   bool
		body   string
	}{
		"gone":                       {e.host("gone"), nil, 410, apierror.SandboxGone, false, `"sandboxID":"gone"`},
		"gone, in a browser":         {e.host("gone"), page, 410, apierror.SandboxGone, true, "This sandbox has ended"},
		"when and why, in a browser": {e.host("gone"), page, 410, apierror.SandboxGone, true, "This sandbox was released at 2023-11-14T22:13:20Z: Idle."},
		"gone, for an E2B SDK":       {e.host("gone"), http.Header{"E2b-Sandbox-Id": {"gone"}}, 502, apierror.SandboxGone, false, "was not found"},
		"unknown":                    {e.host("none"), nil, 404, apierror.SandboxNotFound, false, "no such sandbox"},
		"unknown, for an E2B SDK":    {gatewayHost, http.Header{"E2b-Sandbox-Id": {"none"}, "E2b-Sandbox-Port": {"49983"}}, 502, apierror.SandboxNotFound, false, "was not found"},
		"private":                    {e.host("private"), nil, 403, apierror.PortPrivate, false, "opens 1"},
		"private, in a browser":      {e.host("private"), page, 403, apierror.PortPrivate, true, "This port is private"},
		"private, for an E2B SDK":    {e.host("private"), http.Header{"E2b-Sandbox-Id": {"private"}}, 502, apierror.PortPrivate, false, "port is not open"},
		"outside the pod ranges":     {e.host("out"), nil, 503, apierror.NoRoute, false, "pod address ranges"},
		"no sandbox's host":          {"a&b." + sandboxDomain, page, 400, apierror.BadHost, true, "a&amp;b"},
		"no sandbox at the gateway":  {gatewayHost, nil, 404, apierror.NotFound, false, "nothing is served"},
		"the gateway, in a browser":  {gatewayHost, page, 200, apierror.NotFound, true, "Berth runs sandboxes"},
		"two sandboxes in headers":   {gatewayHost, http.Header{"E2b-Sandbox-Id": {"a"}, "X-Sandbox-Id": {"b"}}, 400, apierror.BadTarget, false, "contradict"},
		"a script of a page, not it": {e.host("gone"), http.Header{"Accept": {browserAccept}, "Sec-Fetch-Mode": {"cors"}}, 410, apierror.SandboxGone, false, "released"},
	} {
		t.Run(name, func(t *testing.T) {
			a := e.do(e.request(c.host, "/", c.header))
			require.Equal(t, c.code, a.code, a.body)
			require.Equal(t, string(c.reason), a.header.Get(envoy.ReasonHeader))
			require.Equal(t, "no-store", a.header.Get("Cache-Control"))
			require.Equal(t, "nosniff", a.header.Get("X-Content-Type-Options"))
			require.Contains(t, a.body, c.body)
			require.Equal(t, apierror.KindOf(c.reason).RetryAfter > 0, a.header.Get("Retry-After") != "")
			if c.html {
				require.Equal(t, "text/html; charset=utf-8", a.header.Get("Content-Type"))
				require.Equal(t, apierror.PageCSP, a.header.Get("Content-Security-Policy"))
				require.Contains(t, a.body, "<!doctype html>")
				return
			}
			require.Equal(t, "application/json", a.header.Get("Content-Type"))
			var answered apierror.Error
			require.NoError(t, json.Unmarshal([]byte(a.body), &answered), a.body)
			require.Equal(t, c.code, answered.Code)
			if c.code == http.StatusBadGateway {
				require.NotContains(t, a.body, "reason", "E2B's answer has three fields")
				return
			}
			require.Equal(t, c.reason, answered.Reason)
			require.NotEmpty(t, answered.RequestID)
		})
	}
}

// Invariant: P15
func TestPagesOfEveryOriginReadErrorsOfTheAgentsPort(t *testing.T) {
	g := startGateway(t)
	for _, failure := range []play{g.to(closed(t)), g.to(breaking(t, "")), unavailable} {
		g.router.set(failure)
		for host, origins := range map[string][]string{
			"49983-abc." + sandboxDomain: {"*"}, "49983-ABC." + sandboxDomain + ".:80": {"*"},
			host: nil, "8080-49983." + sandboxDomain: nil, "api." + sandboxDomain: nil,
		} {
			a := g.do(g.request(host, "/", http.Header{"Origin": {"https://page.example"}}))
			require.GreaterOrEqual(t, a.code, 500)
			require.Equal(t, origins, a.header["Access-Control-Allow-Origin"], host)
			require.NotContains(t, a.header, "Access-Control-Allow-Credentials")
		}
	}
}
