package e2e

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The programs in examples run as their users run them, and leave no sandbox behind.
func TestExamplesRunAndLeaveNothing(t *testing.T) {
	e := startAlone(t, 3, overTLS)
	from := func(names ...string) string {
		path, err := filepath.Abs(filepath.Join(append([]string{"..", "examples"}, names...)...))
		require.NoError(t, err)
		return path
	}
	python, err := pythonExample()
	require.NoError(t, err)
	sdk := installed(t, python)
	environment := append(e.domainOnly(sdk), "POOL="+e.pool,
		"BERTH_API_URL="+e.stack.Allocators[0].API, "BERTH_API_KEY="+e.site.key(),
		"JOB="+e.pool, "HTTPS_PROXY="+localProxy(t))
	run := func(dir string, program ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		command := exec.CommandContext(ctx, program[0], program[1:]...)
		command.Dir, command.Env = dir, environment
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return string(out)
	}

	require.Equal(t, "plan: POST /plan\nbuild: POST /build\ntest: POST /test\n",
		run(compiled(t, from("typescript"), run), "node", "agent.js"))

	out := run(from(".."), "go", "run", "./examples/go")
	require.Regexp(t, `^sandbox of job-`+e.pool+` ends in 5m0s\n200 OK \{.*"path":"/hello"`, out)

	require.Equal(t, "plan: GET /plan\nbuild: GET /build\ntest: GET /test\n", run(from("python"), "python3", "agent.py"))

	require.JSONEq(t, "[]", e.api(http.MethodGet, "/sandboxes?template="+e.pool, "").body)
}

// compiled returns a directory with the TypeScript example in JavaScript, and its packages.
func compiled(t *testing.T, source string, run func(dir string, program ...string) string) string {
	t.Helper()
	node, err := nodeExample()
	require.NoError(t, err)
	cached := installed(t, node)
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(source)))
	require.NoError(t, os.Symlink(filepath.Join(cached, "node_modules"), filepath.Join(dir, "node_modules")))
	run(dir, "node", "node_modules/typescript/bin/tsc")
	return dir
}

// localProxy is a proxy that connects to this machine, whatever the name. Go does not resolve names
// below localhost.
func localProxy(t *testing.T) string {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, port, err := net.SplitHostPort(r.Host)
		if err != nil || r.Method != http.MethodConnect {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		server, err := (&net.Dialer{}).DialContext(r.Context(), "tcp", "127.0.0.1:"+port)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer server.Close()
		w.WriteHeader(http.StatusOK)
		client, read, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer client.Close()
		go func() {
			_, _ = io.Copy(server, read) // the server has read a byte of the handshake by now, or not
			_ = server.(*net.TCPConn).CloseWrite()
		}()
		_, _ = io.Copy(client, server)
	}))
	t.Cleanup(proxy.Close)
	return proxy.URL
}
