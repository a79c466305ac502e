package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Invariant: P15
func TestPrivateSandboxOpensWithItsTokenOrLink(t *testing.T) {
	e := start(t, 1)
	client := e.client()
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	a := e.api(http.MethodPost, "/v2/sandboxes", `{"templateID":"`+e.pool+`","timeout":600,`+
		`"network":{"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}"}}`)
	require.Equal(t, http.StatusCreated, a.code, a.body)
	var s openapi.Sandbox
	require.NoError(t, json.Unmarshal([]byte(a.body), &s))
	require.NotNil(t, s.TrafficAccessToken)
	host := e.host(8080, s.SandboxID)
	get := func(host, path string, headers ...string) answer {
		t.Helper()
		a, err := do(t.Context(), client, http.MethodGet, "http://gateway"+path, host, "", headers...)
		require.NoError(t, err)
		return a
	}
	e.eventually(func() error { // a real cluster's network may need a moment
		if a := get(host, "/", "E2b-Traffic-Access-Token", *s.TrafficAccessToken); a.code != http.StatusOK {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	require.Equal(t, s.PodName, get(host, "/", "E2b-Traffic-Access-Token", *s.TrafficAccessToken).identity(t).Pod)
	for _, headers := range [][]string{nil, {"E2b-Traffic-Access-Token", *s.TrafficAccessToken + "0"}} {
		denied := get(host, "/", headers...)
		require.Equal(t, http.StatusForbidden, denied.code)
		require.Equal(t, apierror.AccessDenied, denied.refusal(t).Reason)
	}

	// The token is the same in later answers, and no list has it.
	a = e.api(http.MethodPost, "/v2/sandboxes/"+s.SandboxID+"/connect", `{}`)
	require.Contains(t, a.body, *s.TrafficAccessToken)
	require.NotContains(t, e.api(http.MethodGet, "/v2/sandboxes", "").body, *s.TrafficAccessToken)

	a = e.api(http.MethodPost, "/v1/sandboxes/"+s.SandboxID+"/links", `{"path":"/a"}`)
	require.Equal(t, http.StatusCreated, a.code, a.body)
	var link openapi.Link
	require.NoError(t, json.Unmarshal([]byte(a.body), &link))
	u, err := url.Parse(link.URL)
	require.NoError(t, err)
	a = get(u.Host, u.RequestURI())
	require.Equal(t, http.StatusSeeOther, a.code, a.body)
	require.Equal(t, "/a", a.header.Get("Location"))
	cookie, _, _ := strings.Cut(a.header.Get("Set-Cookie"), ";")
	require.Equal(t, s.PodName, get(u.Host, "/a", "Cookie", cookie).identity(t).Pod)

	e.release(s.SandboxID)
	require.Equal(t, http.StatusGone, get(host, "/", "E2b-Traffic-Access-Token", *s.TrafficAccessToken).code)
}
