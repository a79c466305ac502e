package agent

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

// FuzzRequestsWithoutToken sends any request to a configured agent: without the token nothing is served, and
// nothing changes its configuration.
func FuzzRequestsWithoutToken(f *testing.F) {
	f.Add("GET", "/envs", "", "", []byte(nil))
	f.Add("POST", "/process.Process/Start", "application/connect+json", "secreT", []byte("\x00\x00\x00\x00\x02{}"))
	f.Add("POST", "/process.Process/../process.Process/List", "application/json", "", []byte("{}"))
	f.Add("GET", "//files", "", "", []byte(nil))
	f.Add("GET", "/files?signature=of+secre", "", "", []byte(nil))
	f.Add("POST", "/init", "application/octet-stream", "", []byte{initbox.Version, 0, 1})
	f.Add("POST", "/archive", "application/octet-stream", "", []byte{initbox.Version, 0, 1})
	f.Add("POST", "/restore", "application/octet-stream", "", []byte{0, 0, 0, 1, initbox.Version, 0})
	f.Fuzz(func(t *testing.T, method, target, contentType, token string, body []byte) {
		h := newHarness(t)
		h.configure(initbox.Config{SandboxID: "a", AccessToken: "secret"})
		before := h.Config()
		u, err := url.ParseRequestURI(target)
		if err != nil || token == "secret" || u.Query().Get("signature") == "of secret" {
			return
		}
		r := &http.Request{Method: method, URL: u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header: http.Header{}, Body: http.NoBody}
		if len(body) > 0 {
			r = httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
			r.Method, r.URL = method, u
		}
		r.Header.Set("Content-Type", contentType)
		r.Header.Set(TokenHeader, token)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.NotContains(t, w.Body.String(), "served")
		require.NotEqual(t, http.StatusInternalServerError, w.Code)
		require.Same(t, before, h.Config())
	})
}
