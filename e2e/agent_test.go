package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Invariant: P16
func TestClaimConfiguresItsAgentBeforeTheAnswer(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("agents", 2, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		s.Ports = []int32{8080}
	})
	const canary = "c4n4ry-5ecret"
	file := filepath.Join(t.TempDir(), "a", "b")
	s, _ := e.claimOf(pool, fmt.Sprintf(`"envVars":{"A":"1=2"},"secrets":{"KEY":%q},`+
		`"files":[{"path":%q,"content":"text","mode":"0600"}]`, canary, file))
	require.NotNil(t, s.EnvdAccessToken)
	require.Equal(t, "0.6.4", s.EnvdVersion)
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "text", string(raw))

	client, host := e.client(), e.host(sandboxaccess.AgentPort, s.SandboxID)
	get := func(path string, headers ...string) answer {
		t.Helper()
		a, err := do(t.Context(), client, http.MethodGet, "http://gateway"+path, host, "", headers...)
		require.NoError(t, err)
		return a
	}
	token := []string{sandboxaccess.AgentHeader, *s.EnvdAccessToken}
	envs := get("/envs", token...)
	require.Equal(t, http.StatusOK, envs.code, envs.body)
	require.JSONEq(t, `{"A":"1=2"}`, envs.body)
	require.Equal(t, http.StatusNoContent, get("/health").code)
	for _, a := range []answer{
		get("/envs"), get("/init"), get("/envs", sandboxaccess.AgentHeader, "wrong"), get("/files?path=/etc/hostname"),
	} {
		require.Equal(t, http.StatusUnauthorized, a.code, a.body)
		require.Equal(t, apierror.AgentToken, a.refusal(t).Reason)
	}
	// The router lets a signature through, and the agent judges it.
	require.Equal(t, http.StatusUnauthorized, get("/files?path=/etc/hostname&signature=v1_x").code)
	require.Equal(t, http.StatusOK, get("/files?path="+file, token...).code)
	e.reachable(client, s) // the pool's own command runs beside it

	other, _ := e.claimOf(pool, `"envVars":{"A":"3"}`)
	require.NotEqual(t, *s.EnvdAccessToken, *other.EnvdAccessToken)
	a, err := do(t.Context(), client, http.MethodGet, "http://gateway/envs",
		e.host(sandboxaccess.AgentPort, other.SandboxID), "", token...)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, a.code, "the token of another sandbox")

	var record v1alpha1.Sandbox
	e.eventually(func() (err error) {
		record, err = e.record(s.SandboxID)
		return err
	})
	require.EqualValues(t, sandboxaccess.AgentPort, record.Spec.AgentPort)
	shown, err := json.Marshal(record)
	require.NoError(t, err)
	require.NotContains(t, string(shown), canary)
}

// Requests that name the agent or its paths in other ways reach it no more than plain ones do. They are bytes on
// a connection to Envoy, because a client would tidy them.
// Invariant: P16
func TestNoFormOfARequestReachesTheAgentWithoutToken(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("tricks", 2, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		s.Ports = []int32{8080}
	})
	const secret = "only-with-the-token"
	s, _ := e.claimOf(pool, fmt.Sprintf(`"envVars":{"A":%q}`, secret))
	other, _ := e.claimOf(pool, `"envVars":{"A":"of another"}`)
	host, token := e.host(sandboxaccess.AgentPort, s.SandboxID), *s.EnvdAccessToken
	const header = "\r\nX-Access-Token: "
	wrong := header + *other.EnvdAccessToken
	const upgrade = "\r\nConnection: Upgrade"
	forms := map[string]string{
		"two slashes":                 "GET //envs HTTP/1.1\r\nHost: " + host,
		"from the files":              "GET /files/../envs?signature=v1_x HTTP/1.1\r\nHost: " + host,
		"from the files, escaped dot": "GET /files/%2e%2e/envs?signature=v1_x HTTP/1.1\r\nHost: " + host,
		"escaped slashes":             "GET /files%2f..%2fenvs?signature=v1_x HTTP/1.1\r\nHost: " + host,
		"backslashes":                 "GET /files\\..\\envs?signature=v1_x HTTP/1.1\r\nHost: " + host,
		"from health":                 "GET /health/../envs HTTP/1.1\r\nHost: " + host,
		"two questions":               "GET /envs?/files?signature=v1_x HTTP/1.1\r\nHost: " + host,
		"fragment":                    "GET /files?signature=v1_x#/../envs HTTP/1.1\r\nHost: " + host,
		"a parameter of the path":     "GET /files;/../envs?signature=v1_x HTTP/1.1\r\nHost: " + host,
		"absolute form":               "GET http://" + host + "/envs HTTP/1.1\r\nHost: " + host,
		"absolute form, other host":   "GET http://" + host + "/envs HTTP/1.1\r\nHost: " + e.host(8080, s.SandboxID),
		"another host, then this": "GET /envs HTTP/1.1\r\nHost: " + e.host(8080, s.SandboxID) +
			"\r\nHost: " + host,
		"port in another form": "GET /envs HTTP/1.1\r\nHost: 0" + host,
		"port with a sign":     "GET /envs HTTP/1.1\r\nHost: +" + host,
		"upper case":           "GET /envs HTTP/1.1\r\nHost: " + strings.ToUpper(host),
		"trailing dot":         "GET /envs HTTP/1.1\r\nHost: " + host + ".",
		"a port of the host":   "GET /envs HTTP/1.1\r\nHost: " + e.host(8080, s.SandboxID) + ":49983",
		"headers name the port": "GET /envs HTTP/1.1\r\nHost: " + e.site.domain() +
			"\r\nX-Sandbox-Id: " + s.SandboxID +
			"\r\nX-Sandbox-Port: 49983",
		"headers against the host": "GET /envs HTTP/1.1\r\nHost: " + e.host(8080, s.SandboxID) +
			"\r\nX-Sandbox-Port: 49983",
		"HTTP/2 upgrade": "GET /envs HTTP/1.1\r\nHost: " + host + upgrade + ", HTTP2-Settings\r\nUpgrade: h2c" +
			"\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
		"WebSocket": "GET /envs HTTP/1.1\r\nHost: " + host + upgrade +
			"\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13" +
			"\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
		"WebSocket to the files": "GET /files?signature=v1_x HTTP/1.1\r\nHost: " + host + upgrade +
			"\r\nUpgrade: websocket" +
			"\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==" +
			"\r\n\r\nGET /envs HTTP/1.1\r\nHost: " + host,
		"tunnel":          "CONNECT " + host + ":80 HTTP/1.1\r\nHost: " + host,
		"no version":      "GET /envs HTTP/1.0\r\nHost: " + host,
		"another's token": "GET /envs HTTP/1.1\r\nHost: " + host + wrong,
		"both tokens":     "GET /envs HTTP/1.1\r\nHost: " + host + header + token + wrong,
		"both, reversed":  "GET /envs HTTP/1.1\r\nHost: " + host + wrong + header + token,
		"two in one":      "GET /envs HTTP/1.1\r\nHost: " + host + header + token + ", " + token,
		"underscores":     "GET /envs HTTP/1.1\r\nHost: " + host + "\r\nX_Access_Token: " + token,
		"as a cookie":     "GET /envs HTTP/1.1\r\nHost: " + host + "\r\nCookie: X-Access-Token=" + token,
		"in the query":    "GET /envs?X-Access-Token=" + token + " HTTP/1.1\r\nHost: " + host,
		"hidden by a body": "POST /files?signature=v1_x HTTP/1.1\r\nHost: " + host +
			"\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
		"ended by a connection": "GET /envs HTTP/1.1\r\nHost: " + host + header + token +
			"\r\nConnection: close, X-Access-Token",
	}
	require.Contains(t, e.raw("GET /envs HTTP/1.1\r\nHost: "+host+header+token), secret, "a plain request")
	for name, form := range forms {
		t.Run(name, func(t *testing.T) {
			answer := e.raw(form)
			require.NotContains(t, answer, secret)
			if answer == "" || strings.Contains(answer, `"port":8080,`) {
				return // Envoy has closed the connection, or it was a request to that port
			}
			require.Regexp(t, `^HTTP/1\.[01] (30[178]|4\d\d|501)`, answer)
		})
	}
}

// raw sends the lines of a request to Envoy, and returns all that comes back until the connection ends.
func (e *env) raw(lines string) string {
	e.t.Helper()
	c, err := e.site.front(e.t.Context())
	require.NoError(e.t, err)
	defer c.Close()
	require.NoError(e.t, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(c, lines+"\r\nConnection: close\r\n\r\n")
	require.NoError(e.t, err)
	raw, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		require.NoError(e.t, err, string(raw))
	}
	return string(raw)
}

// agentOf is the agent of a sandbox, which is called through Envoy with its token.
func (e *env) agentOf(s openapi.Sandbox) processpb.ProcessClient {
	e.t.Helper()
	require.NotNil(e.t, s.EnvdAccessToken)
	token := connect.WithInterceptors(withHeader{sandboxaccess.AgentHeader, *s.EnvdAccessToken})
	return processpb.NewProcessClient(e.streaming(), "http://"+e.host(sandboxaccess.AgentPort, s.SandboxID), token)
}

// runs starts a script in a sandbox. Its client stays until stop or the end of the test.
func (e *env) runs(s openapi.Sandbox, script string) (pid uint32, stop func()) {
	e.t.Helper()
	ctx, cancel := context.WithCancel(e.t.Context())
	e.t.Cleanup(cancel)
	stream, err := e.agentOf(s).Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}},
	}))
	require.NoError(e.t, err)
	require.True(e.t, stream.Receive(), "%v", stream.Err())
	pid = stream.Msg().GetEvent().GetStart().GetPid()
	require.NotZero(e.t, pid)
	return pid, func() {
		cancel()
		_ = stream.Close()
	}
}

// withHeader adds a header to each call.
type withHeader struct{ name, value string }

func (h withHeader) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		r.Header().Set(h.name, h.value)
		return next(ctx, r)
	}
}

func (h withHeader) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		c.RequestHeader().Set(h.name, h.value)
		return c
	}
}

func (withHeader) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
