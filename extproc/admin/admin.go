package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/adminpages"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Cache knows where sandboxes are. *routecache.Cache implements it.
type Cache interface {
	Dump() []routecache.Entry
	Fresh() bool
}

// Tracker knows how sandboxes are used. *lastactive.Tracker implements it.
type Tracker interface {
	Dump() []lastactive.Activity
	LookError() string
}

// Options configure the pages. All are required unless they say otherwise.
type Options struct {
	// AnyHost (optional) lets Admin answer at any address and for any host. Otherwise it answers only at
	// loopback addresses, and only to requests for localhost or a loopback address.
	AnyHost bool
	Cache   Cache
	// Tracker is nil for a router that knows no use. Then there is no page of it.
	Tracker Tracker
	// Ready returns nil if routes may be served, or the reason why not.
	Ready   func() error
	Metrics prometheus.Gatherer
	Now     func() time.Time
	// Envoy connects to Envoy's admin socket.
	Envoy *http.Client
}

// Pages has the HTTP handlers.
type Pages struct{ o Options }

// New checks the options.
func New(o Options) (*Pages, error) {
	if err := options.Require(o, "Cache", "Ready", "Metrics", "Now", "Envoy"); err != nil {
		return nil, err
	}
	return &Pages{o}, nil
}

// Admin returns the handler of all pages.
func (p *Pages) Admin() http.Handler {
	mux := p.o.health("/admin/last-active, /admin/routes, /admin/envoy/..., /healthz, /readyz, /metrics or /debug/pprof/")
	if p.o.Tracker != nil {
		mux.HandleFunc("GET /admin/last-active", page(p.o.lastActive))
	}
	mux.HandleFunc("GET /admin/routes", page(p.o.routes))
	for _, name := range []string{"clusters", "config_dump", "server_info", "stats/prometheus"} {
		mux.Handle("GET /admin/envoy/"+name, adminpages.LoopbackOnly(p.o.envoyPage(name)))
	}
	adminpages.AddProfiles(mux, nil)
	if p.o.AnyHost {
		return mux
	}
	return adminpages.LoopbackOnly(mux)
}

// Health returns the handler of /healthz, /readyz and /metrics.
func (p *Pages) Health() http.Handler { return p.o.health("/healthz, /readyz or /metrics") }

func (o Options) health(pages string) *http.ServeMux {
	alive := func() error { return nil }
	return adminpages.New(adminpages.Checks{"/healthz": alive, "/readyz": o.Ready}, o.Metrics, pages)
}

// envoyTime bounds a page of Envoy.
const envoyTime = 10 * time.Second

// envoyPage passes on a page of Envoy's admin interface that changes nothing. Envoy leaves private keys out of its
// configuration.
func (o Options) envoyPage(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), envoyTime)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envoy/"+name, http.NoBody)
		var answer *http.Response
		if err == nil {
			answer, err = o.Envoy.Do(request)
		}
		if err != nil {
			http.Error(w, "the admin socket of Envoy: "+err.Error(), http.StatusBadGateway)
			return
		}
		defer answer.Body.Close()
		w.Header().Set("Content-Type", answer.Header.Get("Content-Type"))
		w.WriteHeader(answer.StatusCode)
		_, _ = io.Copy(w, answer.Body) // a reader that sees too few bytes knows it
	})
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

func (o Options) lastActive(keep filter) LastActive {
	now := o.Now()
	dump := LastActive{Now: now, LookError: o.Tracker.LookError(), Sandboxes: []LastActiveSandbox{}}
	for _, a := range o.Tracker.Dump() {
		if keep(a.ID) {
			dump.Sandboxes = append(dump.Sandboxes, LastActiveSandbox{
				SandboxID: a.ID, PodIP: a.Addr.String(),
				LastActive: now.Add(-a.Age), AgeSeconds: a.Age.Seconds(),
				Kind: a.Kind, OpenRequests: a.Open, UnreadAnswers: a.Unread,
			})
		}
	}
	slices.SortFunc(dump.Sandboxes, func(a, b LastActiveSandbox) int {
		return cmp.Compare(a.SandboxID, b.SandboxID)
	})
	return dump
}

// String is the text form: a line for each sandbox.
func (d LastActive) String() string {
	var text strings.Builder
	if d.LookError != "" {
		fmt.Fprintf(&text, "cannot tell what is open: %s\n", d.LookError)
	}
	for _, s := range d.Sandboxes {
		fmt.Fprintf(&text, "%s  %s  %s  %.0fs ago  %s  open %d  unread %d\n",
			s.SandboxID, s.PodIP, s.LastActive.UTC().Format(time.RFC3339),
			s.AgeSeconds, s.Kind, s.OpenRequests, s.UnreadAnswers)
	}
	return text.String()
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

func (o Options) routes(keep filter) Routes {
	dump := Routes{Fresh: o.Cache.Fresh(), Routes: []Route{}}
	for _, e := range o.Cache.Dump() {
		if keep(e.ID) {
			dump.Routes = append(dump.Routes, Route{
				SandboxID: e.ID, PodIP: e.Route.Addr.String(),
				DefaultPort: e.Route.DefaultPort, Ports: e.Route.Ports.List(),
			})
		}
	}
	slices.SortFunc(dump.Routes, func(a, b Route) int { return cmp.Compare(a.SandboxID, b.SandboxID) })
	return dump
}

// String is the text form: a line for each route.
func (d Routes) String() string {
	var text strings.Builder
	for _, r := range d.Routes {
		fmt.Fprintf(&text, "%s  %s  default port %d  ports %v\n",
			r.SandboxID, r.PodIP, r.DefaultPort, routecache.NewPorts(r.Ports))
	}
	return text.String()
}

// filter reports whether a dump includes a sandbox.
type filter func(id string) bool

// page serves a dump as JSON, or in its text form.
func page[D fmt.Stringer](dump func(filter) D) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		keep, asText, err := parseQuery(r.URL.RawQuery)
		if err != nil {
			apierror.New(apierror.BadRequest, "%v", err).Write(w)
			return
		}
		d := dump(keep)
		if asText {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_, _ = io.WriteString(w, d.String())
			return
		}
		w.Header().Set("Content-Type", "application/json")
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		_ = encoder.Encode(d) // fails only if the client has gone
	}
}

func parseQuery(query string) (keep filter, asText bool, err error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return nil, false, fmt.Errorf("query: %w", err)
	}
	for name, given := range values {
		if name != "id" && name != "prefix" && name != "format" {
			return nil, false, fmt.Errorf("parameter %q: unknown; id, prefix and format are known", name)
		}
		if len(given) > 1 {
			return nil, false, fmt.Errorf("parameter %q: given %d times", name, len(given))
		}
	}
	id, prefix, format := values.Get("id"), values.Get("prefix"), cmp.Or(values.Get("format"), "json")
	if values.Has("id") && id == "" {
		return nil, false, errors.New(`parameter "id": must not be empty; leave it out to see all`)
	}
	if format != "json" && format != "text" {
		return nil, false, fmt.Errorf("parameter format=%q: must be json or text", format)
	}
	return func(candidate string) bool {
		return (id == "" || candidate == id) && strings.HasPrefix(candidate, prefix)
	}, format == "text", nil
}
