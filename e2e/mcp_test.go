package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// tools is a session of the protocol. It keeps what was sent in both directions.
type tools struct {
	*mcp.ClientSession
	t *testing.T

	mu  sync.Mutex
	all bytes.Buffer
}

func (s *tools) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.Write(b)
}

func (s *tools) seen() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.String()
}

func openTools(t *testing.T, transport mcp.Transport) *tools {
	t.Helper()
	s := &tools{t: t}
	client := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1"}, nil)
	session, err := client.Connect(t.Context(), &mcp.LoggingTransport{Transport: transport, Writer: s}, nil)
	require.NoError(t, err)
	s.ClientSession = session
	return s
}

// call returns the structured answer of a tool, or the text of its error.
func (s *tools) call(name string, arguments map[string]any) (answer map[string]any, problem string) {
	s.t.Helper()
	r, err := s.CallTool(s.t.Context(), &mcp.CallToolParams{Name: name, Arguments: arguments})
	require.NoError(s.t, err, name)
	text := r.Content[0].(*mcp.TextContent).Text
	if r.IsError {
		require.NotEmpty(s.t, text)
		return nil, text
	}
	require.NoError(s.t, json.Unmarshal([]byte(text), &answer))
	require.Equal(s.t, answer, r.StructuredContent)
	return answer, ""
}

func (s *tools) must(name string, arguments map[string]any) map[string]any {
	s.t.Helper()
	answer, problem := s.call(name, arguments)
	require.Empty(s.t, problem, "%s %v", name, arguments)
	return answer
}

// keyOf sends a key with each request.
type keyOf string

func (k keyOf) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-API-Key", string(k))
	return http.DefaultTransport.RoundTrip(r)
}

func agentPool(s *v1alpha1.SandboxPoolSpec) {
	s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
}

// wholeSession uses every tool.
func (s *tools) wholeSession(pool string) (id string) {
	t := s.t
	listed, err := s.ListTools(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, listed.Tools, 8)
	id = s.must("create_sandbox", map[string]any{
		"pool": pool, "timeout": 600, "envs": map[string]string{"A": "1=2"}, "metadata": map[string]string{"job": "17"},
		"access": "token",
	})["sandboxID"].(string)
	in := func(more map[string]any) map[string]any {
		more["sandboxID"] = id
		return more
	}
	run := func(command string, more map[string]any) map[string]any {
		more["command"] = command
		return s.must("run_command", in(more))
	}
	require.Equal(t, map[string]any{
		"exitCode": 7.0, "stdout": map[string]any{"text": "1=2 3 /\n"}, "stderr": map[string]any{"text": "wrong\n"},
	}, run(`echo $A $B $(pwd); echo wrong >&2; exit 7`, map[string]any{"envs": map[string]string{"B": "3"}, "dir": "/"}))
	require.Equal(t, map[string]any{"text": "0123", "omittedBytes": 2.0, "end": "6789"},
		run("printf 0123456789", map[string]any{"maxOutput": 8})["stdout"])
	require.Equal(t, map[string]any{"text": "\uFFFD\u001b[31m<b>"},
		run(`printf '\377\033[31m<b>'`, map[string]any{})["stdout"])
	late := run("echo early; exec sleep 3600", map[string]any{"timeout": 1})
	require.Equal(t, "its timeout has passed", late["killed"])
	require.NotContains(t, late, "exitCode")
	require.Equal(t, map[string]any{"text": "early\n"}, late["stdout"])
	flood := run("yes | head -c 80000000; sleep 3600", map[string]any{"maxOutput": 4})
	require.Contains(t, flood["killed"], "64 MiB")

	dir := t.TempDir()
	file := filepath.Join(dir, "new", "file")
	write := func(more map[string]any) map[string]any {
		more["path"] = file
		return s.must("write_file", in(more))
	}
	require.Equal(t, map[string]any{"bytes": 5.0}, write(map[string]any{"content": "hello"}))
	require.Equal(t, map[string]any{"bytes": 3.0}, write(map[string]any{"content": "AP8B", "encoding": "base64"}))
	require.Equal(t, map[string]any{"content": "AP8B", "encoding": "base64"},
		s.must("read_file", in(map[string]any{"path": file})))
	write(map[string]any{"content": "0123456789"})
	require.Equal(t, map[string]any{"content": "2345", "encoding": "utf-8", "nextOffset": 6.0},
		s.must("read_file", in(map[string]any{"path": file, "offset": 2, "maxBytes": 4})))
	require.Equal(t, map[string]any{"entries": []any{
		map[string]any{"path": filepath.Join(dir, "new"), "type": "directory", "size": s.size(in, dir)},
		map[string]any{"path": file, "type": "file", "size": 10.0},
	}}, s.must("list_files", in(map[string]any{"path": dir, "depth": 2})))
	_, problem := s.call("read_file", in(map[string]any{"path": dir + "/none"}))
	require.Contains(t, problem, dir+"/none")
	_, problem = s.call("create_sandbox", map[string]any{"pool": "nosuch"})
	require.Contains(t, problem, "pool_not_found")

	opened := s.must("expose_port", in(map[string]any{"port": 8080}))
	require.Contains(t, opened["url"], "8080-"+id)
	require.NotEmpty(t, opened["headers"].(map[string]any)[sandboxaccess.TokenHeader])
	listedSandboxes := s.must("list_sandboxes", map[string]any{"pool": pool})["sandboxes"].([]any)
	require.Equal(t, id, listedSandboxes[0].(map[string]any)["sandboxID"])
	return id
}

// size returns the size that the sandbox gives the first entry of a directory.
func (s *tools) size(in func(map[string]any) map[string]any, dir string) any {
	return s.must("list_files", in(map[string]any{"path": dir}))["entries"].([]any)[0].(map[string]any)["size"]
}

// Invariant: P19
func TestToolsOfMCPRunAWholeSession(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	c := e.commandLine()
	pool := e.otherPool("agents", 2, agentPool)

	t.Run("standard input and output", func(t *testing.T) {
		command := c.command("mcp", "--kill-on-exit")
		var logged bytes.Buffer
		command.Stderr = &logged
		s := openTools(t, &mcp.CommandTransport{Command: command})
		id := s.wholeSession(pool)
		killed := s.must("create_sandbox", map[string]any{"pool": pool})["sandboxID"].(string)
		s.must("kill_sandbox", map[string]any{"sandboxID": killed})
		_, problem := s.call("run_command", map[string]any{"sandboxID": killed, "command": "true"})
		require.Contains(t, problem, "sandbox_gone")
		require.NoError(t, s.Close())
		require.Empty(t, logged.String())
		require.NotContains(t, s.seen(), e.site.key())
		require.Contains(t, c.run(3, "get", id), "sandbox_gone", "the session's end kills what it has created")
	})
	t.Run("client in Python", func(t *testing.T) {
		program := filepath.Join(binDir, "berth")
		command := exec.CommandContext(t.Context(), "python3", "mcp_tools.py", installed(t, pythonMCP), program)
		command.Dir, command.Env = "sdk", slices.Concat(c.environ, []string{"POOL=" + pool})
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
	t.Run("interrupted", func(t *testing.T) {
		command := c.command("mcp")
		s := openTools(t, &mcp.CommandTransport{Command: command})
		id := s.must("create_sandbox", map[string]any{"pool": pool})["sandboxID"].(string)
		require.NoError(t, command.Process.Signal(syscall.SIGTERM))
		require.NoError(t, s.Wait())
		require.NoError(t, s.Close())
		require.Contains(t, c.run(0, "get", id), id, "without --kill-on-exit a sandbox stays")
		c.run(0, "kill", id)
	})
	t.Run("streamable HTTP", func(t *testing.T) {
		a, revoke := e.newKey("a", access.Member)
		b, _ := e.newKey("b", access.Member)
		for _, key := range []string{a, b} {
			e.as(key, http.MethodGet, "/sandboxes", "")
		}
		server := c.command("mcp", "--http=127.0.0.1:0")
		address, logged, stop := serveTools(t, server)
		connect := func(key string) *tools {
			s := openTools(t, &mcp.StreamableClientTransport{
				Endpoint: address, HTTPClient: &http.Client{Transport: keyOf(key)}, MaxRetries: -1,
			})
			t.Cleanup(func() { _ = s.Close() })
			return s
		}
		mine, theirs := connect(a), connect(b)
		python := exec.CommandContext(t.Context(), "python3", "mcp_tools.py", installed(t, pythonMCP), address)
		python.Dir, python.Env = "sdk", slices.Concat(c.environ, []string{"POOL=" + pool, "KEY=" + a})
		out, err := python.CombinedOutput()
		require.NoError(t, err, "%s", out)
		id := mine.wholeSession(pool)
		require.Empty(t, theirs.must("list_sandboxes", nil)["sandboxes"])
		for tool, more := range map[string]map[string]any{
			"run_command": {"command": "true"}, "read_file": {"path": "/x"}, "write_file": {"path": "/x", "content": ""},
			"list_files": {"path": "/"}, "expose_port": {"port": 8080}, "kill_sandbox": {},
		} {
			more["sandboxID"] = id
			_, problem := theirs.call(tool, more)
			require.Contains(t, problem, "sandbox_not_found", tool)
		}
		mine.must("run_command", map[string]any{"sandboxID": id, "command": "true"}) // it lives
		revoke()
		e.eventually(func() error {
			_, err := mine.CallTool(t.Context(), &mcp.CallToolParams{Name: "list_sandboxes"})
			if err == nil {
				return io.ErrNoProgress
			}
			require.ErrorContains(t, err, "Unauthorized")
			return nil
		})
		stop()
		for _, text := range []string{mine.seen(), theirs.seen(), logged()} {
			for _, key := range []string{a, b, e.site.key()} {
				require.NotContains(t, text, key)
			}
		}
		require.Contains(t, c.run(0, "get", id), id, "it outlives the server")
		c.run(0, "kill", id)
	})
}

// serveTools starts a server. stop ends it as an operator does, and logged returns what it has written.
func serveTools(t *testing.T, server *exec.Cmd) (address string, logged func() string, stop func()) {
	t.Helper()
	lines, err := server.StderrPipe()
	require.NoError(t, err)
	server.Stdout = io.Discard
	require.NoError(t, server.Start())
	reader := bufio.NewReader(lines)
	first, err := reader.ReadString('\n')
	require.NoError(t, err)
	address = strings.Fields(first)[3]
	require.Contains(t, address, "http://127.0.0.1:")
	var rest []byte
	return address, func() string { return first + string(rest) }, func() {
		require.NoError(t, server.Process.Signal(syscall.SIGTERM))
		rest, err = io.ReadAll(reader)
		require.NoError(t, err)
		require.NoError(t, server.Wait(), "%s", rest)
	}
}
