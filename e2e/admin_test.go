package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

func TestAdminListenersHaveThePagesOfTheReference(t *testing.T) {
	e := startHere(t, 0)
	raw, err := os.ReadFile(filepath.Join("..", "docs", "reference", "admin.md"))
	require.NoError(t, err)
	leader, err := e.stack.Leader(t.Context())
	require.NoError(t, err)
	get := func(url string) answer {
		a, err := do(t.Context(), http.DefaultClient, http.MethodGet, url, "", "")
		require.NoError(t, err, url)
		return a
	}
	// named are the pages that the answer to any other path names. Those of Envoy are one of them.
	named := map[string][]string{}
	var common []string
	for line := range strings.Lines(string(raw)) {
		cells := strings.Split(line, " | ")
		if !strings.HasPrefix(line, "| `/") {
			continue
		}
		require.Len(t, cells, 4, line)
		for _, page := range regexp.MustCompile("`(/[^`]+)`").FindAllStringSubmatch(cells[0], -1) {
			shown := regexp.MustCompile(`^/admin/envoy/.*`).ReplaceAllString(page[1], "/admin/envoy/...")
			for i, url := range []string{leader.Admin, e.stack.Gateways[0].Admin} {
				status := http.StatusNotFound
				if cells[1+i] == "yes" {
					status = http.StatusOK
					named[url] = append(named[url], shown)
				}
				require.Equal(t, status, get(url+page[1]).code, url+page[1])
			}
			if cells[1] == "yes" && cells[2] == "yes" {
				common = append(common, page[1])
			}
		}
	}
	require.Equal(t, []string{"/healthz", "/readyz", "/metrics", "/debug/pprof/"}, common, "what both programs have")
	for url, expected := range named {
		var problem openapi.Error
		a := get(url + "/")
		require.Equal(t, http.StatusNotFound, a.code)
		require.NoError(t, json.Unmarshal([]byte(a.body), &problem), a.body)
		said := regexp.MustCompile(`/[a-z/_-]+(\.\.\.)?`).FindAllString(problem.Message, -1)
		require.Subset(t, expected, said, problem.Message)
		for _, page := range expected {
			require.Contains(t, problem.Message, page)
		}
	}
}
