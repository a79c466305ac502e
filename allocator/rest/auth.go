package rest

import (
	"context"
	"net/http"

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

// authenticated lets calls through that have a valid key.
func (a *api) authenticated(next http.Handler) http.Handler {
	if a.Keys == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := presentedKey(r)
		team, ok := a.Keys.Name(key)
		if !ok {
			message := "unknown key"
			if key == "" {
				message = "a key is required, in the header X-API-Key or as Authorization: Bearer <key>"
			}
			w.Header().Set("WWW-Authenticate", "Bearer") // RFC 9110, section 11.6.1
			refuse(w, r, apierror.New(apierror.Unauthorized, "%s", message))
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), teamKey{}, team)))
	})
}

type teamKey struct{}

// teamOf returns the name of the caller's key, "" for an API without keys.
func teamOf(ctx context.Context) string {
	team, _ := ctx.Value(teamKey{}).(string)
	return team
}
