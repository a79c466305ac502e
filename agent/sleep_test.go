package agent

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

// order gives the agent an order, and returns the answer.
func (h *harness) order(id string, kind initbox.Kind, counter uint64) (int, string) {
	h.t.Helper()
	o := &initbox.Order{SandboxID: id, Kind: kind, Term: 1, Counter: counter}
	sealed, err := h.sealer.For(h.o.Keys.PublicKey()).SealOrder(o)
	require.NoError(h.t, err)
	return h.call(http.MethodPost, initbox.SleepPath, sealed)
}

// Invariant: P28
func TestOrdersAreObeyedForTheOwnSandboxOnly(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	status, body := h.order("a", initbox.Freeze, 1)
	require.Equal(t, http.StatusServiceUnavailable, status, body)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	status, body = h.order("b", initbox.Freeze, 1)
	require.Equal(t, http.StatusMisdirectedRequest, status, body)
	config := h.box(initbox.Config{SandboxID: "a", AccessToken: "t"})
	status, body = h.call(http.MethodPost, initbox.SleepPath, config, TokenHeader, "t")
	require.Equal(t, http.StatusUnauthorized, status, body)
	status, body = h.call(http.MethodPost, initbox.SleepPath, make([]byte, initbox.MaxSealedOrder+1))
	require.Equal(t, http.StatusRequestEntityTooLarge, status, body)
	require.False(t, h.freezer.Asleep())

	status, body = h.order("a", initbox.Freeze, 2)
	require.Equal(t, http.StatusOK, status, body)
	require.Regexp(t, `^{"processes":0,"took_ms":\d+}\n$`, body)
	require.True(t, h.freezer.Asleep())
	status, body = h.order("a", initbox.Thaw, 1)
	require.Equal(t, http.StatusConflict, status, body)
	require.True(t, h.freezer.Asleep())
	status, body = h.order("a", initbox.Thaw, 3)
	require.Equal(t, http.StatusOK, status, body)
	require.False(t, h.freezer.Asleep())

	h.freezer.End()
	status, body = h.order("a", initbox.Freeze, 4)
	require.Equal(t, http.StatusUnprocessableEntity, status, body)
	require.JSONEq(t, `{"code":422,"message":"the container was told to end","reason":"ending"}`, body)
}

// Invariant: P28
func TestSleepingAgentServesNoFileAndNoCommand(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	connect := []string{TokenHeader, "t", "Connect-Protocol-Version", "1", "Content-Type", "application/json"}
	for counter, asleep := range []bool{false, true, false} {
		kind := initbox.Thaw
		if asleep {
			kind = initbox.Keep
		}
		status, body := h.order("a", kind, uint64(counter+1))
		require.Equal(t, http.StatusOK, status, body)
		for target, always := range map[string]bool{
			"/envs": false, "/files": false, "/files?signature=of+t": false, "/process.Process/List": false,
			"/health": true, "/init": true, "/metrics": true, "/metrics/history": true,
		} {
			method := http.MethodGet
			if strings.Contains(target, "Process") {
				method = http.MethodPost
			}
			header := connect
			if strings.Contains(target, "signature") {
				header = nil
			}
			status, body := h.call(method, target, nil, header...)
			if asleep && !always {
				require.Equal(t, http.StatusServiceUnavailable, status, target)
				require.Contains(t, body, "the sandbox is asleep", target)
				continue
			}
			require.Less(t, status, 300, "%s: %s", target, body)
		}
		status, _ = h.call(http.MethodGet, "/envs", nil)
		require.Equal(t, http.StatusUnauthorized, status, "also while it is asleep")
		status, body = h.call(http.MethodPost, "/process.Process/List", []byte("{}"), connect...)
		require.Equal(t, asleep, strings.Contains(body, `"code":"unavailable"`), "%d %s", status, body)
	}
}

// Invariant: P28
func TestBegunUploadWaitsForTheWake(t *testing.T) {
	h := newHarness(t)
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	read := make(chan string, 9)
	h.Handle("/read", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		for b := make([]byte, 9); ; {
			n, err := r.Body.Read(b)
			read <- fmt.Sprint(string(b[:n]), err)
			if err != nil {
				return
			}
		}
	}))
	server := httptest.NewServer(h)
	defer server.Close()
	upload := func(ctx context.Context) (*io.PipeWriter, <-chan struct{}) {
		body, w := io.Pipe()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+"/read", body)
		require.NoError(t, err)
		r.Header.Set(TokenHeader, "t")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if answer, err := http.DefaultClient.Do(r); err == nil {
				answer.Body.Close()
			}
		}()
		return w, ended
	}
	defer http.DefaultClient.CloseIdleConnections()
	w, ended := upload(t.Context())
	defer h.freezer.Wake()
	defer w.Close()
	_, err := io.WriteString(w, "a")
	require.NoError(t, err)
	require.Equal(t, "a<nil>", <-read)
	status, body := h.order("a", initbox.Keep, 1)
	require.Equal(t, http.StatusOK, status, body)
	_, err = io.WriteString(w, "b")
	require.NoError(t, err)
	select {
	case text := <-read:
		require.Fail(t, "handed over", text)
	case <-time.After(50 * time.Millisecond):
	}
	status, body = h.order("a", initbox.Thaw, 2)
	require.Equal(t, http.StatusOK, status, body)
	require.Equal(t, "b<nil>", <-read)

	ctx, leave := context.WithCancel(t.Context())
	second, left := upload(ctx)
	_, err = io.WriteString(second, "c")
	require.NoError(t, err)
	require.Equal(t, "c<nil>", <-read)
	status, body = h.order("a", initbox.Keep, 3)
	require.Equal(t, http.StatusOK, status, body)
	leave() // its handler does not wait for the wake
	require.NoError(t, second.CloseWithError(ctx.Err()))
	<-left
	require.Contains(t, <-read, "unexpected EOF")
	status, body = h.order("a", initbox.Thaw, 4)
	require.Equal(t, http.StatusOK, status, body)
	require.NoError(t, w.Close())
	require.Contains(t, <-read, "EOF")
	<-ended
}
