package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// gateway starts a server that answers with the host, path and body of a request, and echoes over
// WebSocket.
func gateway(t *testing.T) (address string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
			if err != nil {
				return
			}
			kind, message, err := c.Read(r.Context())
			if err == nil {
				_ = c.Write(r.Context(), kind, append([]byte(r.Host+" "), message...))
			}
			c.CloseNow()
			return
		}
		body, _ := io.ReadAll(r.Body)
		_, _ = io.WriteString(w, r.Method+" "+r.Host+r.URL.String()+" "+string(body)+r.Header.Get(tokenHeader))
	}))
	t.Cleanup(server.Close)
	return host(server.URL)
}

// stubCurl puts a program in the place of curl. It prints its arguments and the file of
// --config, and fails as curl does if it cannot connect to port 1. The tests in e2e use curl.
func stubCurl(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	script := `#!/bin/sh
config=
for argument; do
	printf '%s\n' "$argument"
	if [ "$config" = next ]; then config=$argument; fi
	if [ "$argument" = --config ]; then config=next; fi
	if [ "$argument" = ::127.0.0.1:1 ]; then echo 'curl: (7) refused' >&2; exit 7; fi
done
if [ -n "$config" ]; then cat "$config"; fi
`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "curl"), []byte(script), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestCurlGetsTheAddressAndItsArguments(t *testing.T) {
	stubCurl(t)
	_, url := serve(t)
	stdout, err := berth(t, "curl", "--api-url="+url, "--gateway=127.0.0.1:9", first+":3000/a?b=c", "-d", "words", "-H", "A: b")
	require.NoError(t, err)
	require.Equal(t, []string{
		"--connect-to", "::127.0.0.1:9", "--silent", "--show-error", "-d", "words", "-H", "A: b",
		"http://3000-" + first + ".sandbox.localhost:8000/a?b=c", "",
	}, strings.Split(stdout, "\n"))
	_, stderr, err := command(t.Context(), "curl", "--api-url="+url, "--gateway=127.0.0.1:1", first)
	require.ErrorContains(t, err, "exit status 7")
	require.Equal(t, 7, cli.ExitCode(err))
	require.Contains(t, stderr, "curl: (7)")
}

func TestCurlThatIsNotInstalledIsNamed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, url := serve(t)
	_, err := berth(t, "curl", "--api-url="+url, first)
	require.ErrorContains(t, err, "install curl, or use berth port-forward")
}

// A token is in no argument of curl, because others on the machine can see arguments.
func TestTokenOfAPrivateSandboxIsSent(t *testing.T) {
	stubCurl(t)
	s, url := serve(t)
	s.live[0].Access, s.live[0].TrafficAccessToken = openapi.AccessToken, new("sesame")
	stdout, err := berth(t, "curl", "--api-url="+url, first)
	require.NoError(t, err)
	arguments, config, found := strings.Cut(stdout, "/\n")
	require.True(t, found)
	require.Contains(t, arguments, "--config\n/dev/fd/3\n")
	require.NotContains(t, arguments, "sesame")
	require.Equal(t, "header = \""+tokenHeader+": sesame\"\n", config[strings.LastIndex(config, "header"):])
	s.live[0].TrafficAccessToken = nil
	_, err = berth(t, "curl", "--api-url="+url, first)
	require.ErrorContains(t, err, "a key with the role member sees it")
	s.live[0].Access = openapi.AccessTeam
	_, err = berth(t, "port-forward", "--api-url="+url, first)
	require.ErrorContains(t, err, "use berth open")
	require.Equal(t, exitRefused, cli.ExitCode(err))
}

func TestPortForwardPassesHTTPAndWebSocket(t *testing.T) {
	_, url := serve(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, write := io.Pipe()
	done := make(chan error, 1)
	go func() {
		var c portForwardCommand
		c.APIURL, c.Gateway, c.ID, c.Ports, c.RequestTimeout = url, gateway(t), first, ":9000", 1e10
		done <- c.Run(ctx, newOutput(write, io.Discard, nil))
		write.Close()
	}()
	line, err := bufio.NewReader(read).ReadString('\n')
	require.NoError(t, err)
	local := strings.Fields(line)[2]
	require.True(t, strings.HasPrefix(local, "http://127.0.0.1:"), line)

	response, err := http.Post(local+"/x", "text/plain", strings.NewReader("words"))
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	response.Body.Close()
	require.Equal(t, "POST 9000-"+first+".sandbox.localhost:8000/x words", string(body))

	c, _, err := websocket.Dial(ctx, local, nil)
	require.NoError(t, err)
	require.NoError(t, c.Write(ctx, websocket.MessageText, []byte("hello")))
	_, message, err := c.Read(ctx)
	require.NoError(t, err)
	require.Equal(t, "9000-"+first+".sandbox.localhost:8000 hello", string(message))
	c.CloseNow()

	cancel()
	require.NoError(t, <-done)
	http.DefaultClient.CloseIdleConnections()
}

func TestOpenRunsTheBrowserWithTheAddress(t *testing.T) {
	_, url := serve(t)
	dir := t.TempDir()
	browser := dir + "/browser"
	require.NoError(t, os.WriteFile(browser, []byte("#!/bin/sh\necho \"$1\" >"+dir+"/seen\n"), 0o755))
	t.Setenv("BROWSER", browser)
	stdout, err := berth(t, "open", "--api-url="+url, first+"/a")
	require.NoError(t, err)
	require.Equal(t, "http://8080-"+first+".sandbox.localhost:8000/a\n", stdout)
	seen, err := os.ReadFile(dir + "/seen")
	require.NoError(t, err)
	require.Equal(t, stdout, string(seen))
}
