package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/adminpages"
	"github.com/berth-sandbox/berth/internal/localhost"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Options configure the pages. All are required except AnyHost.
type Options struct {
	// AnyHost turns off the check of the Host header, for a listener of Admin that is not on
	// loopback and whose name is therefore unknown.
	AnyHost bool
	Cache   *routecache.Cache
	Tracker *lastactive.Tracker
	// Ready returns nil if routes may be served, or the reason why not.
	Ready   func() error
	Metrics prometheus.Gatherer
	Now     func() time.Time
}

// Pages has the HTTP handlers.
type Pages struct{ o Options }

// New checks the options.
func New(o Options) (*Pages, error) {
	if err := options.Require(o, "Cache", "Tracker", "Ready", "Metrics", "Now"); err != nil {
		return nil, err
	}
	return &Pages{o}, nil
}

// Admin returns the handler of all pages.
func (p *Pages) Admin() http.Handler {
	mux := p.o.health("/admin/last-active, /admin/routes, /healthz, /readyz, /metrics or /debug/pprof/")
	mux.HandleFunc("GET /admin/last-active", p.o.lastActive)
	mux.HandleFunc("GET /admin/routes", p.o.routes)
	adminpages.AddProfiles(mux, nil)
	if p.o.AnyHost {
		return mux
	}
	// A web page whose host name resolves to a loopback address (DNS rebinding) must not read
	// the IDs.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !localhost.Is(localhost.Hostname(r.Host)) {
			apierror.New(apierror.HostRefused,
				"host %q: this listener accepts only localhost and loopback addresses", r.Host).Write(w)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// Health returns the handler of /healthz, /readyz and /metrics.
func (p *Pages) Health() http.Handler { return p.o.health("/healthz, /readyz or /metrics") }

func (o Options) health(pages string) *http.ServeMux {
	alive := func() error { return nil }
	return adminpages.New(adminpages.Checks{"/healthz": alive, "/readyz": o.Ready}, o.Metrics, pages)
}

// LastActive is the body of /admin/last-active.
type LastActive struct {
	// Now is the router's clock at the time of the dump.
	Now time.Time `json:"now"`
	// LookError says why this router cannot tell what its Envoy holds open. No sandbox is
	// released for being idle meanwhile. Absent: the newest look succeeded.
	LookError string `json:"lookError,omitempty"`
	// Sandboxes are sorted by ID.
	Sandboxes []LastActiveSandbox `json:"sandboxes"`
}

// LastActiveSandbox says when one sandbox was last used through this gateway.
type LastActiveSandbox struct {
	// SandboxID is empty if the router does not know which sandbox is at PodIP.
	SandboxID string `json:"sandboxID"`
	PodIP     string `json:"podIP"`
	// LastActive is Now less the age.
	LastActive time.Time `json:"lastActive"`
	// AgeSeconds is the time since the last use. 0: it is in use, or may be.
	AgeSeconds float64 `json:"ageSeconds"`
	// Kind is the kind of the last use: admission, open, bytes or unknown.
	Kind activity.Kind `json:"kind"`
	// OpenRequests is how many open requests the newest look at Envoy has shown.
	OpenRequests int `json:"openRequests"`
	// UnreadAnswers is how many admitted requests have an answer that Envoy may not have read.
	UnreadAnswers int `json:"unreadAnswers"`
}

func (o Options) lastActive(w http.ResponseWriter, r *http.Request) {
	q, ok := parseQuery(w, r)
	if !ok {
		return
	}
	now := o.Now()
	dump := LastActive{Now: now, LookError: o.Tracker.LookError(), Sandboxes: []LastActiveSandbox{}}
	for _, a := range o.Tracker.Dump() {
		if q.keep(a.ID) {
			dump.Sandboxes = append(dump.Sandboxes, LastActiveSandbox{
				SandboxID: a.ID, PodIP: a.Addr.String(),
				LastActive: now.Add(-a.Age), AgeSeconds: a.Age.Seconds(),
				Kind: a.Kind, OpenRequests: a.Open, UnreadAnswers: a.Unread,
			})
		}
	}
	slices.SortFunc(dump.Sandboxes, func(a, b LastActiveSandbox) int {
		return cmp.Or(cmp.Compare(a.SandboxID, b.SandboxID), cmp.Compare(a.PodIP, b.PodIP))
	})
	if q.text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if dump.LookError != "" {
			fmt.Fprintf(w, "cannot tell what is open: %s\n", dump.LookError)
		}
		for _, s := range dump.Sandboxes {
			fmt.Fprintf(w, "%s  %s  %s  %.3fs ago  %s  open %d  unread %d\n",
				cmp.Or(s.SandboxID, "-"), s.PodIP, s.LastActive.UTC().Format(time.RFC3339Nano),
				s.AgeSeconds, s.Kind, s.OpenRequests, s.UnreadAnswers)
		}
		return
	}
	writeJSON(w, dump)
}

// Routes is the body of /admin/routes.
type Routes struct {
	// Fresh is false if routes are not served, because the allocator has been unreachable for
	// longer than max-stale.
	Fresh bool `json:"fresh"`
	// Routes are sorted by ID.
	Routes []Route `json:"routes"`
}

// Route says which pod holds a sandbox.
type Route struct {
	SandboxID   string `json:"sandboxID"`
	PodIP       string `json:"podIP"`
	DefaultPort uint16 `json:"defaultPort"`
	// Ports are the ports that requests may reach, in ascending order. Absent: every port.
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
			dump.Routes = append(dump.Routes, Route{
				SandboxID: e.ID, PodIP: e.Route.Addr.String(),
				DefaultPort: e.Route.DefaultPort, Ports: e.Route.Ports.List(),
			})
		}
	}
	sort.Slice(dump.Routes, func(i, j int) bool { return dump.Routes[i].SandboxID < dump.Routes[j].SandboxID })
	if q.text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, e := range dump.Routes {
			fmt.Fprintf(w, "%s  %s  default port %d  ports %v\n",
				e.SandboxID, e.PodIP, e.DefaultPort, routecache.NewPorts(e.Ports))
		}
		return
	}
	writeJSON(w, dump)
}

// query has the parameters of both dumps.
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
	_ = encoder.Encode(v) // fails only if the client has gone
}
