package rest

import (
	"encoding/json"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestDashboardListsPoolsInPages(t *testing.T) {
	f := &fake{}
	for i, name := range []string{"a1", "a2", "b1", "a3"} { // the last two are of the same second
		p := poolOf(name)
		p.CreationTimestamp = metav1.NewTime(noon.Add(time.Duration(min(i, 2)) * time.Second))
		f.pools = append(f.pools, p)
	}
	h := handler(t, f)
	pages := func(query string) (all [][]string) {
		next := ""
		for {
			w := call(h, "GET", "/dashboard/templates?limit=2"+query+next, "")
			require.Equal(t, http.StatusOK, w.Code, w.Body)
			var page struct {
				Data []struct {
					TemplateID string
					IsDefault  *bool
				}
				NextCursor *string
			}
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &page))
			require.NotNil(t, page.Data)
			names := []string{}
			for _, p := range page.Data {
				names = append(names, p.TemplateID)
				require.NotNil(t, p.IsDefault)
			}
			all = append(all, names)
			if page.NextCursor == nil {
				return all
			}
			next = "&cursor=" + url.QueryEscape(*page.NextCursor)
		}
	}
	require.Equal(t, [][]string{{"b1", "a3"}, {"a2", "a1"}}, pages(""))
	require.Equal(t, [][]string{{"a1", "a2"}, {"a3", "b1"}}, pages("&sort=created_at_asc"))
	require.Equal(t, [][]string{{"a3", "a2"}, {"a1"}}, pages("&search=A"))
	require.Equal(t, [][]string{{}}, pages("&public=true"))
	require.Contains(t, refusal(t, call(h, "GET", "/dashboard/templates?cursor=gone", ""), 400, apierror.BadRequest).Message, "cursor")
	refusal(t, call(h, "GET", "/dashboard/templates?limit=101", ""), 400, apierror.BadRequest)

	const shown = `{"templateID": "a1", "buildID": "u-1", "aliases": ["a1"], "names": ["a1"], "public": false, "isDefault": false,
		"createdAt": "2030-01-01T12:00:00Z", "updatedAt": "2030-01-01T12:00:00Z", "createdBy": null, "lastSpawnedAt": null,
		"spawnCount": 0, "buildCount": 1, "cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0, "envdVersion": "0.1.0"}`
	require.JSONEq(t, shown, call(h, "GET", "/dashboard/templates/a1", "").Body.String())
	require.JSONEq(t, `{"data": [`+shown+`], "nextCursor": null}`, call(h, "GET", "/dashboard/templates?search=a1", "").Body.String())
}

func TestDashboardGetsEmptyListsOfWhatBerthLacks(t *testing.T) {
	h := handler(t, &fake{pools: []*v1alpha1.SandboxPool{poolOf("a1")}})
	for path, want := range map[string]string{
		"/dashboard/templates/defaults":                                      `{"templates": []}`,
		"/dashboard/templates/a1/tags/groups?assignmentLimit=6&tagsLimit=20": `{"tags": [], "nextCursor": null}`,
		"/dashboard/templates/a1/tags/count":                                 `{"total": 0}`,
		"/dashboard/templates/a1/tags/exists?tag=v1":                         `{"exists": false, "normalizedTag": "v1"}`,
		"/dashboard/templates/a1/tags/v1/assignments?limit=50":               `{"data": [], "nextCursor": null}`,
		"/dashboard/builds?statuses=building,failed,success&limit=50":        `{"data": [], "nextCursor": null}`,
		"/dashboard/builds/statuses?build_ids=1,2":                           `{"buildStatuses": []}`,
	} {
		w := call(h, "GET", path, "")
		require.Equal(t, http.StatusOK, w.Code, "%s: %s", path, w.Body)
		require.JSONEq(t, want, w.Body.String(), path)
	}
	for _, path := range []string{"/dashboard/templates/none", "/dashboard/templates/none/tags/count", "/dashboard/templates/none/tags/exists?tag=x"} {
		refusal(t, call(h, "GET", path, ""), 404, apierror.PoolNotFound)
	}
	refusal(t, call(h, "GET", "/dashboard/builds/7", ""), 404, apierror.NotFound)
	require.Equal(t, http.StatusOK, call(h, "GET", "/templates?teamID=any", "").Code)
}

func TestDashboardNeedsAKeyForAllButItsHealth(t *testing.T) {
	h := handlerWithKeys(t, &fake{}, keysIn(map[string]string{"ann": keyOne}))
	require.Equal(t, http.StatusOK, call(h, "GET", "/dashboard/health", "").Code)
	for _, path := range []string{"/dashboard/templates", "/dashboard/templates/defaults", "/dashboard/builds", "/dashboard/builds/7"} {
		refusal(t, call(h, "GET", path, ""), 401, apierror.Unauthorized)
		require.NotEqual(t, 401, callWith(h, "GET", path, http.Header{"X-Api-Key": {keyOne}}).Code)
	}
}
