package agent

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/files"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/internal/options"
)

// Port is where E2B's SDKs expect the agent.
const Port = 49983

// TokenHeader carries the access token of the sandbox.
const TokenHeader = "X-Access-Token"

// Options are what an Agent is made of.
type Options struct {
	Log *slog.Logger
	// Keys open the box of the sandbox's configuration.
	Keys *initbox.Keys
	// Accounts are those of the pod.
	Accounts *accounts.Directory
	// WriteFile writes a file of the configuration for an account. Its error may have the path in it,
	// and must not have the contents.
	WriteFile func(accounts.Account, initbox.File) error
	// Freezer stops and continues the processes.
	Freezer *freeze.Freezer
}

// Agent serves one sandbox. Its methods may be called concurrently.
type Agent struct {
	o      Options
	mux    *http.ServeMux
	errors *connect.ErrorWriter
	meter  *meter
	series series
	// config is nil until the agent is configured. What it points to is never changed.
	config atomic.Pointer[initbox.Config]
	// configured is closed when the agent is.
	configured chan struct{}
	// stop is the archive of a stop that was begun last; nil: none was.
	stop atomic.Pointer[Stop]
	// boxes bounds the boxes that are read at one time, orders those of orders, and calls what is served with the
	// access token.
	boxes, orders, calls chan struct{}
	// configuring is held while a box is opened and its files are written.
	configuring sync.Mutex
	// restored says what came of the files of restoredFor, a sandbox. earlier was restored with them; nil: nothing. All
	// are guarded by configuring.
	restored    restored
	restoredFor string
	earlier     *earlier
}

// A client needs no token to send a box, so these bound what boxes take: how many are read at one time, and
// the time for reading one. The allocator gives an agent 1 s.
const (
	maxBoxes = 2
	boxWait  = 10 * time.Second
)

const (
	// maxCalls is the number of calls with the access token at one time. Each can hold a thread, of which Go's
	// runtime allows 10,000.
	maxCalls = 4096
	// bodyWait is how long a client may send nothing while its request is read.
	bodyWait = 5 * time.Minute
	// restWait is how long net/http may wait for the rest of a body that was not read to its end.
	restWait = 10 * time.Second
)

// New returns an agent that is not configured.
func New(o Options) (*Agent, error) {
	if err := options.Require(o, "Log", "Keys", "Accounts", "WriteFile", "Freezer"); err != nil {
		return nil, err
	}
	a := &Agent{o: o, mux: http.NewServeMux(),
		// Without the option, requests for /files count as calls of Connect.
		errors: connect.NewErrorWriter(connect.WithRequireConnectProtocolHeader()),
		meter:  newMeter("/", time.Now()), boxes: make(chan struct{}, maxBoxes),
		orders: make(chan struct{}, maxOrders), calls: make(chan struct{}, maxCalls), configured: make(chan struct{})}
	a.mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	a.mux.HandleFunc("GET "+initbox.Path, a.hello)
	a.mux.HandleFunc("POST "+initbox.Path, boxed(a.boxes, initbox.MaxSealed, boxWait, io.ReadAll, a.configure))
	order := func(path string, read func(io.Reader) ([]byte, error), use boxHandler) {
		a.mux.HandleFunc("POST "+path, boxed(a.orders, initbox.MaxSealedOrder, orderWait, read, use))
	}
	order(initbox.SleepPath, io.ReadAll, a.sleep)
	order(initbox.ArchivePath, io.ReadAll, a.archive)
	order(initbox.RestorePath, first, a.restore)
	a.Handle("GET /envs", http.HandlerFunc(a.envs))
	a.handle("GET /metrics", http.HandlerFunc(a.metrics), nil, true)
	a.handle("GET /metrics/history", http.HandlerFunc(a.history), nil, true)
	return a, nil
}

// Handle adds a handler that only requests with the access token reach. The pattern is one of
// http.ServeMux. Call it before the agent serves.
func (a *Agent) Handle(pattern string, h http.Handler) { a.HandleSigned(pattern, h, nil) }

// HandleSigned is Handle for a handler that requests without the header TokenHeader may reach too: signed
// judges them, with the access token that the header lacks. Its error is answered with 401.
func (a *Agent) HandleSigned(pattern string, h http.Handler, signed func(r *http.Request, token string) error) {
	a.handle(pattern, h, signed, false)
}

// handle is HandleSigned. always: also while the sandbox is asleep.
func (a *Agent) handle(pattern string, h http.Handler, signed func(*http.Request, string) error, always bool) {
	a.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		err := a.admit(r, signed)
		if err == nil && !always && a.o.Freezer.Asleep() {
			err = errAsleep
		}
		if err != nil {
			a.refuse(w, r, err)
			return
		}
		select {
		case a.calls <- struct{}{}:
			defer func() { <-a.calls }()
		default:
			a.refuse(w, r, errBusy)
			return
		}
		r.Body = &body{r.Body, http.NewResponseController(w), a.o.Freezer, r.Context()}
		h.ServeHTTP(w, r)
	})
}

// body is that of a request. A client that sends nothing for bodyWait ends it. While the sandbox is asleep nothing is
// handed over, so that an upload that has begun writes no file then.
type body struct {
	io.ReadCloser
	control *http.ResponseController
	freezer *freeze.Freezer
	ctx     context.Context //nolint:containedctx // of the request
}

// Read has a deadline only while it waits: one that passes later would end the context of the request, and
// thereby a stream that is silent.
func (b *body) Read(p []byte) (n int, err error) {
	_ = b.control.SetReadDeadline(time.Now().Add(bodyWait)) // fails only without a connection, in tests
	n, err = b.ReadCloser.Read(p)
	_ = b.control.SetReadDeadline(time.Time{}) // as above
	if err != nil && !errors.Is(err, io.EOF) {
		return n, err
	}
	select {
	case <-b.freezer.Awake():
		return n, err
	case <-b.ctx.Done():
		return n, b.ctx.Err()
	}
}

// HandleOpen is Handle for a handler that every request reaches, also before the configuration.
func (a *Agent) HandleOpen(pattern string, h http.Handler) { a.mux.Handle(pattern, h) }

// ServeHTTP implements http.Handler. Pages of every origin may read the answers (CORS): they have to know the token,
// and a browser has no credential of its own for the agent. The router answers their preflights.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Access-Control-Allow-Origin", "*")
	w.Header().Set("Access-Control-Expose-Headers", sandboxaccess.AgentExposedHeaders)
	// net/http reads on after the handler, also for a client without token.
	defer func() { _ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(restWait)) }()
	a.mux.ServeHTTP(w, r)
}

// Config returns the configuration of the sandbox, nil before there is one. It must not be changed.
func (a *Agent) Config() *initbox.Config { return a.config.Load() }

// Account returns the account of this name. "" is the sandbox's default user.
func (a *Agent) Account(name string) (accounts.Account, error) {
	if name == "" {
		name = a.o.Accounts.Default()
		if c := a.Config(); c != nil && c.DefaultUser != "" {
			name = c.DefaultUser
		}
	}
	return a.o.Accounts.Lookup(name)
}

// errUnconfigured is the answer to a call that comes before the configuration.
var errUnconfigured = errors.New("the sandbox is not configured yet")

// errAsleep is the answer to a call that comes while the sandbox is asleep.
var errAsleep = errors.New("the sandbox is asleep")

// errBusy is the answer to a call beyond maxCalls.
var errBusy = fmt.Errorf("%d calls are being served: end some of them and try again", maxCalls)

// admit returns why a request may not be served, or nil.
func (a *Agent) admit(r *http.Request, signed func(*http.Request, string) error) error {
	c := a.Config()
	if c == nil {
		return errUnconfigured
	}
	if c.Public {
		return nil
	}
	token := r.Header.Get(TokenHeader)
	switch {
	case token == "" && signed != nil:
		return signed(r, c.AccessToken)
	case token == "":
		return fmt.Errorf("header %s is missing", TokenHeader)
	case subtle.ConstantTimeCompare([]byte(token), []byte(c.AccessToken)) != 1:
		return fmt.Errorf("header %s is not the access token of this sandbox", TokenHeader)
	}
	return nil
}

// refuse answers a request that was not admitted, in the form of its protocol.
func (a *Agent) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, code := http.StatusUnauthorized, connect.CodeUnauthenticated
	switch {
	case errors.Is(err, errUnconfigured), errors.Is(err, errAsleep):
		status, code = http.StatusServiceUnavailable, connect.CodeUnavailable
	case errors.Is(err, errBusy):
		status, code = http.StatusTooManyRequests, connect.CodeResourceExhausted
	}
	if a.errors.IsSupported(r) {
		_ = a.errors.Write(w, r, connect.NewError(code, err)) // the client is away
		return
	}
	Error(w, status, err.Error())
}

// Error answers with a status and the body that E2B's SDKs read.
func Error(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // the client is away
}

// hello answers who the agent is. It needs no token: the allocator asks it before there is one.
func (a *Agent) hello(w http.ResponseWriter, _ *http.Request) {
	h := initbox.Hello{Version: initbox.Version, PublicKey: a.o.Keys.PublicKey()}
	if c := a.Config(); c != nil {
		h.Sandbox = initbox.SandboxDigest(c.SandboxID)
	}
	writeJSON(w, http.StatusOK, h)
}

// boxHandler does what a box says, and answers. Its error says what is wrong with the box.
type boxHandler func(w http.ResponseWriter, r *http.Request, sealed []byte) error

// boxed reads a box for use while it has one of the places. It answers with the error of use.
func boxed(
	places chan struct{}, most int64, wait time.Duration, read func(io.Reader) ([]byte, error), use boxHandler,
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(wait)) // fails only without a connection, in tests
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
		default:
			w.Header().Set("Connection", "close") // its body is still on the way
			Error(w, http.StatusServiceUnavailable, "box: others are being read; try again")
			return
		}
		sealed, err := read(http.MaxBytesReader(w, r.Body, most))
		if err != nil {
			status := http.StatusBadRequest
			if errors.As(err, new(*http.MaxBytesError)) {
				status = http.StatusRequestEntityTooLarge
			}
			Error(w, status, fmt.Sprintf("box: %v", err))
			return
		}
		switch err := use(w, r, sealed); {
		case errors.Is(err, initbox.ErrSealed):
			Error(w, http.StatusUnauthorized, err.Error())
		case err != nil:
			Error(w, http.StatusBadRequest, err.Error())
		}
	}
}

// configure takes the box with the configuration, once.
func (a *Agent) configure(w http.ResponseWriter, _ *http.Request, sealed []byte) error {
	a.configuring.Lock()
	defer a.configuring.Unlock()
	c, err := a.o.Keys.Open(sealed)
	if err != nil {
		return err
	}
	if now := a.Config(); now != nil {
		if now.SandboxID != c.SandboxID {
			Error(w, http.StatusConflict, fmt.Sprintf("this agent was configured for sandbox %s", now.SandboxID))
			return nil
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if a.restored != nothing && (a.restored != whole || a.restoredFor != c.SandboxID) {
		Error(w, http.StatusConflict, "this agent has files of another sandbox, or a part of those of this one")
		return nil
	}
	if c.Stopped != (a.earlier != nil) {
		Error(w, http.StatusConflict,
			"stopped: must be set for an agent that has restored a configuration, and for no other one")
		return nil
	}
	if c.Stopped {
		c = a.earlier.config(c)
	}
	if err := a.prepare(c); err != nil {
		return err
	}
	a.config.Store(c)
	a.earlier = nil
	close(a.configured)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// earlier is what a sandbox that was stopped had: its configuration, and the paths that were archived.
type earlier struct {
	restored *initbox.Config
	paths    []string
}

// config returns the configuration of a sandbox that was stopped: what its claim has brought is as before. Who may call
// the agent, and the proxy, are as the allocator says now.
func (e *earlier) config(now *initbox.Config) *initbox.Config {
	c := *e.restored
	c.SandboxID, c.AccessToken, c.Public, c.Proxy, c.Stopped = now.SandboxID, now.AccessToken, now.Public, now.Proxy, false
	return &c
}

// has reports whether a file was restored, or was not there any more.
func (e *earlier) has(name string) bool {
	return e != nil && slices.ContainsFunc(e.paths, func(p string) bool { return strings.HasPrefix(name+"/", p+"/") })
}

// prepare does what must be done before the agent counts as configured. After an error the sandbox is
// thrown away: nothing is undone. A file below an archived path is left as the sandbox has left it.
func (a *Agent) prepare(c *initbox.Config) error {
	name := c.DefaultUser
	if name == "" {
		name = a.o.Accounts.Default()
	}
	account, err := a.o.Accounts.Lookup(name)
	if err != nil {
		return fmt.Errorf("defaultUser: %w", err)
	}
	for i, f := range c.Files {
		name, err := files.Resolve(f.Path, account)
		if err == nil && !a.earlier.has(name) {
			err = a.o.WriteFile(account, f)
		}
		if err != nil {
			return fmt.Errorf("files[%d]: %w", i, err)
		}
	}
	return nil
}

// envs answers the environment variables of the configuration, without its secrets.
func (a *Agent) envs(w http.ResponseWriter, _ *http.Request) {
	envs := a.Config().Envs
	if envs == nil {
		envs = map[string]string{}
	}
	writeJSON(w, http.StatusOK, envs)
}
