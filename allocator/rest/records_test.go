package rest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

func record(id string, phase core.Phase) core.Sandbox {
	s := core.Sandbox{
		Binding: core.Binding{ID: id, ClaimedAt: noon, Team: "blue", User: "eve", EndAt: noon.Add(time.Hour), IdleTimeout: time.Minute},
		Pool:    core.PoolKey{Name: "python"}, Pod: core.PodKey{Name: "python-x"}, IP: netip.MustParseAddr("10.0.0.7"), DefaultPort: 80, Ports: []uint16{80, 443}, Phase: phase,
	}
	if phase >= core.Released {
		s.Reason, s.ReleasedAt = fact.ReasonIdleTimeout, noon.Add(time.Minute)
	}
	return s
}

const recordJSON = `"sandboxID": "aa1", "pool": "python", "team": "blue", "user": "eve", "claimedAt": "2030-01-01T12:00:00Z", "endAt": "2030-01-01T13:00:00Z",
	"idleTimeout": 60, "podName": "python-x", "podIP": "10.0.0.7", "url": "https://80-aa1.sandbox.example.com:8443/", "defaultPort": 80, "ports": [80, 443]`

func TestSandboxExplainsWhyItIsAliveOrGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{activities: activities()[:1], sandboxes: map[string]core.Sandbox{"aa1": record("aa1", core.Running)}}
		f.activities[0].Sandbox = record("aa1", core.Running)
		w := call(handler(t, f), "GET", "/v1/sandboxes/aa1", "")
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		require.JSONEq(t, `{"now": "2000-01-01T00:00:00Z", "dryRun": false, "sandbox": {"phase": "running", `+recordJSON+`}, "activity": {
			"sandboxID": "aa1", "pool": "python", "lastActive": "1999-12-31T23:59:47.654322Z", "ageSeconds": 12.346, "kind": "open", "router": "router-a", "open": 2,
			"idleTimeout": 60, "activity": "Requests", "endAt": "2030-01-01T13:00:00Z", "next": {"reason": "IdleTimeout", "at": "2000-01-01T00:00:47.654Z", "inSeconds": 47.654},
			"asks": ["router-a", "router-b", "router-c"], "awaits": ["router-b", "router-c"]}}`, w.Body.String())
		require.Equal(t, []Filter{{ID: "aa1"}}, f.which)

		f = &fake{sandboxes: map[string]core.Sandbox{"aa1": record("aa1", core.Ended)}}
		w = call(handler(t, f), "GET", "/v1/sandboxes/aa1", "")
		require.JSONEq(t, `{"now": "2000-01-01T00:00:00Z", "dryRun": false, "sandbox": {"phase": "ended", "reason": "IdleTimeout", "releasedAt": "2030-01-01T12:01:00Z", `+recordJSON+`}}`, w.Body.String())
		refusal(t, call(handler(t, f), "GET", "/v1/sandboxes/none", ""), 404, apierror.SandboxNotFound)
		refusal(t, call(handler(t, f), "GET", "/v1/sandboxes/aa1?format=text", ""), 400, apierror.BadRequest)
	})
}

func TestRecordsAreSelectedByTeamPoolUserAndPhase(t *testing.T) {
	f := &fake{}
	phases := []core.Phase{core.Starting, core.Running, core.Releasing, core.Released, core.Ended}
	for i := range 20 {
		s := record(fmt.Sprintf("id%02d", i), phases[i%5])
		s.ClaimedAt = noon.Add(time.Duration(i) * time.Second)
		s.Team, s.User = []string{"blue", "red"}[i%2], []string{"eve", "bob"}[i/10]
		f.live = append(f.live, s)
	}
	for query, want := range map[string][]string{
		"limit=3":                  {"id17", "id16", "id15"},
		"limit=3&order=asc":        {"id00", "id01", "id02"},
		"order=asc&phase=starting": {"id00", "id05", "id10", "id15"},
		"order=asc&phase=released,starting&team=blue": {"id00", "id08", "id10", "id18"},
		"order=asc&phase=ended&user=bob":              {"id14", "id19"},
		"phase=ended%2Creleased&order=asc&limit=2":    {"id03", "id04"},
		"pool=ruby": nil,
		"phase=starting,running,released,ended&limit=1": {"id19"},
	} {
		w := call(handler(t, f), "GET", "/v1/sandboxes?"+query, "")
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		var page openapi.SandboxRecords
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &page))
		var got []string
		for _, s := range page.Sandboxes {
			got = append(got, s.SandboxID)
		}
		require.Equal(t, want, got, query)
	}
	require.Equal(t, `{"sandboxes":[]}`, call(handler(t, f), "GET", "/v1/sandboxes?pool=ruby", "").Body.String())
	for query, says := range map[string]string{
		"phase=": "phase", "phase=paused": "phase", "limit=1001": "limit", "team=": "team", "x=1": "x", "nextToken=x": "nextToken",
	} {
		require.Contains(t, refusal(t, call(handler(t, f), "GET", "/v1/sandboxes?"+query, ""), 400, apierror.BadRequest).Message, says, query)
	}
}

func TestIndexedListsReadOnlyOnePage(t *testing.T) {
	f := &fake{live: someSandboxes(1000)}
	for query, most := range map[string]int{
		"": 101, "pool=p&team=t&limit=7": 8, "phase=starting,running,fallingAsleep,asleep,waking,stopped": 101, "phase=released,ended": 101, "phase=starting": 101, "user=x": 101,
	} {
		f.queries = nil
		require.Equal(t, http.StatusOK, call(handler(t, f), "GET", "/v1/sandboxes?"+query, "").Code)
		require.Len(t, f.queries, 1, query)
		require.Equal(t, most, f.queries[0].Most, query)
		require.Equal(t, query == "phase=starting" || query == "user=x", f.queries[0].Keep != nil, query)
	}
}

func TestRecordsHavePages(t *testing.T) {
	f := &fake{live: someSandboxes(250)}
	var all []string
	token := ""
	for more := true; more; more = token != "" {
		var page openapi.SandboxRecords
		w := call(handler(t, f), "GET", "/v1/sandboxes?order=asc&limit=99&nextToken="+token, "")
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &page), w.Body)
		for _, s := range page.Sandboxes {
			all = append(all, s.SandboxID)
		}
		token = page.NextToken
	}
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(all))), 250)
}

func TestRouteSaysWhyItIsNotRoutable(t *testing.T) {
	fence := &core.FenceStatus{Sandbox: record("gone", core.Released), Window: time.Second}
	f := &fake{routes: map[string]core.RouteStatus{
		"runs": {Sandbox: record("runs", core.Running), Why: core.RouteServed, NotReady: "containers not ready", Others: 2, Routers: []core.RouterOfRoute{
			{SessionStatus: core.SessionStatus{ID: "a", From: "10.0.0.1", Connected: true}, Acknowledged: true},
			{SessionStatus: core.SessionStatus{ID: "b", Connected: true}}, {SessionStatus: core.SessionStatus{ID: "c"}},
		}},
		"starts": {Sandbox: record("starts", core.Starting), Why: core.RouteStarting},
		"gone":   {Sandbox: record("gone", core.Released), Why: core.RouteReleased, Fence: fence},
	}}
	explained := func(id string) (r openapi.RouteExplanation) {
		w := call(handler(t, f), "GET", "/v1/sandboxes/"+id+"/route", "")
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &r))
		return r
	}
	r := explained("runs")
	require.True(t, r.Routable)
	require.Equal(t, "containers not ready", r.PodNotReady)
	require.Equal(t, []openapi.RouterOfRoute{
		{SessionID: "a", Address: "10.0.0.1", Connected: true, State: openapi.RouterOfRouteStateAcknowledged},
		{SessionID: "b", Connected: true, State: openapi.RouterOfRouteStateSent}, {SessionID: "c", State: openapi.RouterOfRouteStateUnknown},
	}, r.Routers)
	require.Equal(t, 2, r.RoutersOthers)
	r = explained("starts")
	require.False(t, r.Routable)
	require.Contains(t, r.Why, "PostStart")
	r = explained("gone")
	require.Equal(t, "it was released; released at 2030-01-01T12:01:00Z: IdleTimeout", r.Why)
	require.Equal(t, openapi.FencePhaseConnectWindow, r.Fence.Phase)
	refusal(t, call(handler(t, f), "GET", "/v1/sandboxes/none/route", ""), 404, apierror.SandboxNotFound)
	for why := core.RouteServed; why <= core.RouteEnded; why++ {
		require.NotEmpty(t, routeWhy[why])
	}
}

func TestDocumentHasEveryReasonOfAnEnd(t *testing.T) {
	var document struct {
		Components struct {
			Schemas struct {
				SandboxRecord struct {
					Properties struct {
						Reason struct{ Enum []string }
					}
				}
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(openapi.YAML, &document))
	var want []string
	for _, r := range fact.Reasons {
		want = append(want, r.Reason)
	}
	require.Equal(t, want, document.Components.Schemas.SandboxRecord.Properties.Reason.Enum)
}
