package rest

import (
	"net/http"
	"strings"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/localhost"
)

// home answers people who open the API in a browser. The page needs no key, because it says nothing
// but the domain.
func (a *api) home(next http.Handler) http.Handler {
	page := apierror.Home(localhost.Hostname(a.PublicHost))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mode := r.Header.Get("Sec-Fetch-Mode") // absent: an old browser
		if r.URL.Path != "/" || r.Method != http.MethodGet && r.Method != http.MethodHead || mode != "" && mode != "navigate" ||
			!strings.Contains(strings.Join(r.Header.Values("Accept"), ","), "text/html") {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", apierror.PageCSP)
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write(page) // the client may have gone
	})
}
