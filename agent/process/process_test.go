package process_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
)

type startRequest = connect.Request[processpb.StartRequest]

// Both codecs, through the client of the protocol.
func TestEachCallWorksInBothCodecs(t *testing.T) {
	for name, options := range map[string][]connect.ClientOption{"JSON": {connect.WithProtoJSON()}, "protobuf": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, options...)
			tag := "reader"
			request := command("cat; exit 3")
			request.Stdin, request.Tag = nil, &tag
			p := s.start(t.Context(), request)

			list, err := s.List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
			require.NoError(t, err)
			require.Len(t, list.Msg.GetProcesses(), 1)
			info := list.Msg.GetProcesses()[0]
			require.Equal(t, p.pid, info.GetPid())
			require.Equal(t, tag, info.GetTag())
			require.Equal(t, request.GetProcess().GetArgs(), info.GetConfig().GetArgs())

			byTag := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: tag}}
			second, err := s.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byTag}))
			require.NoError(t, err)
			defer second.Close()
			require.True(t, second.Receive())
			require.Equal(t, p.pid, second.Msg().GetEvent().GetStart().GetPid())

			s.sendInput(p, stdin("one\n"))
			in := s.StreamInput(t.Context())
			start := &processpb.StreamInputRequest_StartEvent{Process: p.selector()}
			require.NoError(t, in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Start{Start: start}}))
			for _, line := range []string{"two\n", "three\n"} {
				data := &processpb.StreamInputRequest_DataEvent{Input: stdin(line)}
				require.NoError(t, in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{Data: data}}))
				alive := &processpb.StreamInputRequest_Keepalive{Keepalive: &processpb.StreamInputRequest_KeepAlive{}}
				require.NoError(t, in.Send(&processpb.StreamInputRequest{Event: alive}))
			}
			_, err = in.CloseAndReceive()
			require.NoError(t, err)
			for range 2 {
				_, err = s.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: p.selector()}))
				if err != nil { // the process may have ended between the two
					require.Equal(t, connect.CodeNotFound, connect.CodeOf(err))
				}
			}
			require.Equal(t, "one\ntwo\nthree\n", p.wait())
			require.Equal(t, int32(3), p.end.GetExitCode())
			require.True(t, p.end.GetExited())
			require.Equal(t, "exit status 3", p.end.GetStatus())
			require.Equal(t, "exit status 3", p.end.GetError())

			var out strings.Builder
			for second.Receive() {
				out.WriteString(text(second.Msg().GetEvent().GetData()))
			}
			require.NoError(t, second.Err())
			require.Equal(t, "one\ntwo\nthree\n", out.String())
		})
	}
}

func TestSourcesOfOutputAreToldApart(t *testing.T) {
	t.Parallel()
	s := serve(t)
	p := s.start(t.Context(), command("printf out; printf err >&2"))
	var out, err string
	for p.stream.Receive() {
		out += string(p.stream.Msg().GetEvent().GetData().GetStdout())
		err += string(p.stream.Msg().GetEvent().GetData().GetStderr())
	}
	require.NoError(t, p.stream.Err())
	require.Equal(t, []string{"out", "err"}, []string{out, err})
}

func TestEndSaysHowTheProcessEnded(t *testing.T) {
	t.Parallel()
	s := serve(t)
	for script, want := range map[string]*processpb.ProcessEvent_EndEvent{
		"exit 0":        {Exited: true, Status: "exit status 0"},
		"exit 200":      {Exited: true, Status: "exit status 200", ExitCode: 200},
		"kill -KILL $$": {Status: "signal: killed", ExitCode: -1},
		"kill -TERM $$": {Status: "signal: terminated", ExitCode: -1},
	} {
		p := s.start(t.Context(), command(script))
		p.wait()
		if want.Status != "exit status 0" {
			want.Error = &want.Status
		}
		assert.Equal(t, want.String(), p.end.String(), script)
	}
}

func TestRefusedCallsNameTheReason(t *testing.T) {
	t.Parallel()
	s := serve(t)
	missing, file, many := "/does/not/exist", "/etc/passwd", uint32(1<<16)
	sleeping := command("exec sleep 1000")
	p := s.start(t.Context(), sleeping)
	shell := s.start(t.Context(), terminal("exec sleep 1000"))
	start := func(change func(r *startRequest)) func() error {
		return func() error {
			r := connect.NewRequest(command("true"))
			change(r)
			stream, err := s.Start(t.Context(), r)
			require.NoError(t, err)
			defer stream.Close()
			require.False(t, stream.Receive())
			return stream.Err()
		}
	}
	input := func(p *started, in *processpb.ProcessInput) func() error {
		return func() error {
			_, err := s.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: p.selector(), Input: in}))
			return err
		}
	}
	update := func(p *started, size *processpb.PTY_Size) func() error {
		return func() error {
			r := &processpb.UpdateRequest{Process: p.selector(), Pty: &processpb.PTY{Size: size}}
			_, err := s.Update(t.Context(), connect.NewRequest(r))
			return err
		}
	}
	for name, c := range map[string]struct {
		call    func() error
		code    connect.Code
		message string
	}{
		"missing cwd": {
			start(func(r *startRequest) { r.Msg.Process.Cwd = &missing }),
			connect.CodeInvalidArgument, `cwd "/does/not/exist" does not exist`,
		},
		"file as cwd": {
			start(func(r *startRequest) { r.Msg.Process.Cwd = &file }),
			connect.CodeInvalidArgument, "is not a directory",
		},
		"long tag": {
			start(func(r *startRequest) { r.Msg.Tag = new(strings.Repeat("a", 1025)) }),
			connect.CodeInvalidArgument, "tag: 1025 bytes, at most 1024",
		},
		"long command": {
			start(func(r *startRequest) { r.Msg.Process.Cmd = strings.Repeat("a", 4097) }),
			connect.CodeInvalidArgument, "at most 4096 bytes",
		},
		"no command": {
			start(func(r *startRequest) { r.Msg.Process = nil }),
			connect.CodeInvalidArgument, "process.cmd",
		},
		"missing command": {
			start(func(r *startRequest) { r.Msg.Process.Cmd = missing }),
			connect.CodeInvalidArgument, missing,
		},
		"unknown command": {
			start(func(r *startRequest) { r.Msg.Process.Cmd = "no-such-program" }),
			connect.CodeInvalidArgument, "PATH",
		},
		"not executable": {
			start(func(r *startRequest) { r.Msg.Process.Cmd = file }),
			connect.CodePermissionDenied, file,
		},
		"zero byte": {
			start(func(r *startRequest) { r.Msg.Process.Args = []string{"a\x00"} }),
			connect.CodeInvalidArgument, "zero byte",
		},
		"bad variable": {
			start(func(r *startRequest) { r.Msg.Process.Envs = map[string]string{"A=B": ""} }),
			connect.CodeInvalidArgument, `"A=B"`,
		},
		"long argument": {start(func(r *startRequest) {
			r.Msg.Process.Args = []string{strings.Repeat("a", 1<<20)}
		}), connect.CodeInvalidArgument, "too long"},
		"large terminal": {start(func(r *startRequest) {
			r.Msg.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: many}}
		}), connect.CodeInvalidArgument, "pty.size"},
		"unknown user": {start(func(r *startRequest) {
			r.Header().Set("Authorization", basic("nobody-here"))
		}), connect.CodeUnauthenticated, `no user "nobody-here"`},
		"other scheme": {
			start(func(r *startRequest) { r.Header().Set("Authorization", "Bearer x") }),
			connect.CodeUnauthenticated, "Basic",
		},
		"bad keepalive": {
			start(func(r *startRequest) { r.Header().Set("Keepalive-Ping-Interval", "soon") }),
			connect.CodeInvalidArgument, "Keepalive-Ping-Interval",
		},
		"no selector": {func() error {
			_, err := s.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{}))
			return err
		}, connect.CodeInvalidArgument, "process"},
		"no signal": {
			func() error { return s.signal(p, processpb.Signal_SIGNAL_UNSPECIFIED) },
			connect.CodeInvalidArgument, "SIGNAL_SIGTERM",
		},
		"unknown process": {func() error { return s.signal(&started{pid: 1 << 30}, processpb.Signal_SIGNAL_SIGKILL) },
			connect.CodeNotFound, "1073741824"},
		"no stdin":          {input(p, stdin("a")), connect.CodeFailedPrecondition, "without standard input"},
		"no terminal":       {input(p, typed("a")), connect.CodeFailedPrecondition, "without a terminal"},
		"stdin of terminal": {input(shell, stdin("a")), connect.CodeFailedPrecondition, "as pty"},
		"no input":          {input(p, nil), connect.CodeInvalidArgument, "stdin or pty"},
		"size of no terminal": {
			update(p, &processpb.PTY_Size{Cols: 1, Rows: 1}),
			connect.CodeFailedPrecondition, "without a terminal",
		},
		"no size":        {update(shell, nil), connect.CodeInvalidArgument, "pty.size"},
		"size too large": {update(shell, &processpb.PTY_Size{Cols: many}), connect.CodeInvalidArgument, "65536"},
		"close terminal": {func() error {
			_, err := s.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: shell.selector()}))
			return err
		}, connect.CodeFailedPrecondition, "Ctrl-D"},
		"data before start": {func() error {
			in := s.StreamInput(t.Context())
			data := &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: stdin("a")}}
			_ = in.Send(&processpb.StreamInputRequest{Event: data})
			_, err := in.CloseAndReceive()
			return err
		}, connect.CodeInvalidArgument, "start"},
	} {
		t.Run(name, func(t *testing.T) { code(t, c.call(), c.code, c.message) })
	}
	require.NoError(t, s.signal(p, processpb.Signal_SIGNAL_SIGKILL))
	p.wait()
	code(t, s.signal(p, processpb.Signal_SIGNAL_SIGKILL), connect.CodeNotFound, strconv.Itoa(int(p.pid)))
}

func basic(user string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
}

func TestVariablesOfTheCallWinOverThoseOfTheSandbox(t *testing.T) {
	t.Setenv("AGENT_A", "agent")
	t.Setenv("AGENT_B", "agent")
	t.Setenv("AGENT_C", "agent")
	t.Setenv("BERTH_ALLOCATOR_KEY", "key")
	s := serve(t)
	s.sandbox.config.Envs = map[string]string{"AGENT_B": "sandbox", "AGENT_C": "sandbox", "S": "env"}
	s.sandbox.config.Secrets = map[string]string{"S": "secret"}
	r := command("echo $AGENT_A $AGENT_B $AGENT_C $S $E2B_SANDBOX $E2B_SANDBOX_ID $USER [$BERTH_ALLOCATOR_KEY]")
	r.Process.Envs = map[string]string{"AGENT_C": "call"}
	require.Equal(t, "agent sandbox call secret true abc "+s.sandbox.Own().Name+" []\n", s.start(t.Context(), r).wait())
}

func TestProxyIsInTheVariablesOfEachProcess(t *testing.T) {
	const proxy = "http://abc:token@10.96.0.9:3128"
	t.Setenv("HTTP_PROXY", "http://of-the-image:1")
	s := serve(t)
	all := func(envs map[string]string) string {
		r := command("echo $HTTP_PROXY $http_proxy $HTTPS_PROXY $https_proxy $NO_PROXY $no_proxy [$NODE_USE_ENV_PROXY]")
		r.Process.Envs = envs
		return strings.TrimSpace(s.start(t.Context(), r).wait())
	}
	require.Equal(t, "http://of-the-image:1 []", all(nil))
	s.sandbox.config.Proxy = proxy
	none := "localhost,127.0.0.1,::1"
	require.Equal(t, strings.Join([]string{proxy, proxy, proxy, proxy, none, none, "[1]"}, " "), all(nil))
	s.sandbox.config.Envs = map[string]string{"https_proxy": "of-the-claim"}
	require.Equal(t, strings.Join([]string{proxy, "of-the-call", proxy, "of-the-claim", none, none, "[1]"}, " "),
		all(map[string]string{"http_proxy": "of-the-call"}))
}

func TestDirectoriesAreRelativeToTheHome(t *testing.T) {
	home, work := t.TempDir(), t.TempDir()
	t.Setenv("HOME", home)
	require.NoError(t, os.Mkdir(home+"/sub", 0o755))
	s := serve(t)
	pwd := func(cwd *string) string {
		r := command("pwd -P")
		r.Process.Cwd = cwd
		return strings.TrimSpace(s.start(t.Context(), r).wait())
	}
	relative, tilde := "sub", "~/sub"
	require.Equal(t, home, pwd(nil))
	require.Equal(t, home+"/sub", pwd(&relative))
	require.Equal(t, home+"/sub", pwd(&tilde))
	s.sandbox.config.Workdir = work
	require.Equal(t, work, pwd(nil))
}

func TestHomeThatIsMissingIsReplacedByRoot(t *testing.T) {
	t.Setenv("HOME", "/does/not/exist")
	s := serve(t)
	require.Equal(t, "/\n", s.start(t.Context(), command("pwd")).wait())
}

func TestProcessOutlivesItsStream(t *testing.T) {
	t.Parallel()
	s := serve(t, connect.WithProtoJSON())
	ctx, cancel := context.WithCancel(t.Context())
	r := command("read a; echo got $a; read b; echo got $b")
	r.Stdin = nil
	p := s.start(ctx, r)
	cancel()
	for p.stream.Receive() { // ends with the context
	}
	s.sendInput(p, stdin("one\n"))
	again, err := s.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: p.selector()}))
	require.NoError(t, err)
	defer again.Close()
	s.sendInput(p, stdin("two\n"))
	var out strings.Builder
	for again.Receive() {
		out.WriteString(text(again.Msg().GetEvent().GetData()))
	}
	require.NoError(t, again.Err())
	// The first line may have been handed to the first stream before the server saw that it is gone.
	require.Contains(t, out.String(), "got two\n")
}

func TestTimeoutOfStartKillsTheProcess(t *testing.T) {
	t.Parallel()
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("client away: %t", away), func(t *testing.T) {
			t.Parallel()
			s := serve(t)
			// The client of connect-go would end the stream by itself when its deadline has passed.
			r := connect.NewRequest(command("exec sleep 1000"))
			r.Header().Set("Connect-Timeout-Ms", "300")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stream, err := s.Start(ctx, r)
			require.NoError(t, err)
			require.True(t, stream.Receive())
			number := int(stream.Msg().GetEvent().GetStart().GetPid())
			if away {
				cancel()
			} else {
				require.False(t, stream.Receive())
				code(t, stream.Err(), connect.CodeDeadlineExceeded, "Connect-Timeout-Ms")
			}
			gone(t, number)
		})
	}
}

// gone waits until there is no process with this number.
func gone(t testing.TB, number int) {
	t.Helper()
	require.Eventually(t, func() bool { return syscall.Kill(number, 0) != nil }, time.Minute, time.Millisecond)
}

func TestTimeoutOfConnectEndsOnlyTheStream(t *testing.T) {
	t.Parallel()
	s := serve(t)
	p := s.start(t.Context(), command("exec sleep 1000"))
	r := connect.NewRequest(&processpb.ConnectRequest{Process: p.selector()})
	r.Header().Set("Connect-Timeout-Ms", "50")
	stream, err := s.Connect(t.Context(), r)
	require.NoError(t, err)
	for stream.Receive() {
	}
	code(t, stream.Err(), connect.CodeDeadlineExceeded, "Connect-Timeout-Ms")
	require.NoError(t, s.signal(p, processpb.Signal_SIGNAL_SIGTERM))
	p.wait()
	require.Equal(t, "signal: terminated", p.end.GetStatus())
}

func TestSilentStreamsSendKeepalives(t *testing.T) {
	t.Parallel()
	s := serve(t, connect.WithProtoJSON())
	r := connect.NewRequest(command("exec sleep 1000"))
	r.Header().Set("Keepalive-Ping-Interval", "1")
	stream, err := s.Start(t.Context(), r)
	require.NoError(t, err)
	defer stream.Close()
	require.True(t, stream.Receive())
	for range 2 {
		require.True(t, stream.Receive())
		require.NotNil(t, stream.Msg().GetEvent().GetKeepalive())
	}
}

func TestSignalsReachTheWholeGroup(t *testing.T) {
	t.Parallel()
	s := serve(t)
	for _, signal := range []processpb.Signal{processpb.Signal_SIGNAL_SIGTERM, processpb.Signal_SIGNAL_SIGKILL} {
		p := s.start(t.Context(), command("sleep 1000 & echo $!; wait"))
		child, err := strconv.Atoi(strings.TrimSpace(p.until("\n")))
		require.NoError(t, err)
		require.NoError(t, s.signal(p, signal))
		p.wait()
		gone(t, child)
	}
}

func TestKillIsAnsweredAfterTheEnd(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.service.SetKillWait(time.Minute) // that of the agent can pass on a busy machine
	for range 20 {
		p := s.start(t.Context(), command("exec sleep 1000"))
		require.NoError(t, s.signal(p, processpb.Signal_SIGNAL_SIGKILL))
		require.ErrorIs(t, syscall.Kill(int(p.pid), 0), syscall.ESRCH)
		require.NoError(t, p.stream.Close())
	}
}

// A server that is started with & goes on, and can still write.
func TestCommandEndsBeforeItsBackgroundProcess(t *testing.T) {
	t.Parallel()
	s := serve(t)
	dir := t.TempDir()
	for _, name := range []string{"in", "out"} {
		require.NoError(t, syscall.Mkfifo(dir+"/"+name, 0o600))
	}
	r := command(`(trap '' PIPE; read line < in; echo more; echo $? > out) & echo now`)
	r.Process.Cwd = &dir
	p := s.start(t.Context(), r)
	require.Equal(t, "now\n", p.wait())
	require.True(t, p.end.GetExited())
	require.NoError(t, os.WriteFile(dir+"/in", []byte("go on\n"), 0))
	status, err := os.ReadFile(dir + "/out")
	require.NoError(t, err)
	require.Equal(t, "0\n", string(status))
}

func TestCloseDoesNotWaitForDaemons(t *testing.T) {
	t.Parallel()
	s := serve(t)
	p := s.start(t.Context(), command("setsid sh -c 'echo $$; exec sleep 1000' & exec sleep 1000"))
	daemon, err := strconv.Atoi(strings.TrimSpace(p.until("\n")))
	require.NoError(t, err)
	require.NoError(t, s.signal(p, processpb.Signal_SIGNAL_SIGKILL))
	p.wait()
	q := s.start(t.Context(), command("exec sleep 1000"))
	s.service.Close()
	q.wait()
	require.NoError(t, syscall.Kill(daemon, syscall.SIGKILL))
}

func TestThousandProcessesRunAtOnce(t *testing.T) {
	t.Parallel()
	s := serve(t, connect.WithProtoJSON())
	count := 1000
	if testing.Short() {
		count = 100
	}
	var wg sync.WaitGroup
	started := make(chan uint32, count)
	release := make(chan struct{})
	for i := range count {
		wg.Go(func() {
			r := command("read a; echo $a; exit $a")
			r.Stdin = nil
			p := s.start(t.Context(), r)
			started <- p.pid
			<-release
			s.sendInput(p, stdin(strconv.Itoa(i%200)+"\n"))
			assert.Equal(t, strconv.Itoa(i%200)+"\n", p.wait())
			assert.Equal(t, int32(i%200), p.end.GetExitCode())
		})
	}
	pids := map[uint32]bool{}
	for range count {
		pids[<-started] = true
	}
	require.Len(t, pids, count)
	require.Equal(t, count, s.service.Running())
	close(release)
	wg.Wait()
	require.Zero(t, s.service.Running())
}
