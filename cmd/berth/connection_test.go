package main

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/cmd/internal/contexts"
)

// keyed starts an API that answers with the key that it gets as the ID of a sandbox.
func keyed(t *testing.T) (url string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer(w, http.StatusOK, openapi.SandboxRecords{
			Sandboxes: []openapi.SandboxRecord{{SandboxID: r.Host + " " + r.Header.Get("X-API-Key")}},
		})
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func host(url string) string { return strings.TrimPrefix(url, "http://") }

func TestFlagThenEnvironmentThenContextThenDevelopmentCluster(t *testing.T) {
	isolate(t)
	flag, environment, first, second, development := keyed(t), keyed(t), keyed(t), keyed(t), keyed(t)
	who := func(args ...string) string {
		t.Helper()
		stdout, err := berth(t, append([]string{"ls", "-o", "name"}, args...)...)
		require.NoError(t, err)
		return strings.TrimSpace(stdout)
	}
	set := func(args ...string) {
		t.Helper()
		_, err := berth(t, append([]string{"context"}, args...)...)
		require.NoError(t, err)
	}
	withdraw, err := contexts.Publish("dev", contexts.Context{APIURL: development})
	require.NoError(t, err)
	require.Equal(t, host(development), who())
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte("secret\n"), 0o600))
	set("set", "one", "--api-url="+first, "--api-key-file="+file)
	set("set", "two", "--api-url="+second)
	require.Equal(t, host(first)+" secret", who(), "the first context is the current one")
	require.Equal(t, host(development), who("--context=dev"))
	require.Equal(t, host(second), who("--context=two"), "the key is of the other context")
	set("use", "two")
	require.Equal(t, host(second), who())
	t.Setenv("BERTH_CONTEXT", "one")
	require.Equal(t, host(first)+" secret", who())
	t.Setenv("BERTH_API_URL", environment)
	require.Equal(t, host(environment), who(), "a context's key goes to its own address only")
	require.Equal(t, host(second), who("--context=two"))
	require.Equal(t, host(flag), who("--api-url="+flag))
	t.Setenv("BERTH_API_KEY", "from-the-environment")
	require.Equal(t, host(flag)+" from-the-environment", who("--api-url="+flag))

	list, err := berth(t, "context", "ls", "-o", "wide")
	require.NoError(t, err)
	for _, c := range []string{"one", "two", "dev", first, second, development, file, "development cluster"} {
		require.Contains(t, list, c)
	}
	require.NoError(t, withdraw())
	list, err = berth(t, "context", "ls", "-o", "name")
	require.NoError(t, err)
	require.Equal(t, "one\ntwo\n", list)
}

func TestContextSaysWhichOneIsCurrent(t *testing.T) {
	isolate(t)
	context := func(args ...string) string {
		t.Helper()
		out, err := berth(t, append([]string{"context"}, args...)...)
		require.NoError(t, err)
		return out
	}
	require.Contains(t, context("set", "one", "--api-url=http://127.0.0.1:1"), "; it is the current one now, also instead of a development cluster (berth context delete one undoes this)")
	require.Contains(t, context("set", "two", "--api-url=http://127.0.0.1:1"), "; the current one is still one\n")
	require.NotContains(t, context("set", "one", "--namespace=a"), ";")
	require.Equal(t, "two is deleted\n", context("delete", "two"))
	require.Equal(t, "one is deleted; no context is current now\n", context("delete", "one"))
	require.Empty(t, context("ls", "-o", "name"))
	_, err := berth(t, "context", "delete", "one")
	require.ErrorContains(t, err, `no context "one" in `)
	require.Equal(t, cli.ExitUsage, cli.ExitCode(err))
}

func TestClusterOfAnEndedProcessIsNotFound(t *testing.T) {
	isolate(t)
	dir := filepath.Join(os.Getenv("BERTH_CACHE"), "contexts")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "dead.yaml"), []byte("apiURL: http://127.0.0.1:1\npid: 2147483646\n"), 0o600))
	list, stderr, err := command(t.Context(), "context", "ls")
	require.NoError(t, err)
	require.Equal(t, "none\n", list+stderr)
	_, err = contexts.Publish("a", contexts.Context{APIURL: "http://127.0.0.1:1"})
	require.NoError(t, err)
	_, err = contexts.Publish("b", contexts.Context{APIURL: "http://127.0.0.1:1"})
	require.NoError(t, err)
	_, err = berth(t, "ls")
	require.ErrorContains(t, err, "2 development clusters run: a, b; choose one with --context")
}

// answering starts an API with one answer.
func answering(t *testing.T, status int, body string) (url string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// speaking starts a server that is not HTTP/1.1.
func speaking(t *testing.T, words string) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(words))
			_, _ = c.Read(make([]byte, 1024))
			c.Close()
		}
	}()
	return "http://" + l.Addr().String()
}

func TestErrorsSayWhatToDoAndHaveTheirStatus(t *testing.T) {
	config := isolate(t)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the key went to %s", r.Host)
	}))
	defer elsewhere.Close()
	redirects := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusFound))
	defer redirects.Close()
	secure := httptest.NewUnstartedServer(http.NotFoundHandler())
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	defer secure.Close()
	refusal := func(status int, reason string) string {
		return answering(t, status, `{"code":1,"reason":"`+reason+`","message":"the message","requestID":"r1"}`)
	}
	t.Setenv("BERTH_API_KEY", "wrong")
	for _, c := range []struct {
		url  string
		code int
		says []string
	}{
		{"http://127.0.0.1:1", exitUnreachable, []string{"cannot be reached", "BERTH_API_URL", "berth context use", "berth-dev up"}},
		{"127.0.0.1:8081", cli.ExitUsage, []string{"--api-url", "must be a URL such as"}},
		{speaking(t, "\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00"), exitUnreachable, []string{"is not the HTTP API", "control port"}},
		{secure.URL, exitUnreachable, []string{"certificate", "--ca-file"}},
		{"http://" + strings.TrimPrefix(secure.URL, "https://"), 1, []string{"is not Berth's API"}},
		{redirects.URL, 1, []string{"is not Berth's API", "302 Found"}},
		{answering(t, http.StatusOK, "<html>"), 1, []string{"is not Berth's"}},
		{answering(t, http.StatusNotFound, "nothing"), 1, []string{"is not Berth's API", "404"}},
		{refusal(http.StatusUnauthorized, "unauthorized"), exitRefused, []string{"does not know this key", "(request r1)"}},
		{refusal(http.StatusForbidden, "forbidden"), exitRefused, []string{"forbidden: the message"}},
		{refusal(http.StatusTooManyRequests, "pool_empty"), exitRefused, []string{"pool_empty"}},
		{refusal(http.StatusConflict, "session_alive"), exitRefused, []string{"session_alive"}},
		{refusal(http.StatusNotFound, "sandbox_gone"), exitNotFound, []string{"berth ls lists"}},
		{refusal(http.StatusBadRequest, "bad_request"), cli.ExitUsage, []string{"bad_request"}},
		{refusal(http.StatusGatewayTimeout, "timeout"), exitUnreachable, []string{"timeout: the message"}},
		{refusal(http.StatusInternalServerError, "internal"), 1, []string{"internal"}},
	} {
		stdout, err := berth(t, "ls", "--api-url="+c.url)
		require.Equal(t, c.code, cli.ExitCode(err), "%s: %v", c.url, err)
		for _, says := range c.says {
			require.ErrorContains(t, err, says)
		}
		require.Empty(t, stdout)
	}
	t.Setenv("BERTH_API_KEY", "")
	_, err := berth(t, "ls", "--api-url="+refusal(http.StatusUnauthorized, "unauthorized"))
	require.ErrorContains(t, err, "set BERTH_API_KEY or --api-key-file")
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"ls", "--api-key-file=/nowhere/key"}, "--api-key-file"},
		{[]string{"ls", "--ca-file=/nowhere/ca"}, "--ca-file"},
		{[]string{"ls", "--context=nosuch"}, "berth context ls"},
		{[]string{"ls", "--context=a", "--api-url=http://a"}, "only one of them"},
		{[]string{"ls", "-o", "xml"}, "see berth ls --help"},
		{[]string{"lst"}, `did you mean one of "ls"`},
		{[]string{"context", "use", "nosuch"}, "berth context set"},
		{[]string{"context", "set", "x", "--api-url=a"}, "must be a URL"},
		{[]string{"timeout", "x", "0s"}, "berth kill"},
		{[]string{"claim", "x", "--timeout=1500ms"}, "whole seconds"},
		{[]string{"open", "x:0"}, "must be 1 to 65535"},
		{[]string{"port-forward", "x", "a:80"}, "must be 1 to 65535"},
		{[]string{"fence", "declare-dead", "x", "--reason=burnt"}, "--gone"},
		{[]string{"fence", "declare-dead", "x", "--reason=burnt", "--gone=false"}, "--gone"},
		{[]string{"fence", "declare-dead", "x", "--gone"}, "--reason"},
	} {
		_, err := berth(t, c.args...)
		require.ErrorContains(t, err, c.says)
		require.Equal(t, cli.ExitUsage, cli.ExitCode(err), "%v: %v", c.args, err)
	}
	require.NoError(t, os.WriteFile(config, []byte("contexts: {a: {address: x}}"), 0o600))
	_, err = berth(t, "ls")
	require.ErrorContains(t, err, config)
	require.ErrorContains(t, err, "address")
}

func TestServerBelievesTheAuthorityThatIsInItsFileNow(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "ca.crt")
	believe := func(der []byte) {
		require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	}
	believe(server.Certificate().Raw)
	transport, err := newTransport(file, func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, server.Listener.Addr().String())
	})
	require.NoError(t, err)
	reread(transport, file)
	ask := func(host string) error {
		response, err := (&http.Client{Transport: transport}).Get("https://" + host)
		if err == nil {
			err = response.Body.Close()
		}
		return err
	}
	require.NoError(t, ask("example.com")) // the name in the certificate
	require.ErrorContains(t, ask("other.example.org"), "not other.example.org")
	require.ErrorContains(t, ask("127.0.0.1"), "needs a name")
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	other, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{}, &key.PublicKey, key)
	require.NoError(t, err)
	believe(other)
	require.ErrorContains(t, ask("example.com"), "unknown authority")
	believe(server.Certificate().Raw)
	require.NoError(t, ask("example.com"))
	require.NoError(t, os.Remove(file))
	require.ErrorContains(t, ask("example.com"), "--ca-file")
}

func TestServerOfToolsNamesTheFlagThatIsWrong(t *testing.T) {
	isolate(t)
	for says, args := range map[string][]string{
		`--http "8090": must be ip:port`: {"--http=8090"},
		"--http: listen":                 {"--http=192.0.2.1:8090"},
		"--kill-on-exit: not with":       {"--http=127.0.0.1:0", "--kill-on-exit"},
		`--gateway "x": must be`:         {"--gateway=x"},
		"--plain-gateway: needs":         {"--plain-gateway"},
	} {
		_, err := berth(t, append([]string{"mcp"}, args...)...)
		require.ErrorContains(t, err, says)
	}
}
