package adminpages_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/adminpages"
)

func get(h http.Handler, url string, local net.Addr) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, url, http.NoBody)
	if local != nil {
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, local))
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestFailingCheckIsA503WithTheReason(t *testing.T) {
	t.Parallel()
	var failure error
	mux := adminpages.New(adminpages.Checks{"/readyz": func() error { return failure }}, prometheus.NewRegistry(), "/readyz or /metrics")
	require.Equal(t, 200, get(mux, "/readyz", nil).Code)
	require.Equal(t, 200, get(mux, "/metrics", nil).Code)
	failure = errors.New("no leader")
	w := get(mux, "/readyz", nil)
	require.Equal(t, 503, w.Code)
	require.Contains(t, w.Body.String(), "no leader")
	w = get(mux, "/other", nil)
	require.Equal(t, 404, w.Code)
	require.Contains(t, w.Body.String(), "/readyz or /metrics")
}

func TestProfilesAnswerOnlyOnLoopback(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	adminpages.AddProfiles(mux, adminpages.LoopbackOnly)
	loopback, network := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9902}, &net.TCPAddr{IP: net.IPv4(10, 0, 0, 7), Port: 9902}
	for _, page := range []string{"", "cmdline", "symbol"} {
		page = "/debug/pprof/" + page
		require.Equal(t, 200, get(mux, "http://localhost:9902"+page, loopback).Code, page)
		require.Equal(t, 200, get(mux, "http://127.0.0.1:9902"+page, loopback).Code, page)
		require.NotEqual(t, 200, get(mux, "http://evil.example:9902"+page, loopback).Code, page)
		require.NotEqual(t, 200, get(mux, "http://localhost:9902"+page, network).Code, page)
		require.NotEqual(t, 200, get(mux, "http://localhost:9902"+page, nil).Code, page)
	}
}
