package poststart_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/poststart"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func leads() bool { return true }

// pod is a server that stands for the sandbox's pod.
func pod(t *testing.T, h http.HandlerFunc) (core.Sandbox, v1alpha1.PostStartHook) {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	at := s.Listener.Addr().(*net.TCPAddr).AddrPort()
	return core.Sandbox{
		Binding: core.Binding{ID: "k3x9", Metadata: map[string]string{"k": "v"}, User: "ada"}, Pool: core.PoolKey{Name: "python"}, IP: at.Addr(),
	}, v1alpha1.PostStartHook{Port: int32(at.Port()), Path: "/start?x=1", TimeoutSeconds: 10}
}

func TestHookIsToldWhichSandboxItsPodHasBecome(t *testing.T) {
	var got map[string]any
	s, hook := pod(t, func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, http.MethodPost, r.Method)
		require.Equal(t, "/start?x=1", r.URL.RequestURI())
		require.Equal(t, "application/json", r.Header.Get("Content-Type"))
		raw, _ := io.ReadAll(r.Body)
		require.NoError(t, json.Unmarshal(raw, &got))
		w.WriteHeader(http.StatusNoContent)
	})
	require.NoError(t, poststart.New(nil, leads).Call(t.Context(), hook, 1, s))
	require.Equal(t, map[string]any{"sandboxID": "k3x9", "pool": "python", "metadata": map[string]any{"k": "v"}, "user": "ada"}, got)

	port := hook.Port
	hook.Port = 0 // then it is the pool's default port
	require.NoError(t, poststart.New(nil, leads).Call(t.Context(), hook, uint16(port), s))
}

func TestHookFailsOnAnyOtherAnswer(t *testing.T) {
	var calls atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the allocator went where the pod told it to") }))
	defer elsewhere.Close()
	for _, code := range []int{302, 404, 500, 503} {
		calls.Store(0)
		s, hook := pod(t, func(w http.ResponseWriter, _ *http.Request) {
			calls.Add(1)
			w.Header().Set("Location", elsewhere.URL)
			w.WriteHeader(code)
		})
		require.ErrorContains(t, poststart.New(nil, leads).Call(t.Context(), hook, 1, s), "answered")
		require.EqualValues(t, 1, calls.Load(), "an answer is an answer")
	}
}

func TestHookIsCalledAgainWhileThePodCannotBeConnectedTo(t *testing.T) {
	s, hook := pod(t, func(http.ResponseWriter, *http.Request) {})
	tries := 0
	c := poststart.New(func(ctx context.Context, network, address string) (net.Conn, error) {
		require.Equal(t, netip.AddrPortFrom(s.IP, uint16(hook.Port)).String(), address)
		if tries++; tries < 4 {
			return nil, &net.OpError{Op: "dial", Net: network, Err: io.ErrUnexpectedEOF}
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}, leads)
	require.NoError(t, c.Call(t.Context(), hook, 1, s))
	require.Equal(t, 4, tries)
}

func TestHookThatDoesNotAnswerIsGivenUp(t *testing.T) {
	released := make(chan struct{})
	s, hook := pod(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-released:
		}
	})
	defer close(released)
	hook.TimeoutSeconds = 1
	began := time.Now()
	require.ErrorIs(t, poststart.New(nil, leads).Call(t.Context(), hook, 1, s), context.DeadlineExceeded)
	require.GreaterOrEqual(t, time.Since(began), time.Second)
}

func TestNobodyIsCalledByAProcessThatMayNotLeadAnyMore(t *testing.T) {
	s, hook := pod(t, func(http.ResponseWriter, *http.Request) { t.Error("the pod of somebody else was called") })
	var asked, dialed int
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		dialed++
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	for leadsFor := range 2 { // not any more: before it connects, and once it has connected
		asked, dialed = 0, 0
		c := poststart.New(dial, func() bool { asked++; return asked <= leadsFor })
		require.ErrorContains(t, c.Call(t.Context(), hook, 1, s), "may not lead")
		require.Equal(t, leadsFor, dialed)
	}
}
