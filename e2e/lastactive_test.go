package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/extproc/admin"
)

// uses asks the API when sandboxes were last used.
func (e *env) uses(query string) openapi.LastActive {
	e.t.Helper()
	a := e.api(http.MethodGet, "/v1/last-active?"+query, "")
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	var all openapi.LastActive
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &all))
	return all
}

// usesThrough asks every router the same. It returns the answers as JSON and as text.
func (e *env) usesThrough(query string) (all []admin.LastActive, texts []string) {
	e.t.Helper()
	listeners, err := e.site.admins(e.t.Context())
	require.NoError(e.t, err)
	require.NotEmpty(e.t, listeners)
	for _, dial := range listeners {
		page := func(query string) string {
			a, err := do(e.t.Context(), e.clientOf(dial, 0), http.MethodGet, "http://localhost/admin/last-active?"+query, "", "")
			require.NoError(e.t, err)
			require.Equal(e.t, http.StatusOK, a.code, a.body)
			return a.body
		}
		var of admin.LastActive
		require.NoError(e.t, json.Unmarshal([]byte(page(query)), &of))
		all, texts = append(all, of), append(texts, page(query+"&format=text"))
	}
	return all, texts
}

// lastActive is when a sandbox was last used through any router, zero if no router knows it.
func (e *env) lastActive(id string) (last time.Time) {
	e.t.Helper()
	pages, _ := e.usesThrough("id=" + id)
	for _, page := range pages {
		for _, s := range page.Sandboxes {
			if s.LastActive.After(last) {
				last = s.LastActive
			}
		}
	}
	return last
}

func TestAnOpenWebSocketCountsAsActivity(t *testing.T) {
	e := start(t, 1)
	s := e.claim()
	socket := e.open(s)
	e.echoes(socket, "ahoy")
	// Nothing is sent from here on, and the time of the last use moves on.
	first := e.lastActive(s.SandboxID)
	require.NotZero(t, first)
	e.eventually(func() error {
		if now := e.lastActive(s.SandboxID); !now.After(first) {
			return fmt.Errorf("last active at %v, as before", now)
		}
		return nil
	})
	require.NoError(t, socket.Close(websocket.StatusNormalClosure, ""))
	e.release(s.SandboxID)
	require.Zero(t, e.lastActive(s.SandboxID), "the routers list a released sandbox")
}

func TestOperatorsSeeLastUseAndNextRelease(t *testing.T) {
	e := start(t, 2)
	used, _ := e.claimOf(e.pool, `"idleTimeout":6`)
	silent, _ := e.claimOf(e.pool, `"idleTimeout":600,"timeout":3600`)
	socket := e.open(used)
	e.reaches(e.client(), silent)
	e.seesUse(used)
	e.seesIdleness(used, silent)
	require.Empty(t, e.uses("pool=nosuch").Sandboxes)
	require.Empty(t, e.uses("id="+silent.SandboxID+"&prefix=-").Sandboxes)
	limited := e.uses("pool=" + e.pool + "&limit=1")
	require.Len(t, limited.Sandboxes, 1)
	require.Equal(t, 1, limited.Truncated)
	require.Equal(t, apierror.BadRequest,
		e.api(http.MethodGet, "/v1/last-active?sandbox=x", "").refusal(t).Reason, "an unknown parameter is refused")

	text := e.api(http.MethodGet, "/v1/last-active?format=text&id="+used.SandboxID, "").body
	require.Regexp(t, `^`+used.SandboxID+`  `+e.pool+
		`  \S+  \d+s ago  open at \S+  1 open  IdleTimeout (in \ds|is due)(, waits for .*)?\n$`, text)
	out, err := e.berth("last-active", "--pool="+e.pool)
	require.NoError(t, err)
	table := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, table, 3)
	require.Regexp(t, `^SANDBOX +POOL +LAST ACTIVE +BY +OPEN +IDLE TIMEOUT +NEXT$`, table[0])
	one, err := e.berth("last-active", "--id="+used.SandboxID)
	require.NoError(t, err)
	require.Regexp(t, used.SandboxID+` +`+e.pool+` +(\S+ ago|now) +open +1 +6s +IdleTimeout (in \ds|is due)`, one)
	require.NotContains(t, one, silent.SandboxID)
	e.echoes(socket, "still there")
}

// seesUse checks what the leader and the routers show of a sandbox with one open request and an
// idle timeout of 6 s.
func (e *env) seesUse(used openapi.Sandbox) {
	e.t.Helper()
	var first openapi.LastActive
	e.eventually(func() error { // a look shows it, then the router reports it
		first = e.uses("id=" + used.SandboxID)
		require.Len(e.t, first.Sandboxes, 1)
		if first.Sandboxes[0].Open != 1 {
			return fmt.Errorf("%+v", first.Sandboxes[0])
		}
		return nil
	})
	a := first.Sandboxes[0]
	require.False(e.t, first.DryRun)
	require.Equal(e.t, e.pool, a.Pool)
	require.InDelta(e.t, 6, a.IdleTimeout, 0)
	require.NotNil(e.t, a.Activity)
	require.EqualValues(e.t, v1alpha1.ActivityRequests, *a.Activity)
	require.EqualValues(e.t, activity.Open, a.Kind)
	require.NotNil(e.t, a.Router)
	require.Nil(e.t, a.EndAt)
	require.NotNil(e.t, a.Next)
	require.EqualValues(e.t, fact.ReasonIdleTimeout, a.Next.Reason)
	require.InDelta(e.t, max(0, 6-a.AgeSeconds), a.Next.InSeconds, 0.001)

	open := 0
	pages, texts := e.usesThrough("id=" + used.SandboxID)
	for i, page := range pages {
		for _, s := range page.Sandboxes {
			require.Equal(e.t, used.SandboxID, s.SandboxID)
			require.Contains(e.t, texts[i], used.SandboxID)
			if open += s.OpenRequests; s.OpenRequests > 0 {
				require.Zero(e.t, s.AgeSeconds, "it is in use")
				require.Contains(e.t, texts[i], "open 1")
			}
		}
		require.Empty(e.t, page.LookError)
	}
	require.Equal(e.t, 1, open)
}

// seesIdleness checks that a silent sandbox counts down and a used one does not.
func (e *env) seesIdleness(used, silent openapi.Sandbox) {
	e.t.Helper()
	before := e.uses("prefix=" + silent.SandboxID[:10]).Sandboxes
	require.Len(e.t, before, 1)
	require.EqualValues(e.t, fact.ReasonIdleTimeout, before[0].Next.Reason, "which is before its end")
	require.NotNil(e.t, before[0].EndAt)
	e.pass(2 * 6 * time.Second)
	var after map[string]openapi.Activity
	e.eventually(func() error { // a look of a busy machine may come late
		after = map[string]openapi.Activity{}
		for _, s := range e.uses("pool=" + e.pool).Sandboxes {
			after[s.SandboxID] = s
		}
		require.Len(e.t, after, 2)
		if s := after[used.SandboxID]; s.AgeSeconds >= s.IdleTimeout || s.Open != 1 {
			return fmt.Errorf("%+v", s)
		}
		// A look that comes late counts as late a request that it is the first to show.
		if s := after[silent.SandboxID]; s.AgeSeconds <= before[0].AgeSeconds ||
			s.Next.InSeconds >= before[0].Next.InSeconds {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	s := after[silent.SandboxID]
	require.Zero(e.t, s.Open)
}
