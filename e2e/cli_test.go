package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

// commandLine runs the program berth with a configuration of the test's own.
type commandLine struct {
	*env
	environ []string
}

func (e *env) commandLine() *commandLine {
	dir := e.t.TempDir()
	key := filepath.Join(dir, "key")
	require.NoError(e.t, os.WriteFile(key, []byte(e.site.key()+"\n"), 0o600))
	c := &commandLine{e, append(os.Environ(), "BERTH_CONFIG="+filepath.Join(dir, "config.yaml"), "BERTH_CACHE="+dir)}
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
	cmd := exec.CommandContext(c.t.Context(), filepath.Join(binDir, "berth"), args...)
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
	require.Contains(t, c.run(0, "why", id), "Timeout in")
	require.Contains(t, c.run(0, "last-active", "--pool", c.pool), other)
	require.Contains(t, c.run(0, "fence", "sessions"), "router-")
	require.Regexp(t, "Routable: +yes", c.run(0, "diagnose", id))
	require.Contains(t, c.run(0, "pools", "scale", c.pool, "--warm=1", "--max-pods=5"), "keeps 1 pods warm, at most 5")
	var pool openapi.Pool
	require.NoError(t, json.Unmarshal([]byte(c.run(0, "pools", "get", c.pool, "-o", "json")), &pool))
	require.Equal(t, 5, pool.Spec.MaxPods)
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
