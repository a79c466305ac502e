package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/openapi"
)

// The calls are those that E2B's dashboard makes: to the API of E2B, and to its second API at
// NEXT_PUBLIC_DASHBOARD_API_URL, which is /dashboard here. Its browser part calls the agent with E2B's SDK.
func TestCallsOfE2BsDashboardAreAnswered(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("dashboard", 1, agentPool)
	key, _ := e.newKey("team", access.Member)
	s := sandboxOf(t, e.as(key, http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"timeout":600}`, pool)))
	get := func(path string, into any) answer {
		t.Helper()
		a := e.as(key, http.MethodGet, path, "")
		require.Equal(t, http.StatusOK, a.code, "%s: %s", path, a.body)
		require.NoError(t, json.Unmarshal([]byte(a.body), into), path)
		return a
	}

	const signIn = "/v2/sandboxes?limit=1"
	require.Equal(t, http.StatusOK, e.as(key, http.MethodGet, signIn, "").code)
	refused, err := e.callAPI(http.MethodGet, signIn, "", "e2b_"+strings.Repeat("0", 40))
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, refused.code)
	var health struct{ Message string }
	get("/dashboard/health", &health)
	require.NotEmpty(t, health.Message)
	var list []openapi.Sandbox
	get("/v2/sandboxes?state=running,paused&limit=1", &list)
	require.Equal(t, s.SandboxID, list[0].SandboxID)
	var shown openapi.Sandbox
	get("/sandboxes/"+s.SandboxID, &shown)
	require.NotEmpty(t, shown.EnvdAccessToken, "the browser calls the agent with it")
	var events []struct{ Type string }
	e.eventually(func() error {
		get("/events/sandboxes/"+s.SandboxID+"?offset=0&limit=100&orderAsc=true", &events)
		if len(events) == 0 {
			return errors.New("no event yet")
		}
		return nil
	})
	require.Equal(t, "sandbox.lifecycle.created", events[0].Type)
	get("/events/sandboxes/"+s.SandboxID+"?offset=100&limit=100&orderAsc=true", &events)
	require.Empty(t, events, "the page after the last")

	// A series: measurements of the agent from before this call.
	began := time.Now()
	var series []openapi.SandboxMetric
	e.eventually(func() error {
		get(fmt.Sprintf("/sandboxes/%s/metrics?start=%d&end=%d", s.SandboxID, began.Unix()-3600, began.Unix()+3600), &series)
		if n := len(series); n < 2 || series[0].TimestampUnix == series[n-1].TimestampUnix {
			return errors.New("measurements of one second")
		}
		return nil
	})
	require.Positive(t, series[0].MemUsed)
	require.Positive(t, series[0].DiskTotal)
	require.Less(t, series[0].TimestampUnix, series[len(series)-1].TimestampUnix)
	get(fmt.Sprintf("/sandboxes/%s/metrics?start=%d&end=%d", s.SandboxID, began.Unix()-7200, began.Unix()-3600), &series)
	require.Empty(t, series)
	var all openapi.SandboxesWithMetrics
	get("/sandboxes/metrics?sandbox_ids="+s.SandboxID, &all)
	require.Positive(t, all.Sandboxes[s.SandboxID].MemUsed)
	logs := "/v2/sandboxes/" + s.SandboxID + "/logs?limit=100&direction=backward&level=info&search=x"
	if a := e.as(key, http.MethodGet, logs, ""); a.code != http.StatusOK {
		require.Equal(t, http.StatusNotImplemented, a.code, "a node without logs: %s", a.body)
	}

	var templates []openapi.Template
	get("/templates?teamID=team", &templates)
	require.NotEmpty(t, templates)
	var page openapi.DashboardTemplates
	get("/dashboard/templates?limit=50&sort=updated_at_desc&search="+url.QueryEscape(pool), &page)
	require.Equal(t, pool, page.Data[0].TemplateID)
	require.Nil(t, page.NextCursor)
	var one openapi.DashboardTemplate
	get("/dashboard/templates/"+pool, &one)
	require.Equal(t, page.Data[0], one)
	for path, field := range map[string]string{
		"/dashboard/templates/defaults":                                "templates",
		"/dashboard/templates/" + pool + "/tags/groups":                "tags",
		"/dashboard/templates/" + pool + "/tags/v1/assignments":        "data",
		"/dashboard/builds?statuses=building,failed,success&limit=50":  "data",
		"/dashboard/builds/statuses?build_ids=" + url.QueryEscape("1"): "buildStatuses",
	} {
		var empty map[string][]any
		get(path, &empty)
		require.Equal(t, []any{}, empty[field], path)
	}
	var tag struct {
		Exists        bool
		NormalizedTag string
	}
	get("/dashboard/templates/"+pool+"/tags/exists?tag=v1", &tag)
	require.False(t, tag.Exists)
	require.Equal(t, "v1", tag.NormalizedTag)
	require.Equal(t, http.StatusNotFound, e.as(key, http.MethodGet, "/dashboard/builds/"+one.BuildID, "").code)
	require.Equal(t, http.StatusNotImplemented, e.as(key, http.MethodPatch, "/v2/templates/"+pool, `{"public":true}`).code)
	require.Equal(t, http.StatusNoContent, e.as(key, http.MethodPost, "/sandboxes/"+s.SandboxID+"/pause", "").code)
	require.Equal(t, http.StatusNoContent, e.as(key, http.MethodDelete, "/sandboxes/"+s.SandboxID, "").code)
	// The page shows the message of what Berth lacks. The first two are of the page of a sandbox that has ended.
	for _, call := range []struct{ method, path, body string }{
		{http.MethodGet, "/sandboxes/" + s.SandboxID, ""},
		{http.MethodGet, "/dashboard/sandboxes/" + s.SandboxID + "/record", ""},
		{http.MethodGet, "/templates/" + pool + "/tags", ""},
		{http.MethodPost, "/templates/tags", `{"target":"` + pool + `:1","tags":["v1"]}`},
		{http.MethodDelete, "/templates/tags", `{"name":"` + pool + `","tags":["v1"]}`},
		{http.MethodDelete, "/templates/" + pool, ""},
		{http.MethodGet, "/teams/team/metrics?start=1&end=2", ""},
		{http.MethodGet, "/teams/team/metrics/max?start=1&end=2&metric=concurrent_sandboxes", ""},
	} {
		a := e.as(key, call.method, call.path, call.body)
		require.Contains(t, []int{http.StatusNotFound, http.StatusNotImplemented}, a.code,
			"%s %s: %s", call.method, call.path, a.body)
		var refusal struct{ Message string }
		require.NoError(t, json.Unmarshal([]byte(a.body), &refusal), a.body)
		require.NotEmpty(t, refusal.Message)
	}
}

// What the leader has counted is in its history some seconds later.
func TestHistoryShowsClaimsAndLiveSandboxes(t *testing.T) {
	e := start(t, 1)
	s := e.claim()
	e.eventually(func() error {
		a := e.api(http.MethodGet, "/v1/history", "")
		require.Equal(t, http.StatusOK, a.code, a.body)
		var h openapi.History
		require.NoError(t, json.Unmarshal([]byte(a.body), &h))
		n := len(h.Live)
		require.Len(t, h.ClaimsClaimed, n)
		require.Equal(t, time.Duration(n*h.StepSeconds)*time.Second, min(h.Until.Sub(h.Since), time.Hour))
		if n == 0 || h.Live[n-1] == nil || *h.Live[n-1] == 0 {
			return fmt.Errorf("no step with sandbox %s: %s", s.SandboxID, a.body)
		}
		return nil
	})
	member, _ := e.newKey("a", access.Member)
	refused := e.as(member, http.MethodGet, "/v1/history", "")
	require.Equal(t, http.StatusForbidden, refused.code, "it has numbers of all teams")
}
