package allocator

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/console"
)

// BenchmarkConsole: pages of the console over HTTP, with 5,000 live sandboxes of ten teams, from the request to the
// last byte.
func BenchmarkConsole(b *testing.B) {
	const sandboxes, batch = 5_000, 100
	keys := callers{"admin": {Key: "admin", Team: "ops", Role: access.Admin}}
	for i := range 10 {
		name := fmt.Sprint("team", i)
		keys[name] = access.Caller{Key: name, Team: name, Role: access.Admin}
	}
	var objects atomic.Int64
	leader, stop := serveLeader(b, sandboxes, keys, func(m *memoryAPI) {
		m.written = func(_, at string, _ map[string]any) {
			if path.Base(path.Dir(at)) == "sandboxes" {
				objects.Add(1)
			}
		}
	})
	defer stop()
	for i := range sandboxes / batch {
		body := fmt.Sprintf(`{"pool":"python","count":%d,"timeout":36000,"user":"u%d","metadata":{"run":"r%d","agent":"a"}}`,
			batch, i, i)
		w := leader.call(fmt.Sprint("team", i%10), "POST", "/v1/claims", body)
		require.Equal(b, http.StatusCreated, w.Code, w.Body)
	}
	// The Sandbox objects are written in the background.
	for before := int64(-1); before < sandboxes || before < objects.Load(); time.Sleep(time.Second) {
		before = objects.Load()
	}
	pages, err := console.New(console.Options{
		API: console.Handler(leader.api), APIURL: "http://localhost", Log: zap.NewNop(),
	})
	require.NoError(b, err)
	p := leader.signIn(pages, "admin")
	server := httptest.NewServer(pages)
	defer server.Close()
	for _, page := range []struct{ name, path, shows string }{
		{"overview", "", "Live sandboxes</span> <span class=\"value\">5000<"}, {"sandboxes", "sandboxes", "Next page"},
		{"metadata", "sandboxes?metadata=run%3Dr3", "aria-label=\"Sandboxes\""},
		{"none", "sandboxes?user=none", "No sandbox matches"}, {"pools", "pools", "python"},
	} {
		b.Run(page.name, func(b *testing.B) {
			b.ReportAllocs()
			var all []time.Duration
			size := 0
			for b.Loop() {
				r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, server.URL+"/console/"+page.path, nil)
				require.NoError(b, err)
				r.Host = "localhost" // where the session began
				for _, c := range p.cookies {
					r.AddCookie(c)
				}
				began := time.Now()
				w, err := http.DefaultClient.Do(r)
				require.NoError(b, err)
				raw, err := io.ReadAll(w.Body)
				all = append(all, time.Since(began))
				require.NoError(b, err)
				require.Equal(b, http.StatusOK, w.StatusCode, string(raw))
				require.Contains(b, string(raw), page.shows)
				require.NoError(b, w.Body.Close())
				size = len(raw)
			}
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "p50_ms")
			b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "p99_ms")
			b.ReportMetric(float64(size), "bytes")
		})
	}
}
