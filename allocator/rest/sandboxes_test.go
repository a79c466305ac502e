package rest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/printable"
)

// Objects may be older than the checks of the API, or be written by others. A terminal obeys none of them.
//
// Invariant: P18
func TestAnswersAreSafeForATerminal(t *testing.T) {
	const evil = "x\u009b2J\x7f\u202e\ufffe\U000e0001"
	const shown = `x\u009b2J\u007f\u202e\ufffe\udb40\udc01`
	s := core.Sandbox{Binding: core.Binding{ID: "k3x9", ClaimedAt: noon, User: evil, Metadata: map[string]string{evil: evil}}, DefaultPort: 80}
	f := &fake{
		sandboxes: map[string]core.Sandbox{"k3x9": s}, live: []core.Sandbox{s},
		activities: []core.ActivityStatus{{Sandbox: s, Why: evil, Kind: activity.Unknown}},
		pools:      []*v1alpha1.SandboxPool{{Status: v1alpha1.SandboxPoolStatus{Conditions: []metav1.Condition{{Type: "Ready", Message: evil}}}}},
	}
	for path, contains := range map[string]string{
		"/sandboxes/k3x9": shown, "/sandboxes": shown, "/v1/sandboxes": shown, "/v1/sandboxes/k3x9": shown, "/v1/pools": shown,
		"/v1/last-active": shown, "/v1/last-active?format=text": shown,
		"/v1/sandboxes?user=" + url.QueryEscape(evil): "U+009B at byte 1", "/v1/sandboxes?" + url.QueryEscape(evil) + "=1": `x\\u009b2J`,
		"/v1/last-active?id=" + url.QueryEscape(evil): "U+009B at byte 1",
	} {
		body := call(handler(t, f), "GET", path, "").Body.String()
		require.Contains(t, body, contains, path)
		require.Equal(t, printable.Text(body), body, path)
		if strings.HasPrefix(body, "{") && !strings.Contains(body, `"code"`) {
			var decoded any
			require.NoError(t, json.Unmarshal([]byte(body), &decoded))
			require.Contains(t, fmt.Sprint(decoded), evil, "%s: JSON keeps the value", path)
		}
	}
	for _, field := range []string{"user", "templateID"} {
		raw, err := json.Marshal(map[string]string{field: evil})
		require.NoError(t, err)
		e := refusal(t, call(handler(t, f), "POST", "/sandboxes", string(raw)), 400, apierror.BadRequest)
		require.Contains(t, e.Message, field+": U+009B at byte 1: control and format characters are refused")
	}
	e := refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"a","metadata":{"a":"1","a":"2"}}`), 400, apierror.BadRequest)
	require.Equal(t, "metadata.a: is there twice; send it once", e.Message)
}

func TestReleaseReportsOutstandingRouters(t *testing.T) {
	for _, outstanding := range []int{0, 3} {
		f := &fake{status: core.CallOK, outstanding: outstanding}
		w := call(handler(t, f), "DELETE", "/sandboxes/k3x9", "")
		require.Equal(t, http.StatusNoContent, w.Code)
		require.Equal(t, fmt.Sprint(outstanding), w.Header().Get("Berth-Routers-Outstanding"))
		require.Empty(t, w.Body.String())
		require.Equal(t, []string{"k3x9 Killed"}, f.released)
	}
}

func TestReleaseOfUnknownOrGoneSandboxIs404(t *testing.T) {
	for status, reason := range map[core.CallStatus]apierror.Reason{
		core.CallUnknown: apierror.SandboxNotFound, core.CallGone: apierror.SandboxGone,
	} {
		w := call(handler(t, &fake{status: status}), "DELETE", "/sandboxes/k3x9", "")
		require.Equal(t, "k3x9", refusal(t, w, 404, reason).SandboxID)
		require.NotContains(t, w.Header(), OutstandingHeader)
	}
}

func TestGetShowsLiveSandboxesOnly(t *testing.T) {
	live := core.Sandbox{Binding: core.Binding{ID: "k3x9", ClaimedAt: noon}, DefaultPort: 80}
	ended := live
	ended.Phase, ended.Reason, ended.ReleasedAt = core.Ended, "EndTime", noon.Add(time.Hour)
	released := ended
	released.Phase = core.Released
	releasing := live
	releasing.Phase = core.Releasing
	h := handler(t, &fake{sandboxes: map[string]core.Sandbox{"live": live, "releasing": releasing, "ended": ended, "released": released}})
	for _, id := range []string{"live", "releasing"} {
		w := call(h, "GET", "/sandboxes/"+id, "")
		require.Equal(t, 200, w.Code)
		require.Contains(t, w.Body.String(), `"endAt":"9999-12-31T23:59:59Z"`, "the SDKs do not read a sandbox without an end")
	}
	for _, id := range []string{"ended", "released"} {
		e := refusal(t, call(h, "GET", "/v2/sandboxes/"+id, ""), 404, apierror.SandboxGone)
		require.Equal(t, "this sandbox was released at 2030-01-01T13:00:00Z: EndTime", e.Message)
		require.Equal(t, id, e.SandboxID)
	}
	require.Equal(t, "unknown", refusal(t, call(h, "GET", "/sandboxes/unknown", ""), 404, apierror.SandboxNotFound).SandboxID)
}

func TestListHasPages(t *testing.T) {
	w := call(handler(t, &fake{}), "GET", "/sandboxes", "")
	require.Equal(t, "[]", w.Body.String())
	require.NotContains(t, w.Header(), NextTokenHeader)
	f := &fake{}
	for i := range 250 {
		f.live = append(f.live, core.Sandbox{Binding: core.Binding{ID: fmt.Sprintf("id%03d", i), ClaimedAt: noon.Add(time.Duration(i/3) * time.Microsecond)}})
	}
	for _, c := range []struct {
		limit string
		pages []int
	}{{"", []int{100, 100, 50}}, {"limit=100", []int{100, 100, 50}}, {"limit=50", []int{50, 50, 50, 50, 50}}, {"limit=99", []int{99, 99, 52}}} {
		token := ""
		var pages []int
		var ids []string
		for more := true; more; more = token != "" {
			w := call(handler(t, f), "GET", "/v2/sandboxes?order=asc&"+c.limit+"&nextToken="+token, "")
			var page []openapi.Sandbox
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &page), w.Body)
			pages = append(pages, len(page))
			for _, s := range page {
				ids = append(ids, s.SandboxID)
			}
			token = w.Header().Get("x-next-token")
		}
		require.Equal(t, c.pages, pages)
		require.True(t, slices.IsSorted(ids))
		require.Len(t, slices.Compact(ids), 250)
	}
	for query, says := range map[string]string{
		"limit=0": "limit", "limit=101": "limit", "limit=": "limit", "limit=x": "limit", "limit=1&limit=2": "limit",
		"nextToken=x": "nextToken", "nextToken=eA": "nextToken", "nextToken=MSA": "nextToken", "nextToken=" + encodeToken(core.Mark{ID: "a"}) + "&nextToken=": "nextToken",
	} {
		require.Contains(t, refusal(t, call(handler(t, f), "GET", "/sandboxes?"+query, ""), 400, apierror.BadRequest).Message, says, query)
	}
}

func TestListSelectsByItsParameters(t *testing.T) {
	f := &fake{}
	for i := range 1200 {
		s := core.Sandbox{Binding: core.Binding{ID: fmt.Sprintf("id%04d", i), ClaimedAt: noon.Add(time.Duration(i) * time.Second)}, Pool: core.PoolKey{Name: []string{"python", "node"}[i%2]}}
		s.Metadata = map[string]string{"i": strconv.Itoa(i), "a&b=c d": "é+%"}
		f.live = append(f.live, s)
	}
	doubly := func(k, v string) string { // as the SDKs encode it
		return url.QueryEscape(url.Values{url.QueryEscape(k): {url.QueryEscape(v)}}.Encode())
	}
	for query, want := range map[string][]string{
		"limit=2":                                      {"id1199", "id1198"},
		"limit=2&order=asc":                            {"id0000", "id0001"},
		"limit=2&order=desc&template=python":           {"id1198", "id1196"},
		"template=ruby":                                {},
		"state=running&limit=1":                        {"id1199"},
		"state=paused%2Crunning&limit=1":               {"id1199"},
		"state=paused":                                 {},
		"metadata=" + doubly("i", "17"):                {"id0017"},
		"metadata=" + doubly("a&b=c d", "other"):       {},
		"metadata=i%3D17%26x%3Dy":                      {},
		"limit=1&metadata=" + doubly("a&b=c d", "é+%"): {"id1199"},
		"startedAfter=" + noon.Add(1198*time.Second).Format(time.RFC3339):                {"id1199", "id1198"},
		"startedAfter=" + noon.Add(1199*time.Second).Format(time.RFC3339) + "&order=asc": {"id1199"},
	} {
		w := call(handler(t, f), "GET", "/sandboxes?"+query, "")
		require.Equal(t, 200, w.Code, w.Body)
		var page []openapi.Sandbox
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &page))
		ids := []string{}
		for _, s := range page {
			ids = append(ids, s.SandboxID)
		}
		require.Equal(t, want, ids, query)
		require.Equal(t, strings.HasPrefix(query, "limit") || strings.HasSuffix(query, "limit=1"), w.Header().Get(NextTokenHeader) != "", query)
	}
	for query, says := range map[string]string{
		"state=ended": "state", "order=up": "order", "startedAfter=yesterday": "startedAfter", "metadata=%25zz": "metadata", "metadata=a%3D1%26a%3D2": "metadata",
	} {
		require.Contains(t, refusal(t, call(handler(t, f), "GET", "/sandboxes?"+query, ""), 400, apierror.BadRequest).Message, says, query)
	}
}
