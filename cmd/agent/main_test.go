package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// asAgent is set in the environment of a test's process that is to be the agent.
const asAgent = "BERTH_TEST_AS_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		os.Unsetenv(asAgent)
		main()
		return
	}
	os.Exit(m.Run())
}

// token is the access token of the tests' sandboxes.
const token = "secret-token"

// running is an agent as a process of its own.
type running struct {
	t      *testing.T
	cmd    *exec.Cmd
	url    string
	sealer *initbox.Sealer
	out    *os.File
	processpb.ProcessClient
}

// start starts an agent with this command of the container, as this user.
func start(t *testing.T, uid int, command ...string) *running {
	t.Helper()
	sealer, err := initbox.NewSealer([32]byte{1: 1})
	require.NoError(t, err)
	address := freeAddress(t)
	args := []string{"run", "--listen=" + address}
	if len(command) > 0 {
		args = append(append(args, "--"), command...)
	}
	out, theirs, err := os.Pipe()
	require.NoError(t, err)
	program := "/proc/self/exe"
	if uid != 0 {
		program = installed(t)
	}
	r := &running{t: t, sealer: sealer, url: "http://" + address, out: out, cmd: exec.Command(program, args...)}
	r.cmd.Env = append(os.Environ(), asAgent+"=1", initbox.PublicKeyEnv+"="+sealer.PublicKey().String())
	r.cmd.Stdout, r.cmd.Stderr = theirs, os.Stderr
	if uid != 0 {
		r.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	require.NoError(t, r.cmd.Start())
	theirs.Close()
	t.Cleanup(func() {
		_ = r.cmd.Process.Signal(syscall.SIGTERM) // so that it leaves no process behind
		_ = r.cmd.Wait()
		out.Close()
	})
	r.ProcessClient = processpb.NewProcessClient(http.DefaultClient, r.url, connect.WithProtoJSON(),
		connect.WithInterceptors(withToken{}))
	return r
}

// withToken adds the access token to each call.
type withToken struct{}

func (withToken) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		r.Header().Set(agent.TokenHeader, token)
		return next(ctx, r)
	}
}

func (withToken) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		c.RequestHeader().Set(agent.TokenHeader, token)
		return c
	}
}

func (withToken) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// installed is a copy of the program that every user may execute, made by the program itself.
func installed(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		require.NoError(t, os.Chmod(d, 0o755))
	}
	install := exec.Command("/proc/self/exe", "install", dir)
	install.Env = append(os.Environ(), asAgent+"=1")
	out, err := install.CombinedOutput()
	require.NoError(t, err, "%s", out)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	return filepath.Join(dir, "berth-agent")
}

// request waits until the agent serves.
func (r *running) request(method, path string, body []byte) (status int, answer string) {
	r.t.Helper()
	var resp *http.Response
	require.Eventually(r.t, func() bool {
		q, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, bytes.NewReader(body))
		require.NoError(r.t, err)
		resp, err = http.DefaultClient.Do(q)
		return err == nil
	}, time.Minute, 5*time.Millisecond)
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	require.NoError(r.t, err)
	return resp.StatusCode, string(all)
}

// configure makes the agent serve commands.
func (r *running) configure(c initbox.Config) {
	r.t.Helper()
	_, text := r.request(http.MethodGet, initbox.Path, nil)
	var hello initbox.Hello
	require.NoError(r.t, json.Unmarshal([]byte(text), &hello))
	c.SandboxID, c.AccessToken = "abc", token
	box, err := r.sealer.Seal(&c, hello.PublicKey)
	require.NoError(r.t, err)
	status, text := r.request(http.MethodPost, initbox.Path, box)
	require.Equal(r.t, http.StatusNoContent, status, text)
}

// shell runs a script and returns its output and its exit code.
func (r *running) shell(script, user string) (out string, code int32) {
	r.t.Helper()
	no := false
	q := connect.NewRequest(&processpb.StartRequest{Stdin: &no,
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}})
	if user != "" {
		q.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
	stream, err := r.Start(r.t.Context(), q)
	require.NoError(r.t, err)
	defer stream.Close()
	for stream.Receive() {
		e := stream.Msg().GetEvent()
		out += string(e.GetData().GetStdout()) + string(e.GetData().GetStderr())
		code = e.GetEnd().GetExitCode()
	}
	require.NoError(r.t, stream.Err())
	return out, code
}

// line reads a line that the container's command writes.
func (r *running) line() string {
	r.t.Helper()
	require.NoError(r.t, r.out.SetReadDeadline(time.Now().Add(20*time.Second)))
	var line []byte
	for b := make([]byte, 1); ; {
		_, err := r.out.Read(b)
		require.NoError(r.t, err)
		if b[0] == '\n' {
			return string(line)
		}
		line = append(line, b[0])
	}
}

// wait returns the exit code of the agent.
func (r *running) wait() int {
	_ = r.cmd.Wait()
	return r.cmd.ProcessState.ExitCode()
}

func gone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool { return syscall.Kill(pid, 0) != nil }, time.Minute, time.Millisecond)
}

func TestAgentExitsAsItsCommandDoes(t *testing.T) {
	t.Parallel()
	for want, command := range map[int][]string{
		0:   {"true"},
		7:   {"sh", "-c", "exit 7"},
		143: {"sh", "-c", "kill -TERM $$"},
		127: {"no-such-program"},
		126: {"/etc/passwd"},
	} {
		t.Run(strconv.Itoa(want), func(t *testing.T) {
			t.Parallel()
			require.Equal(t, want, start(t, 0, command...).wait())
		})
	}
}

func TestSignalsReachTheContainersCommand(t *testing.T) {
	t.Parallel()
	r := start(t, 0, "sh", "-c", `trap 'echo usr' USR1; trap 'exit 9' TERM; echo $BERTH_ALLOCATOR_KEY ready
		while :; do sleep 1000 & wait; kill $!; done`)
	require.Equal(t, " ready", " "+strings.TrimSpace(r.line()))
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGUSR1))
	require.Equal(t, "usr", r.line())
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 9, r.wait())
}

// A daemon has left its session, and its parent.
func TestOrphansAreReapedAndDieWithTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, 0)
	r.configure(initbox.Config{})
	dir := t.TempDir()
	daemon := func(script string) int {
		out, _ := r.shell(fmt.Sprintf("cd %s; (setsid sh -c 'echo $$ > pid; mv pid done; exec %s' >/dev/null 2>&1 &);"+
			"while ! [ -e done ]; do :; done; cat done; rm done", dir, script), "")
		pid, err := strconv.Atoi(strings.TrimSpace(out))
		require.NoError(t, err, "%s", out)
		return pid
	}
	short := daemon("true")
	gone(t, short) // a zombie is still there
	long := daemon("sleep 1000")
	require.NoError(t, syscall.Kill(long, 0))
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 0, r.wait())
	gone(t, long)
}

func TestConfiguredAgentServesCommandsWithTheToken(t *testing.T) {
	t.Parallel()
	r := start(t, 0)
	status, body := r.request(http.MethodPost, processpb.ProcessListProcedure, nil)
	require.Equal(t, http.StatusServiceUnavailable, status, body)
	r.configure(initbox.Config{Envs: map[string]string{"A": "1"}, Workdir: "/",
		Files: []initbox.File{{Path: filepath.Join(t.TempDir(), "sub", "file"), Data: []byte("x")}}})
	status, body = r.request(http.MethodPost, processpb.ProcessListProcedure, nil)
	require.NotEqual(t, http.StatusOK, status, body)
	out, _ := r.shell("echo $A; pwd", "")
	require.Equal(t, "1\n/\n", out)
}

func TestBusyAnswersWhetherACommandRuns(t *testing.T) {
	t.Parallel()
	r := start(t, 0)
	busy := func() int {
		status, _ := r.request(http.MethodGet, "/busy", nil)
		return status
	}
	require.Equal(t, http.StatusNoContent, busy())
	r.configure(initbox.Config{})
	require.Equal(t, http.StatusNoContent, busy())
	stream, err := r.Start(t.Context(), connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "sleep", Args: []string{"1000"}}}))
	require.NoError(t, err)
	require.True(t, stream.Receive())
	require.Equal(t, http.StatusOK, busy())
	require.NoError(t, stream.Close())
	require.Equal(t, http.StatusOK, busy())
}

// Invariant: P17
func TestCommandsRunAsTheUserOfTheCall(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root acts for other users")
	}
	r := start(t, 0)
	r.configure(initbox.Config{Workdir: "/"})
	out, _ := r.shell("id -un; id -Gn; echo $USER $HOME; cat /etc/shadow 2>&1", "nobody")
	require.Contains(t, out, "nobody\nnogroup\nnobody /nonexistent\n")
	require.Contains(t, out, "Permission denied")
}

// The environment stands for the memory: both need the same right.
func TestProcessesCannotLookIntoTheAgent(t *testing.T) {
	t.Parallel()
	const nobody = 65534
	uid := 0
	if os.Getuid() == 0 {
		uid = nobody
	}
	r := start(t, uid)
	r.configure(initbox.Config{Workdir: "/"})
	out, code := r.shell("id -u; cat /proc/$PPID/environ; cat /proc/$PPID/maps", "")
	require.NotContains(t, out, initbox.PublicKeyEnv)
	require.Contains(t, out, "Permission denied")
	require.NotZero(t, code)
}

// The agent holds one read of the output, however much there is.
func TestLargeOutputNeedsNoMemory(t *testing.T) {
	t.Parallel()
	const size, bound = 128 << 20, 100 << 10 // bytes, KiB; the race detector needs most of it
	r := start(t, 0)
	r.configure(initbox.Config{})
	binary := processpb.NewProcessClient(http.DefaultClient, r.url, connect.WithInterceptors(withToken{}))
	no := false
	stream, err := binary.Start(t.Context(), connect.NewRequest(&processpb.StartRequest{Stdin: &no,
		Process: &processpb.ProcessConfig{Cmd: "head", Args: []string{"-c", strconv.Itoa(size), "/dev/zero"}}}))
	require.NoError(t, err)
	defer stream.Close()
	read := 0
	for stream.Receive() {
		read += len(stream.Msg().GetEvent().GetData().GetStdout())
	}
	require.NoError(t, stream.Err())
	require.Equal(t, size, read)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	require.NoError(t, err)
	_, peak, found := strings.Cut(string(status), "VmHWM:")
	require.True(t, found)
	var kib int
	_, err = fmt.Sscan(peak, &kib)
	require.NoError(t, err)
	require.Less(t, kib, bound)
	t.Logf("%d MiB, at most %d KiB of memory", size>>20, kib)
}
