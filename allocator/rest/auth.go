package rest

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/internal/localhost"
)

// knownHost lets calls through whose Host is one of ours. Without keys only the browser's
// same-origin rule keeps foreign pages out, and a page whose name resolves to a loopback address
// has the same origin. A proxy on this machine, such as a gateway's Envoy, connects from loopback for
// clients anywhere, so the client that it names must be local too. With keys any call is let through.
func (a *api) knownHost(next http.Handler) http.Handler {
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
		if !fromHere(r) {
			refuse(w, r, apierror.New(apierror.HostRefused,
				"without keys this API answers a call through a gateway only if the gateway names a client on loopback (the last address in X-Forwarded-For); give it keys, or call it at its own address"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// fromHere reports whether the client that the nearest proxy saw has a loopback address. A call
// without X-Forwarded-For came through no proxy. Only the last address counts: the proxy appends it,
// and the client can make up the others.
func fromHere(r *http.Request) bool {
	values := r.Header.Values("X-Forwarded-For")
	if len(values) == 0 {
		return true
	}
	last := values[len(values)-1]
	return localhost.Is(strings.TrimSpace(last[strings.LastIndexByte(last, ',')+1:]))
}

// origins says which web pages may call the API. With keys pages of every origin may, because a page has to know a key: a
// browser sends none by itself. Without keys no page of another origin may: it must not claim or release from a browser
// through a listener that only loopback protects.
func (a *api) origins(next http.Handler) http.Handler {
	if a.Keys == nil {
		same := http.NewCrossOriginProtection()
		same.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			refuse(w, r, apierror.New(apierror.CrossOrigin, "a web page of another origin may not call this API from a browser: it has no keys"))
		}))
		return same.Handler(next)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Access-Control-Allow-Origin", "*")
		if r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != "" {
			h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
			h.Set("Access-Control-Allow-Headers", allowedHeaders)
			h.Set("Access-Control-Max-Age", "7200")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		h.Set("Access-Control-Expose-Headers", exposedHeaders)
		next.ServeHTTP(w, r)
	})
}

// Headers of calls that pages of other origins may send and read: those of E2B's API, and Idempotency-Key.
const (
	allowedHeaders = "Origin, Content-Type, Authorization, X-API-Key, X-Team-ID, Idempotency-Key, browser, lang, lang_version, " +
		"machine, os, package_version, processor, publisher, release, sdk_runtime, system"
	exposedHeaders = "X-Next-Token, X-Total-Running, RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset, Retry-After, Berth-Trace-Id"
)

// authenticated lets calls through that have a valid key, and names their caller in the context.
// Without keys every caller is an admin of the team "".
func (a *api) authenticated(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller := access.Caller{Role: access.Admin}
		if isHealthPath(r.URL.Path) {
			caller = access.Caller{}
		} else if a.Keys != nil {
			var err *apierror.Error
			if caller, err = a.callerOf(r); err != nil {
				if err.Reason == apierror.Unauthorized {
					w.Header().Set("WWW-Authenticate", "Bearer") // RFC 9110, section 11.6.1
					_, pattern := mux.Handler(r)
					a.audit.refusal(r, a.operations[pattern], "", err)
				}
				refuse(w, r, err)
				return
			}
			if err = a.rates.take(caller.Key); err != nil {
				a.counts.rateLimited.Inc()
				refuse(w, r, err)
				return
			}
		}
		mux.ServeHTTP(w, r.WithContext(access.With(r.Context(), caller)))
	})
}

// callerOf returns the caller whose key a request presents.
func (a *api) callerOf(r *http.Request) (access.Caller, *apierror.Error) {
	key := sandboxaccess.PresentedKey(r.Header)
	if key == "" {
		return access.Caller{}, apierror.New(apierror.Unauthorized,
			"a key is required, in the header X-API-Key or as Authorization: Bearer <key>")
	}
	c, err := a.Keys.Caller(key)
	switch {
	case err == nil:
		return c, nil
	case errors.Is(err, access.ErrUnknownKey):
		return access.Caller{}, apierror.New(apierror.Unauthorized, "unknown key")
	}
	return access.Caller{}, apierror.New(apierror.APINotReady, "this replica has just started: %v; try again", err)
}

// still reports whether the key of a long call has been neither revoked nor changed since the call
// began.
func (a *api) still(r *http.Request) bool {
	if a.Keys == nil {
		return true
	}
	c, err := a.callerOf(r)
	return err == nil && c == access.From(r.Context())
}

// claimContext returns the context of a claim that may wait for a pod. It also ends when the key of its
// caller is revoked or changed; its cause is the refusal then, see whyEnded.
func (a *api) claimContext(r *http.Request, wait time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(r.Context(), wait+answerWait)
	if a.Keys == nil {
		return ctx, cancel
	}
	ctx, refuse := context.WithCancelCause(ctx)
	revoked := apierror.New(apierror.Unauthorized, "the key was revoked or changed during the call")
	judge := func() {
		for {
			keys := a.Keys.Current()
			if !a.still(r) {
				refuse(revoked)
				return
			}
			select {
			case <-keys.Done():
			case <-ctx.Done():
				return
			}
		}
	}
	stop := context.AfterFunc(a.Keys.Current(), judge) // no claim has a goroutine before the keys change
	if !a.still(r) {
		refuse(revoked)
	}
	return ctx, func() { stop(); refuse(nil); cancel() }
}

// whyEnded returns the refusal of a call whose context ended with one, else err.
func whyEnded(ctx context.Context, err error) error {
	var refusal *apierror.Error
	if errors.Is(err, context.Canceled) && errors.As(context.Cause(ctx), &refusal) {
		return refusal
	}
	return err
}

// permitted lets calls of an operation through whose caller has the role.
func (a *api) permitted(o *openapi.Operation, needed access.Role, next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if c := access.From(r.Context()); !c.Role.May(needed) {
			err := apierror.New(apierror.Forbidden, "the key %s has the role %s, and this call needs %s", c.Key, c.Role, needed)
			a.audit.refusal(r, o.ID, objectOf(o, r), err)
			refuse(w, r, err)
			return
		}
		next(w, r)
	}
}
