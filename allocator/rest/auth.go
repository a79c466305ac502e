package rest

import (
	"context"
	"net/http"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/localhost"
)

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
