package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/internal/pipetest"
)

// harness is an agent without processes and files, and the allocator that configures it.
type harness struct {
	*Agent
	t       *testing.T
	sealer  *initbox.Sealer
	freezer *freeze.Freezer
	// written has the contents of the files by their path.
	written map[string]string
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	const hold = time.Hour // the tests end before
	sealer, err := initbox.NewSealer([32]byte{1: 1})
	require.NoError(t, err)
	keys, err := initbox.NewKeys(sealer.PublicKey())
	require.NoError(t, err)
	directory, err := accounts.New(false)
	require.NoError(t, err)
	h := &harness{t: t, sealer: sealer, written: map[string]string{}}
	h.freezer, err = freeze.New(freeze.Options{Children: children.New(), Hold: hold, Bound: time.Minute})
	require.NoError(t, err)
	h.Agent, err = New(Options{Log: slog.New(slog.DiscardHandler), Keys: keys, Accounts: directory, Freezer: h.freezer,
		WriteFile: func(_ accounts.Account, f initbox.File) error {
			if f.Path == "/full" {
				return errors.New("/full: the disk is full")
			}
			h.written[f.Path] = string(f.Data)
			return nil
		}})
	require.NoError(t, err)
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "served") })
	h.Handle("/process.Process/", ok)
	h.HandleSigned("/files", ok, func(r *http.Request, token string) error {
		if r.URL.Query().Get("signature") != "of "+token {
			return errors.New("the signature is wrong")
		}
		return nil
	})
	return h
}

// call returns the status and the body of an answer.
func (h *harness) call(method, target string, body []byte, header ...string) (int, string) {
	h.t.Helper()
	r := httptest.NewRequest(method, target, bytes.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

// box seals a configuration for the agent.
func (h *harness) box(c initbox.Config) []byte {
	h.t.Helper()
	sealed, err := h.sealer.Seal(&c, h.o.Keys.PublicKey())
	require.NoError(h.t, err)
	return sealed
}

func (h *harness) configure(c initbox.Config) {
	h.t.Helper()
	status, body := h.call(http.MethodPost, initbox.Path, h.box(c))
	require.Equal(h.t, http.StatusNoContent, status, body)
}

func TestCallsNeedTheAccessToken(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	public := newHarness(t)
	public.configure(initbox.Config{SandboxID: "a", AccessToken: "secret", Public: true})
	unconfigured := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "secret"})
	for name, c := range map[string]struct {
		h      *harness
		target string
		header []string
		status int
		body   string
	}{
		"token":               {h, "/envs", []string{TokenHeader, "secret"}, 200, "{}"},
		"no token":            {h, "/envs", nil, 401, "X-Access-Token is missing"},
		"other token":         {h, "/envs", []string{TokenHeader, "secreT"}, 401, "not the access token"},
		"part of it":          {h, "/envs", []string{TokenHeader, "secre"}, 401, "not the access token"},
		"token as bearer":     {h, "/envs", []string{"Authorization", "Bearer secret"}, 401, "X-Access-Token"},
		"rpc with token":      {h, "/process.Process/List", []string{TokenHeader, "secret"}, 200, "served"},
		"rpc without":         {h, "/process.Process/List", nil, 401, "X-Access-Token"},
		"signature":           {h, "/files?signature=of+secret", nil, 200, "served"},
		"wrong signature":     {h, "/files?signature=x", nil, 401, "the signature is wrong"},
		"signature and token": {h, "/files?signature=of+secret", []string{TokenHeader, "x"}, 401, "not the access token"},
		"signature elsewhere": {h, "/envs?signature=of+secret", nil, 401, "X-Access-Token"},
		"metrics":             {h, "/metrics", nil, 401, "X-Access-Token"},
		"health":              {h, "/health", nil, 204, ""},
		"hello":               {h, "/init", nil, 200, `"sandbox":"` + initbox.SandboxDigest("a") + `"`},
		"public":              {public, "/envs", nil, 200, "{}"},
		"unconfigured":        {unconfigured, "/envs", []string{TokenHeader, ""}, 503, "not configured"},
		"unconfigured files":  {unconfigured, "/files?signature=of+", nil, 503, "not configured"},
		"unconfigured health": {unconfigured, "/health", nil, 204, ""},
		"unconfigured hello":  {unconfigured, "/init", nil, 200, `"publicKey"`},
		"unknown":             {h, "/other", []string{TokenHeader, "secret"}, 404, ""},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := c.h.call(http.MethodGet, c.target, nil, c.header...)
			require.Equal(t, c.status, status, body)
			require.Contains(t, body, c.body)
		})
	}
}

// A stream's error is an envelope in an answer with 200, or the SDKs do not see its code.
// Invariant: P15
func TestPagesOfEveryOriginReadTheAnswers(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "secret"})
	for _, target := range []string{"/envs", "/process.Process/List", "/files?signature=of+secret", "/health", "/other"} {
		for _, token := range []string{"secret", "x"} {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, target, nil)
			r.Header.Set("Origin", "https://page.example")
			r.Header.Set(TokenHeader, token)
			h.ServeHTTP(w, r)
			require.Equal(t, []string{"*"}, w.Result().Header["Access-Control-Allow-Origin"], target)
			require.Contains(t, w.Result().Header.Get("Access-Control-Expose-Headers"), "Grpc-Status", target)
			require.NotContains(t, w.Result().Header, "Access-Control-Allow-Credentials")
		}
	}
}

func TestRefusedCallsSpeakTheProtocolOfTheCall(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "secret"})
	status, body := h.call(http.MethodPost, "/process.Process/Start", nil,
		"Connect-Protocol-Version", "1", "Content-Type", "application/connect+json")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, `"code":"unauthenticated"`)
	status, body = h.call(http.MethodPost, "/process.Process/List", nil,
		"Connect-Protocol-Version", "1", "Content-Type", "application/json")
	require.Equal(t, http.StatusUnauthorized, status)
	require.Contains(t, body, `"code":"unauthenticated"`)
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut} {
		status, body = h.call(method, "/files?signature=x", nil, "Content-Type", "application/octet-stream")
		require.Equal(t, http.StatusUnauthorized, status)
		require.Contains(t, body, `"code":401`)
	}
}

func TestAgentIsConfiguredOnce(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	file := initbox.File{Path: "/a", Data: []byte("1")}
	first := initbox.Config{SandboxID: "a", AccessToken: "t1", Files: []initbox.File{file},
		Envs: map[string]string{"E": "1"}, Secrets: map[string]string{"S": "hidden"}}
	h.configure(first)
	require.Equal(t, map[string]string{"/a": "1"}, h.written)

	again := first
	again.AccessToken, again.Files = "t2", []initbox.File{{Path: "/a", Data: []byte("2")}}
	h.configure(again) // the same sandbox: a delivery that was repeated
	require.Equal(t, "t1", h.Config().AccessToken)
	require.Equal(t, "1", h.written["/a"])

	other := first
	other.SandboxID = "b"
	status, body := h.call(http.MethodPost, initbox.Path, h.box(other))
	require.Equal(t, http.StatusConflict, status)
	require.Contains(t, body, "sandbox a")
	require.Equal(t, "a", h.Config().SandboxID)

	status, body = h.call(http.MethodGet, "/envs", nil, TokenHeader, "t1")
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"E":"1"}`, body)
}

// A client needs no token to send a box.
func TestBoxesThatAreReadAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		listener := pipetest.Listen()
		server := &http.Server{Handler: h}
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		send := func(n int, body []byte) *bufio.Reader {
			c := listener.Connect()
			_, err := fmt.Fprintf(c, "POST /init HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", n, body)
			require.NoError(t, err)
			return bufio.NewReader(c)
		}
		status := func(from *bufio.Reader) int {
			answer, err := http.ReadResponse(from, nil)
			require.NoError(t, err)
			_, _ = io.Copy(io.Discard, answer.Body)
			return answer.StatusCode
		}
		var slow []*bufio.Reader
		for range maxBoxes {
			slow = append(slow, send(100, []byte("x")))
			synctest.Wait()
		}
		refused := send(100, nil)
		require.Equal(t, http.StatusServiceUnavailable, status(refused))
		_, err := refused.ReadByte()
		require.ErrorIs(t, err, io.EOF, "it is closed when its body does not arrive")
		for _, from := range slow {
			require.Equal(t, http.StatusBadRequest, status(from), "it did not arrive in time")
		}
		synctest.Wait()
		box := h.box(initbox.Config{SandboxID: "a", AccessToken: "t"})
		require.Equal(t, http.StatusNoContent, status(send(len(box), box)))
		listener.HangUp()
		require.NoError(t, server.Close())
		<-served
	})
}

func TestConfigurationsThatAreRefusedLeaveTheAgentUnconfigured(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	foreign, err := initbox.NewSealer([32]byte{1: 2})
	require.NoError(t, err)
	config := initbox.Config{SandboxID: "a", AccessToken: "t", Secrets: map[string]string{"S": "hidden"}}
	forged, err := foreign.Seal(&config, h.o.Keys.PublicKey())
	require.NoError(t, err)
	changed := h.box(config)
	changed[len(changed)-1] ^= 1
	otherVersion := h.box(config)
	otherVersion[0] = initbox.Version + 1
	nobody := config
	nobody.DefaultUser = "no-such-user"
	full := config
	full.Files = []initbox.File{{Path: "/full", Data: []byte("hidden")}}
	for name, c := range map[string]struct {
		box    []byte
		status int
		body   string
	}{
		"empty":         {nil, 401, "not sealed"},
		"forged":        {forged, 401, "not sealed"},
		"changed":       {changed, 401, "not sealed"},
		"other version": {otherVersion, 400, "version"},
		"too large":     {make([]byte, initbox.MaxSealed+1), 413, "box"},
		"user":          {h.box(nobody), 400, "defaultUser: the sandbox has no user"},
		"file":          {h.box(full), 400, "files[0]: /full: the disk is full"},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := h.call(http.MethodPost, initbox.Path, c.box)
			require.Equal(t, c.status, status, body)
			require.Contains(t, body, c.body)
			require.NotContains(t, body, "hidden")
			require.Nil(t, h.Config())
		})
	}
	h.configure(config)
}

func TestMetricsAreThoseOfTheSandboxsCgroup(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\nCached: 300 kB\n")
	write("proc/stat", "cpu  100 0 100 1000 50 0 0 0 0 0\ncpu0 1 1 1 1\n")
	start := time.Unix(1000, 0)
	m := newMeter(root, start)

	write("proc/stat", "cpu  200 0 200 2000 50 0 0 0 0 0\n")
	got, err := m.read(start.Add(2 * time.Second))
	require.NoError(t, err)
	require.Equal(t, []uint64{1000 << 10, 600 << 10, 300 << 10}, []uint64{got.MemTotal, got.MemUsed, got.MemCache})
	require.InDelta(t, 100/float64(got.CPUCount), got.CPUUsedPct, 0.01)
	require.Equal(t, int64(1002), got.Timestamp)
	require.NotZero(t, got.DiskTotal)

	write("sys/fs/cgroup/cpu.max", "150000 100000\n")
	write("sys/fs/cgroup/cpu.stat", "usage_usec 1000000\nuser_usec 1\n")
	write("sys/fs/cgroup/memory.max", "512000\n")
	write("sys/fs/cgroup/memory.current", "300000\n")
	write("sys/fs/cgroup/memory.stat", "anon 1\nfile 200000\ninactive_file 100000\n")
	m = newMeter(root, start)
	write("sys/fs/cgroup/cpu.stat", "usage_usec 2000000\n")
	got, err = m.read(start.Add(2 * time.Second))
	require.NoError(t, err)
	require.Equal(t, []uint64{512000, 200000, 200000}, []uint64{got.MemTotal, got.MemUsed, got.MemCache})
	require.Equal(t, 2, got.CPUCount)
	require.InDelta(t, 25, got.CPUUsedPct, 0.01)
	again, err := m.read(start.Add(2*time.Second + 1))
	require.NoError(t, err)
	require.InDelta(t, 25, again.CPUUsedPct, 0.01, "calls in a row get one value")

	write("sys/fs/cgroup/memory.max", "max\n")
	got, err = m.read(start.Add(3 * time.Second))
	require.NoError(t, err)
	require.Equal(t, uint64(1000<<10), got.MemTotal)

	h := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	status, body := h.call(http.MethodGet, "/metrics", nil, TokenHeader, "t")
	require.Equal(t, http.StatusOK, status, body)
	var shape map[string]any
	require.NoError(t, json.NewDecoder(strings.NewReader(body)).Decode(&shape))
	for _, name := range []string{
		"ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "disk_total", "disk_used",
	} {
		require.Contains(t, shape, name)
	}
}

// listening serves an agent in memory, for tests in a bubble. The result connects.
func (h *harness) listening(t *testing.T) func() net.Conn {
	listener := pipetest.Listen()
	server := &http.Server{Handler: h}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		listener.HangUp()
		require.NoError(t, server.Close())
		<-served
	})
	return listener.Connect
}

// Neither a client without the token nor one with it holds a connection by a body that does not come.
func TestSilentBodiesEndTheirConnections(t *testing.T) {
	for name, c := range map[string]struct {
		token string
		wait  time.Duration
	}{"without token": {wait: restWait}, "with token": {"X-Access-Token: t\r\n", bodyWait + restWait}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t)
				h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
				h.Handle("/read", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
					_, err := io.ReadAll(r.Body)
					require.ErrorIs(t, err, os.ErrDeadlineExceeded)
				}))
				conn := h.listening(t)()
				began := time.Now()
				_, err := fmt.Fprintf(conn, "POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n%s\r\nx", c.token)
				require.NoError(t, err)
				_, err = io.Copy(io.Discard, conn)
				require.NoError(t, err)
				require.LessOrEqual(t, time.Since(began), c.wait)
			})
		})
	}
}

func TestSilentStreamsOutliveTheDeadlineOfBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
		h.Handle("/stream", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			select {
			case <-time.After(3 * bodyWait):
			case <-r.Context().Done():
			}
			_, _ = io.WriteString(w, fmt.Sprint(r.Context().Err()))
		}))
		conn := h.listening(t)()
		_, err := io.WriteString(conn, "POST /stream HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nX-Access-Token: t\r\n\r\nx")
		require.NoError(t, err)
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.Equal(t, "<nil>", string(text))
	})
}

func TestCallsBeyondTheBoundAreRefused(t *testing.T) {
	h := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	for range maxCalls {
		h.calls <- struct{}{}
	}
	call := func(target string) (int, string) {
		return h.call(http.MethodPost, target, []byte("{}"), TokenHeader, "t",
			"Connect-Protocol-Version", "1", "Content-Type", "application/json")
	}
	status, body := call("/process.Process/List")
	require.Equal(t, http.StatusTooManyRequests, status)
	require.Contains(t, body, `"code":"resource_exhausted","message":"4096 calls are being served`)
	status, body = call("/files")
	require.Equal(t, http.StatusTooManyRequests, status, body)
	status, _ = h.call(http.MethodGet, "/health", nil)
	require.Equal(t, http.StatusNoContent, status)
	<-h.calls
	for range 2 {
		status, body = call("/files")
		require.Equal(t, http.StatusOK, status, body)
	}
}
