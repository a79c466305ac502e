// Package admin is what the router answers to operators and to probes. The whole
// of it shows sandbox IDs, which are credentials, and belongs on loopback, where it
// answers only to localhost and loopback addresses; health and metrics show none, and
// can also be had alone.
//
//	GET /admin/last-active   when each sandbox was last used; ?id= or ?prefix= filter, ?format=text
//	GET /admin/routes        the route cache; same parameters
//	GET /healthz             200 while the process works; never depends on the allocator
//	GET /readyz              200 while routes may be served; else 503 and why
//	GET /metrics             Prometheus
//	GET /debug/pprof/        profiles
package admin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/pprof"
	"net/url"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/localhost"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Options configure the pages. All are required but AnyHost.
type Options struct {
	// AnyHost: the listener of Admin is not on loopback, so its name is not known.
	AnyHost bool
	Cache   *routecache.Cache
	Tracker *lastactive.Tracker
	// Ready returns nil, or why the router is not ready.
	Ready   func() error
	Metrics prometheus.Gatherer
	Now     func() time.Time
}

// Pages are what can be asked for.
type Pages struct{ o Options }

// New checks the options.
func New(o Options) (*Pages, error) {
	if o.Cache == nil || o.Tracker == nil || o.Ready == nil || o.Metrics == nil || o.Now == nil {
		return nil, errors.New("admin: all options but AnyHost are required")
	}
	return &Pages{o}, nil
}

// Admin answers everything.
func (p *Pages) Admin() http.Handler {
	mux := p.o.health("/admin/last-active, /admin/routes, /healthz, /readyz, /metrics or /debug/pprof/")
	mux.HandleFunc("GET /admin/last-active", p.o.lastActive)
	mux.HandleFunc("GET /admin/routes", p.o.routes)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", takesLong(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", takesLong(pprof.Trace))
	if p.o.AnyHost {
		return mux
	}
	// A page in somebody's browser, whose name resolves to a loopback address, must not
	// read the IDs.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !localhost.Is(localhost.Hostname(r.Host)) {
			apierror.New(apierror.HostRefused, "host %q: this listener answers only to localhost and loopback addresses", r.Host).Write(w)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// takesLong is for pages that take as long as they are asked to: the listener's deadline
// for reading the request, which has been read, would end them. That for writing they move
// themselves.
func takesLong(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // an error where there is no connection
		h(w, r)
	}
}

// Health answers /healthz, /readyz and /metrics, and nothing else.
func (p *Pages) Health() http.Handler { return p.o.health("/healthz, /readyz or /metrics") }

func (o Options) health(pages string) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := o.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		apierror.New(apierror.NotFound, "no such page; try %s", pages).Write(w)
	})
	return mux
}

// LastActive is the answer of /admin/last-active.
type LastActive struct {
	// Now is the router's clock at the time of the dump.
	Now time.Time `json:"now"`
	// Blind is why this router cannot tell what its Envoy holds open: no sandbox is released
	// for being idle meanwhile. Absent: it can.
	Blind string `json:"blind,omitempty"`
	// Sandboxes are sorted by ID.
	Sandboxes []LastActiveSandbox `json:"sandboxes"`
}

// LastActiveSandbox says when one sandbox was last used, through this router.
type LastActiveSandbox struct {
	// SandboxID is empty if it is not known which sandbox is at PodIP.
	SandboxID string `json:"sandboxId"`
	PodIP     string `json:"podIP"`
	// LastActive is Now less the age.
	LastActive time.Time `json:"lastActive"`
	// AgeSeconds is the time since it was last in use. 0: it is, or may be.
	AgeSeconds float64 `json:"ageSeconds"`
	// Kind is what the last use was: admission, open, bytes or unknown.
	Kind activity.Kind `json:"kind"`
	// OpenRequests is how many requests the newest look at Envoy has shown to be open.
	OpenRequests int `json:"openRequests"`
	// UnreadAnswers is how many requests were admitted whose answer Envoy may not have
	// read.
	UnreadAnswers int `json:"unreadAnswers"`
}

func (o Options) lastActive(w http.ResponseWriter, r *http.Request) {
	q, ok := parseQuery(w, r)
	if !ok {
		return
	}
	now := o.Now()
	dump := LastActive{Now: now, Blind: o.Tracker.Blind(), Sandboxes: []LastActiveSandbox{}}
	for _, a := range o.Tracker.Dump() {
		if q.keep(a.ID) {
			dump.Sandboxes = append(dump.Sandboxes, LastActiveSandbox{
				SandboxID: a.ID, PodIP: a.Addr.String(), LastActive: now.Add(-a.Age), AgeSeconds: a.Age.Seconds(),
				Kind: a.Kind, OpenRequests: a.Open, UnreadAnswers: a.Unread,
			})
		}
	}
	slices.SortFunc(dump.Sandboxes, func(a, b LastActiveSandbox) int {
		return cmp.Or(cmp.Compare(a.SandboxID, b.SandboxID), cmp.Compare(a.PodIP, b.PodIP))
	})
	if q.text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if dump.Blind != "" {
			fmt.Fprintf(w, "cannot tell what is open: %s\n", dump.Blind)
		}
		for _, s := range dump.Sandboxes {
			fmt.Fprintf(w, "%s  %s  %s  %.3fs ago  %s  open %d  unread %d\n",
				cmp.Or(s.SandboxID, "-"), s.PodIP, s.LastActive.UTC().Format(time.RFC3339Nano), s.AgeSeconds, s.Kind, s.OpenRequests, s.UnreadAnswers)
		}
		return
	}
	writeJSON(w, dump)
}

// Routes is the answer of /admin/routes.
type Routes struct {
	// Fresh is false when routes are not served, because the allocator has been
	// out of reach for too long.
	Fresh bool `json:"fresh"`
	// Routes are sorted by ID.
	Routes []Route `json:"routes"`
}

// Route is where one sandbox is.
type Route struct {
	SandboxID   string `json:"sandboxId"`
	PodIP       string `json:"podIP"`
	DefaultPort uint16 `json:"defaultPort"`
	// Ports are those that may be reached, ascending; absent: all.
	Ports []uint16 `json:"ports,omitempty"`
}

func (o Options) routes(w http.ResponseWriter, r *http.Request) {
	q, ok := parseQuery(w, r)
	if !ok {
		return
	}
	dump := Routes{Fresh: o.Cache.Fresh(), Routes: []Route{}}
	for _, e := range o.Cache.Dump() {
		if q.keep(e.ID) {
			dump.Routes = append(dump.Routes, Route{SandboxID: e.ID, PodIP: e.Route.Addr.String(), DefaultPort: e.Route.DefaultPort, Ports: e.Route.Ports.List()})
		}
	}
	sort.Slice(dump.Routes, func(i, j int) bool { return dump.Routes[i].SandboxID < dump.Routes[j].SandboxID })
	if q.text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, e := range dump.Routes {
			fmt.Fprintf(w, "%s  %s  default port %d  ports %v\n", e.SandboxID, e.PodIP, e.DefaultPort, routecache.NewPorts(e.Ports))
		}
		return
	}
	writeJSON(w, dump)
}

// query is the parameters that both dumps take.
type query struct {
	keep func(id string) bool
	text bool
}

func parseQuery(w http.ResponseWriter, r *http.Request) (query, bool) {
	bad := func(message string) (query, bool) {
		apierror.New(apierror.BadRequest, "%s", message).Write(w)
		return query{}, false
	}
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return bad("query: " + err.Error())
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		switch name {
		case "id", "prefix", "format":
		default:
			return bad(fmt.Sprintf("parameter %q: unknown; id, prefix and format are known", name))
		}
		if len(values[name]) > 1 {
			return bad(fmt.Sprintf("parameter %q: given %d times", name, len(values[name])))
		}
	}
	if values.Has("id") && values.Get("id") == "" {
		return bad(`parameter "id": must not be empty; leave it out to see all`)
	}
	var q query
	switch format := values.Get("format"); format {
	case "", "json":
	case "text":
		q.text = true
	default:
		return bad(fmt.Sprintf("parameter format=%q: must be json or text", format))
	}
	id, prefix := values.Get("id"), values.Get("prefix")
	q.keep = func(candidate string) bool {
		return (id == "" || candidate == id) && strings.HasPrefix(candidate, prefix)
	}
	return q, true
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(v) // the client may have gone; there is nobody else to tell
}
