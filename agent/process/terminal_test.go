package process_test

import (
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
)

// terminal is a request for a shell that runs a script on a terminal of 100 columns and 30 rows.
func terminal(script string) *processpb.StartRequest {
	r := command(script)
	r.Stdin, r.Pty = nil, &processpb.PTY{Size: &processpb.PTY_Size{Cols: 100, Rows: 30}}
	return r
}

func TestTerminalIsResizedAndSignalled(t *testing.T) {
	t.Parallel()
	s := serve(t, connect.WithProtoJSON())
	p := s.start(t.Context(), terminal(
		`trap 'stty size; exit 5' WINCH; stty size; tty; sleep 1000 & echo ready; while :; do wait; done`))
	out := p.until("ready")
	require.Contains(t, out, "30 100\r\n")
	require.Contains(t, out, "/dev/pts/")
	size := &processpb.PTY{Size: &processpb.PTY_Size{Cols: 81, Rows: 25}}
	_, err := s.Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{Process: p.selector(), Pty: size}))
	require.NoError(t, err)
	require.Contains(t, p.wait(), "25 81\r\n")
	require.Equal(t, int32(5), p.end.GetExitCode())
}

// A page that does not show its terminal yet has no size for it.
func TestTerminalOfUnknownSizeIsServed(t *testing.T) {
	t.Parallel()
	s := serve(t)
	r := terminal("stty size; read line; stty size")
	r.Pty.Size = &processpb.PTY_Size{}
	p := s.start(t.Context(), r)
	require.Equal(t, "0 0\r\n", p.until("\n"))
	for _, size := range []*processpb.PTY_Size{{Cols: 9, Rows: 7}, {}} {
		update := &processpb.UpdateRequest{Process: p.selector(), Pty: &processpb.PTY{Size: size}}
		_, err := s.Update(t.Context(), connect.NewRequest(update))
		require.NoError(t, err)
	}
	s.sendInput(p, typed("\n"))
	require.Contains(t, p.wait(), "0 0\r\n")
}

func TestTypedInputReachesTheTerminal(t *testing.T) {
	t.Parallel()
	s := serve(t)
	p := s.start(t.Context(), terminal("read a; echo [$a]; cat; echo bye"))
	s.sendInput(p, typed("hello\n"))
	p.until("[hello]")
	s.sendInput(p, typed("\x04")) // ends cat
	require.Contains(t, p.wait(), "bye")
}

// A shell with job control gives each job a process group of its own.
func TestKillOfTerminalReachesItsJobs(t *testing.T) {
	t.Parallel()
	s := serve(t)
	p := s.start(t.Context(), terminal(
		`set -m; trap '' HUP; sh -c 'trap "" HUP; echo job $$; exec sleep 1000' & wait`))
	out := p.until("job ")
	for len(out) == 0 || out[len(out)-1] != '\n' {
		out += p.until("\n")
	}
	job := number(t, out, "job ")
	require.NoError(t, s.signal(p, processpb.Signal_SIGNAL_SIGKILL))
	p.wait()
	require.Equal(t, "signal: killed", p.end.GetStatus())
	gone(t, job)
}
