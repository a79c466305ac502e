package envoy_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
)

// raw sends a request whose target goes out byte for byte, which net/http's
// client would tidy up.
func (g *gateway) raw(address, method, target, host, headers string) (int, string) {
	g.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(g, err)
	defer conn.Close()
	require.NoError(g, conn.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(conn, method+" "+target+" HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n"+headers+"\r\n")
	require.NoError(g, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	require.NoError(g, err, "%s %s", method, target)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(g, err, "%s %s", method, target)
	return response.StatusCode, string(body)
}

// adminPages are pages of Envoy's admin interface that change something or show what no
// client may see.
func adminPages() []string {
	return []string{
		"/", "/help", "/config_dump", "/clusters", "/listeners", "/certs", "/server_info", "/memory", "/runtime", "/stats", "/stats/", "/stats?format=json",
		"/stats/recentlookups", "/contention", "/hot_restart_version", "/init_dump", "/heap_dump", "/allocprofiler", "/tap",
		"/quitquitquit", "/drain_listeners", "/healthcheck/fail", "/healthcheck/ok", "/logging?level=trace", "/reset_counters", "/runtime_modify?a=b", "/reopen_logs", "/cpuprofiler?enable=y",
	}
}

// adminTargets are adminPages, and ways to spell pages that may be shown.
func adminTargets() []string {
	return append(adminPages(),
		"/ready/", "/READY", "/Ready", "//ready", "/./ready", "/ready/.", "/ready/..", "/ready//", "/ready;x", "/ready%20", "/ready%00", "/ready%3fx", "/%72eady", "/ready%2f..%2fconfig_dump", "/ready/../quitquitquit",
		"/ready/../config_dump", "/stats/prometheus/", "/stats//prometheus", "/stats/Prometheus", "/stats/prometheus/../../config_dump", "/stats/prometheus/..%2f..%2fconfig_dump",
		"/stats/prometheus%2f..%2f..%2fquitquitquit", "/stats/prometheus\\..\\..\\config_dump", "/x/../ready", "http://envoy/config_dump", "http://envoy/quitquitquit", "http://envoy//ready",
	)
}

// untouched requires that the requests have not changed Envoy.
func (g *gateway) untouched() {
	g.Helper()
	code, body := g.raw(g.health, http.MethodGet, "/ready", "health", "")
	require.Equal(g, http.StatusOK, code)
	require.Equal(g, "LIVE\n", body)
	require.Len(g, g.listeners(), 2)
}

func TestHealthListenerShowsReadinessAndMetrics(t *testing.T) {
	g := startGateway(t)
	g.untouched()
	for _, target := range []string{"/stats/prometheus", "/stats/prometheus?usedonly", "http://anything/stats/prometheus"} {
		code, body := g.raw(g.health, http.MethodGet, target, "10.0.0.1:8082", "")
		require.Equal(t, http.StatusOK, code)
		require.Contains(t, body, "envoy_server_live")
	}
}

func TestHealthListenerHidesOtherAdminPages(t *testing.T) {
	g := startGateway(t)
	for _, target := range adminTargets() {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodHead} {
			code, body := g.raw(g.health, method, target, "health", "Content-Length: 0\r\n")
			require.Contains(t, []int{http.StatusNotFound, http.StatusBadRequest}, code, "%s %s: %s", method, target, body)
			require.NotContains(t, body, "envoy_", "%s %s", method, target)
			require.Less(t, len(body), 100, "%s %s: %s", method, target, body)
		}
	}
	for _, target := range []string{"/ready", "/stats/prometheus"} {
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodHead, http.MethodOptions, http.MethodTrace} {
			code, body := g.raw(g.health, method, target, "health", "Content-Length: 0\r\n")
			require.Equal(t, http.StatusNotFound, code, "%s %s", method, target)
			require.Empty(t, body)
		}
	}
	code, _ := g.raw(g.health, http.MethodConnect, "health:80", "health", "")
	require.GreaterOrEqual(t, code, 400)
	code, _ = g.raw(g.health, http.MethodOptions, "*", "health", "")
	require.GreaterOrEqual(t, code, 400)
	g.untouched()
}

// Headers do not change which page a request gets.
func TestHeadersDoNotSelectAnotherAdminPage(t *testing.T) {
	g := startGateway(t)
	for _, header := range []string{
		"X-HTTP-Method-Override: POST", "X-Method-Override: POST", "X-Original-URL: /quitquitquit", "X-Rewrite-URL: /quitquitquit",
		"X-Envoy-Original-Path: /quitquitquit", "X-Envoy-Original-Dst-Host: 127.0.0.1:1", "X-Forwarded-Host: envoy", "X-Envoy-Internal: true", "X-Forwarded-For: 127.0.0.1",
	} {
		code, body := g.raw(g.health, http.MethodGet, "/ready", "health", header+"\r\n")
		require.Equal(t, http.StatusOK, code, header)
		require.Equal(t, "LIVE\n", body, header)
		code, _ = g.raw(g.health, http.MethodPost, "/quitquitquit", "health", header+"\r\nContent-Length: 0\r\n")
		require.Equal(t, http.StatusNotFound, code, header)
	}
	code, _ := g.raw(g.health, http.MethodGet, "/ready", "health", "Upgrade: websocket\r\nConnection: Upgrade\r\n")
	require.NotEqual(t, http.StatusSwitchingProtocols, code)
	g.untouched()
}

// Clients of sandboxes reach the sandbox or nothing.
func TestIngressHidesTheAdminInterface(t *testing.T) {
	g := startGateway(t)
	targets := append(adminTargets(), "/ready", "/stats/prometheus")
	for _, host := range []string{"8080-abc.sandbox.example.com", "envoy_admin", "health", "localhost"} {
		g.router.set(func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error { return nil })
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			for _, target := range targets {
				code, body := g.raw(g.addr, method, target, host, "Content-Length: 0\r\n")
				require.Contains(t, []int{http.StatusServiceUnavailable, http.StatusBadRequest}, code, "%s %s: %s", method, target, body)
			}
		}
	}
	g.router.set(admit(g.admitted("abc")))
	for _, target := range []string{"/ready", "/stats/prometheus", "/quitquitquit", "/config_dump"} {
		before := g.hits.Load()
		code, _ := g.raw(g.addr, http.MethodPost, target, "8080-abc.sandbox.example.com", "Content-Length: 0\r\n")
		require.Equal(t, http.StatusOK, code)
		require.Equal(t, before+1, g.hits.Load(), "the sandbox's own %s", target)
	}
	g.untouched()
}

// The router may connect to the admin socket. Even a compromised router must not change Envoy, or
// read more than the open requests, the statistics and the configuration, which is no secret. It may begin a drain, which takes less than it can refuse by itself.
// Invariant: I4
func TestAdminSocketShowsOnlyUsedPages(t *testing.T) {
	g := startGatewayWith(t, config{onlyAllowed: true})
	info, err := os.Stat(g.settings.AdminSocket)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o660), info.Mode().Perm())
	for _, target := range []string{
		"/clusters", "/ready", "/stats/prometheus", "/stats/prometheus?usedonly", "/config_dump", "/server_info",
	} {
		code, body := g.adminPage(http.MethodGet, target)
		require.Equal(t, http.StatusOK, code, "%s: %s", target, body)
		require.NotContains(t, body, "PRIVATE KEY")
	}
	_, body := g.adminPage(http.MethodGet, "/clusters")
	require.Contains(t, body, "pods_h1::")
	require.Contains(t, body, "pods_h2::")
	for _, target := range adminPages() {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			if strings.HasPrefix(target, "/healthcheck/") {
				target += "?x" // without a query they are for drains
			}
			switch target {
			case "/clusters":
				target = "/clusters?format=json" // which keeps Envoy's main thread busy for five times as long
			case "/config_dump", "/server_info":
				target += "?x"
			}
			code, body := g.adminPage(method, target)
			require.Equal(t, http.StatusForbidden, code, "%s %s: %s", method, target, body)
		}
	}
	for _, target := range []string{"/ready/../quitquitquit", "/ready/../certs", "/clusters/../quitquitquit", "/stats/prometheus/../../certs", "/stats/prometheus?/../../certs/../quitquitquit"} {
		code, body := g.adminPage(http.MethodPost, target)
		require.True(t, code != http.StatusOK || strings.Contains(body, "envoy_server_live"), "%s: %d %s", target, code, body)
	}
	code, _ := g.adminPage(http.MethodGet, "/ready")
	require.Equal(t, http.StatusOK, code)
}
