package envoy_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	fixedheapv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
)

// Connections above the limit are closed. Those below it, and the health listener, continue.
// Invariant: P8
func TestConnectionsAboveTheBoundAreClosedAtOnce(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.MaxConnections = 2 }})
	g.router.set(admit(g.admitted("abc")))
	dial := func() net.Conn {
		c, err := net.Dial("tcp", g.addr)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
		return c
	}
	ask := func(c net.Conn) (string, error) {
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n") // Envoy may have closed it
		answer, err := io.ReadAll(c)
		return string(answer), err
	}
	first, second := dial(), dial()
	require.Eventually(t, func() bool { return g.counter(`http\.ingress\.downstream_cx_active`) == 2 }, time.Minute, 10*time.Millisecond)
	third, err := ask(dial())
	require.Empty(t, third)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it must be refused at once")
	for _, c := range []net.Conn{first, second} {
		answer, err := ask(c)
		require.NoError(t, err)
		require.Contains(t, answer, "HTTP/1.1 200 OK")
	}
	code, _ := g.raw(g.health, http.MethodGet, "/ready", "health", "")
	require.Equal(t, http.StatusOK, code)
}

// Clients that hold every connection must not prevent looks.
// Invariant: I4
func TestAdminSocketAnswersAtTheConnectionLimit(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.MaxConnections = 2 }})
	arrived, release := make(chan struct{}, 2), make(chan struct{})
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-release }))
	g.router.set(g.to(p.addr.String()))
	var clients sync.WaitGroup
	for range 2 {
		clients.Go(func() { g.do(g.request(host, "/", nil)) })
		<-arrived
	}
	code, body := g.adminPage(http.MethodGet, "/clusters")
	close(release)
	clients.Wait()
	require.Equal(t, http.StatusOK, code)
	open := 0
	for _, m := range regexp.MustCompile(`(?m)^pods_h1::`+regexp.QuoteMeta(p.addr.String())+`::rq_active::(\d+)$`).FindAllStringSubmatch(body, -1) {
		n, err := strconv.Atoi(m[1])
		require.NoError(t, err)
		open += n
	}
	require.Equal(t, 2, open, body)
}

// Envoy refuses requests that it cannot forward. A queue would let them outlive the connect window.
// Invariant: P8
func TestRequestsAboveTheLimitAreRefusedAtOnce(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.MaxConnections = 2 }, patch: func(b *bootstrapv3.Bootstrap) {
		b.OverloadManager = nil // which counts the clients' connections
	}})
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-release }))
	g.router.set(g.to(p.addr.String()))
	held := make(chan answer, 2)
	for range 2 {
		go func() { held <- g.do(g.request(host, "/", nil)) }()
		<-arrived
	}
	a := g.do(g.request(host, "/", nil))
	var e apierror.Error
	require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
	require.Equal(t, apierror.NoRoute, e.Reason)
	require.Equal(t, http.StatusServiceUnavailable, a.code)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	close(release)
	for range 2 {
		require.Equal(t, http.StatusOK, (<-held).code)
	}
	require.Empty(t, arrived)
	require.Zero(t, g.counter(`cluster\.pods_h1\.upstream_cx_overflow`), "a request would have waited for a connection")
}

// However many there are, each admitted request is at its pod and not in a queue of
// Envoy's, where it would outlive the window. There are more of them than Envoy
// takes by default. They come as fast as they arrive at their pods: a router that gets
// all of them in one moment may need longer for the last than Envoy waits for it.
// Invariant: I3, P8
func TestNoAdmittedRequestWaitsForAnother(t *testing.T) {
	const each = 2000 // of HTTP/1.1 and of gRPC
	underway, failed := make(chan struct{}, 1000), make(chan struct{})
	e, v := startVersatile(t)
	pods := func(stat string) int { return e.counter(`cluster\.pods_h[12]\.` + stat) }
	var asking sync.WaitGroup
	answers := make(chan string, 2*each)
	for name, client := range e.clients() {
		contentType := "text/plain"
		if name == "HTTP/2" {
			contentType = "application/grpc"
		}
		for i := range each {
			asking.Go(func() {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+e.host([]string{"abc", "def"}[i%2])+"/wait", http.NoBody)
				if !assert.NoError(t, err) {
					return
				}
				r.Header.Set("Content-Type", contentType)
				select {
				case underway <- struct{}{}:
				case <-failed:
					return
				}
				response, err := client.Do(r)
				if !assert.NoError(t, err) {
					return
				}
				response.Body.Close()
				answers <- fmt.Sprint(response.StatusCode, response.Header)
			})
		}
	}
	arrived := 0
	for end := time.After(time.Minute); arrived < 2*each; arrived++ {
		select {
		case <-v.arrived:
			<-underway
		case <-end:
			t.Errorf("%d of %d requests are at their pods; %d wait in Envoy", arrived, 2*each, pods("upstream_rq_pending_active"))
			end = nil
		case a := <-answers:
			t.Errorf("a request was answered before its pod did that: %s", a)
			end = nil
		}
		if t.Failed() {
			close(failed)
			break
		}
	}
	if !t.Failed() {
		require.Equal(t, 2*each, pods("upstream_rq_active"))
		require.Zero(t, pods("upstream_rq_pending_active"))
	}
	close(v.release)
	asking.Wait()
	close(answers)
	for a := range answers {
		require.Contains(t, a, "200 ")
	}
	for _, stat := range []string{"upstream_cx_overflow", "upstream_cx_pool_overflow", "upstream_rq_pending_overflow", "upstream_rq_retry_overflow"} {
		require.Zero(t, pods(stat), stat)
	}
}

// Invariant: P8
func TestRequestsAreRefusedWhenMemoryIsShort(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.MaxHeap = 64 << 20 }, patch: func(b *bootstrapv3.Bootstrap) {
		for _, action := range b.OverloadManager.Actions {
			action.Triggers[0].TriggerOneof = &overloadv3.Trigger_Threshold{Threshold: &overloadv3.ThresholdTrigger{Value: 0.001}} // what Envoy has at rest is more
		}
	}})
	g.router.set(admit(g.admitted("abc")))
	var a answer
	require.Eventually(t, func() bool {
		a = g.do(g.request(host, "/", nil))
		return a.code != http.StatusOK
	}, time.Minute, 50*time.Millisecond, "the heap is not looked at")
	var e apierror.Error
	require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
	require.Equal(t, apierror.Overloaded, e.Reason, a.body)
	require.Equal(t, http.StatusServiceUnavailable, a.code)
	code, _ := g.raw(g.health, http.MethodGet, "/ready", "health", "")
	require.Equal(t, http.StatusOK, code, "a pod must not be taken for dead because it is busy")
}

// A worker that reads from thousands of clients in one pass learns of an action only after the pass. It asks each of
// these points at each socket or request, so each must refuse by itself.
// Invariant: P8
func TestEachLoadShedPointRefusesByItself(t *testing.T) {
	const part = "GET / HTTP/1.1\r\nHost: " + host + "\r\nX-Part: "
	overloaded := func(g *gateway, a answer) {
		require.Equal(g, http.StatusServiceUnavailable, a.code, a.body)
		require.Equal(g, string(apierror.Overloaded), a.header.Get(envoy.ReasonHeader))
	}
	for name, shed := range map[string]func(*gateway){
		"http_connection_manager_decode_headers": func(g *gateway) { overloaded(g, g.do(g.request(host, "/", nil))) },
		"hcm_ondata_creating_codec":              func(g *gateway) { require.Zero(g, g.answer(part).code) },
		"http1_server_abort_dispatch":            func(g *gateway) { overloaded(g, g.answer(part)) },
		"http2_server_go_away_and_close_on_dispatch": func(g *gateway) {
			require.Zero(g, g.h2(":method", "GET", ":scheme", "http", ":path", "/", ":authority", host).code)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.MaxHeap = 64 << 20 }, patch: func(b *bootstrapv3.Bootstrap) {
				o := b.OverloadManager
				full, err := anypb.New(&fixedheapv3.FixedHeapConfig{MaxHeapSizeBytes: 1 << 20}) // what Envoy has at rest is more
				require.NoError(t, err)
				for _, m := range o.ResourceMonitors {
					if m.Name == "envoy.resource_monitors.fixed_heap" {
						m.ConfigType = &overloadv3.ResourceMonitor_TypedConfig{TypedConfig: full}
					}
				}
				o.Actions = nil
				o.LoadshedPoints = slices.DeleteFunc(o.LoadshedPoints, func(p *overloadv3.LoadShedPoint) bool {
					return p.Name != "envoy.load_shed_points."+name
				})
				require.Len(t, o.LoadshedPoints, 1)
			}})
			g.router.set(admit(g.admitted("abc")))
			stat := `overload\.envoy\.load_shed_points\.` + name + `\.`
			require.Eventually(t, func() bool { return g.counter(stat+"scale_percent") == 100 }, time.Minute, 10*time.Millisecond, "the heap is not looked at")
			shed(g)
			require.NotZero(t, g.counter(stat+"shed_load_count"))
			require.Zero(t, g.hits.Load())
		})
	}
}

func TestTooManyHeadersAreRefused(t *testing.T) {
	g := startGateway(t)
	p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for i := range 150 {
			w.Header().Set(fmt.Sprintf("X-Answer-%d", i), "x")
		}
	}))
	g.router.set(g.to(p.addr.String()))
	ask := func(headers int) answer {
		h := http.Header{}
		for i := range headers {
			h.Set(fmt.Sprintf("X-Many-%d", i), "x")
		}
		return g.do(g.request(host, "/", h))
	}
	a := ask(150)
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.Equal(t, "x", a.header.Get("X-Answer-149"))
	a = ask(250)
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, a.code)
	require.Equal(t, string(apierror.HeadersTooLarge), a.header.Get(envoy.ReasonHeader))
}

// Large cookies and a signed URL pass together by default. The bound counts both.
// Invariant: P8
func TestHeadersPassUpToTheirBound(t *testing.T) {
	g := startGateway(t)
	g.router.set(admit(g.admitted("abc")))
	ask := func(cookies, path int) int {
		return g.do(g.request(host, "/"+strings.Repeat("p", path), http.Header{"Cookie": {"c=" + strings.Repeat("x", cookies)}})).code
	}
	require.Equal(t, http.StatusOK, ask(24<<10, 8<<10))
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, ask(24<<10, 17<<10))
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, ask(41<<10, 0))
}

// Many users may share one connection of a proxy in front.
func TestInvalidStreamDoesNotAffectOthers(t *testing.T) {
	e, v := startVersatile(t)
	for name, headers := range map[string][]string{
		"te":                    {":method", "GET", ":scheme", "http", ":path", "/", ":authority", e.host("abc"), "te", "gzip"},
		"two methods":           {":method", "GET", ":method", "GET", ":scheme", "http", ":path", "/", ":authority", e.host("abc")},
		"a space in the path":   {":method", "GET", ":scheme", "http", ":path", "/a b", ":authority", e.host("abc")},
		"unknown pseudo-header": {":method", "GET", ":scheme", "http", ":path", "/", ":authority", e.host("abc"), ":dst", "x"},
		"upper case":            {":method", "GET", ":scheme", "http", ":path", "/", ":authority", e.host("abc"), "X-Upper", "x"},
		"no authority":          {":method", "GET", ":scheme", "http", ":path", "/"},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialH2(t, e.addr)
			other := c.open(true, ":method", "GET", ":scheme", "http", ":path", "/wait", ":authority", e.host("abc"))
			<-v.arrived
			bad := c.open(true, headers...)
			p := c.read()
			require.Equal(t, bad, p.stream, "%+v", p)
			require.True(t, p.end)
			require.Zero(t, p.code)
			v.release <- struct{}{}
			p = c.read()
			require.Equal(t, other, p.stream, "%+v", p)
			require.Equal(t, http.StatusOK, p.code)
		})
	}
}
