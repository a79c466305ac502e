package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Invariant: P15
func TestTeamSandboxOpensWithKeysUntilRevoked(t *testing.T) {
	e := start(t, 1)
	e.waitWarm(1)
	member, revoke := e.newKey("a", access.Member)
	reader, _ := e.newKey("a", access.ReadOnly)
	stranger, _ := e.newKey("b", access.Admin)
	s := sandboxOf(t, e.as(member, http.MethodPost, "/sandboxes",
		`{"templateID":"`+e.pool+`","timeout":600,"access":"team"}`))
	client, host := e.client(), e.host(8080, s.SandboxID)
	with := func(key string, code int) (a answer) { // each gateway gets the keys by itself
		t.Helper()
		e.eventually(func() (err error) {
			for range 10 {
				a, err = do(t.Context(), client, http.MethodGet, "http://gateway/", host, "", "X-API-Key", key)
				if err == nil && a.code != code {
					err = fmt.Errorf("%d %s", a.code, a.body)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
		return a
	}
	for _, key := range []string{member, reader} {
		a := with(key, http.StatusOK)
		require.Equal(t, s.PodName, a.identity(t).Pod)
		require.NotContains(t, a.body, key)
	}
	for _, key := range []string{stranger, e.site.key(), access.NewKey(), ""} {
		require.Equal(t, apierror.AccessDenied, with(key, http.StatusForbidden).refusal(t).Reason)
	}
	revoke()
	with(member, http.StatusForbidden)
	with(reader, http.StatusOK)
	e.release(s.SandboxID)
	require.Equal(t, "this sandbox has been released", with(reader, http.StatusGone).refusal(t).Message,
		"not how it ended")
}

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
