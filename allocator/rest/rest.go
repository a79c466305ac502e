package rest

import (
	"context"
	"errors"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
)

// Bounds of what a client may send.
const (
	maxBody     = 64 << 10
	maxMetadata = 2 << 10
	// defaultTimeout is what an absent timeout means, as E2B documents it.
	defaultTimeout    = 300 * time.Second
	maxTimeout        = 365 * 24 * time.Hour
	maxUser           = 256
	maxIdempotencyKey = 255
	// answerWait bounds how long a call may take beside the wait for a pod.
	answerWait = 10 * time.Second
	// defaultPage and maxPage are how many sandboxes a list shows, as E2B documents it.
	defaultPage = 100
	maxPage     = 100
)

// MaxWait is the longest that a claim may wait for a pod.
const MaxWait = 5 * time.Minute

// Allocator is what the API stands on.
type Allocator interface {
	// Leading reports whether this replica can act, and if not, the address of
	// the API of the replica that can, "" if that is not known.
	Leading() (ok bool, leader string)
	// ClaimWait is how long a claim waits for a pod if it does not say.
	ClaimWait() time.Duration
	// Claim takes a sandbox from the pool. What the claim leaves open is filled in.
	// The error is an *apierror.Error or ctx's.
	Claim(ctx context.Context, pool string, c core.Claim) (core.Sandbox, error)
	// Release ends a sandbox and returns how many routers have not acknowledged.
	Release(ctx context.Context, id, reason string) (core.ReleaseStatus, int, error)
	// KeepAlive counts as activity of a sandbox. SetTimeout does, too, and moves its
	// end to so long from now.
	KeepAlive(ctx context.Context, id string) (core.ReleaseStatus, error)
	SetTimeout(ctx context.Context, id string, lifetime time.Duration) (core.ReleaseStatus, error)
	// Activities returns at most so many live sandboxes, by ID, and how many more there
	// are.
	Activities(ctx context.Context, which Which, most int) ([]core.ActivityStatus, int, error)
	Sandbox(ctx context.Context, id string) (core.Sandbox, bool, error)
	// Live returns sandboxes that are starting or running, the oldest first, at most so
	// many from a mark on, and whether there are more.
	Live(ctx context.Context, after core.Mark, most int) ([]core.Sandbox, bool, error)
	// Fences and Sessions return at most so many, and how many more there are.
	Fences(ctx context.Context, most int) ([]core.FenceStatus, int, error)
	Sessions(ctx context.Context, most int) ([]core.SessionStatus, int, error)
	// DeclareDead waits no longer for a router, because an operator says, for this
	// reason, that it has ended. by is the name of the key.
	DeclareDead(ctx context.Context, session, by, reason string) (core.DeadDeclared, error)
}

// Options configure the handler. All are required unless they say otherwise.
type Options struct {
	Allocator Allocator
	// Keys open the API. Optional: without them it is open to everybody who can
	// connect to it.
	Keys *Keys
	// PublicScheme and PublicHost make the URLs of sandboxes:
	// <scheme>://<port>-<id>.<host>/. PublicHost may carry a port.
	PublicScheme, PublicHost string
	// MinIdleTimeout is the shortest idle timeout of a claim: core.Config.Window.
	MinIdleTimeout time.Duration
	// ReapDryRun: idle sandboxes are not released. Optional; it is only shown.
	ReapDryRun bool
	Log        *zap.Logger
}

type api struct {
	Options
	forwarder      *httputil.ReverseProxy
	claims, others *class
	answers        *budget
}

// New returns the handler.
func New(o Options) (http.Handler, error) {
	if o.Allocator == nil || o.PublicScheme == "" || o.PublicHost == "" || o.MinIdleTimeout <= 0 || o.Log == nil {
		return nil, errors.New("rest: all options but Keys and ReapDryRun are required")
	}
	a := &api{
		Options: o, forwarder: newForwarder(o.Log), answers: newBudget(answerBytes),
		claims: newClass(claimsInFlight, MaxWait+answerWait), others: newClass(inFlight, answerWait),
	}
	mux := http.NewServeMux()
	for _, prefix := range []string{"", "/v2"} {
		mux.HandleFunc("POST "+prefix+"/sandboxes", a.handle(a.claims, a.create))
		mux.HandleFunc("GET "+prefix+"/sandboxes", a.handle(a.others, a.list, "limit", "nextToken"))
		mux.HandleFunc("GET "+prefix+"/sandboxes/{id}", a.handle(a.others, a.get))
		mux.HandleFunc("DELETE "+prefix+"/sandboxes/{id}", a.handle(a.others, a.kill))
		mux.HandleFunc("POST "+prefix+"/sandboxes/{id}/timeout", a.handle(a.others, a.setTimeout))
	}
	mux.HandleFunc("POST /v1/sandboxes/{id}/keepalive", a.handle(a.others, a.keepAlive))
	mux.HandleFunc("GET /v1/sandboxes/{id}", a.handle(a.others, a.why))
	mux.HandleFunc("GET /v1/admin/last-active", a.handle(a.others, a.lastActive, "id", "prefix", "pool", "format", "limit"))
	mux.HandleFunc("GET /v1/fences", a.handle(a.others, a.fences, "limit"))
	mux.HandleFunc("GET /v1/sessions", a.handle(a.others, a.sessions, "limit"))
	mux.HandleFunc("POST /v1/sessions/{id}/declare-dead", a.handle(a.others, a.declareDead))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		e := apierror.New(apierror.NotFound, "no such resource; this version serves /sandboxes, /sandboxes/{id}, /sandboxes/{id}/timeout, /v1/sandboxes/{id}, /v1/sandboxes/{id}/keepalive, /v1/admin/last-active, /v1/fences, /v1/sessions and /v1/sessions/{id}/declare-dead")
		if strings.HasPrefix(strings.TrimPrefix(r.URL.Path, "/v2")+"/", "/sandboxes/") {
			e = notImplemented("%s %s is not implemented", r.Method, r.URL.Path)
		}
		refuse(w, r, e)
	})
	// A page in somebody's browser must not claim or release through a listener
	// that only loopback protects.
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuse(w, r, apierror.New(apierror.CrossOrigin, "a web page of another origin may not call this API from a browser"))
	}))
	return bounded(a.known(origin.Handler(a.authenticated(mux)))), nil
}
