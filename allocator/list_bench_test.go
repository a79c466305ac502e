package allocator

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
)

// BenchmarkList: one page of each list over HTTP, with 10,000 live sandboxes of nine teams. More than half of
// them are of the team of the caller in /v2.
func BenchmarkList(b *testing.B) {
	const sandboxes, batch = 10_000, 100
	keys := callers{"admin": {Key: "admin", Team: "ops", Role: access.Admin}}
	for i := range 10 {
		name := fmt.Sprint("team", i)
		keys[name] = access.Caller{Key: name, Team: name, Role: access.Admin}
	}
	leader, stop := serveLeader(b, sandboxes, keys)
	defer stop()
	for i := range sandboxes / batch {
		team := 0
		if i%2 == 1 {
			team = i / 2 % 9
		}
		body := fmt.Sprintf(`{"pool":"python","count":%d,"timeout":36000,"user":"u%d","metadata":{"run":"r%d","agent":"a"}}`, batch, i, i)
		w := leader.call(fmt.Sprint("team", team), "POST", "/v1/claims", body)
		require.Equal(b, http.StatusCreated, w.Code, w.Body)
	}
	server := httptest.NewServer(leader.api)
	defer server.Close()
	for _, c := range []struct{ key, path string }{
		{"team0", "/v2/sandboxes?limit=100"},
		{"team0", "/v2/sandboxes?limit=100&order=asc&state=running"},
		{"team0", "/v2/sandboxes?limit=100&metadata=run%3Dr0"},
		{"team0", "/v2/sandboxes?limit=100&metadata=run%3Dnone"},
		{"admin", "/v1/sandboxes?limit=100"},
		{"admin", "/v1/sandboxes?limit=1000"},
		{"admin", "/v1/sandboxes?team=team5&limit=100"},
		{"admin", "/v1/sandboxes?user=u0&limit=100"},
		{"admin", "/v1/sandboxes?user=none&limit=100"},
		{"admin", "/v1/sandboxes?phase=starting&limit=100"},
		{"admin", "/v1/sandboxes?phase=released,ended&limit=100"},
	} {
		b.Run(strings.NewReplacer("/", "|", "&", "+").Replace(c.path), func(b *testing.B) {
			var all []time.Duration
			for b.Loop() {
				r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, server.URL+c.path, nil)
				require.NoError(b, err)
				r.Header.Set("X-API-Key", c.key)
				began := time.Now()
				w, err := http.DefaultClient.Do(r)
				require.NoError(b, err)
				raw, err := io.ReadAll(w.Body)
				all = append(all, time.Since(began))
				require.NoError(b, err)
				require.Equal(b, http.StatusOK, w.StatusCode, string(raw))
				require.NoError(b, w.Body.Close())
			}
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "p50_ms")
		})
	}
}
