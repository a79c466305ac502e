package rest

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
)

func TestPeopleGetThePageWithoutKey(t *testing.T) {
	a := &api{Options: Options{PublicHost: "sandbox.example.com:8443"}}
	handler := a.home(http.NotFoundHandler())
	ask := func(method, path, accept, mode string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, http.NoBody)
		r.Header.Set("Accept", accept)
		if mode != "" {
			r.Header.Set("Sec-Fetch-Mode", mode)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	const page = "text/html,application/xhtml+xml"
	for _, mode := range []string{"", "navigate"} {
		w := ask(http.MethodGet, "/", page, mode)
		require.Equal(t, http.StatusOK, w.Code)
		require.Equal(t, string(apierror.Home("sandbox.example.com")), w.Body.String())
		require.Equal(t, apierror.PageCSP, w.Header().Get("Content-Security-Policy"))
	}
	require.Equal(t, http.StatusNotFound, ask(http.MethodPost, "/", page, "").Code)
	require.Equal(t, http.StatusNotFound, ask(http.MethodGet, "/sandboxes", page, "").Code)
	require.Equal(t, http.StatusNotFound, ask(http.MethodGet, "/", "*/*", "").Code)
	require.Equal(t, http.StatusNotFound, ask(http.MethodGet, "/", page, "cors").Code)
}
