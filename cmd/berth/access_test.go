package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
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

func TestCurlReachesTheSandboxThroughTheGateway(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("no curl on this machine")
	}
	_, url := serve(t)
	at := "--gateway=" + gateway(t)
	stdout, err := berth(t, "curl", "--api-url="+url, at, first+":3000/a?b=c", "-d", "words", "-H", "A: b")
	require.NoError(t, err)
	require.Equal(t, "POST 3000-"+first+".sandbox.localhost:8000/a?b=c words", stdout)
	_, stderr, err := command(t.Context(), "curl", "--api-url="+url, "--gateway=127.0.0.1:1", first)
	require.ErrorContains(t, err, "exit status 7")
	require.Contains(t, stderr, "curl: (7)")
}

// A token is in no argument of curl, because others on the machine can see arguments.
func TestTokenOfAPrivateSandboxIsSent(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("no curl on this machine")
	}
	s, url := serve(t)
	at := "--gateway=" + gateway(t)
	s.live[0].Access, s.live[0].TrafficAccessToken = openapi.AccessToken, new("sesame")
	stdout, err := berth(t, "curl", "--api-url="+url, at, first)
	require.NoError(t, err)
	require.Contains(t, stdout, "sesame")
	s.live[0].TrafficAccessToken = nil
	_, err = berth(t, "curl", "--api-url="+url, at, first)
	require.ErrorContains(t, err, "a key with the role member sees it")
	s.live[0].Access = openapi.AccessTeam
	_, err = berth(t, "port-forward", "--api-url="+url, at, first)
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
		done <- c.Run(ctx, &output{write, io.Discard, nil})
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
