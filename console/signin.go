package console

import (
	"crypto/subtle"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/berth-sandbox/berth/api/openapi"
)

// Sign-ins that may happen in all: attemptsAtOnce at once, and one more in each attemptEvery.
const (
	attemptsAtOnce = 20
	attemptEvery   = 200 * time.Millisecond
)

// newAttempts bounds the sign-ins, so that no client can try many keys.
func newAttempts() *rate.Limiter { return rate.NewLimiter(rate.Every(attemptEvery), attemptsAtOnce) }

// signInForm is the page of the sign-in.
type signInForm struct {
	Return string
	// Error belongs to the field, Note to the page.
	Error, Note string
	// Unprotected: no key may be entered here. Elsewhere: there is no form, because a program lets people in.
	Unprotected, Elsewhere bool
	// Again is the address of a page that was asked for from another site.
	Again string
}

// notes are the reasons for which a page led to the sign-in.
var notes = map[string]string{
	"ended":  "Your session has ended. Sign in again to go on where you were.",
	"key":    "The key of your session is not valid any more. Sign in with another one.",
	"signed": "You are signed out.",
}

func (c *Console) showSignIn(w http.ResponseWriter, r *http.Request) {
	if c.o.Open {
		http.Redirect(w, r, home, http.StatusSeeOther)
		return
	}
	query := r.URL.Query()
	c.showForm(w, r, http.StatusOK, signInForm{Return: returnPath(query.Get("return")), Note: notes[query.Get("why")]})
}

func (c *Console) showForm(w http.ResponseWriter, r *http.Request, status int, f signInForm) {
	f.Unprotected, f.Elsewhere = !c.protected(r), c.o.Entry != nil
	c.write(w, r, status, page{name: "sign-in", Title: "Sign in", Data: f}, nil)
}

// signIn begins a session with the key of a form.
func (c *Console) signIn(w http.ResponseWriter, r *http.Request) {
	if c.o.Open || c.o.Entry != nil {
		c.refuse(w, r, http.StatusNotFound, "This console has no sign-in with a key.")
		return
	}
	if !c.protected(r) {
		c.showForm(w, r, http.StatusForbidden, signInForm{Return: home})
		return
	}
	if err := r.ParseForm(); err != nil {
		c.refuse(w, r, http.StatusRequestEntityTooLarge, "The form is too large, or is not one.")
		return
	}
	form := signInForm{Return: returnPath(r.PostForm.Get("return"))}
	key, status := strings.TrimSpace(r.PostForm.Get("key")), http.StatusUnprocessableEntity
	var caller *openapi.Caller
	switch {
	case key == "":
		form.Error = "Enter an API key."
	case len(key) > maxKey || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }):
		form.Error = "This is not an API key: a key has at most 256 printable ASCII characters and no spaces."
	case !c.attempts.AllowN(c.o.Now(), 1):
		form.Error, status = "Too many sign-ins are being tried. Wait a second and try again.", http.StatusTooManyRequests
		w.Header().Set("Retry-After", "1")
	default:
		ctx, cancel := bounded(r, pageWait)
		defer cancel()
		api, err := c.api(r, key)
		if err == nil {
			caller, err = api.Caller(ctx)
		}
		switch {
		case err == nil:
		case statusOf(err) == http.StatusUnauthorized:
			form.Error = "The API does not know this key."
		default:
			form.Error, status = "The key could not be checked: "+sentence(reasonOf(err)), http.StatusServiceUnavailable
		}
	}
	if form.Error == "" {
		if err := c.begin(w, r, key); err != nil {
			form.Error, status = "The session could not be made.", http.StatusInternalServerError
		}
	}
	if form.Error != "" {
		c.audit.Info("console sign-in refused", zap.String("client", r.RemoteAddr), zap.Int("status", status))
		c.showForm(w, r, status, form)
		return
	}
	c.audit.Info("console sign-in", auditFields(r, caller)...)
	http.Redirect(w, r, form.Return, http.StatusSeeOther)
}

func auditFields(r *http.Request, caller *openapi.Caller) []zap.Field {
	return []zap.Field{
		zap.String("key", caller.Key), zap.String("team", caller.Team), zap.String("role", string(caller.Role)),
		zap.String("client", r.RemoteAddr),
	}
}

// signOut ends the session of this browser. The key stays valid.
func (c *Console) signOut(w http.ResponseWriter, r *http.Request) {
	if s, err := c.session(r); err == nil && !c.o.Open {
		ctx, cancel := bounded(r, panelWait)
		defer cancel()
		caller := &openapi.Caller{}
		if api, err := c.api(r, s.key); err == nil {
			if known, err := api.Caller(ctx); err == nil {
				caller = known
			}
		}
		c.audit.Info("console sign-out", auditFields(r, caller)...)
	}
	end(w, r)
	http.Redirect(w, r, signInPath+"?why=signed", http.StatusSeeOther)
}

// entry is the way in that is used once.
type entry struct {
	mu   sync.Mutex
	left Entry // without a token: it was used
}

// enter begins the session of the person who has started the console.
func (c *Console) enter(w http.ResponseWriter, r *http.Request) {
	if !c.entry.use(r.URL.Query().Get("token")) {
		c.refuse(w, r, http.StatusForbidden, "This address has been used, or it is not one of this console. "+
			"Run berth console again, and open the address that it prints.")
		return
	}
	if err := c.begin(w, r, c.o.Entry.Key); err != nil {
		c.refuse(w, r, http.StatusInternalServerError, "The session could not be made.")
		return
	}
	http.Redirect(w, r, home, http.StatusSeeOther)
}

func (e *entry) use(token string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.left.Token == "" || subtle.ConstantTimeCompare([]byte(token), []byte(e.left.Token)) != 1 {
		return false
	}
	e.left.Token = ""
	return true
}

// returnPath returns the page to which a sign-in leads: a path of the console, or its first page.
func returnPath(text string) string {
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || u.Opaque != "" || len(text) > maxQuery,
		!strings.HasPrefix(u.Path, home) || strings.Contains(u.Path, "//") || strings.Contains(u.Path, "/."),
		strings.HasPrefix(u.Path, signInPath) || strings.HasPrefix(u.Path, enterPath),
		strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' || r == '\\' }):
		return home
	}
	return text
}

// toSignIn leads a person to the sign-in and back to the page.
func (c *Console) toSignIn(w http.ResponseWriter, r *http.Request, why string) {
	if r.Header.Get("Sec-Fetch-Dest") == "empty" { // a script, which cannot sign in
		http.Error(w, "sign in again", http.StatusUnauthorized)
		return
	}
	query := url.Values{}
	if why != "" {
		query.Set("why", why)
	}
	if r.Method == http.MethodGet {
		query.Set("return", returnPath(r.URL.RequestURI()))
	}
	http.Redirect(w, r, signInPath+"?"+query.Encode(), http.StatusSeeOther)
}

// fromElsewhere reports whether a page of another site led here. The browser did not send the cookie then, because it
// is SameSite=Strict, and sends it when the page of the console leads on.
func fromElsewhere(r *http.Request) bool {
	site, mode := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Sec-Fetch-Mode")
	return r.Method == http.MethodGet && (site == "cross-site" || site == "same-site") && mode == "navigate"
}

func statusOf(err error) int {
	if e := apiError(err); e != nil {
		return e.Status
	}
	return 0
}
