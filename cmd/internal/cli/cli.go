// Package cli is what Berth's commands have in common: flags with environment
// fallbacks, logs, HTTP listeners, signals.
package cli

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"
	"k8s.io/apimachinery/pkg/util/validation"
)

// ErrHelp is returned by Parse when help or the version was printed.
var ErrHelp = errors.New("help was printed")

// Parse reads args into into, a pointer to a struct with kong's tags. Each flag
// can also be set in the environment, as prefix and the flag's name in upper
// case. Errors name the flag. A field of type kong.VersionFlag prints Version,
// and like --help needs no other flag to be given.
func Parse(into any, name, description, prefix string, args []string, stdout, stderr io.Writer) (*kong.Context, error) {
	exited := false
	parser, err := kong.New(into,
		kong.Name(name), kong.Description(description),
		kong.DefaultEnvars(prefix), kong.Writers(stdout, stderr),
		kong.Vars{"version": Version()},
		kong.Exit(func(int) { exited = true }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
	if err != nil {
		return nil, fmt.Errorf("flags: %w", err)
	}
	k, err := parser.Parse(args)
	if exited {
		return nil, ErrHelp
	}
	if err != nil {
		return nil, fmt.Errorf("%w; see %s --help", err, name)
	}
	return k, nil
}

// release is the version that an image's programs were built as: the linker sets
// it, see tools/images.
var release string

// Version is the version this binary was built from.
func Version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return info.Main.Version + " " + s.Value[:12]
		}
	}
	return info.Main.Version
}

// Main runs a command until SIGTERM or SIGINT, and ends the process with 1 and
// the error on stderr if it fails.
func Main(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	main(run, func(w io.Writer, err error) { fmt.Fprintln(w, "error:", err) })
}

// MainOfService is Main for a program that writes a log: the error is its last line, in
// the form of the others.
func MainOfService(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) {
	main(run, Fatal)
}

// fatalWait bounds the writing of the error: who reads stderr may stand still, and the
// process has to end all the same.
const fatalWait = time.Second

func main(run func(ctx context.Context, args []string, stdout, stderr io.Writer) error, report func(io.Writer, error)) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err == nil || errors.Is(err, ErrHelp) {
		return
	}
	reported := make(chan struct{})
	go func() {
		defer close(reported)
		report(os.Stderr, err)
	}()
	select {
	case <-reported:
	case <-time.After(fatalWait):
	}
	os.Exit(1)
}

// Fatal writes the error that ends a service as a line of its log.
func Fatal(w io.Writer, err error) {
	newLogger(zapcore.ErrorLevel, w).Error("ended with an error", zap.Error(err))
}

// Logger writes JSON lines, or readable lines when w is a terminal.
func Logger(level string, w io.Writer) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("--log-level %q: must be debug, info, warn or error", level)
	}
	return newLogger(l, w), nil
}

func newLogger(level zapcore.Level, w io.Writer) *zap.Logger {
	config := zap.NewProductionEncoderConfig()
	config.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	config.TimeKey = "time"
	encoder := zapcore.NewJSONEncoder(config)
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		config.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		config.EncodeLevel = zapcore.CapitalColorLevelEncoder
		encoder = zapcore.NewConsoleEncoder(config)
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(w)), level))
}

// Deadlines of every connection, for what a client does: to send a request's header, to
// send all of it, to read the answer, and to begin another one. A handler that takes
// longer than these says so for its call (http.ResponseController).
const (
	headerWait = 5 * time.Second
	readWait   = 10 * time.Second
	writeWait  = 30 * time.Second
	idleWait   = 2 * time.Minute
	// maxHeader bounds a header, of which every connection may hold one.
	maxHeader = 16 << 10
)

// AdminConns is how many connections a listener for operators, probes and metrics has.
const AdminConns = 256

// HTTPServer is an HTTP server bound to its address.
type HTTPServer struct {
	name     string
	server   *http.Server
	listener net.Listener
}

// Listen binds an address; Serve answers on it, on at most so many connections. name is
// the flag that the address comes from.
func Listen(name, address string, conns int) (*HTTPServer, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return serveOn(name, l, conns), nil
}

func serveOn(name string, l net.Listener, most int) *HTTPServer {
	c := &conns{most: most, waiting: list.New(), all: map[net.Conn]*list.Element{}}
	return &HTTPServer{name: name, listener: l, server: &http.Server{
		ReadHeaderTimeout: headerWait, ReadTimeout: readWait, WriteTimeout: writeWait, IdleTimeout: idleWait, MaxHeaderBytes: maxHeader,
		ConnState: c.changed,
	}}
}

// conns bounds connections. Above the bound the one is closed that has had no request for
// the longest: it is idle, or has not sent a header. So clients that only connect cannot
// keep others out, and one in the middle of a call is never closed. If all are, the new
// one is closed.
type conns struct {
	most int

	mu      sync.Mutex
	waiting *list.List                 // of net.Conn without a request, the longest first
	all     map[net.Conn]*list.Element // their elements in waiting, nil for those with a request
}

func (c *conns) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	elem, known := c.all[conn]
	if elem != nil {
		c.waiting.Remove(elem)
	}
	switch {
	case state == http.StateNew || state == http.StateIdle && known:
		c.all[conn] = c.waiting.PushBack(conn)
	case state == http.StateActive && known:
		c.all[conn] = nil
	default:
		delete(c.all, conn)
	}
	if len(c.all) > c.most {
		oldest := c.waiting.Remove(c.waiting.Front()).(net.Conn)
		delete(c.all, oldest)
		_ = oldest.Close() // the server finds out by itself
	}
}

// Addr is the address it is bound to.
func (s *HTTPServer) Addr() net.Addr { return s.listener.Addr() }

// Serve answers until Stop and then returns nil.
func (s *HTTPServer) Serve(h http.Handler) error {
	s.server.Handler = h
	if err := s.server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}

// Stop answers what is in progress, until ctx ends.
func (s *HTTPServer) Stop(ctx context.Context) {
	if s.server.Shutdown(ctx) != nil {
		_ = s.server.Close() // what is left is cut off; there is nothing more to do
	}
}

// Loopback reports whether only this machine can reach the address.
func Loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// Advertisable reports whether an address means something to somebody elsewhere:
// a port, and a host that is a DNS name or an IP address other than a wildcard.
// What a variable left behind that was not expanded, as $(POD_IP), is none.
func Advertisable(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return false
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return !ip.Unmap().IsUnspecified() && ip.Zone() == ""
	}
	return len(validation.IsDNS1123Subdomain(strings.ToLower(strings.TrimSuffix(host, ".")))) == 0
}
