package console

import (
	"cmp"
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/berth-sandbox/berth/internal/localhost"
	"github.com/berth-sandbox/berth/internal/options"
)

// Bounds of what a browser can make the console do.
const (
	// MaxConns is the number of connections that a listener of a console needs.
	MaxConns = 512
	// maxForm bounds the body of a form in bytes.
	maxForm = 8 << 10
	// maxQuery bounds the query of an address in bytes.
	maxQuery = 4 << 10
	// pageWait bounds the calls of a page, panelWait those of a part of a page that may be left out.
	pageWait  = 10 * time.Second
	panelWait = 2 * time.Second
	// sendWait is the time in which a browser must read an answer, or a part of a stream.
	sendWait = 10 * time.Second
)

// Options configure a console. All are required unless their comment says otherwise.
type Options struct {
	// API carries calls to the HTTP API at APIURL. Handler makes one for an API in this process.
	API http.RoundTripper
	// APIURL is the address of the API.
	APIURL string
	// URL is where browsers reach the console through TLS, such as https://console.example.com. Optional: without it
	// the console is for browsers on this machine.
	URL *url.URL
	// Sealing seals the cookies of sessions. Replicas with the same one accept each other's. Optional: the default is
	// random.
	Sealing [32]byte
	// Open: the API needs no key, so there is no sign-in.
	Open bool
	// Entry lets a person in without a form. Optional.
	Entry *Entry
	Log   *zap.Logger
	// Now is the wall clock. Optional: the default is time.Now.
	Now func() time.Time
}

// Entry is a way in for the person who has started the console: the first request for Path gets a session with Key.
type Entry struct {
	Key, Token string
}

// Path is the path and query that opens a session, once.
func (e *Entry) Path() string { return enterPath + "?token=" + url.QueryEscape(e.Token) }

const (
	base       = "/console"
	home       = base + "/"
	signInPath = base + "/sign-in"
	enterPath  = base + "/enter"
)

// Console serves the pages. Its methods may be called concurrently.
type Console struct {
	o        Options
	seal     sealer
	pages    map[string]*template.Template
	assets   map[string]asset // by path
	attempts *rate.Limiter
	entry    entry
	mux      *http.ServeMux
	audit    *zap.Logger
}

//go:embed templates
var templates embed.FS

//go:embed static
var static embed.FS

// New returns a console, or an error that names the missing and wrong options.
func New(o Options) (*Console, error) {
	if err := options.Require(o, "API", "APIURL", "Log"); err != nil {
		return nil, err
	}
	if o.URL != nil && (o.URL.Scheme != "https" || o.URL.Host == "") {
		return nil, fmt.Errorf("console: Options.URL %q: must be https://<host>[:port]", o.URL)
	}
	o.APIURL = strings.TrimSuffix(o.APIURL, "/")
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Sealing == [32]byte{} {
		if _, err := rand.Read(o.Sealing[:]); err != nil {
			return nil, fmt.Errorf("console: make a key: %w", err)
		}
	}
	c := &Console{o: o, attempts: newAttempts(), audit: o.Log.Named("audit")}
	var err error
	if c.seal, err = newSealer(o.Sealing); err != nil {
		return nil, fmt.Errorf("console: %w", err)
	}
	if o.Entry != nil {
		c.entry = entry{left: *o.Entry}
	}
	if c.assets, err = loadAssets(static); err != nil {
		return nil, fmt.Errorf("console: %w", err)
	}
	if c.pages, err = c.loadPages(templates); err != nil {
		return nil, fmt.Errorf("console: %w", err)
	}
	c.mux = c.routes()
	return c, nil
}

// routes are the addresses of the console.
func (c *Console) routes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", redirect(home))
	mux.HandleFunc("GET "+base, redirect(home))
	mux.HandleFunc("GET "+base+"/static/{file...}", c.serveAsset)
	mux.HandleFunc("GET "+signInPath, c.showSignIn)
	mux.HandleFunc("POST "+signInPath, c.signIn)
	mux.HandleFunc("POST "+base+"/sign-out", c.signOut)
	mux.HandleFunc("GET "+enterPath, c.enter)
	mux.HandleFunc("GET "+base+"/events", c.events)
	for pattern, f := range map[string]func(*visit) (page, error){
		"GET /{$}":                             overview,
		"GET /connect":                         connectPage,
		"GET /pools":                           poolsPage,
		"GET /pools/{pool}":                    poolPage,
		"POST /pools/{pool}/scale":             scale,
		"GET /sandboxes":                       sandboxesPage,
		"GET /sandboxes/{id}":                  sandboxPage,
		"GET /sandboxes/{id}/end":              confirmEnd,
		"POST /sandboxes/{id}/end":             endSandbox,
		"POST /sandboxes/{id}/timeout":         moveEnd,
		"POST /sandboxes/{id}/open":            openSandbox,
		"GET /sandboxes/{id}/terminal":         terminalPage,
		"GET /sandboxes/{id}/files":            filesPage,
		"GET /routers":                         routersPage,
		"GET /routers/{session}/declare-dead":  confirmDead,
		"POST /routers/{session}/declare-dead": declareDead,
		"GET /fences":                          fencesPage,
		"GET /teams":                           teamsPage,
		"GET /{rest...}":                       nothing,
	} {
		method, path, _ := strings.Cut(pattern, " ")
		mux.HandleFunc(method+" "+base+path, c.visited(f))
	}
	return mux
}

func nothing(*visit) (page, error) {
	return page{}, &failure{status: http.StatusNotFound, text: "There is no such page."}
}

func redirect(to string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, to, http.StatusSeeOther) }
}

// ServeHTTP answers a request of a browser.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy("", "", ""))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	// same-origin and not no-referrer: with that one browsers send "Origin: null" with forms (Fetch Standard, "append a
	// request Origin header"), and a POST could not be told from one of another site.
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	// A body that is refused is not read to its end, and a slow one must not hold the connection.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(sendWait)) // fails without a connection, in tests
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	switch {
	case !c.knownHost(r):
		c.refuse(w, r, http.StatusMisdirectedRequest, c.otherHost(r))
	case len(r.URL.RawQuery) > maxQuery:
		c.refuse(w, r, http.StatusRequestURITooLong, "The address is too long.")
	case r.Method == http.MethodPost && !c.sameOrigin(r):
		c.refuse(w, r, http.StatusForbidden, "This form did not come from a page of this console, so nothing was done. "+
			"Open the page again and send the form from there.")
	case r.Method != http.MethodGet && r.Method != http.MethodHead && r.Method != http.MethodPost:
		h.Set("Allow", "GET, HEAD, POST")
		c.refuse(w, r, http.StatusMethodNotAllowed, "The console answers GET and POST only.")
	default:
		c.mux.ServeHTTP(w, r)
	}
}

// local reports whether the browser runs on the machine that it connects to, so that the connection needs no TLS.
func local(r *http.Request) bool { return localhost.Is(localhost.Hostname(r.Host)) }

// knownHost refuses names that lead here without our knowledge. A page whose name resolves to a loopback address has
// the same origin as a console that is served by that name.
func (c *Console) knownHost(r *http.Request) bool {
	return local(r) || c.o.URL != nil && strings.EqualFold(withoutPort(r.Host), withoutPort(c.o.URL.Host))
}

// withoutPort leaves out the port of https, which browsers leave out too.
func withoutPort(host string) string { return strings.TrimSuffix(host, ":443") }

func (c *Console) otherHost(r *http.Request) string {
	if c.o.URL != nil {
		return fmt.Sprintf("This console is at %s, and not at %q.", c.o.URL, r.Host)
	}
	return fmt.Sprintf("This console answers only to localhost and loopback addresses, and not to %q. To serve it to "+
		"other machines, put TLS in front of it and name its address with --console-url.", r.Host)
}

// origin is what a browser calls the pages of this console when it asks for them as in r.
func (c *Console) origin(r *http.Request) string {
	if r.TLS != nil || !local(r) {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

// sameOrigin reports whether a page of this console has sent a request. Browsers without Sec-Fetch-Site send Origin
// with every POST.
func (c *Console) sameOrigin(r *http.Request) bool {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	if site != "" && site != "same-origin" {
		return false
	}
	if origin == "" {
		return site != ""
	}
	return origin == c.origin(r)
}

// protected reports whether a key that a person enters reaches the console without others reading it.
func (c *Console) protected(r *http.Request) bool {
	if r.TLS != nil || local(r) {
		return true
	}
	if proto := r.Header.Get("X-Forwarded-Proto"); proto != "" {
		return strings.EqualFold(strings.TrimSpace(proto[strings.LastIndexByte(proto, ',')+1:]), "https")
	}
	// A proxy that does not say how the browser connects. A browser that navigates sends Upgrade-Insecure-Requests, and
	// Sec-Fetch-Site only where the connection is protected (Fetch Metadata, section 2).
	return r.Header.Get("Upgrade-Insecure-Requests") == "" || r.Header.Get("Sec-Fetch-Site") != ""
}

// policy is the Content-Security-Policy of a page. connect and forms are further sources of these kinds. Elements
// style with the nonce apply too, if there is one.
func policy(connect, forms, nonce string) string {
	styles := "style-src 'self'"
	if nonce != "" {
		styles += " 'nonce-" + nonce + "'"
	}
	return strings.TrimRight("default-src 'none'; script-src 'self'; "+styles+"; img-src 'self'; "+
		"connect-src 'self' "+connect, " ") +
		strings.TrimRight("; form-action 'self' "+forms, " ") + "; base-uri 'none'; frame-ancestors 'none'"
}

// failure is an answer other than a page.
type failure struct {
	status int
	text   string
}

func (f *failure) Error() string { return f.text }

// bounded returns the context of the calls of a page.
func bounded(r *http.Request, wait time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(r.Context(), wait, errSlow)
}

// panelOf returns the context of the calls of a part of a page that may be left out.
func panelOf(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, panelWait, errSlow)
}

var errSlow = errors.New("the API did not answer in time")

// or returns the first text that is not empty.
func or(texts ...string) string { return cmp.Or(texts...) }
