package rest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
)

const (
	memberKey = "e2b_member"
	readerKey = "e2b_reader"
)

// withAudit serves an API with a key of each lower role, and collects its log.
func withAudit(t *testing.T, f *fake) (http.Handler, *observer.ObservedLogs) {
	t.Helper()
	seen, logs := observer.New(zap.DebugLevel)
	h, err := New(Options{
		Allocator: f, PublicScheme: "https", PublicHost: "sandbox.example.com", MinIdleTimeout: minIdle, Log: zap.New(seen),
		Keys: knownKeys{
			memberKey: {Key: "ci", Team: "search", Role: access.Member}, readerKey: {Key: "view", Team: "search", Role: access.ReadOnly},
		},
	})
	require.NoError(t, err)
	return h, logs
}

func TestEachMutatingCallIsOneAuditLine(t *testing.T) {
	long := strings.Repeat("r", 200)
	for _, c := range []struct {
		method, path, body, key string
		status                  core.CallStatus
		want                    map[string]any
	}{
		{"POST", "/sandboxes", `{"templateID":"python"}`, memberKey, core.CallOK,
			map[string]any{"key": "ci", "team": "search", "role": "member", "operation": "createSandbox", "object": "k3x9", "outcome": "done", "status": int64(201)}},
		{"POST", "/sandboxes", `{"templateID":"python","timeout":1.5e9}`, memberKey, core.CallOK,
			map[string]any{"operation": "createSandbox", "outcome": "refused", "status": int64(400)}},
		{"POST", "/v1/claims", `{"pool":"python","count":1,"atLeast":2}`, memberKey, core.CallOK,
			map[string]any{"operation": "claimBatch", "object": "python", "outcome": "refused", "status": int64(400)}},
		{"DELETE", "/v2/sandboxes/k3x9abcdefghij", "", memberKey, core.CallOK,
			map[string]any{"operation": "killSandbox", "object": "k3x9a...", "outcome": "done", "status": int64(204)}},
		{"DELETE", "/sandboxes/k3x9abcdefghij", "", memberKey, core.CallUnknown,
			map[string]any{"operation": "killSandbox", "object": "k3x9a...", "outcome": "refused", "status": int64(404)}},
		{"POST", "/sandboxes/k3x9abcdefghij/timeout", `{"timeout":0}`, memberKey, core.CallOK,
			map[string]any{"operation": "setTimeout", "outcome": "refused", "status": int64(400)}},
		{"DELETE", "/sandboxes/k3x9abcdefghij", "", readerKey, core.CallOK,
			map[string]any{"key": "view", "role": "read-only", "operation": "killSandbox", "object": "k3x9a...", "outcome": "refused", "status": int64(403)}},
		{"POST", "/v1/sessions/" + long + "/declare-dead", `{"reason":"x"}`, memberKey, core.CallOK,
			map[string]any{"operation": "declareDead", "object": long[:maxAudited], "outcome": "refused", "status": int64(403)}},
		{"GET", "/v2/sandboxes", "", "e2b_wrong", core.CallOK,
			map[string]any{"key": "", "operation": "listSandboxes", "outcome": "refused", "status": int64(401), "client": "192.0.2.1:1234"}},
		{"GET", "/v2/sandboxes", "", memberKey, core.CallOK, nil},
		{"GET", "/v1/fences", "", readerKey, core.CallOK, map[string]any{"operation": "listFences", "outcome": "refused", "status": int64(403)}},
	} {
		h, logs := withAudit(t, &fake{status: c.status})
		w := call(h, c.method, c.path, c.body)
		require.Equal(t, 401, w.Code)
		logs.TakeAll()
		w = callWithBody(h, c.method, c.path, c.body, c.key)
		lines := logs.Filter(func(e observer.LoggedEntry) bool { return e.LoggerName == "audit" }).All()
		if c.want == nil {
			require.Empty(t, lines, "%s %s changes nothing", c.method, c.path)
			continue
		}
		require.Len(t, lines, 1, "%s %s", c.method, c.path)
		line := lines[0].ContextMap()
		require.EqualValues(t, w.Code, line["status"])
		require.Equal(t, "req-1", line["requestID"])
		for name, value := range c.want {
			require.Equal(t, value, line[name], "%s of %s %s", name, c.method, c.path)
		}
		for _, entry := range logs.All() {
			for name, value := range entry.ContextMap() {
				require.NotContains(t, fmt.Sprint(value), "e2b_", "%s shows a key", name)
			}
		}
	}
}

func callWithBody(h http.Handler, method, path, body, key string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := request(context.Background(), method, path, strings.NewReader(body))
	r.Header.Set("X-Request-Id", "req-1")
	r.Header.Set("X-API-Key", key)
	h.ServeHTTP(w, r)
	return w
}

// A client without a key must not fill the log.
func TestLinesAboutRefusedCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, logs := withAudit(t, &fake{})
		for range 3 {
			for range 10 * refusedPerSecond {
				callWithBody(h, "GET", "/sandboxes", "", "e2b_wrong")
			}
			callWithBody(h, "GET", "/v1/fences", "", readerKey)
			require.Len(t, logs.FilterMessage("call without a valid key").TakeAll(), refusedPerSecond)
			require.Len(t, logs.FilterMessage("call refused").All(), 1, "lines about roles have a bound of their own")
			logs.TakeAll()
			time.Sleep(2 * time.Second)
		}
		for range 10 * refusedPerSecond {
			callWithBody(h, "DELETE", "/sandboxes/x", "", memberKey)
		}
		require.Equal(t, 10*refusedPerSecond, logs.FilterMessage("call").Len(), "no line about a call that was carried out is dropped")
	})
}

func TestLogOfFailedCallsShortensSandboxIDs(t *testing.T) {
	const id = "k3x9k3x9k3x9k3x9k3x9"
	h, logs := withAudit(t, &fake{err: errors.New("broken")})
	w := callWith(h, "GET", "/sandboxes/"+id, http.Header{"X-Api-Key": {memberKey}})
	require.Equal(t, http.StatusInternalServerError, w.Code, w.Body)
	failed := logs.FilterMessage("request failed").All()
	require.Len(t, failed, 1)
	require.Equal(t, map[string]any{"operation": "getSandbox", "object": "k3x9k...", "error": "broken"}, failed[0].ContextMap())
}
