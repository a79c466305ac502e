package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/berth-sandbox/berth/internal/bootclock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const guard = time.Minute

// started is a running demo-sandbox on free ports.
type started struct {
	t      *testing.T
	lines  *bufio.Scanner
	ended  chan error // capacity 1, what run returned
	cancel context.CancelFunc
	addrs  []string
	http   http.Client
}

// start runs demo-sandbox until the test ends and waits for its listeners.
func start(t *testing.T, listeners int, args ...string) *started {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	s := &started{t: t, cancel: cancel, lines: bufio.NewScanner(r), ended: make(chan error, 1), http: http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ended <- run(ctx, args, w, io.Discard)
		w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		r.Close() // a write meanwhile fails, which does not matter
		<-done
	})
	for range listeners {
		s.addrs = append(s.addrs, strings.TrimPrefix(s.line(), "listening on "))
	}
	return s
}

func (s *started) line() string {
	s.t.Helper()
	require.True(s.t, s.lines.Scan(), "a line of output: %v", s.lines.Err())
	return s.lines.Text()
}

func (s *started) do(method, path string, body io.Reader) (int, string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), guard)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.addrs[0]+path, body)
	require.NoError(s.t, err)
	resp, err := s.http.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	return resp.StatusCode, strings.TrimSpace(string(text))
}

func (s *started) get(path string) (int, string) {
	s.t.Helper()
	return s.do(http.MethodGet, path, nil)
}

func TestEveryPathSaysWhoAnswered(t *testing.T) {
	s := start(t, 2, "--ip", "127.0.0.1", "--ports", "0,0", "--pod", "p", "--pod-uid", "u")
	code, body := s.do(http.MethodPut, "/a/b?c=d", strings.NewReader("x"))
	require.Equal(t, http.StatusOK, code)
	var who identity
	require.NoError(t, json.Unmarshal([]byte(body), &who))
	require.Equal(t, "p", who.Pod)
	require.Equal(t, "u", who.PodUID)
	require.Equal(t, "127.0.0.1", who.IP)
	require.Equal(t, http.MethodPut, who.Method)
	require.Equal(t, "/a/b?c=d", who.Path)
	require.Equal(t, s.addrs[0], who.Host)
	require.True(t, strings.HasSuffix(s.addrs[0], fmt.Sprintf(":%d", who.Port)))
	require.NotEmpty(t, who.Headers.Get("User-Agent"))
}

func TestHitsAreCountedPerPortWithoutHealthChecks(t *testing.T) {
	s := start(t, 2, "--ip", "127.0.0.1", "--ports", "0,0")
	s.get("/healthz")
	s.get("/readyz")
	s.get("/one")
	s.get("/two")
	_, body := s.get("/hits")
	require.JSONEq(t, `{"hits":2}`, body)
	s.addrs = s.addrs[1:]
	_, body = s.get("/hits")
	require.JSONEq(t, `{"hits":0}`, body)
}

func TestWhatReachesAPodIsRecordedBeforeItIsAnswered(t *testing.T) {
	dir := t.TempDir()
	args := []string{"--ip", "127.0.0.1", "--ports", "0", "--pod", "p", "--pod-uid", "u", "--record", dir}
	lines := func() (all []received) {
		raw, err := os.ReadFile(filepath.Join(dir, "u.jsonl"))
		require.NoError(t, err)
		for line := range strings.Lines(string(raw)) {
			var r received
			require.NoError(t, json.Unmarshal([]byte(line), &r))
			all = append(all, r)
		}
		return all
	}
	began := int64(bootclock.Now())
	first := start(t, 1, args...)
	first.get("/readyz") // is a probe's
	require.Empty(t, lines())
	first.do(http.MethodPost, "/a?b", strings.NewReader("x"))
	got := lines()
	require.Len(t, got, 1)
	require.GreaterOrEqual(t, got[0].At, began)
	got[0].At = 0
	require.Equal(t, received{Pod: "p", PodUID: "u", Host: first.addrs[0], Method: http.MethodPost, Path: "/a"}, got[0])

	// A container that starts again goes on with the file. HTTP/2 is the same.
	second := start(t, 1, args...)
	transport := &http.Transport{Protocols: &http.Protocols{}}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+second.addrs[0]+"/b", http.NoBody)
	require.NoError(t, err)
	request.Header.Set("X-Soak-Request", "r")
	response, err := transport.RoundTrip(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, 2, response.ProtoMajor)
	got = lines()
	require.Len(t, got, 2)
	require.Equal(t, "r", got[1].Request)
	require.Equal(t, "/b", got[1].Path)

	// What cannot be recorded is not answered as if it had been.
	require.ErrorContains(t, run(t.Context(), append(args, "--record", filepath.Join(dir, "missing")), io.Discard, io.Discard), "record")
}

func TestReadinessIsWhatWasAskedFor(t *testing.T) {
	s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0")
	for _, step := range []struct {
		set  string
		want int
	}{{"", http.StatusOK}, {"false", http.StatusServiceUnavailable}, {"true", http.StatusOK}} {
		if step.set != "" {
			code, _ := s.do(http.MethodPost, "/ready?value="+step.set, nil)
			require.Equal(t, http.StatusOK, code)
		}
		code, _ := s.get("/readyz")
		require.Equal(t, step.want, code)
	}
}

func TestEndpointsForTraffic(t *testing.T) {
	s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0")
	_, body := s.do(http.MethodPost, "/upload", strings.NewReader(strings.Repeat("x", 100_000)))
	require.JSONEq(t, `{"bytes":100000}`, body)
	_, body = s.get("/sse?interval=1ms&count=3")
	require.Equal(t, "id: 1\ndata: 1\n\nid: 2\ndata: 2\n\nid: 3\ndata: 3", body)
	code, _ := s.get("/sleep?ms=1")
	require.Equal(t, http.StatusOK, code)
	for _, wrong := range []string{"/sleep", "/sse?interval=x", "/exit?code=256"} {
		code, _ := s.get(wrong)
		require.Equal(t, http.StatusBadRequest, code, wrong)
	}
	ctx, cancel := context.WithTimeout(t.Context(), guard)
	defer cancel()
	c, _, err := websocket.Dial(ctx, "ws://"+s.addrs[0]+"/ws", nil)
	require.NoError(t, err)
	require.NoError(t, c.Write(ctx, websocket.MessageText, []byte("hello")))
	kind, message, err := c.Read(ctx)
	require.NoError(t, err)
	require.Equal(t, websocket.MessageText, kind)
	require.Equal(t, "hello", string(message))
	require.NoError(t, c.Close(websocket.StatusNormalClosure, ""))
}

func TestGRPCStreamsAreEchoed(t *testing.T) {
	s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0")
	conn, err := grpc.NewClient("passthrough:///"+s.addrs[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), guard)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/berth.demo.Echo/Echo")
	require.NoError(t, err)
	for _, word := range []string{"one", "two"} { // each answer is there before the next question
		require.NoError(t, stream.SendMsg(wrapperspb.String(word)))
		var got wrapperspb.StringValue
		require.NoError(t, stream.RecvMsg(&got))
		require.Equal(t, word, got.GetValue())
	}
	require.NoError(t, stream.CloseSend())
	require.ErrorIs(t, stream.RecvMsg(new(wrapperspb.StringValue)), io.EOF)
	_, hits := s.get("/hits")
	require.JSONEq(t, `{"hits":1}`, hits)
	require.Equal(t, codes.Unimplemented, grpcstatus.Code(conn.Invoke(ctx, "/berth.demo.Other/Call", wrapperspb.String(""), new(wrapperspb.StringValue))))
}

func TestHowItEnds(t *testing.T) {
	t.Run("asked for a code", func(t *testing.T) {
		s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0")
		s.get("/exit?code=7")
		var code exit
		require.ErrorAs(t, <-s.ended, &code)
		require.EqualValues(t, 7, code)
	})
	t.Run("by itself", func(t *testing.T) {
		s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0", "--exit-after", "1ms", "--exit-code", "3")
		require.Equal(t, exit(3), <-s.ended)
	})
	t.Run("SIGTERM ends open requests", func(t *testing.T) {
		s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0")
		slept := make(chan error, 1)
		go func() {
			resp, err := s.http.Get("http://" + s.addrs[0] + "/sleep?ms=3600000")
			if err == nil {
				err = resp.Body.Close()
			}
			slept <- err
		}()
		require.Eventually(t, func() bool { _, hits := s.get("/hits"); return hits == `{"hits":1}` }, guard, time.Millisecond)
		require.NoError(t, syscall.Kill(syscall.Getpid(), syscall.SIGTERM))
		require.Equal(t, "SIGTERM", s.line())
		require.NoError(t, <-s.ended)
		require.NoError(t, <-slept)
	})
	t.Run("SIGTERM ignored", func(t *testing.T) {
		s := start(t, 1, "--ip", "127.0.0.1", "--ports", "0", "--ignore-sigterm")
		require.NoError(t, syscall.Kill(syscall.Getpid(), syscall.SIGTERM))
		require.Equal(t, "SIGTERM", s.line())
		code, _ := s.get("/healthz")
		require.Equal(t, http.StatusOK, code)
	})
}

func TestOnlyARelayPassesRequestsOn(t *testing.T) {
	target := start(t, 1, "--ip", "127.0.0.1", "--ports", "0", "--pod", "target")
	relay := start(t, 1, "--ip", "127.0.0.1", "--ports", "0", "--pod", "relay", "--relay")
	get := func(through *started, to string) (int, string) {
		t.Helper()
		client := &http.Client{Timeout: guard, Transport: &http.Transport{DisableKeepAlives: true,
			Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: through.addrs[0]})}}
		resp, err := client.Get("http://" + to + "/some/path")
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
	code, body := get(relay, target.addrs[0])
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, body, `"pod":"target"`)
	require.Contains(t, body, `"path":"/some/path"`)
	code, _ = get(relay, "127.0.0.1:1")
	require.Equal(t, http.StatusBadGateway, code)
	_, body = get(target, relay.addrs[0])
	require.Contains(t, body, `"pod":"target"`)
}

func TestWrongFlagsAreReported(t *testing.T) {
	err := run(t.Context(), []string{"--no-such-flag"}, io.Discard, io.Discard)
	require.ErrorContains(t, err, "no-such-flag")
	var code exit
	require.False(t, errors.As(err, &code))
	require.NoError(t, run(t.Context(), []string{"--help"}, io.Discard, io.Discard))
}
