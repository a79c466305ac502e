// Package rest is the allocator's HTTP API. Create, get, list and kill have the
// shapes of the E2B API, under / and /v2; what is accepted is carried out, and
// what is not carried out is refused by name, never dropped in silence.
//
//	POST   /sandboxes        claim a sandbox: 201, at the latest after the claim's wait
//	GET    /sandboxes        live sandboxes, oldest first: 200
//	GET    /sandboxes/{id}   one live sandbox: 200, or 404
//	DELETE /sandboxes/{id}   release: 204, or 404
//	POST   /sandboxes/{id}/timeout       {"timeout":seconds}: the sandbox ends so long from now: 204, or 404
//	POST   /v1/sandboxes/{id}/keepalive  counts as activity: 204, or 404
//
// For operators, under /v1 (?limit=, 1 to 1,000, 100 if left out):
//
//	GET    /v1/admin/last-active           when each live sandbox was last used, how that is known, and what
//	                                       happens next: 200; ?id=, ?prefix=, ?pool=, ?format=text,
//	                                       ?limit= (1 to 10,000, 1,000 if left out)
//	GET    /v1/fences                      released sandboxes whose pods are kept, and whom they wait for: 200
//	GET    /v1/sessions                    routers, and how many fences wait for each: 200
//	POST   /v1/sessions/{id}/declare-dead  {"reason":"..."}: wait no longer for a router that has ended
//	                                       together with its Envoy: 200 when that is durable, 404,
//	                                       or 409 while it may live
//
// A call needs a key, in X-API-Key or as a bearer token, unless the API has no
// keys, which is for a listener on loopback only: it then answers only to localhost,
// to loopback addresses, and to the public host and api. before it. A replica that does not lead
// passes calls on to the one that does.
//
// A sandbox is released at its end (timeout), after its idle timeout without activity,
// or when its pool's maximum lifetime is over, whichever comes first. A claim without
// a timeout ends after 300 s, or not at all if it has an idleTimeout other than 0. A
// new timeout replaces the old one, and may be shorter.
//
// A claim waits for a pod when its pool has none. With an Idempotency-Key header
// it can be repeated safely: while its sandbox lives, and ten minutes after, the
// same key with the same body is answered with the same sandbox.
//
// 204 means that the release is durable and that every connected router has
// acknowledged it, or that one second has passed: the header
// Berth-Routers-Outstanding then says how many have not.
package rest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/localhost"
)

// OutstandingHeader is on the answer of a release: how many routers may still
// know the route.
const OutstandingHeader = "Berth-Routers-Outstanding"

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
	// bodyWait bounds how long a client may take to send its request.
	bodyWait = 5 * time.Second
	// claimsInFlight and inFlight bound the claims, and the other requests, that are
	// served at one time: claims may wait, and must not keep releases waiting.
	claimsInFlight = 4_000
	inFlight       = 1_000
)

// MaxWait is the longest that a claim may wait for a pod.
const MaxWait = 5 * time.Minute

// agentVersion is what is reported as envdVersion. The SDKs refuse sandboxes
// below 0.1.0, and a higher one would claim features of an agent in the pod.
const agentVersion = "0.1.0"

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
	// Live returns the sandboxes that are starting or running.
	Live(ctx context.Context) ([]core.Sandbox, error)
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
	// ActivityWindow is the shortest idle timeout: what is open is not known sooner.
	ActivityWindow time.Duration
	// ReapDryRun: idle sandboxes are not released. Optional; it is only shown.
	ReapDryRun bool
	Log        *zap.Logger
}

type api struct {
	Options
	forwarder *httputil.ReverseProxy
	// One for each request that is being served.
	claimSlots, slots chan struct{}
}

// New returns the handler.
func New(o Options) (http.Handler, error) {
	if o.Allocator == nil || o.PublicScheme == "" || o.PublicHost == "" || o.ActivityWindow <= 0 || o.Log == nil {
		return nil, errors.New("rest: all options but Keys and ReapDryRun are required")
	}
	a := &api{Options: o, forwarder: newForwarder(o.Log), claimSlots: make(chan struct{}, claimsInFlight), slots: make(chan struct{}, inFlight)}
	mux := http.NewServeMux()
	for _, prefix := range []string{"", "/v2"} {
		mux.HandleFunc("POST "+prefix+"/sandboxes", a.handle(a.claimSlots, a.create))
		mux.HandleFunc("GET "+prefix+"/sandboxes", a.handle(a.slots, a.list))
		mux.HandleFunc("GET "+prefix+"/sandboxes/{id}", a.handle(a.slots, a.get))
		mux.HandleFunc("DELETE "+prefix+"/sandboxes/{id}", a.handle(a.slots, a.kill))
		mux.HandleFunc("POST "+prefix+"/sandboxes/{id}/timeout", a.handle(a.slots, a.setTimeout))
	}
	mux.HandleFunc("POST /v1/sandboxes/{id}/keepalive", a.handle(a.slots, a.keepAlive))
	mux.HandleFunc("GET /v1/admin/last-active", a.handle(a.slots, a.lastActive, "id", "prefix", "pool", "format", "limit"))
	mux.HandleFunc("GET /v1/fences", a.handle(a.slots, a.fences, "limit"))
	mux.HandleFunc("GET /v1/sessions", a.handle(a.slots, a.sessions, "limit"))
	mux.HandleFunc("POST /v1/sessions/{id}/declare-dead", a.handle(a.slots, a.declareDead))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		e := apierror.New(apierror.NotFound, "no such resource; this version serves /sandboxes, /sandboxes/{id}, /sandboxes/{id}/timeout, /v1/sandboxes/{id}/keepalive, /v1/admin/last-active, /v1/fences, /v1/sessions and /v1/sessions/{id}/declare-dead")
		if strings.HasPrefix(strings.TrimPrefix(r.URL.Path, "/v2")+"/", "/sandboxes/") {
			e = notImplemented("%s %s is not implemented", r.Method, r.URL.Path)
		}
		answer(w, r, e)
	})
	// A page in somebody's browser must not claim or release through a listener
	// that only loopback protects.
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, apierror.New(apierror.CrossOrigin, "a web page of another origin may not call this API from a browser"))
	}))
	return a.known(origin.Handler(a.authenticated(mux))), nil
}

// known lets through calls that name a host of ours. Without keys the browser is all that
// keeps foreign pages out, and a page whose name resolves to a loopback address is of the
// same origin for it. With keys any name is good: nothing is done without one.
func (a *api) known(next http.Handler) http.Handler {
	if a.Keys != nil {
		return next
	}
	public := localhost.Hostname(a.PublicHost)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host := localhost.Hostname(r.Host); !localhost.Is(host) && host != public && host != "api."+public {
			answer(w, r, apierror.New(apierror.HostRefused,
				"host %q: without keys this API answers only to localhost, loopback addresses, %s and api.%s", r.Host, public, public))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// authenticated lets through calls that show a key.
func (a *api) authenticated(next http.Handler) http.Handler {
	if a.Keys == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := presented(r)
		team, ok := a.Keys.Name(key)
		if !ok {
			message := "this key is not known"
			if key == "" {
				message = "a key is needed, in the header X-API-Key or as Authorization: Bearer <key>"
			}
			w.Header().Set("WWW-Authenticate", "Bearer") // RFC 9110, section 11.6.1
			answer(w, r, apierror.New(apierror.Unauthorized, "%s", message))
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), teamKey{}, team)))
	})
}

type teamKey struct{}

// teamOf is the name of the key that the call has shown, "" when none is needed.
func teamOf(ctx context.Context) string {
	team, _ := ctx.Value(teamKey{}).(string)
	return team
}

// handle turns a function that may fail into a handler. Where this replica does
// not lead, the leader answers. parameters are those that the call may have in its
// query.
func (a *api) handle(slots chan struct{}, f func(http.ResponseWriter, *http.Request) error, parameters ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		default:
			answer(w, r, apierror.New(apierror.Overloaded, "too many requests are being served; try again"))
			return
		}
		if ok, leader := a.Allocator.Leading(); !ok {
			a.forward(w, r, leader)
			return
		}
		err := noParametersBut(r, parameters)
		if err == nil {
			err = f(w, r)
		}
		if err == nil {
			return
		}
		var e *apierror.Error
		switch {
		case errors.As(err, &e):
		case errors.Is(err, context.DeadlineExceeded):
			e = apierror.New(apierror.Timeout, "the API server did not confirm in time; a claim that was not answered is given back, unless it had an Idempotency-Key; a release goes on")
		case errors.Is(err, context.Canceled):
			return // the client has gone
		default:
			a.Log.Error("request failed", zap.String("path", r.URL.Path), zap.Error(err))
			e = apierror.New(apierror.Internal, "the allocator failed; its log says more")
		}
		answer(w, r, e)
	}
}

// answer answers r with the error.
func answer(w http.ResponseWriter, r *http.Request, e *apierror.Error) {
	e.RequestID = r.Header.Get("X-Request-Id")
	e.Write(w)
}

// noParametersBut refuses query parameters that the call does not have.
func noParametersBut(r *http.Request, known []string) error {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return invalid("query: %v", err)
	}
	maps.DeleteFunc(values, func(name string, _ []string) bool { return slices.Contains(known, name) })
	if len(values) > 0 {
		return notImplemented("parameter %s: not supported by this version; leave it out", strings.Join(slices.Sorted(maps.Keys(values)), ", "))
	}
	return nil
}

// Sandbox is a sandbox as the API shows it.
type Sandbox struct {
	SandboxID   string    `json:"sandboxID"`
	TemplateID  string    `json:"templateID"`
	ClientID    string    `json:"clientID"`
	EnvdVersion string    `json:"envdVersion"`
	Domain      string    `json:"domain"`
	URL         string    `json:"url"`
	State       string    `json:"state"`
	StartedAt   time.Time `json:"startedAt"`
	// EndAt is when it ends if nobody moves that, noEnd if never.
	EndAt time.Time `json:"endAt"`
	// IdleTimeout is in seconds, absent if there is none.
	IdleTimeout float64           `json:"idleTimeout,omitempty"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	User        string            `json:"user,omitempty"`
	PodName     string            `json:"podName"`
}

// noEnd is the end of a sandbox that has none: the E2B SDKs do not read a sandbox without
// an end.
var noEnd = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

func (a *api) show(s core.Sandbox) Sandbox {
	shown := Sandbox{
		SandboxID: s.ID, TemplateID: s.Pool.Name, ClientID: "berth", EnvdVersion: agentVersion,
		Domain: a.PublicHost, URL: fmt.Sprintf("%s://%d-%s.%s/", a.PublicScheme, s.DefaultPort, s.ID, a.PublicHost),
		State: "running", StartedAt: s.ClaimedAt, Metadata: s.Metadata, User: s.User, PodName: s.Pod.Name,
	}
	if s.Phase == core.Starting {
		shown.State = "starting"
	}
	shown.EndAt, shown.IdleTimeout = noEnd, seconds(s.IdleTimeout)
	if end := endOf(s); end != nil {
		shown.EndAt = *end
	}
	return shown
}

func (a *api) create(w http.ResponseWriter, r *http.Request) error {
	reading := http.NewResponseController(w)
	_ = reading.SetReadDeadline(time.Now().Add(bodyWait)) // errors where there is no connection
	request, err := a.decodeCreate(r.Body)
	if err != nil {
		return err // what is left of the body is still to be read, within the deadline
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	_ = reading.SetReadDeadline(time.Time{}) // it would end the request's context
	wait := a.Allocator.ClaimWait()
	if request.Wait != nil {
		wait = *request.Wait
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait+answerWait)
	defer cancel()
	s, err := a.Allocator.Claim(ctx, request.TemplateID, core.Claim{
		Binding: core.Binding{
			Metadata: request.Metadata, Team: teamOf(ctx), User: request.User,
			IdempotencyKey: key, RequestHash: request.Hash,
		},
		Lifetime: request.Timeout, IdleTimeout: request.IdleTimeout, Wait: wait,
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, a.show(s))
}

// idempotencyKey reads the header that makes a claim safe to repeat.
func idempotencyKey(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	key := values[0]
	if len(values) > 1 || len(key) < 1 || len(key) > maxIdempotencyKey || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", invalid("Idempotency-Key: must be one header of 1 to %d printable ASCII characters", maxIdempotencyKey)
	}
	return key, nil
}

// createRequest is the body of a create.
type createRequest struct {
	TemplateID string
	// Timeout is 0 for none.
	Timeout time.Duration
	// IdleTimeout is nil when the request does not say, and 0 for none.
	IdleTimeout *time.Duration
	Metadata    map[string]string
	User        string
	// Wait is nil when the request does not say.
	Wait *time.Duration
	// Hash is that of the body, as it was sent.
	Hash [sha256.Size]byte
}

// read reads a body.
func read(body io.Reader) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(body, maxBody+1))
	switch {
	case err != nil:
		return nil, invalid("body: %v", err)
	case len(raw) > maxBody:
		return nil, apierror.New(apierror.BodyTooLarge, "body: at most %d bytes", maxBody)
	case !utf8.Valid(raw): // the decoder would put something else in its place
		return nil, invalid("body: must be UTF-8")
	}
	return raw, nil
}

func (a *api) decodeCreate(body io.Reader) (*createRequest, error) {
	raw, err := read(body)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, invalid("body: must be a JSON object: %v", err)
	}
	request := createRequest{Hash: sha256.Sum256(raw)}
	var timeout, idle, wait *int64  // in seconds
	var metadata map[string]*string // nil: a null, which is not a string
	for _, known := range []struct {
		name string
		into any
	}{{"templateID", &request.TemplateID}, {"timeout", &timeout}, {"idleTimeout", &idle}, {"metadata", &metadata}, {"user", &request.User}, {"waitTimeout", &wait}} {
		if value, ok := fields[known.name]; ok {
			if err := json.Unmarshal(value, known.into); err != nil {
				return nil, invalid("%s: %v", known.name, err)
			}
			delete(fields, known.name)
		}
	}
	var refused []string
	for name, value := range fields {
		if !empty(value) {
			refused = append(refused, name)
		}
	}
	if len(refused) > 0 {
		sort.Strings(refused)
		return nil, notImplemented("%s: not supported by this version; leave it out", strings.Join(refused, ", "))
	}
	if request.TemplateID == "" {
		return nil, invalid("templateID: required: the name of a SandboxPool")
	}
	if idle != nil {
		d, err := a.idleTimeoutOf(*idle)
		if err != nil {
			return nil, err
		}
		request.IdleTimeout = &d
	}
	switch {
	case timeout != nil:
		if request.Timeout, err = timeoutOf(*timeout); err != nil {
			return nil, err
		}
	case request.IdleTimeout == nil || *request.IdleTimeout == 0: // something must end it
		request.Timeout = defaultTimeout
	}
	if wait != nil {
		if *wait < 0 || *wait > int64(MaxWait/time.Second) {
			return nil, invalid("waitTimeout: %d: must be 0 to %d seconds", *wait, int64(MaxWait/time.Second))
		}
		d := time.Duration(*wait) * time.Second
		request.Wait = &d
	}
	if len(request.User) > maxUser {
		return nil, invalid("user: %d bytes: at most %d", len(request.User), maxUser)
	}
	size := 0
	if len(metadata) > 0 {
		request.Metadata = make(map[string]string, len(metadata))
	}
	for k, v := range metadata {
		if v == nil {
			return nil, invalid("metadata: %q: must be a string", k)
		}
		request.Metadata[k] = *v
		size += len(k) + len(*v)
	}
	if size > maxMetadata {
		return nil, invalid("metadata: %d bytes: at most %d in all", size, maxMetadata)
	}
	return &request, nil
}

// empty reports whether a JSON value asks for nothing: SDKs send fields that
// the caller has not set.
func empty(value json.RawMessage) bool {
	switch strings.TrimSpace(string(value)) {
	case "null", "false", `""`, "{}", "[]":
		return true
	}
	return false
}

func (a *api) get(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id := r.PathValue("id")
	s, known, err := a.Allocator.Sandbox(ctx, id)
	switch {
	case err != nil:
		return err
	case !known:
		return missing(id, apierror.SandboxNotFound, "there is no such sandbox")
	case s.Phase == core.Released || s.Phase == core.Ended:
		return missing(id, apierror.SandboxGone, fmt.Sprintf("this sandbox was released at %s: %s", s.EndedAt.UTC().Format(time.RFC3339), s.Reason))
	}
	return writeJSON(w, http.StatusOK, a.show(s))
}

func (a *api) list(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	running, err := a.Allocator.Live(ctx)
	if err != nil {
		return err
	}
	sort.Slice(running, func(i, j int) bool {
		if !running[i].ClaimedAt.Equal(running[j].ClaimedAt) {
			return running[i].ClaimedAt.Before(running[j].ClaimedAt)
		}
		return running[i].ID < running[j].ID
	})
	all := make([]Sandbox, 0, len(running))
	for _, s := range running {
		all = append(all, a.show(s))
	}
	return writeJSON(w, http.StatusOK, all)
}

func (a *api) kill(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id := r.PathValue("id")
	status, outstanding, err := a.Allocator.Release(ctx, id, core.ReasonKilled)
	if err != nil {
		return err
	}
	if err := notLive(id, status); err != nil {
		return err
	}
	w.Header().Set(OutstandingHeader, strconv.Itoa(outstanding))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func invalid(format string, args ...any) *apierror.Error {
	return apierror.New(apierror.BadRequest, format, args...)
}

func notImplemented(format string, args ...any) *apierror.Error {
	return apierror.New(apierror.NotImplemented, format, args...)
}

func missing(id string, reason apierror.Reason, message string) *apierror.Error {
	e := apierror.New(reason, "%s", message)
	e.SandboxID = id
	e.Code = http.StatusNotFound // also for one that is gone: the E2B SDKs know no 410
	return e
}

func writeJSON(w http.ResponseWriter, code int, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(raw) // the client may have gone; there is nobody else to tell
	return nil
}
