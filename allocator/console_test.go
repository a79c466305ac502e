package allocator

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/console"
)

// person is signed in to a console in front of an API.
type person struct {
	served
	console *console.Console
	cookies []*http.Cookie
}

func (s served) signIn(pages *console.Console, key string) person {
	s.Helper()
	p := person{served: s, console: pages}
	w := p.send("POST", "/console/sign-in", url.Values{"key": {key}})
	require.Equal(s, http.StatusSeeOther, w.Code, w.Body)
	p.cookies = w.Result().Cookies()
	return p
}

func (p person) send(method, path string, form url.Values) *httptest.ResponseRecorder {
	p.Helper()
	ctx, cancel := context.WithCancel(p.Context())
	defer cancel()
	r := httptest.NewRequestWithContext(ctx, method, "http://localhost"+path, strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Origin", "http://localhost")
	for _, c := range p.cookies {
		r.AddCookie(c)
	}
	w := httptest.NewRecorder()
	p.console.ServeHTTP(w, r)
	return w
}

// Each page and each form of the console in front of a leader, by each role, for a sandbox of the own team and one of another.
// Invariant: P26
func TestConsoleDoesWhatTheKeyMayAndNoMore(t *testing.T) {
	keys := callers{
		"reader": {Key: "reader", Team: "ours", Role: access.ReadOnly}, "member": {Key: "member", Team: "ours", Role: access.Member},
		"admin": {Key: "admin", Team: "ours", Role: access.Admin}, "stranger": {Key: "stranger", Team: "theirs", Role: access.Member},
	}
	synctest.Test(t, func(t *testing.T) {
		s, stop := serveLeader(t, 20, keys)
		defer stop()
		pages, err := console.New(console.Options{API: console.Handler(s.api), APIURL: "http://localhost", Log: zap.NewNop()})
		require.NoError(t, err)
		for key, caller := range keys {
			p := s.signIn(pages, key)
			own, foreign := s.claim("member"), s.claim("stranger")
			sees := []string{own}
			if caller.Role == access.Admin || key == "stranger" {
				sees = append(sees, foreign)
			}
			if key == "stranger" {
				sees = []string{foreign}
			}
			for _, id := range []string{own, foreign} {
				seen := slices.Contains(sees, id)
				for _, path := range []string{"/console/sandboxes", "/console/sandboxes?id=" + id, "/console/", "/console/sandboxes/" + id} {
					w := p.send("GET", path, nil)
					if !seen && !strings.Contains(path, id) {
						require.NotContains(t, w.Body.String(), id, "%s by %s", path, key)
					}
				}
				want := http.StatusOK
				if !seen {
					want = http.StatusNotFound
				}
				require.Equal(t, want, p.send("GET", "/console/sandboxes/"+id, nil).Code, "%s by %s", id, key)
				may := seen && caller.Role.May(access.Member)
				for _, action := range []string{"/timeout", "/open", "/end"} {
					w := p.send("POST", "/console/sandboxes/"+id+action, url.Values{"timeout": {"4000"}})
					require.Equal(t, may, w.Code == http.StatusSeeOther, "%s by %s: %d %s", action, key, w.Code, w.Body)
				}
				owner := map[string]string{own: "member", foreign: "stranger"}[id]
				gone := s.call(owner, "GET", "/sandboxes/"+id, "").Code == http.StatusNotFound
				require.Equal(t, may, gone, "%s by %s", id, key)
			}
			for _, path := range []string{"/console/routers", "/console/fences", "/console/teams"} {
				w := p.send("GET", path, nil)
				require.Equal(t, caller.Role == access.Admin, w.Code == http.StatusOK, "%s by %s: %s", path, key, w.Body)
			}
			w := p.send("POST", "/console/pools/python/scale", url.Values{"warm": {"20"}, "generation": {"1"}})
			require.Equal(t, caller.Role != access.Admin, w.Code == http.StatusForbidden, "%s: %d %s", key, w.Code, w.Body)
			w = p.send("POST", "/console/routers/r/declare-dead", url.Values{"reason": {"x"}, "sure": {"yes"}})
			require.Equal(t, caller.Role != access.Admin, w.Code == http.StatusForbidden, "%s: %d %s", key, w.Code, w.Body)
		}
		// A key that is revoked ends its session.
		p := s.signIn(pages, "member")
		delete(keys, "member")
		require.Contains(t, p.send("GET", "/console/", nil).Header().Get("Location"), "/console/sign-in")
	})
}

// Invariant: P26
func TestConsoleOfAnAPIWithoutKeysAnswersThisMachineOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, stop := serveLeader(t, 3, nil)
		defer stop()
		pages, err := console.New(console.Options{API: console.Handler(s.api), APIURL: "http://localhost", Open: true, Log: zap.NewNop()})
		require.NoError(t, err)
		w := s.call("", "POST", "http://localhost/sandboxes", `{"templateID":"python"}`)
		require.Equal(t, http.StatusCreated, w.Code, w.Body)
		var made openapi.Sandbox
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &made))
		id := made.SandboxID
		end := func(edit func(*http.Request)) int {
			r := httptest.NewRequestWithContext(t.Context(), "POST", "http://localhost/console/sandboxes/"+id+"/end", http.NoBody)
			r.Header.Set("Origin", "http://localhost")
			edit(r)
			w := httptest.NewRecorder()
			pages.ServeHTTP(w, r)
			return w.Code
		}
		for _, edit := range []func(*http.Request){
			func(r *http.Request) { r.Host = "evil.example" },
			func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") },
			func(r *http.Request) { r.Header.Set("Origin", "http://8080-"+id+".localhost") },
			func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") },
			func(r *http.Request) { r.Header.Set("X-Forwarded-For", "192.0.2.1") }, // a proxy on this machine
		} {
			require.Contains(t, []int{http.StatusForbidden, http.StatusMisdirectedRequest, http.StatusBadRequest}, end(edit))
			require.Equal(t, http.StatusOK, s.call("", "GET", "http://localhost/sandboxes/"+id, "").Code)
		}
		require.Equal(t, http.StatusSeeOther, end(func(*http.Request) {}))
	})
}

func TestTeamsHaveTheirLimitsUseAndKeys(t *testing.T) {
	keys := callers{
		"admin": {Key: "admin", Team: "ours", Role: access.Admin}, "idle": {Key: "idle", Team: "idle", Role: access.Member},
		"gone": {Key: "gone", Team: "theirs", Role: access.Member},
	}
	synctest.Test(t, func(t *testing.T) {
		s, stop := serveLeader(t, 5, keys)
		defer stop()
		s.claim("gone")
		s.claim("gone")
		s.call("admin", "DELETE", "/sandboxes/"+s.claim("admin"), "")
		delete(keys, "gone") // its sandboxes stay
		list := func(query string) (all openapi.TeamStatuses) {
			w := s.call("admin", "GET", "/v1/teams"+query, "")
			require.Equal(t, http.StatusOK, w.Code, w.Body)
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &all))
			return all
		}
		key := func(name, role string) []openapi.KeyOfTeam { return []openapi.KeyOfTeam{{Name: name, Role: role}} }
		require.Equal(t, openapi.TeamStatuses{Teams: []openapi.TeamStatus{
			{Team: "idle", Keys: key("idle", "member")}, {Team: "ours", Keys: key("admin", "admin")},
			{Team: "theirs", Sandboxes: 2, Keys: []openapi.KeyOfTeam{}},
		}}, list(""))
		require.Equal(t, openapi.TeamStatuses{Teams: []openapi.TeamStatus{{Team: "idle", Keys: key("idle", "member")}}, Truncated: 2}, list("?limit=1"))
	})
}

func TestRecordsAreFoundByTheBeginOfTheIDAndByMetadata(t *testing.T) {
	keys := callers{"admin": {Key: "admin", Team: "ours", Role: access.Admin}}
	synctest.Test(t, func(t *testing.T) {
		s, stop := serveLeader(t, 5, keys)
		defer stop()
		plain := s.claim("admin")
		w := s.call("admin", "POST", "/sandboxes", `{"templateID":"python","metadata":{"job":"a&b"}}`)
		require.Equal(t, http.StatusCreated, w.Code, w.Body)
		var marked openapi.Sandbox
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &marked))
		find := func(query url.Values) (ids []string) {
			w := s.call("admin", "GET", "/v1/sandboxes?"+query.Encode(), "")
			require.Equal(t, http.StatusOK, w.Code, w.Body)
			var page openapi.SandboxRecords
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &page))
			for _, r := range page.Sandboxes {
				ids = append(ids, r.SandboxID)
			}
			return ids
		}
		require.Equal(t, []string{plain}, find(url.Values{"prefix": {plain[:8]}}))
		require.Equal(t, []string{plain}, find(url.Values{"prefix": {plain}}))
		require.Empty(t, find(url.Values{"prefix": {plain[1:]}}))
		require.Equal(t, []string{marked.SandboxID}, find(url.Values{"metadata": {"job=a%2526b"}}))
		require.Empty(t, find(url.Values{"metadata": {"job=a"}}))
	})
}
