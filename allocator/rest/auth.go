package rest

import (
	"net/http"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/localhost"
)

// knownHost lets calls through whose Host is one of ours. Without keys only the browser's
// same-origin rule keeps foreign pages out, and a page whose name resolves to a loopback address
// has the same origin. With keys any Host is accepted.
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
		next.ServeHTTP(w, r)
	})
}

// authenticated lets calls through that have a valid key, and names their caller in the context.
// Without keys every caller is an admin of the team "".
func (a *api) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller := access.Caller{Role: access.Admin}
		if a.Keys != nil {
			key := presentedKey(r)
			name, ok := a.Keys.Name(key)
			if !ok {
				message := "unknown key"
				if key == "" {
					message = "a key is required, in the header X-API-Key or as Authorization: Bearer <key>"
				}
				w.Header().Set("WWW-Authenticate", "Bearer") // RFC 9110, section 11.6.1
				refuse(w, r, apierror.New(apierror.Unauthorized, "%s", message))
				return
			}
			caller.Key, caller.Team = name, name
		}
		next.ServeHTTP(w, r.WithContext(access.With(r.Context(), caller)))
	})
}

// permitted lets calls through whose caller has a role.
func permitted(needed access.Role, next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if c := access.From(r.Context()); !c.Role.May(needed) {
			refuse(w, r, apierror.New(apierror.Forbidden, "the key %s has the role %s, and this call needs %s", c.Key, c.Role, needed))
			return
		}
		next(w, r)
	}
}
