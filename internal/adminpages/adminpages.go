package adminpages

import (
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/localhost"
)

// Checks are the probes of a service, by path. Each returns nil, or why the probe fails.
type Checks map[string]func() error

// New returns a mux with the checks and the metrics. Other paths get a 404 whose message
// names pages. The caller may add further pages to the mux.
func New(checks Checks, metrics prometheus.Gatherer, pages string) *http.ServeMux {
	mux := http.NewServeMux()
	for path, check := range checks {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			if err := check(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{
		EnableOpenMetrics: true, // the format that has exemplars
	}))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		apierror.New(apierror.NotFound, "no such page; try %s", pages).Write(w)
	})
	return mux
}

// AddProfiles adds /debug/pprof/ to mux. guard, if not nil, wraps each of its pages: the
// pages show the command line and the memory layout, so they must not be reachable over the
// network.
func AddProfiles(mux *http.ServeMux, guard func(http.Handler) http.Handler) {
	for path, page := range map[string]http.HandlerFunc{
		"":        pprof.Index,
		"cmdline": pprof.Cmdline,
		"profile": withoutReadDeadline(pprof.Profile),
		"symbol":  pprof.Symbol,
		"trace":   withoutReadDeadline(pprof.Trace),
	} {
		handler := http.Handler(page)
		if guard != nil {
			handler = guard(page)
		}
		mux.Handle("GET /debug/pprof/"+path, handler)
	}
}

// withoutReadDeadline removes the listener's read deadline for pages that run as long as the
// request asks for. The request has been read, but the deadline would still end them. These
// pages extend the write deadline themselves.
func withoutReadDeadline(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // fails only without a connection, in tests
		h(w, r)
	}
}

// LoopbackOnly refuses requests that did not reach this process at a loopback address, and
// requests whose Host header is neither localhost nor a loopback address. The second rule
// stops web pages whose host name resolves to a loopback address (DNS rebinding).
func LoopbackOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !atLoopback(r) {
			apierror.New(apierror.HostRefused, "this page answers only at a loopback address, for example through kubectl port-forward").Write(w)
			return
		}
		if !localhost.Is(localhost.Hostname(r.Host)) {
			apierror.New(apierror.HostRefused,
				"host %q: this page answers only to localhost and loopback addresses", r.Host).Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// atLoopback reports whether the request's connection ends at a loopback address of this
// machine.
func atLoopback(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return false
	}
	at, err := netip.ParseAddrPort(local.String())
	return err == nil && at.Addr().Unmap().IsLoopback()
}
