package mcpserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	someID = "abcdefghij0123456789"
	keyA   = "key-of-team-a"
	keyB   = "key-of-team-b"

	wait, pause = time.Minute, 10 * time.Millisecond
)

// fakeAPI is an API with a sandbox of the team a. Its sandboxes are at the same address.
type fakeAPI struct {
	*httptest.Server
	// hold, if set, is asked before files are read.
	hold chan struct{}

	mu    sync.Mutex
	calls []*http.Request
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.calls = append(f.calls, r)
	f.mu.Unlock()
	team := map[string]string{keyA: "a", keyB: "b"}[r.Header.Get("X-API-Key")]
	refuse := func(code int, reason, message string) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"code":%d,"reason":%q,"message":%q}`, code, reason, message)
	}
	switch {
	case strings.HasPrefix(r.Host, "49983-") && r.Header.Get("X-Access-Token") == "of the agent":
		if f.hold != nil {
			select {
			case <-f.hold:
			case <-r.Context().Done():
			}
		}
		_, _ = io.WriteString(w, strings.Repeat("ä", 100))
	case team == "":
		refuse(http.StatusUnauthorized, "unauthorized", "unknown key")
	case r.URL.Path == "/teams":
		fmt.Fprintf(w, `[{"teamID":%q}]`, team)
	case r.URL.Path == "/v1/pools":
		_, _ = io.WriteString(w, `{"pools":[{"name":"one"},{"name":"two"}]}`)
	case r.URL.Path == "/sandboxes/"+someID && team == "a":
		fmt.Fprintf(w, `{"sandboxID":%q,"templateID":"one","url":"http://8080-%[1]s.sandbox.example.com/","access":"token",`+
			`"trafficAccessToken":"opens it","envdAccessToken":"of the agent","envdVersion":"0.6.4"}`, someID)
	default:
		refuse(http.StatusNotFound, "sandbox_not_found", "no such sandbox; it may have ended long ago")
	}
}

// reading returns how many reads of files are in progress.
func (f *fakeAPI) reading() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.calls {
		if strings.HasPrefix(r.Host, "49983-") && r.Context().Err() == nil {
			n++
		}
	}
	return n
}

// names returns the addresses that the API was told.
func (f *fakeAPI) names() (all [][]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.calls {
		all = append(all, r.Header.Values("X-Forwarded-For"))
	}
	return all
}

type forwarded []string

func (f forwarded) RoundTrip(r *http.Request) (*http.Response, error) {
	if len(f) > 0 {
		r.Header["X-Forwarded-For"] = f
	}
	return http.DefaultTransport.RoundTrip(r)
}

// serve serves the tools of an API over HTTP.
func serve(t *testing.T, f *fakeAPI) *httptest.Server {
	transport := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, f.Listener.Addr().String())
	}}
	t.Cleanup(transport.CloseIdleConnections)
	t.Cleanup(http.DefaultTransport.(*http.Transport).CloseIdleConnections)
	server := httptest.NewServer(Handler(HTTPOptions{
		Version: "test", Sandboxes: &http.Client{Transport: transport},
		API: func(key string, from []string) (*client.Client, error) {
			return client.New(client.Options{URL: f.URL, Key: key, HTTP: &http.Client{Transport: forwarded(from)}})
		},
	}))
	t.Cleanup(server.Close)
	return server
}

type withKey string

func (k withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+string(k))
	return http.DefaultTransport.RoundTrip(r)
}

// connect returns a session of the SDK's client with a key.
func connect(t *testing.T, server *httptest.Server, key string) (*mcp.ClientSession, error) {
	transport := &mcp.StreamableClientTransport{Endpoint: server.URL + Path, HTTPClient: &http.Client{Transport: withKey(key)}, MaxRetries: -1}
	s, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), transport, nil)
	if err == nil {
		t.Cleanup(func() { _ = s.Close() })
	}
	return s, err
}

// answerOf calls a tool and returns its text.
func answerOf(t *testing.T, s *mcp.ClientSession, tool string, arguments any) (text string, failed bool) {
	t.Helper()
	r, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: arguments})
	require.NoError(t, err)
	require.Len(t, r.Content, 1)
	return r.Content[0].(*mcp.TextContent).Text, r.IsError
}

func TestBadArgumentsAreToolErrorsThatNameTheField(t *testing.T) {
	s, err := connect(t, serve(t, newFakeAPI(t)), keyA)
	require.NoError(t, err)
	in := func(more string) string { return `{"sandboxID":"` + someID + `"` + more + `}` }
	for _, c := range []struct{ tool, arguments, want string }{
		{"create_sandbox", `{}`, "pool: name one of the pools: one, two"},
		{"create_sandbox", `{"timeout":0}`, "/timeout"},
		{"create_sandbox", `{"timeout":1.5}`, "/timeout"},
		{"create_sandbox", `{"timeout":99999999}`, "/timeout"},
		{"create_sandbox", `{"access":"all"}`, "/access"},
		{"create_sandbox", `{"envs":{"A":1}}`, "/envs"},
		{"create_sandbox", `{"nosuch":1}`, "nosuch"},
		{"run_command", `{}`, "sandboxID"},
		{"run_command", in(``), "command"},
		{"run_command", in(`,"command":""`), "/command"},
		{"run_command", in(`,"command":"` + strings.Repeat("x", 64<<10+1) + `"`), "/command"},
		{"run_command", in(`,"command":"true","timeout":241`), "/timeout"},
		{"run_command", in(`,"command":"true","maxOutput":262145`), "/maxOutput"},
		{"run_command", `{"sandboxID":"../pools","command":"true"}`, "sandboxID: must be an ID that create_sandbox"},
		{"run_command", `{"sandboxID":"` + strings.Repeat("x", 65) + `","command":"true"}`, "/sandboxID"},
		{"run_command", `{"sandboxID":"unknown0000000000000","command":"true"}`, "sandbox_not_found: no such sandbox; it may"},
		{"read_file", in(`,"path":""`), "/path"},
		{"read_file", in(`,"path":"/a","offset":-1`), "/offset"},
		{"read_file", in(`,"path":"/a","maxBytes":3`), "/maxBytes"},
		{"write_file", in(`,"path":"/a"`), "content"},
		{"write_file", in(`,"path":"/a","content":"%","encoding":"base64"`), "content: must be base64"},
		{"write_file", in(`,"path":"/a","content":"","encoding":"gzip"`), "/encoding"},
		{"write_file", in(`,"path":"/a","content":"` + strings.Repeat("x", maxContent+1) + `"`), "/content"},
		{"list_files", in(`,"path":"/","depth":11`), "/depth"},
		{"list_sandboxes", `{"pool":7}`, "/pool"},
		{"kill_sandbox", `{"sandboxID":"unknown0000000000000"}`, "sandbox_not_found"},
		{"kill_sandbox", `{"sandboxID":""}`, "/sandboxID"},
		{"expose_port", in(`,"port":0`), "/port"},
		{"expose_port", in(`,"port":65536`), "/port"},
	} {
		text, failed := answerOf(t, s, c.tool, json.RawMessage(c.arguments))
		require.True(t, failed, "%s %.80s: %s", c.tool, c.arguments, text)
		require.Contains(t, text, c.want, "%s %.80s", c.tool, c.arguments)
		require.Less(t, len(text), maxProblem+100)
	}
}

// Invariant: P19
func TestKeyOfARequestDecidesWhatItReaches(t *testing.T) {
	server := serve(t, newFakeAPI(t))
	a, err := connect(t, server, keyA)
	require.NoError(t, err)
	b, err := connect(t, server, keyB)
	require.NoError(t, err)
	port := map[string]any{"sandboxID": someID, "port": 3000}
	text, failed := answerOf(t, a, "expose_port", port)
	require.False(t, failed, text)
	require.Contains(t, text, `"headers":{"e2b-traffic-access-token":"opens it"}`)
	require.NotContains(t, text, keyA)
	text, failed = answerOf(t, b, "expose_port", port)
	require.True(t, failed)
	require.Contains(t, text, "sandbox_not_found")
	_, err = connect(t, server, "unknown")
	require.ErrorContains(t, err, "Unauthorized")
}

// post sends a message of the protocol without its client.
func post(t *testing.T, server *httptest.Server, body io.Reader, headers ...string) (code int, answer string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+Path, body)
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", "application/json, text/event-stream")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	if host := r.Header.Get("Host"); host != "" {
		r.Host = host
	}
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(raw)
}

// Invariant: P19
func TestRequestsAreRefusedBeforeTheyReachTools(t *testing.T) {
	f := newFakeAPI(t)
	server := serve(t, f)
	const list = `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`
	key := []string{"X-API-Key", keyA}
	for _, c := range []struct {
		name, body string
		headers    []string
		code       int
		want       string
	}{
		{"with a key", list, key, http.StatusOK, "create_sandbox"},
		{"without a key", list, nil, http.StatusUnauthorized, "unauthorized"},
		{"unknown key", list, []string{"Authorization", "Bearer x"}, http.StatusUnauthorized, "unknown key"},
		{"key that no header may have", list, []string{"Authorization", "Bearer \x80"}, http.StatusUnauthorized, "unknown key"},
		{"batch", " [" + list + "]", key, http.StatusBadRequest, "no batch"},
		{"no JSON", "{", key, http.StatusBadRequest, "malformed"},
		{"too large", `{"x":"` + strings.Repeat("x", maxBody) + `"}`, key, http.StatusRequestEntityTooLarge, "body_too_large"},
		{"page of another site", list, append(key, "Origin", "http://evil.example.com"), http.StatusForbidden, "cross-origin"},
		{"name that leads here", list, append(key, "Host", "evil.example.com"), http.StatusForbidden, "Host"},
	} {
		code, answer := post(t, server, strings.NewReader(c.body), c.headers...)
		require.Equal(t, c.code, code, "%s: %s", c.name, answer)
		require.Contains(t, answer, c.want, c.name)
		require.NotContains(t, answer, keyA, c.name)
	}
	response, err := http.Get(server.URL + Path)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusMethodNotAllowed, response.StatusCode)
}

func TestAPIHearsWhichClientTheRequestIsOf(t *testing.T) {
	f := newFakeAPI(t)
	h := Handler(HTTPOptions{API: func(key string, from []string) (*client.Client, error) {
		return client.New(client.Options{URL: f.URL, Key: key, HTTP: &http.Client{Transport: forwarded(from)}})
	}})
	t.Cleanup(http.DefaultTransport.(*http.Transport).CloseIdleConnections)
	for _, c := range []struct {
		peer string
		says []string
		want []string
	}{
		{"127.0.0.1:1", nil, nil},
		{"127.0.0.1:1", []string{"1.2.3.4, 5.6.7.8"}, []string{"1.2.3.4, 5.6.7.8"}},
		{"10.0.0.7:1", []string{"127.0.0.1"}, []string{"10.0.0.7"}},
		{"[2001:db8::1]:1", nil, []string{"2001:db8::1"}},
	} {
		r := httptest.NewRequest(http.MethodPost, Path, strings.NewReader("{}"))
		r.RemoteAddr = c.peer
		r.Header["X-Forwarded-For"] = c.says
		h.ServeHTTP(httptest.NewRecorder(), r)
		named := f.names()
		require.Equal(t, c.want, named[len(named)-1], c.peer)
	}
}

// Invariant: P19
func TestCallsOfOneTeamLeaveRoomForOthers(t *testing.T) {
	f := newFakeAPI(t)
	f.hold = make(chan struct{})
	server := serve(t, f)
	read := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"read_file",`+
		`"arguments":{"sandboxID":%q,"path":"/x"}}}`, someID)
	var held sync.WaitGroup
	for range maxTeamCalls {
		held.Go(func() {
			code, answer := post(t, server, strings.NewReader(read), "X-API-Key", keyA)
			if code != http.StatusOK || !strings.Contains(answer, "ää") {
				t.Errorf("%d: %s", code, answer)
			}
		})
	}
	require.Eventually(t, func() bool { return f.reading() == maxTeamCalls }, wait, pause)
	ping := func(key string) int {
		code, _ := post(t, server, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`), "X-API-Key", key)
		return code
	}
	full, other := ping(keyA), ping(keyB)
	close(f.hold)
	held.Wait()
	require.Equal(t, http.StatusServiceUnavailable, full)
	require.Equal(t, http.StatusOK, other)
	require.Equal(t, http.StatusOK, ping(keyA))
}

func TestClientThatGoesEndsItsCall(t *testing.T) {
	f := newFakeAPI(t)
	f.hold = make(chan struct{})
	server := serve(t, f)
	ctx, cancel := context.WithCancel(t.Context())
	s, err := connect(t, server, keyA)
	require.NoError(t, err)
	failed := make(chan error, 1)
	go func() {
		_, err := s.CallTool(ctx, &mcp.CallToolParams{Name: "read_file", Arguments: map[string]any{"sandboxID": someID, "path": "/x"}})
		failed <- err
	}()
	require.Eventually(t, func() bool { return f.reading() == 1 }, wait, pause)
	cancel()
	require.Error(t, <-failed)
	require.Eventually(t, func() bool { return f.reading() == 0 }, wait, pause)
}

func TestFilesAreReadInPiecesOfWholeCharacters(t *testing.T) {
	s, err := connect(t, serve(t, newFakeAPI(t)), keyA)
	require.NoError(t, err)
	var whole string
	for offset, pieces := int64(0), 0; ; pieces++ {
		text, failed := answerOf(t, s, "read_file", map[string]any{"sandboxID": someID, "path": "/x", "offset": offset, "maxBytes": 31})
		require.False(t, failed, text)
		var piece contents
		require.NoError(t, json.Unmarshal([]byte(text), &piece))
		require.Equal(t, "utf-8", piece.Encoding)
		require.LessOrEqual(t, len(piece.Content), 31)
		whole += piece.Content
		if offset = piece.NextOffset; offset == 0 {
			require.Equal(t, 6, pieces)
			break
		}
	}
	require.Equal(t, strings.Repeat("ä", 100), whole)
}

func TestOutputKeepsItsBeginningAndItsEnd(t *testing.T) {
	for _, size := range []int{0, 1, 9, 10, 11, 15, 1000} {
		for _, piece := range []int{1, 3, 1000} {
			e := &ends{half: 5}
			all := bytes.Repeat([]byte("abcdefg"), size/7+1)[:size]
			for rest := all; len(rest) > 0; rest = rest[min(piece, len(rest)):] {
				_, err := e.Write(rest[:min(piece, len(rest))])
				require.NoError(t, err)
			}
			got := e.stream()
			if size <= 10 {
				require.Equal(t, stream{Text: string(all)}, got)
				continue
			}
			require.Equal(t, stream{string(all[:5]), int64(size - 10), string(all[size-5:])}, got)
		}
	}
	e := &ends{half: 2}
	_, err := e.Write([]byte("\xff<\x00>"))
	require.NoError(t, err)
	require.True(t, utf8.ValidString(e.stream().Text))
	shown, err := text(e.stream())
	require.NoError(t, err)
	require.Equal(t, `{"text":"�<\u0000>"}`, shown)
	_, err = e.Write(make([]byte, maxPiped))
	require.ErrorIs(t, err, errPiped)
	require.LessOrEqual(t, len(e.tail), maxPiped+4, "what is thrown away is not kept")
}
