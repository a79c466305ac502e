// Package rest is the allocator's HTTP API. Create, get, list and kill have the
// shapes of the E2B API, under / and /v2; what is accepted is carried out, and
// what is not carried out is refused by name, never dropped in silence.
//
//	POST   /sandboxes        claim a sandbox: 201, at the latest after the claim's wait
//	GET    /sandboxes        live sandboxes, oldest first: 200; ?limit= (1 to 100, 100 if left out); if
//	                         there are more, the header X-Next-Token has what to send as ?nextToken=
//	GET    /sandboxes/{id}   one live sandbox: 200, or 404
//	DELETE /sandboxes/{id}   release: 204, or 404
//	POST   /sandboxes/{id}/timeout       {"timeout":seconds}: the sandbox ends so long from now: 204, or 404
//	GET    /v1/sandboxes/{id}            why it is alive: its last activity, what that was, when it is
//	                                     released if it is not used any more, and for which routers that
//	                                     waits: 200, or 404
//	POST   /v1/sandboxes/{id}/keepalive  counts as activity: 204, or 404
//
// For operators, under /v1 (?limit=, 1 to 1,000, 100 if left out):
//
//	GET    /v1/admin/last-active           the same of every live sandbox: 200; ?id=, ?prefix=, ?pool=, ?format=text,
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
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/localhost"
)

// OutstandingHeader is on the answer of a release: how many routers may still
// know the route.
const OutstandingHeader = "Berth-Routers-Outstanding"

// NextTokenHeader is on a page of a list if there are more: what to send as nextToken for
// the next one.
const NextTokenHeader = "X-Next-Token"

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
			refuse(w, r, apierror.New(apierror.HostRefused,
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
			refuse(w, r, apierror.New(apierror.Unauthorized, "%s", message))
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

// answer answers r with the error.
func answer(w http.ResponseWriter, r *http.Request, e *apierror.Error) {
	e.RequestID = r.Header.Get("X-Request-Id")
	e.Write(w)
}

// noParametersBut refuses query parameters that the call does not have.
func noParametersBut(values url.Values, known []string) error {
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

func (a *api) create(w *reply, r *http.Request) error {
	request, err := a.decodeCreate(r.Body)
	if err != nil {
		return err
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
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
		Lifetime: request.Timeout, IdleTimeout: request.IdleTimeout, MinBytes: request.MinBytes, Wait: wait,
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
	// MinBytes is how many bytes must move over an open connection in a minute, 0 for
	// none; nil when the request does not say.
	MinBytes *uint64
	Metadata map[string]string
	User     string
	// Wait is nil when the request does not say.
	Wait *time.Duration
	// Hash is that of the body, as it was sent.
	Hash [sha256.Size]byte
}

// read reads a body.
func read(body io.Reader) ([]byte, error) {
	raw, err := io.ReadAll(body)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read body: %w", err)
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
	var timeout, idle, wait *int64 // in seconds
	var activity *v1alpha1.Activity
	var minBytes *int64
	var metadata map[string]*string // nil: a null, which is not a string
	for _, known := range []struct {
		name string
		into any
	}{{"templateID", &request.TemplateID}, {"timeout", &timeout}, {"idleTimeout", &idle}, {"activity", &activity}, {"minBytesPerMinute", &minBytes}, {"metadata", &metadata}, {"user", &request.User}, {"waitTimeout", &wait}} {
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
		slices.Sort(refused)
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
	if request.MinBytes, err = minBytesOf(activity, minBytes); err != nil {
		return nil, err
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

func (a *api) get(w *reply, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id := r.PathValue("id")
	s, known, err := a.Allocator.Sandbox(ctx, id)
	if err != nil {
		return err
	}
	if !known || s.Phase == core.Released || s.Phase == core.Ended {
		return notThere(id, s, known)
	}
	return writeJSON(w, http.StatusOK, a.show(s))
}

// notThere is the error for a sandbox that is not live.
func notThere(id string, s core.Sandbox, known bool) error {
	if !known {
		return missing(id, apierror.SandboxNotFound, "there is no such sandbox")
	}
	return missing(id, apierror.SandboxGone, fmt.Sprintf("this sandbox was released at %s: %s", s.EndedAt.UTC().Format(time.RFC3339), s.Reason))
}

func (a *api) list(w *reply, r *http.Request) error {
	limit, err := limitOf(r, defaultPage, maxPage)
	if err != nil {
		return err
	}
	after, err := markOf(r.URL.Query()["nextToken"])
	if err != nil {
		return err
	}
	if err := w.rows(limit); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	page, more, err := a.Allocator.Live(ctx, after, limit)
	if err != nil {
		return err
	}
	if more {
		last := page[len(page)-1]
		w.Header().Set(NextTokenHeader, tokenOf(core.Mark{ClaimedAt: last.ClaimedAt, ID: last.ID}))
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, "[")
	for i, s := range page { // one after the other, so that no more than there is room for is encoded
		if i > 0 {
			_, _ = io.WriteString(w, ",")
		}
		raw, err := json.Marshal(a.show(s))
		if err != nil {
			return fmt.Errorf("encode answer: %w", err)
		}
		if _, _ = w.Write(raw); w.full {
			return nil
		}
	}
	_, _ = io.WriteString(w, "]")
	return nil
}

// tokenOf is a mark as a client sends it back.
func tokenOf(m core.Mark) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(m.ClaimedAt.UnixMicro(), 10) + " " + m.ID))
}

// markOf reads the parameter that says where a list goes on.
func markOf(tokens []string) (core.Mark, error) {
	if len(tokens) == 0 || len(tokens) == 1 && tokens[0] == "" {
		return core.Mark{}, nil
	}
	if raw, err := base64.RawURLEncoding.DecodeString(tokens[0]); err == nil && len(tokens) == 1 {
		claimedAt, id, _ := strings.Cut(string(raw), " ")
		if micros, err := strconv.ParseInt(claimedAt, 10, 64); err == nil && id != "" {
			return core.Mark{ClaimedAt: time.UnixMicro(micros), ID: id}, nil
		}
	}
	return core.Mark{}, invalid("nextToken: must be the %s of the page before, or be left out", NextTokenHeader)
}

func (a *api) kill(w *reply, r *http.Request) error {
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

func writeJSON(w *reply, code int, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(raw)
	return nil
}
