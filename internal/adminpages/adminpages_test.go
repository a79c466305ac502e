package adminpages_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/metric"
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

func TestOnlyOpenMetricsScrapesHaveExemplars(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "x", Buckets: []float64{1}})
	reg.MustRegister(h)
	metric.Observe(h, .5, strings.Repeat("1a", 16))
	mux := adminpages.New(nil, reg, "/metrics")
	require.NotContains(t, get(mux, "/metrics", nil).Body.String(), metric.TraceID)
	r := httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody)
	r.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, r)
	require.Contains(t, w.Body.String(), `x_bucket{le="1.0"} 1 # {trace_id="`+strings.Repeat("1a", 16)+`"} 0.5 `)
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
