package client

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/api/openapi"
)

// hostile is an agent that was replaced by what runs in its sandbox.
func hostile(t *testing.T, h http.HandlerFunc) *Agent {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	transport := server.Client().Transport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	proxied := roundTripper(func(r *http.Request) (*http.Response, error) {
		r = r.Clone(r.Context())
		r.URL.Host = server.Listener.Addr().String()
		return transport.RoundTrip(r)
	})
	s := &openapi.Sandbox{
		SandboxID: "k3x9", URL: "http://8080-k3x9.sandbox.example.com/", EnvdAccessToken: new("token"), EnvdVersion: "0.6.4",
	}
	a, err := NewAgent(s, AgentOptions{HTTP: &http.Client{Transport: proxied}})
	require.NoError(t, err)
	return a
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestAgentCannotLeadItsCallerElsewhere(t *testing.T) {
	calls := 0
	a := hostile(t, func(w http.ResponseWriter, r *http.Request) {
		calls++
		http.Redirect(w, r, "http://inner.example.com/secret", http.StatusTemporaryRedirect)
	})
	_, err := a.ReadFile(t.Context(), "/x")
	require.ErrorContains(t, err, "307")
	require.Error(t, a.WriteFile(t.Context(), "/x", strings.NewReader("contents")))
	require.Equal(t, 2, calls)
}

func TestRefusalsOfTheGatewayCannotBeForged(t *testing.T) {
	header := ""
	a := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
		if header != "" { // Envoy takes it out of what a sandbox answers
			w.Header().Set("X-Berth-Reason", header)
		}
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"reason":"agent_token","message":"m"}`)
	})
	var refusal *Error
	_, err := a.ReadFile(t.Context(), "/x")
	require.ErrorAs(t, err, &refusal)
	require.Empty(t, refusal.Reason)
	header = "agent_token"
	_, err = a.ReadFile(t.Context(), "/x")
	require.ErrorAs(t, err, &refusal)
	require.Equal(t, "agent_token", refusal.Reason)
}

// envelope is one message of a server stream.
func envelope(t *testing.T, flags byte, m proto.Message) []byte {
	t.Helper()
	raw, err := proto.Marshal(m)
	require.NoError(t, err)
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(raw))), raw...)
}

func TestMessagesOfAnAgentAreBounded(t *testing.T) {
	var large bytes.Buffer
	z := gzip.NewWriter(&large)
	_, err := io.CopyN(z, zeros{}, 64<<20)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	for name, body := range map[string][]byte{
		"compressed": append(binary.BigEndian.AppendUint32([]byte{1}, uint32(large.Len())), large.Bytes()...),
		"announced":  {0, 0xff, 0xff, 0xff, 0xff},
	} {
		t.Run(name, func(t *testing.T) {
			a := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/connect+proto")
				w.Header().Set("Connect-Content-Encoding", "gzip")
				_, _ = w.Write(body)
			})
			_, err := a.Run(t.Context(), "true")
			require.Error(t, err)
			require.NotContains(t, err.Error(), "unexpected EOF", "it was refused before it was read")
		})
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func TestExitCodesAreThoseOfAShell(t *testing.T) {
	for _, c := range []struct {
		end  *processpb.ProcessEvent_EndEvent
		code int
		err  string
	}{
		{&processpb.ProcessEvent_EndEvent{Exited: true}, 0, ""},
		{&processpb.ProcessEvent_EndEvent{Exited: true, ExitCode: 255}, 255, ""},
		{&processpb.ProcessEvent_EndEvent{Exited: true, ExitCode: 256}, 0, "has exited with 256"},
		{&processpb.ProcessEvent_EndEvent{Exited: true, ExitCode: -1}, 0, "has exited with -1"},
		{&processpb.ProcessEvent_EndEvent{Status: "signal: segmentation fault (core dumped)"}, 139, ""},
		{&processpb.ProcessEvent_EndEvent{Status: "signal: killed"}, 137, ""},
		{&processpb.ProcessEvent_EndEvent{Status: "signal: user defined signal 1"}, 138, ""},
		{&processpb.ProcessEvent_EndEvent{Status: "signal: signal 34"}, 162, ""},
		{&processpb.ProcessEvent_EndEvent{Status: "unheard of"}, 128, ""},
	} {
		a := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/connect+proto")
			for _, e := range []*processpb.ProcessEvent{
				{Event: &processpb.ProcessEvent_Start{Start: &processpb.ProcessEvent_StartEvent{Pid: 1}}},
				{Event: &processpb.ProcessEvent_End{End: c.end}},
			} {
				_, _ = w.Write(envelope(t, 0, &processpb.StartResponse{Event: e}))
			}
			_, _ = w.Write([]byte{2, 0, 0, 0, 2, '{', '}'})
		})
		out, err := a.Run(t.Context(), "true")
		if c.err != "" {
			require.ErrorContains(t, err, c.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.code, out.ExitCode, c.end)
	}
}

// A command may run although its caller does not know its number yet.
func TestCanceledRunKillsACommandThatStarts(t *testing.T) {
	asked, killed := make(chan struct{}), make(chan struct{})
	agent := &slowAgent{asked: asked, killed: killed}
	_, h := processpb.NewProcessHandler(agent)
	a := hostile(t, h.ServeHTTP)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	_, err := a.Run(ctx, "sleep", "3600")
	require.ErrorIs(t, err, ctx.Err())
	<-killed
}

// slowAgent answers that a command has started when its caller has gone.
type slowAgent struct {
	processpb.UnimplementedProcessHandler
	asked, killed chan struct{}
}

func (s *slowAgent) Start(
	ctx context.Context, _ *connect.Request[processpb.StartRequest], stream *connect.ServerStream[processpb.StartResponse],
) error {
	close(s.asked)
	start := &processpb.ProcessEvent_Start{Start: &processpb.ProcessEvent_StartEvent{Pid: 7}}
	if err := stream.Send(&processpb.StartResponse{Event: &processpb.ProcessEvent{Event: start}}); err != nil {
		return err
	}
	select {
	case <-s.killed:
	case <-ctx.Done():
		return ctx.Err()
	}
	end := &processpb.ProcessEvent_End{End: &processpb.ProcessEvent_EndEvent{Status: "signal: killed"}}
	return stream.Send(&processpb.StartResponse{Event: &processpb.ProcessEvent{Event: end}})
}

func (s *slowAgent) SendSignal(
	_ context.Context, r *connect.Request[processpb.SendSignalRequest],
) (*connect.Response[processpb.SendSignalResponse], error) {
	if r.Msg.GetProcess().GetPid() == 7 && r.Msg.GetSignal() == processpb.Signal_SIGNAL_SIGKILL {
		close(s.killed)
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

func TestErrorOfAFileNamesItOnce(t *testing.T) {
	for _, said := range []string{"/nosuch: no such file or directory", "no such file or directory"} {
		a := hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"message":%q}`, said)
		})
		_, err := a.ReadFile(t.Context(), "/nosuch")
		require.EqualError(t, err, "/nosuch: no such file or directory")
	}
}
