package process_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/agent/process"
)

// table reaps for all tests of this package: there can be one in a process.
var table = children.New()

func TestMain(m *testing.M) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- table.Run(ctx) }()
	code := m.Run()
	table.KillAll(time.Minute) // background processes of the tests
	cancel()
	if err := <-ended; err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	http.DefaultClient.CloseIdleConnections()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// sandbox is a process.Sandbox whose processes have the user of the test.
type sandbox struct {
	*accounts.Directory
	config initbox.Config
}

func (s *sandbox) Config() *initbox.Config { return &s.config }

func (s *sandbox) Account(name string) (accounts.Account, error) {
	if name == "" {
		return s.Own(), nil
	}
	return s.Lookup(name)
}

// server is a service and a client of it.
type server struct {
	processpb.ProcessClient
	t       testing.TB
	service *process.Service
	freezer *freeze.Freezer
	sandbox *sandbox
	url     string
}

func serve(t testing.TB, options ...connect.ClientOption) *server {
	t.Helper()
	directory, err := accounts.New(false)
	require.NoError(t, err)
	s := &server{t: t, sandbox: &sandbox{Directory: directory, config: initbox.Config{SandboxID: "abc"}}}
	s.freezer, err = freeze.New(freeze.Options{Children: table, Bound: time.Minute})
	require.NoError(t, err)
	s.service, err = process.New(process.Options{Sandbox: s.sandbox, Children: table, Freezer: s.freezer})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle(s.service.Handler())
	listening := httptest.NewServer(mux)
	s.url = listening.URL
	s.ProcessClient = processpb.NewProcessClient(http.DefaultClient, listening.URL, options...)
	t.Cleanup(func() {
		s.service.Close()
		http.DefaultClient.CloseIdleConnections()
		listening.Close()
	})
	return s
}

// command is a request for a shell that runs a script, without standard input.
func command(script string) *processpb.StartRequest {
	no := false
	config := &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}
	return &processpb.StartRequest{Stdin: &no, Process: config}
}

// started is a process and its stream.
type started struct {
	t      testing.TB
	stream *connect.ServerStreamForClient[processpb.StartResponse]
	pid    uint32
	// end is set when the stream has brought it.
	end *processpb.ProcessEvent_EndEvent
}

// start returns when the start event is there.
func (s *server) start(ctx context.Context, r *processpb.StartRequest) *started {
	s.t.Helper()
	stream, err := s.Start(ctx, connect.NewRequest(r))
	require.NoError(s.t, err)
	p := &started{t: s.t, stream: stream}
	s.t.Cleanup(func() { _ = stream.Close() })
	require.True(s.t, stream.Receive(), "%v", stream.Err())
	require.NotNil(s.t, stream.Msg().GetEvent().GetStart())
	p.pid = stream.Msg().GetEvent().GetStart().GetPid()
	return p
}

// selector selects the process.
func (p *started) selector() *processpb.ProcessSelector { return pid(p.pid) }

func pid(number uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: number}}
}

// until reads until the output contains text, or the stream ends. It returns the output.
func (p *started) until(text string) string {
	p.t.Helper()
	var out strings.Builder
	for text == "" || !strings.Contains(out.String(), text) {
		if !p.stream.Receive() {
			require.NoError(p.t, p.stream.Err())
			require.NotNil(p.t, p.end, "the stream has ended without an end event")
			require.Empty(p.t, text, "not in the output %q", out.String())
			return out.String()
		}
		p.take(p.stream.Msg().GetEvent(), &out)
	}
	return out.String()
}

func (p *started) take(e *processpb.ProcessEvent, out io.StringWriter) {
	p.t.Helper()
	switch e := e.GetEvent().(type) {
	case *processpb.ProcessEvent_Data:
		_, _ = out.WriteString(text(e.Data))
	case *processpb.ProcessEvent_End:
		require.Nil(p.t, p.end)
		p.end = e.End
	case *processpb.ProcessEvent_Keepalive:
	default:
		require.Fail(p.t, "unexpected event", "%v", e)
	}
}

// text returns the output in an event, whatever its source is.
func text(e *processpb.ProcessEvent_DataEvent) string {
	return string(e.GetStdout()) + string(e.GetStderr()) + string(e.GetPty())
}

// wait reads to the end and returns the output.
func (p *started) wait() string {
	p.t.Helper()
	return p.until("")
}

func (s *server) sendInput(p *started, input *processpb.ProcessInput) {
	s.t.Helper()
	r := &processpb.SendInputRequest{Process: p.selector(), Input: input}
	_, err := s.SendInput(s.t.Context(), connect.NewRequest(r))
	require.NoError(s.t, err)
}

func stdin(text string) *processpb.ProcessInput {
	return &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(text)}}
}

func typed(text string) *processpb.ProcessInput {
	return &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte(text)}}
}

func (s *server) signal(p *started, signal processpb.Signal) error {
	r := &processpb.SendSignalRequest{Process: p.selector(), Signal: signal}
	_, err := s.SendSignal(s.t.Context(), connect.NewRequest(r))
	return err
}

// code requires an error with a code and a text.
func code(t testing.TB, err error, code connect.Code, message string) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, code, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, message)
}

// number returns the number after a prefix.
func number(t testing.TB, out, prefix string) (n int) {
	t.Helper()
	_, rest, found := strings.Cut(out, prefix)
	require.True(t, found, "%q", out)
	_, err := fmt.Sscan(rest, &n)
	require.NoError(t, err)
	return n
}
