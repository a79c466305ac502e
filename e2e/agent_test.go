package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

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
