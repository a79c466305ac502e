package rest

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
)

func TestFencesNameTheRoutersTheyWaitFor(t *testing.T) {
	released := func(id string) core.Sandbox {
		return core.Sandbox{
			Binding: core.Binding{ID: id}, Pool: core.PoolKey{Namespace: "default", Name: "python"}, Pod: core.PodKey{Name: "python-abcdef"},
			IP: netip.MustParseAddr("10.0.0.1"), Phase: core.Released, Cause: core.Cause{Reason: fact.ReasonKilled}, ReleasedAt: noon,
		}
	}
	connected := core.SessionStatus{ID: "router-a", From: "10.1.0.1", Connected: true, Heard: true, Silence: 1500 * time.Millisecond, Sent: 9, Acked: 7, Expires: 15 * time.Minute, Fences: 1}
	away := core.SessionStatus{ID: "router-b", Egress: true, Expires: time.Minute + 500*time.Microsecond, Fences: 1}
	f := &fake{
		truncated: 4,
		fences: []core.FenceStatus{
			{Sandbox: released("k3x9"), Waiting: []core.Awaited{{SessionStatus: connected, Needed: 8}, {SessionStatus: away}}, Others: 2},
			{Sandbox: released("k3xa"), Window: 2300 * time.Millisecond},
			{Sandbox: released("k3xb")},
		},
		sessions: []core.SessionStatus{connected, away},
	}
	w := call(handler(t, f), "GET", "/v1/fences?limit=1000", "")
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	const common = `"pool": "python", "podName": "python-abcdef", "podIP": "10.0.0.1", "releasedAt": "2030-01-01T12:00:00Z", "reason": "Killed"`
	require.JSONEq(t, `{"truncated": 4, "fences": [
		{"sandboxID": "k3x9", `+common+`, "phase": "sessions", "waitsForOthers": 2, "waitsFor": [
			{"sessionID": "router-a", "egress": false, "address": "10.1.0.1", "connected": true, "lastHeardSeconds": 1.5, "expiresInSeconds": 900, "sent": 9, "acknowledged": 7, "until": "acknowledged", "needed": 8},
			{"sessionID": "router-b", "egress": true, "connected": false, "expiresInSeconds": 60.001, "until": "expired"}
		]},
		{"sandboxID": "k3xa", `+common+`, "phase": "connectWindow", "waitsForOthers": 0, "waitsFor": [], "connectWindowEndsInSeconds": 2.3},
		{"sandboxID": "k3xb", `+common+`, "phase": "connectWindow", "waitsForOthers": 0, "waitsFor": [], "connectWindowEndsInSeconds": 0}
	]}`, w.Body.String())
	w = call(handler(t, f), "GET", "/v1/sessions", "")
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.JSONEq(t, `{"truncated": 4, "sessions": [
		{"sessionID": "router-a", "egress": false, "address": "10.1.0.1", "connected": true, "lastHeardSeconds": 1.5, "expiresInSeconds": 900, "sent": 9, "acknowledged": 7, "fences": 1},
		{"sessionID": "router-b", "egress": true, "connected": false, "expiresInSeconds": 60.001, "fences": 1}
	]}`, w.Body.String())
	require.Equal(t, []int{1000, 100}, f.limits)

	for _, path := range []string{"/v1/fences", "/v1/sessions"} {
		w := call(handler(t, &fake{}), "GET", path, "")
		require.Contains(t, w.Body.String(), `[]`, "no list is an empty one")
	}
}

func TestListsHaveALimit(t *testing.T) {
	for _, path := range []string{"/v1/fences", "/v1/sessions"} {
		for _, query := range []string{"limit=0", "limit=1001", "limit=-1", "limit=", "limit=x", "limit=1.5", "limit=1&limit=2"} {
			f := &fake{}
			require.Contains(t, refusal(t, call(handler(t, f), "GET", path+"?"+query, ""), 400, apierror.BadRequest).Message, "limit", query)
			require.Empty(t, f.limits)
		}
		require.Contains(t, refusal(t, call(handler(t, &fake{}), "GET", path+"?limit=1&pool=x", ""), 400, apierror.BadRequest).Message, "pool")
	}
}

const declarePath = "/v1/sessions/router-a/declare-dead"

func TestDeclareDeadRecordsKeyNameAndReason(t *testing.T) {
	keys := keysIn(map[string]string{"ops": "key-of-the-operators"})
	f := &fake{dead: core.DeadDeclared{Status: core.DeclareOK, Fences: 3}}
	h := handlerWithKeys(t, f, keys)
	body := `{"reason": " its node burnt "}`
	refusal(t, call(h, "POST", declarePath, body), 401, apierror.Unauthorized)
	require.Empty(t, f.declared)
	w := httptest.NewRecorder()
	r := request(context.Background(), http.MethodPost, declarePath, strings.NewReader(body))
	r.Header.Set("X-API-Key", "key-of-the-operators")
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.JSONEq(t, `{"sessionID": "router-a", "fences": 3}`, w.Body.String())
	require.Equal(t, []string{"router-a|ops|its node burnt"}, f.declared)
}

func TestDeclareDeadNeedsAReason(t *testing.T) {
	for _, body := range []string{
		"", "{}", "null", "[]", `"x"`, `{"reason":""}`, `{"reason":"  "}`, `{"reason":1}`, `{"reason":null}`, `{"reason":"x","force":true}`, `{"reason":"x"}{}`,
		`{"reason":"a\nb"}`, `{"reason":"` + strings.Repeat("x", maxReason+1) + `"}`, "{\"reason\":\"\xff\"}",
	} {
		f := &fake{dead: core.DeadDeclared{Status: core.DeclareOK}}
		refusal(t, call(handler(t, f), "POST", declarePath, body), 400, apierror.BadRequest)
		require.Empty(t, f.declared, body)
	}
	f := &fake{}
	refusal(t, call(handler(t, f), "POST", declarePath, `{"reason":"`+strings.Repeat("x", maxBody)+`"}`), 413, apierror.BodyTooLarge)
	require.Empty(t, f.declared)
}

func TestRefusedDeclareDeadIsExplainedAndLogged(t *testing.T) {
	for name, c := range map[string]struct {
		answer core.DeadDeclared
		code   int
		reason apierror.Reason
		says   string
	}{
		"unknown":   {core.DeadDeclared{Status: core.DeclareUnknown}, 404, apierror.SessionNotFound, "no session router-a"},
		"connected": {core.DeadDeclared{Status: core.DeclareConnected}, 409, apierror.SessionAlive, "stop that router"},
		"heard":     {core.DeadDeclared{Status: core.DeclareHeard, Wait: 4 * time.Second}, 409, apierror.SessionAlive, "if it has not in 4s, try again"},
	} {
		t.Run(name, func(t *testing.T) {
			seen, logs := observer.New(zap.WarnLevel)
			h, err := New(Options{Allocator: &fake{dead: c.answer}, PublicScheme: "https", PublicHost: "sandbox.example.com", MinIdleTimeout: minIdle, Log: zap.New(seen)})
			require.NoError(t, err)
			require.Contains(t, refusal(t, call(h, "POST", declarePath, `{"reason":"its node burnt"}`), c.code, c.reason).Message, c.says)
			require.Equal(t, 1, logs.Len())
			require.Equal(t, "its node burnt", logs.All()[0].ContextMap()["reason"])
		})
	}
}

func TestOperatorCallsHaveADeadlineAndAreForwarded(t *testing.T) {
	for _, c := range []struct{ method, path, body string }{
		{"GET", "/v1/fences", ""}, {"GET", "/v1/sessions", ""}, {"POST", declarePath, `{"reason":"x"}`}, {"GET", "/v1/last-active", ""}, {"GET", "/v1/sandboxes/k3x9", ""},
		{"POST", "/v1/sandboxes/k3x9/keepalive", ""}, {"POST", "/sandboxes/k3x9/timeout", `{"timeout":1}`},
	} {
		t.Run(fmt.Sprint(c.method, " ", c.path), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				refusal(t, call(handler(t, &fake{followers: true}), c.method, c.path, c.body), 503, apierror.NotLeader)
				began := time.Now()
				refusal(t, call(handler(t, &fake{block: true}), c.method, c.path, c.body), 503, apierror.Timeout)
				require.Equal(t, answerWait, time.Since(began))
			})
		})
	}
}
