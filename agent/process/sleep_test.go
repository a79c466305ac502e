package process_test

import (
	"context"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// These tests stop all processes of this package's tests, so they are not parallel.

func (s *server) order(kind initbox.Kind, counter uint64) {
	s.t.Helper()
	_, err := s.freezer.Obey(initbox.Order{SandboxID: "abc", Kind: kind, Term: 1, Counter: counter})
	require.NoError(s.t, err)
}

// Invariant: P28
func TestTimeoutOfACommandStandsStillWhileAsleep(t *testing.T) {
	const limit = 4 * time.Second
	s := serve(t)
	defer s.freezer.Wake()
	// The client's own deadline would end the stream, so the header is set by hand.
	start := func(timeout string) *started {
		request := connect.NewRequest(command("echo begun; exec sleep 1000"))
		if timeout != "" {
			request.Header().Set("Connect-Timeout-Ms", timeout)
		}
		stream, err := s.Start(t.Context(), request)
		require.NoError(t, err)
		p := &started{t: t, stream: stream}
		t.Cleanup(func() { _ = stream.Close() })
		require.True(t, stream.Receive(), "%v", stream.Err())
		p.pid = stream.Msg().GetEvent().GetStart().GetPid()
		p.until("begun")
		return p
	}
	p, other := start("4000"), start("")
	connected := connect.NewRequest(&processpb.ConnectRequest{Process: other.selector()})
	connected.Header().Set("Connect-Timeout-Ms", "4000")
	second, err := s.Connect(t.Context(), connected)
	require.NoError(t, err)
	defer second.Close()
	require.True(t, second.Receive())
	s.order(initbox.Keep, 1)
	time.Sleep(limit + limit/4)
	require.NoError(t, syscall.Kill(int(p.pid), 0))
	list, err := s.List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
	require.NoError(t, err)
	require.Len(t, list.Msg.GetProcesses(), 2)
	s.order(initbox.Thaw, 2)
	require.False(t, p.stream.Receive())
	require.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(p.stream.Err()))
	require.Eventually(t, func() bool { return syscall.Kill(int(p.pid), 0) != nil }, time.Minute, time.Millisecond)
	for second.Receive() {
	}
	require.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(second.Err()))
	require.NoError(t, syscall.Kill(int(other.pid), 0), "its stream has ended, and it has not")
}

// Invariant: P28
func TestStreamOfAStoppedCommandGoesOnAfterTheWake(t *testing.T) {
	s := serve(t)
	defer s.freezer.Wake()
	p := s.start(t.Context(), command("while :; do echo tick; sleep 0.01; done"))
	for n := range uint64(5) {
		p.until("tick")
		s.order(initbox.Keep, 2*n+1)
		_, err := s.Start(t.Context(), connect.NewRequest(command("true")))
		if err == nil { // the answer of a stream comes with its first message
			stream, _ := s.Start(t.Context(), connect.NewRequest(command("true")))
			require.False(t, stream.Receive())
			err = stream.Err()
			_ = stream.Close()
		}
		code(t, err, connect.CodeUnavailable, "asleep")
		s.order(initbox.Thaw, 2*n+2)
	}
	p.until("tick")
}

// Invariant: P28
func TestShellNeverSeesItsJobStopped(t *testing.T) {
	const bash = "/bin/bash"
	if _, err := os.Stat(bash); err != nil {
		t.Skip("the machine has no bash")
	}
	s := serve(t)
	defer s.freezer.Wake()
	config := &processpb.ProcessConfig{Cmd: bash, Args: []string{"--norc", "-i"}}
	request := &processpb.StartRequest{Process: config, Pty: &processpb.PTY{}}
	p := s.start(context.WithoutCancel(t.Context()), request)
	s.sendInput(p, typed("sh -c 'while read line; do echo got $line; done'\n"))
	var all strings.Builder
	for n := range uint64(50) {
		s.order(initbox.Freeze, 2*n+1)
		s.order(initbox.Thaw, 2*n+2)
		s.sendInput(p, typed("line\n"))
		all.WriteString(p.until("got line"))
	}
	require.NotContains(t, all.String(), "Stopped")
	require.NoError(t, s.signal(p, processpb.Signal_SIGNAL_SIGKILL))
}
