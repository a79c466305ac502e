package rest

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func accessKey(t *testing.T) *sandboxaccess.Key {
	t.Helper()
	k, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	return k
}

func handlerWithAccess(t *testing.T, f *fake) http.Handler {
	t.Helper()
	h, err := New(Options{
		Allocator: f, AccessKey: accessKey(t), PublicScheme: "https", PublicHost: "sandbox.example.com:8443",
		MinIdleTimeout: minIdle, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	return h
}

func poolWith(access v1alpha1.Access) *v1alpha1.SandboxPool {
	p := poolOf("python")
	p.Spec.Access = access
	return p
}

func TestClaimChoosesAccessWithinItsPool(t *testing.T) {
	const public, token, team = core.AccessPublic, core.AccessToken, core.AccessTeam
	for _, c := range []struct {
		pool v1alpha1.Access
		body string
		want core.Access
		says string
	}{
		{"", ``, public, ""},
		{"public", `"network":{}`, public, ""},
		{"public", `"network":{"allowPublicTraffic":null}`, public, ""},
		{"public", `"network":{"allowPublicTraffic":true}`, public, ""},
		{"public", `"network":{"allowPublicTraffic":false}`, token, ""},
		{"public", `"access":"token"`, token, ""},
		{"public", `"access":"team","network":{"allowPublicTraffic":false}`, team, ""},
		{"public", `"access":"public","network":{"allowPublicTraffic":false}`, 0, "access: public contradicts network.allowPublicTraffic false"},
		{"public", `"access":"token","network":{"allowPublicTraffic":true}`, 0, "access: token contradicts network.allowPublicTraffic true"},
		{"public", `"access":"private"`, 0, "access: "},
		{"token", ``, public, ""}, // the core makes it that of the pool
		{"token", `"access":"team"`, team, ""},
		{"token", `"access":"public"`, 0, "access: the access of the pool is token"},
		{"token", `"network":{"allowPublicTraffic":true}`, 0, "network.allowPublicTraffic: the access of the pool is token"},
		{"team", `"access":"token"`, 0, "access: the access of the pool is team"},
		{"team", `"network":{"allowPublicTraffic":false}`, token, ""},
	} {
		f := &fake{pools: []*v1alpha1.SandboxPool{poolWith(c.pool)}}
		w := call(handlerWithAccess(t, f), "POST", "/v2/sandboxes", strings.Replace(`{"templateID":"python",`+c.body+`}`, ",}", "}", 1))
		if c.says != "" {
			require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, c.says)
			continue
		}
		require.Equal(t, 201, w.Code, c.body)
		require.Equal(t, c.want, f.claim.Binding.Access, c.body)
	}
	f := &fake{pools: []*v1alpha1.SandboxPool{poolWith("token")}}
	refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`), 501, apierror.NotImplemented)
}

func TestMaskAndHTTPSPortsAreChecked(t *testing.T) {
	for mask, ok := range map[string]bool{
		"localhost": true, "localhost:${PORT}": true, "localhost:3000": true, "127.0.0.1:${PORT}": true, "[::1]:${PORT}": true, "${PORT}.local": true, "": true,
		"a:65535": true, "a:99999": false, "a:65536": false, "a:0": false, "[::1]:65536": false, "a:1${PORT}": false, "localhost:": false, "localhost:x": false, "a b": false, "a\nb": false, "a/b": false, "a@b": false, "a,b": false, "http://a": false, "${port}": false,
		"localhost:${PORT}0": false, "localhost:${PORT": false, strings.Repeat("a", 254): false, "é": false,
	} {
		raw, err := json.Marshal(mask)
		require.NoError(t, err)
		f := &fake{}
		w := call(handlerWithAccess(t, f), "POST", "/sandboxes", `{"templateID":"python","network":{"maskRequestHost":`+string(raw)+`}}`)
		if !ok {
			require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "network.maskRequestHost: ", mask)
			continue
		}
		require.Equal(t, 201, w.Code, mask)
		require.Equal(t, mask, f.claim.Binding.MaskHost)
	}
	f := &fake{}
	w := call(handlerWithAccess(t, f), "POST", "/sandboxes", `{"templateID":"python","network":{"httpsPorts":[8443,443,8443],"maskRequestHost":"a"}}`)
	require.Equal(t, 201, w.Code)
	require.Equal(t, []uint16{443, 8443}, f.claim.Binding.HTTPSPorts)
	var shown openapi.Sandbox
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &shown))
	require.Equal(t, &openapi.SandboxNetwork{AllowPublicTraffic: true, MaskRequestHost: "a", HTTPSPorts: []int{443, 8443}}, shown.Network)
	for _, ports := range []string{"[0]", "[65536]", `["1"]`, "1"} {
		w := call(handlerWithAccess(t, f), "POST", "/sandboxes", `{"templateID":"python","network":{"httpsPorts":`+ports+`}}`)
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "network.httpsPorts")
	}
}

func TestCredentialsAreAnsweredForOneSandboxOnly(t *testing.T) {
	for access, want := range map[core.Access][2]bool{
		core.AccessPublic: {false, false}, core.AccessToken: {true, true}, core.AccessTeam: {false, true},
	} {
		sb := core.Sandbox{Binding: core.Binding{ID: "k3x9", Access: access}, Phase: core.Running, DefaultPort: 8080}
		f := &fake{sandboxes: map[string]core.Sandbox{"k3x9": sb}, live: []core.Sandbox{sb}, status: core.CallOK, claimed: func(s *core.Sandbox) { s.Access = access }}
		h := handlerWithAccess(t, f)
		for _, r := range [][3]string{
			{"POST", "/v2/sandboxes", `{"templateID":"python"}`}, {"GET", "/sandboxes/k3x9", ""},
			{"POST", "/v2/sandboxes/k3x9/connect", "{}"}, {"POST", "/sandboxes/k3x9/resume", "{}"},
		} {
			var shown openapi.Sandbox
			require.NoError(t, json.Unmarshal(call(h, r[0], r[1], r[2]).Body.Bytes(), &shown))
			require.EqualValues(t, access.String(), shown.Access, r)
			require.Equal(t, want, [2]bool{shown.TrafficAccessToken != nil, shown.EnvdAccessToken != nil}, r)
			if want[0] {
				require.Equal(t, accessKey(t).Token("k3x9"), *shown.TrafficAccessToken)
			}
			if want[1] {
				require.True(t, accessKey(t).Secret("k3x9").IsAgentToken("k3x9", *shown.EnvdAccessToken))
			}
		}
		list := call(h, "GET", "/v2/sandboxes", "").Body.String()
		require.NotContains(t, list, "AccessToken")
	}
}

func TestLinkOpensThePortThatWasAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sb := core.Sandbox{Binding: core.Binding{ID: "k3x9", Access: core.AccessToken}, Phase: core.Running, DefaultPort: 8080}
		open := sb
		open.ID, open.Access = "open", core.AccessPublic
		f := &fake{sandboxes: map[string]core.Sandbox{"k3x9": sb, "open": open}}
		h := handlerWithAccess(t, f)
		for body, c := range map[string]struct {
			host, path string
			age        time.Duration
		}{
			`{}`: {"8080-k3x9.sandbox.example.com:8443", "/", time.Hour},
			`{"port":3000,"path":"/a?b=c","expiresIn":60}`: {"3000-k3x9.sandbox.example.com:8443", "/a?b=c", time.Minute},
		} {
			w := call(h, "POST", "/v1/sandboxes/k3x9/links", body)
			require.Equal(t, 201, w.Code, w.Body)
			var link openapi.Link
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &link))
			require.WithinDuration(t, time.Now().Add(c.age), *link.ExpiresAt, time.Second)
			u, err := url.Parse(link.URL)
			require.NoError(t, err)
			require.Equal(t, c.host, u.Host)
			port := uint16(8080)
			if c.path != "/" {
				port = 3000
			}
			path, expires, err := accessKey(t).Secret("k3x9").OpenLink("k3x9", port, u.RequestURI(), time.Now())
			require.NoError(t, err)
			require.Equal(t, c.path, path)
			require.True(t, expires.Equal(*link.ExpiresAt))
		}
		require.JSONEq(t, `{"url":"https://8080-open.sandbox.example.com:8443/a"}`, call(h, "POST", "/v1/sandboxes/open/links", `{"path":"/a"}`).Body.String())
		for _, body := range []string{`{"port":0}`, `{"port":65536}`, `{"path":"//evil.example"}`, `{"path":"a"}`, `{"expiresIn":0}`, `{"expiresIn":2592001}`, `{"ports":1}`} {
			refusal(t, call(h, "POST", "/v1/sandboxes/k3x9/links", body), 400, apierror.BadRequest)
		}
		refusal(t, call(h, "POST", "/v1/sandboxes/none/links", ""), 404, apierror.SandboxNotFound)
		refusal(t, call(handler(t, f), "POST", "/v1/sandboxes/k3x9/links", ""), 501, apierror.NotImplemented)
	})
}

func TestReaderGetsNoCredentials(t *testing.T) {
	a := api{Options: Options{AccessKey: accessKey(t)}}
	for role, want := range map[access.Role]bool{access.Admin: true, access.Member: true, access.ReadOnly: false, "": false} {
		ctx := access.With(t.Context(), access.Caller{Team: "a", Role: role})
		shown := a.withCredentials(ctx, openapi.Sandbox{}, &core.Sandbox{Binding: core.Binding{ID: "k3x9", Access: core.AccessToken}})
		require.Equal(t, want, shown.TrafficAccessToken != nil, role)
		require.Equal(t, want, shown.EnvdAccessToken != nil, role)
	}
}
