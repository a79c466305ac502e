package console_test

import (
	"bytes"
	"compress/gzip"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

func sandboxAt(id string) openapi.Sandbox {
	return openapi.Sandbox{
		SandboxID: id, TemplateID: "demo", URL: "https://8080-" + id + ".sandbox.example.com:8443/",
		EnvdAccessToken: new("t-" + id),
	}
}

// Invariant: P26
func TestAgentTokenIsOnlyOnPagesForThoseWhoMayAct(t *testing.T) {
	api := newAPI()
	api.answers["GET /sandboxes/abc"] = sandboxAt("abc")
	s := open(t, api)
	s.signIn("k-member")
	for name, script := range map[string]string{"terminal": "terminal-", "files": "files-"} {
		w := s.get("/console/sandboxes/abc/" + name)
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		body, policy := w.Body.String(), w.Header().Get("Content-Security-Policy")
		require.Contains(t, body, `data-agent="https://49983-abc.sandbox.example.com:8443"`)
		require.Contains(t, body, `data-token="t-abc"`)
		require.Contains(t, body, "/console/static/"+script)
		require.Contains(t, policy, "connect-src 'self' https://*.sandbox.example.com:8443;", "for the agent")
		require.NotContains(t, policy, "unsafe")
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	}

	terminal := s.get("/console/sandboxes/abc/terminal")
	_, nonce, _ := strings.Cut(terminal.Header().Get("Content-Security-Policy"), "style-src 'self' 'nonce-")
	nonce, _, _ = strings.Cut(nonce, "'")
	require.GreaterOrEqual(t, len(nonce), 22)
	require.Contains(t, terminal.Body.String(), `nonce="`+nonce+`"`)
	require.NotContains(t, s.get("/console/sandboxes/abc/terminal").Body.String(), nonce, "it is of one answer")
	require.NotContains(t, s.get("/console/sandboxes/abc/files").Header().Get("Content-Security-Policy"), "nonce")
	hostile := s.get("/console/sandboxes/abc/files?path=%2Ftmp%22%3E%3Cscript%3E").Body.String()
	require.Contains(t, hostile, `data-path="/tmp&#34;&gt;&lt;script&gt;"`)

	reader := open(t, api)
	reader.signIn("k-reader")
	for _, page := range []string{"terminal", "files"} {
		w := reader.get("/console/sandboxes/abc/" + page)
		require.Equal(t, http.StatusForbidden, w.Code)
		require.NotContains(t, w.Body.String(), "t-abc")
		require.Equal(t, http.StatusNotFound, s.get("/console/sandboxes/nosuch/"+page).Code)
	}
}

func TestOverviewDrawsTheHourForOperatorsOnly(t *testing.T) {
	api := newAPI()
	counts := []*int{new(1), nil, new(3)}
	api.answers["GET /v1/history"] = openapi.History{
		Since: noon, Until: noon, StepSeconds: 10, ClaimsClaimed: counts, Live: counts,
		ClaimP50Seconds: []*float64{new(.5), nil, nil},
	}
	s := open(t, api)
	s.signIn("k-admin")
	body := s.get("/console/").Body.String()
	require.Equal(t, 7, strings.Count(body, `<figure class="chart"`))
	require.Contains(t, body, "Time of a claim")
	require.Less(t, len(body), 100<<10)

	api.refusal["GET /v1/history"] = http.StatusServiceUnavailable
	require.Contains(t, s.get("/console/").Body.String(), "The last hour is not known now")
	member := open(t, api)
	member.signIn("k-member")
	require.NotContains(t, member.get("/console/").Body.String(), "Last hour")
}

// What a browser loads at most: every file that the console serves.
func TestAllFilesAreAtMost300KiBCompressed(t *testing.T) {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	licences := 0
	require.NoError(t, filepath.WalkDir("static", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if strings.Contains(path, "LICENSE") {
			licences++
			return nil
		}
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NotContains(t, string(raw), "sourceMappingURL", path)
		_, err = w.Write(raw)
		return err
	}))
	require.NoError(t, w.Close())
	require.Equal(t, 1, licences)
	require.Less(t, out.Len(), 300<<10)
	t.Logf("%d KiB", out.Len()>>10)
}
