package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// commandLine runs the program berth with a configuration of the test's own.
type commandLine struct {
	*env
	program string
	environ []string
}

func (e *env) commandLine() *commandLine {
	dir := e.t.TempDir()
	key := filepath.Join(dir, "key")
	require.NoError(e.t, os.WriteFile(key, []byte(e.site.key()+"\n"), 0o600))
	bin := binDir
	if bin == "" { // on a real cluster
		bin = e.t.TempDir()
		require.NoError(e.t, stack.Build(e.t.Context(), bin, false, "berth"))
	}
	environ := append(os.Environ(), "BERTH_CONFIG="+filepath.Join(dir, "config.yaml"), "BERTH_CACHE="+dir)
	c := &commandLine{e, filepath.Join(bin, "berth"), environ}
	_, port, err := net.SplitHostPort(e.address(e.site.front))
	require.NoError(e.t, err)
	c.run(0, "context", "set", "e2e", "--api-url=http://"+e.address(e.site.api), "--api-key-file="+key,
		"--gateway="+net.JoinHostPort("127.0.0.1", port))
	return c
}

// address is where a dialer connects to.
func (e *env) address(dial dialer) string {
	conn, err := dial(e.t.Context())
	require.NoError(e.t, err)
	defer conn.Close()
	return conn.RemoteAddr().String()
}

func (c *commandLine) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(c.t.Context(), c.program, args...)
	cmd.Env = c.environ
	return cmd
}

// run returns the output of a command that ends with this status.
func (c *commandLine) run(status int, args ...string) (stdout string) {
	c.t.Helper()
	cmd := c.command(args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run()
	require.Equal(c.t, status, cmd.ProcessState.ExitCode(), "%v: %s%s", args, &out, &errs)
	if status != 0 {
		return errs.String()
	}
	return strings.TrimSpace(out.String())
}

func TestCommandLineRunsAWholeSession(t *testing.T) {
	onThisMachine(t, "does not depend on the cluster")
	c := start(t, 2).commandLine()
	require.Contains(t, c.run(0, "check", "--gateway="+c.address(c.site.front), "http://"+c.site.domain()), "/health: 200")
	id := c.run(0, "claim", c.pool, "--timeout=10m", "-m", "job=17", "-o", "name", "--key=once")
	require.Equal(t, id, c.run(0, "up", c.pool, "--timeout=10m", "-m", "job=17", "-o", "name", "--key=once"))
	other := c.run(0, "claim", c.pool, "-o", "name")
	require.Equal(t, id, c.run(0, "ls", "--pool", c.pool, "-m", "job=17", "-o", "name"))
	require.Len(t, strings.Split(c.run(0, "ls", "--pool", c.pool, "--no-headers"), "\n"), 2)
	var s openapi.Sandbox
	require.NoError(t, json.Unmarshal([]byte(c.run(0, "get", id, "-o", "json")), &s))
	require.Equal(t, map[string]string{"job": "17"}, s.Metadata)
	require.Contains(t, c.run(0, "__complete", "kill", id[:4]), id)

	var reached identity
	require.NoError(t, json.Unmarshal([]byte(c.run(0, "curl", id+"/x")), &reached))
	require.Equal(t, s.PodName, reached.Pod)
	require.Contains(t, c.run(0, "open", "--print", id), s.SandboxID)
	c.forwards(id, s.PodName)

	c.run(0, "timeout", id, "20m")
	c.run(0, "keepalive", id, other)
	require.Contains(t, c.run(0, "why", id), "EndTime in")
	require.Contains(t, c.run(0, "last-active", "--pool", c.pool), other)
	require.Contains(t, c.run(0, "fence", "sessions"), "router-")
	require.Regexp(t, "Routable: +yes", c.run(0, "diagnose", id))
	require.Contains(t, c.run(0, "pools", "scale", c.pool, "--warm=1", "--max-warm=2", "--max-pods=5"),
		"keeps 1-2 pods warm, at most 5")
	var pool openapi.Pool
	require.NoError(t, json.Unmarshal([]byte(c.run(0, "pools", "get", c.pool, "-o", "json")), &pool))
	require.Equal(t, [3]int{1, 2, 5}, [3]int{pool.Spec.Warm, pool.Spec.MaxWarm, pool.Spec.MaxPods})
	require.Contains(t, c.run(0, "pools", "scale", c.pool, "--max-warm=0"), "keeps 1 pods warm, at most 5")
	require.Contains(t, c.run(0, "pools", "ls", "-o", "name"), c.pool)
	c.run(0, "kill", id)
	c.events(id, "created", "ready", "released")
	require.Contains(t, c.run(0, "why", id), "released at")
	require.Contains(t, c.run(0, "ls", "--pool", c.pool, "--phase=released,ended", "-o", "wide"), "Killed")
	require.Contains(t, c.run(3, "kill", id), "sandbox_gone")
	require.Contains(t, c.run(3, "get", strings.Repeat("x", 20)), "sandbox_not_found")
	require.Equal(t, other+" released", c.run(0, "kill", "--all", "--pool", c.pool))
	require.Empty(t, c.run(0, "ls", "--pool", c.pool))
	private := c.run(0, "claim", c.pool, "--access=token", "--wait=1m", "-o", "name")
	require.Contains(t, c.run(0, "curl", private+"/x"), `"path":"/x"`)
	require.Contains(t, c.run(0, "open", "--print", private+"/y"), "/.berth/access?")
	c.forwards(private, `"path":"/"`)
	c.run(0, "kill", private)
	require.Len(t, strings.Split(c.run(0, "claim", c.pool, "--count=2", "--wait=1m", "-o", "name"), "\n"), 2)
	c.run(0, "kill", "--all", "--pool", c.pool)
	require.Contains(t, c.run(3, "claim", "nosuch"), "pool_not_found")
	require.Contains(t, c.run(5, "ls", "--api-url=http://127.0.0.1:1"), "cannot be reached")
}

func TestCommandLineRunsCommandsAndCopiesFiles(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 1)
	c := e.commandLine()
	pool := e.otherPool("agents", 1, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
	})
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return file
	}
	inside := filepath.Join(dir, "in", "side")
	id := c.run(0, "claim", pool, "--wait=1m", "-o", "name", "--env=A=1=2", "--env-file="+write("env", "# text\n\nB=3\n"),
		"--secret=KEY="+write("secret", "hidden\n"), "--file="+write("here", "text")+":"+inside+":0600")
	raw, err := os.ReadFile(inside)
	require.NoError(t, err)
	require.Equal(t, "text", string(raw))
	require.Equal(t, "1=2 3 hidden 4", c.run(0, "exec", "-e", "C=4", id, "--", "/bin/sh", "-c", `echo $A $B $KEY $C`))
	require.Equal(t, "/", c.run(0, "exec", "-w", "/", id, "pwd"))
	failed := c.run(7, "exec", id, "--", "/bin/sh", "-c", "echo wrong >&2; exit 7")
	require.Contains(t, failed, "wrong\nerror: the command ended with exit status 7")
	require.Contains(t, c.run(143, "exec", id, "--", "/bin/sh", "-c", "kill $$"), "exit status 143")
	require.Contains(t, c.run(1, "exec", id, "--", "/no/such/program"), "no such file")
	require.Contains(t, c.run(2, "exec", "-t", id, "sh"), "standard input is not a terminal")

	cat := c.command("exec", "-i", id, "cat")
	input := strings.Repeat("0123456789", 20_000)
	cat.Stdin = strings.NewReader(input)
	out, err := cat.Output()
	require.NoError(t, err)
	require.Equal(t, input, string(out))

	sleep := c.command("exec", id, "--", "/bin/sh", "-c", "echo started; exec sleep 3600")
	lines, err := sleep.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, sleep.Start())
	_, err = bufio.NewReader(lines).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, sleep.Process.Signal(os.Interrupt))
	require.Error(t, sleep.Wait())
	require.Equal(t, 143, sleep.ProcessState.ExitCode())

	there := filepath.Join(dir, "there")
	c.run(0, "cp", write("up", "up"), id+":"+there+"/")
	c.run(0, "cp", id+":"+there+"/up", filepath.Join(dir, "down"))
	raw, err = os.ReadFile(filepath.Join(dir, "down"))
	require.NoError(t, err)
	require.Equal(t, "up", string(raw))
	require.Equal(t, "up", c.run(0, "cp", id+":"+there+"/up", "-"))
	require.Contains(t, c.run(3, "cp", id+":"+there+"/none", "-"), "none")
	require.Contains(t, c.run(2, "cp", dir, id+":/tmp/x"), "is a directory: tar c")
	require.Contains(t, c.run(2, "cp", "a", "b"), "must be ID:PATH")

	c.terminal(id)
	var s openapi.Sandbox
	require.NoError(t, json.Unmarshal([]byte(c.run(0, "get", id, "-o", "json")), &s))
	c.goClient(&s, filepath.Join(dir, "go"))
	without := c.run(0, "claim", c.pool, "--wait=1m", "-o", "name")
	require.Contains(t, c.run(4, "exec", without, "true"), "the sandbox has no agent: enable spec.agent of its pool")
}

// terminal runs a command in a terminal, changes its size and interrupts it.
func (c *commandLine) terminal(id string) {
	t := c.t
	outer, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer outer.Close()
	require.NoError(t, unix.IoctlSetPointerInt(int(outer.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(outer.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	inner, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer inner.Close()
	resize := func(rows, columns uint16) {
		require.NoError(t, unix.IoctlSetWinsize(int(outer.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}))
	}
	resize(30, 100)
	cmd := c.command("exec", "-t", id, "--", "/bin/sh", "-c", "while true; do stty size; read -r _; done")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inner, inner, os.Stderr
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(outer)
	until := func(size string) {
		for lines.Scan() && strings.TrimSpace(lines.Text()) != size {
			_, err := outer.WriteString("\r")
			require.NoError(t, err)
		}
		require.NoError(t, lines.Err())
	}
	until("30 100")
	resize(40, 120)
	require.NoError(t, cmd.Process.Signal(syscall.SIGWINCH)) // it is not in the foreground of the terminal
	_, err = outer.WriteString("\r")
	require.NoError(t, err)
	until("40 120")
	_, err = outer.WriteString("\x03")
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	require.Equal(t, 128+int(syscall.SIGINT), cmd.ProcessState.ExitCode())
}

// goClient uses the agent as a program does.
func (c *commandLine) goClient(s *openapi.Sandbox, file string) {
	t := c.t
	a, err := client.NewAgent(s, client.AgentOptions{HTTP: c.streaming()})
	require.NoError(t, err)
	out, err := a.Run(t.Context(), "/bin/sh", "-c", "echo out; echo err >&2; exit 3")
	require.NoError(t, err)
	require.Equal(t, &client.Output{Stdout: []byte("out\n"), Stderr: []byte("err\n"), ExitCode: 3}, out)
	require.NoError(t, a.WriteFile(t.Context(), file, strings.NewReader("contents")))
	raw, err := a.ReadFile(t.Context(), file)
	require.NoError(t, err)
	require.Equal(t, "contents", string(raw))
	_, err = a.ReadFile(t.Context(), file+"-none")
	require.True(t, client.IsNotFound(err), "%v", err)
	_, err = a.Run(t.Context(), "/no/such/program")
	require.Error(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := a.Run(ctx, "/bin/sh", "-c", "echo $$ > "+file+"; exec sleep 3600")
		ended <- err
	}()
	c.eventually(func() error {
		raw, err := os.ReadFile(file)
		if err == nil && !strings.HasSuffix(string(raw), "\n") || string(raw) == "contents" {
			err = errors.New("it has not started")
		}
		return err
	})
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	raw, err = os.ReadFile(file)
	require.NoError(t, err)
	c.eventually(func() error {
		if _, err := os.Stat("/proc/" + strings.TrimSpace(string(raw))); err == nil {
			return errors.New("the command runs")
		}
		return nil
	})

	s.EnvdAccessToken = new("wrong")
	a, err = client.NewAgent(s, client.AgentOptions{HTTP: c.streaming()})
	require.NoError(t, err)
	_, err = a.Run(t.Context(), "true")
	require.True(t, client.IsRefused(err), "%v", err)
	require.ErrorContains(t, err, "agent_token")
}

// events reads the events of the pool until those of a sandbox have come, in this order.
func (c *commandLine) events(id string, kinds ...string) {
	cmd := c.command("events", "--pool", c.pool, "--no-headers", "--since=0.0")
	out, err := cmd.StdoutPipe()
	require.NoError(c.t, err)
	cmd.Stderr = os.Stderr
	require.NoError(c.t, cmd.Start())
	lines := bufio.NewScanner(out)
	for len(kinds) > 0 && lines.Scan() {
		if fields := strings.Fields(lines.Text()); fields[2] == id {
			require.Equal(c.t, kinds[0], fields[1])
			kinds = kinds[1:]
		}
	}
	require.Empty(c.t, kinds)
	require.NoError(c.t, cmd.Process.Signal(os.Interrupt))
	require.NoError(c.t, cmd.Wait())
}

// forwards sends a request and a message over WebSocket through port-forward.
func (c *commandLine) forwards(id, pod string) {
	t := c.t
	cmd := c.command("port-forward", id)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	local := strings.Fields(line)[2]
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get(local)
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	response.Body.Close()
	require.Contains(t, string(body), pod)
	socket, _, err := websocket.Dial(t.Context(), local+"/ws", &websocket.DialOptions{HTTPClient: client})
	require.NoError(t, err)
	(&env{t: t}).echoes(socket, "hello")
	require.NoError(t, socket.CloseNow())
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.NoError(t, cmd.Wait())
}

func TestExamplesOfTheGoClientRun(t *testing.T) {
	onThisMachine(t, "does not depend on the cluster")
	e := start(t, 0)
	e.createPool(e.newPool("demo", 1))
	cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-v", "-run=^Example", "../client")
	cmd.Env = append(os.Environ(), "BERTH_API_URL=http://"+e.address(e.site.api), "BERTH_API_KEY="+e.site.key())
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, 3, strings.Count(string(out), "--- PASS: Example"), "%s", out)
}
