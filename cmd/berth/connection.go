package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/cmd/internal/contexts"
)

// The exit statuses besides 0, 1 and cli.ExitUsage.
const (
	exitNotFound    = 3
	exitRefused     = 4
	exitUnreachable = 5
)

// defaultAPI is the address of an allocator on this machine, as in its pod.
const defaultAPI = "http://127.0.0.1:8081"

// apiFlags say how to reach the HTTP API.
type apiFlags struct {
	Context        string        `env:"BERTH_CONTEXT" complete:"context" help:"Context to use instead of the current one."`
	APIURL         string        `name:"api-url" env:"BERTH_API_URL" help:"URL of the HTTP API, instead of a context."`
	APIKeyFile     string        `name:"api-key-file" env:"BERTH_API_KEY_FILE" help:"File with the key for the API. BERTH_API_KEY can hold the key itself."`
	CAFile         string        `name:"ca-file" env:"BERTH_CA_FILE" help:"File with certificates, in PEM, to trust besides the system's."`
	RequestTimeout time.Duration `default:"15s" help:"How long a call may take."`
}

// fromEnvironment sets what no flag has set.
func (f *apiFlags) fromEnvironment() {
	f.Context = cmp.Or(f.Context, os.Getenv("BERTH_CONTEXT"))
	f.APIURL = cmp.Or(f.APIURL, os.Getenv("BERTH_API_URL"))
	f.APIKeyFile = cmp.Or(f.APIKeyFile, os.Getenv("BERTH_API_KEY_FILE"))
	f.CAFile = cmp.Or(f.CAFile, os.Getenv("BERTH_CA_FILE"))
}

// keyVariable holds a key. There is no flag for it, because others on the machine see arguments.
const keyVariable = "BERTH_API_KEY"

// target is the installation that a command uses.
type target struct {
	contexts.Context
	// from says what named it, for errors.
	from string
	key  string
	// wait bounds a call.
	wait time.Duration
	api  *client.Client
	// http sends requests to the API and to sandboxes.
	http *http.Client
}

// find decides which installation is used. A context gives its key, CA and gateway only together
// with its address.
func (f *apiFlags) find() (contexts.Context, string, error) {
	urlFlag := f.APIURL != "" && f.APIURL != os.Getenv("BERTH_API_URL")
	contextFlag := f.Context != "" && f.Context != os.Getenv("BERTH_CONTEXT")
	switch {
	case urlFlag && contextFlag:
		return contexts.Context{}, "", usage("--api-url and --context: only one of them can be given")
	case urlFlag:
		return contexts.Context{APIURL: f.APIURL}, "--api-url", nil
	case f.APIURL != "" && !contextFlag: // a flag comes before the environment
		return contexts.Context{APIURL: f.APIURL}, "BERTH_API_URL", nil
	}
	return selected(f.Context)
}

// selected returns the named context, or else the current one, the only development cluster, or
// the default.
func selected(name string) (contexts.Context, string, error) {
	file, path, err := configuration()
	if err != nil {
		return contexts.Context{}, "", err
	}
	development, err := contexts.Development()
	if err != nil {
		return contexts.Context{}, "", cli.WithExitCode(cli.ExitUsage, err)
	}
	if name = cmp.Or(name, file.Current); name != "" {
		if c, ok := file.Contexts[name]; ok {
			return c, "context " + name, nil
		}
		if c, ok := development[name]; ok {
			return c, "development cluster " + name, nil
		}
		return contexts.Context{}, "", cli.WithExitCode(cli.ExitUsage, fmt.Errorf(
			"no context %q in %s, and no development cluster of that name runs; see berth context ls", name, path))
	}
	switch names := contexts.Names(development); len(names) {
	case 0:
		return contexts.Context{APIURL: defaultAPI}, "the default", nil
	case 1:
		return development[names[0]], "development cluster " + names[0], nil
	default:
		return contexts.Context{}, "", cli.WithExitCode(cli.ExitUsage, fmt.Errorf(
			"%d development clusters run: %s; choose one with --context or BERTH_CONTEXT", len(names), strings.Join(names, ", ")))
	}
}

func configuration() (file contexts.File, path string, err error) {
	if path, err = contexts.Path(); err == nil {
		file, err = contexts.Load(path)
	}
	if err != nil {
		return file, path, cli.WithExitCode(cli.ExitUsage, err)
	}
	return file, path, nil
}

// target returns the installation. It makes no call.
func (f *apiFlags) target() (*target, error) {
	c, from, err := f.find()
	if err != nil {
		return nil, err
	}
	t := &target{Context: c, from: from, wait: f.RequestTimeout}
	t.CAFile = cmp.Or(f.CAFile, c.CAFile)
	if t.key, err = f.readKey(c); err != nil {
		return nil, cli.WithExitCode(cli.ExitUsage, err)
	}
	transport, err := newTransport(t.CAFile, t.dialer())
	if err != nil {
		return nil, cli.WithExitCode(cli.ExitUsage, err)
	}
	// No other host may get the key.
	t.http = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	if t.api, err = client.New(client.Options{URL: t.APIURL, Key: t.key, HTTP: t.http}); err != nil {
		return nil, cli.WithExitCode(cli.ExitUsage, fmt.Errorf("%s: %w", from, err))
	}
	return t, nil
}

func (f *apiFlags) readKey(c contexts.Context) (string, error) {
	key, path := os.Getenv(keyVariable), f.APIKeyFile
	switch {
	case key != "" && path != "":
		return "", fmt.Errorf("%s and --api-key-file: only one of them can be given", keyVariable)
	case key != "":
		return key, nil
	}
	path = cmp.Or(path, c.APIKeyFile)
	if path == "" {
		return "", nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("--api-key-file: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

type dial func(ctx context.Context, network, address string) (net.Conn, error)

// dialer connects to hosts below localhost at this machine, because not every resolver knows them.
func (*target) dialer() dial {
	d := &net.Dialer{Timeout: 10 * time.Second}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err == nil && strings.HasSuffix(host, ".localhost") {
			address = net.JoinHostPort("localhost", port)
		}
		return d.DialContext(ctx, network, address)
	}
}

func newTransport(caFile string, dial dial) (*http.Transport, error) {
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dial, ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}
	if caFile == "" {
		return transport, nil
	}
	pool, err := authorities(caFile)
	if err != nil {
		return nil, err
	}
	transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	return transport, nil
}

// authorities returns the system's certificates and those of a file.
func authorities(caFile string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("--ca-file: %w", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("--ca-file: %w", err)
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--ca-file %s: no certificate in it", caFile)
	}
	return pool, nil
}

// reread has a transport read the file of authorities at each new connection, because a server outlives
// certificates.
func reread(transport *http.Transport, caFile string) {
	transport.TLSClientConfig = &tls.Config{
		MinVersion: tls.VersionTLS12,
		// VerifyConnection verifies instead.
		InsecureSkipVerify: true, //nolint:gosec // see above
		VerifyConnection: func(c tls.ConnectionState) error {
			pool, err := authorities(caFile)
			if err != nil {
				return err
			}
			if c.ServerName == "" { // of an address, which the state does not have
				return errors.New("--ca-file: a server that is read again needs a name")
			}
			between := x509.NewCertPool()
			for _, certificate := range c.PeerCertificates[1:] {
				between.AddCert(certificate)
			}
			_, err = c.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, DNSName: c.ServerName})
			return err
		},
	}
}

// call makes a call of the API within its bound and explains its error.
func call[T any](ctx context.Context, t *target, f func(ctx context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.wait, errors.New("--request-timeout"))
	defer cancel()
	answer, err := f(ctx)
	return answer, t.explain(ctx, err)
}

// do is call for a call without an answer.
func do(ctx context.Context, t *target, f func(ctx context.Context) error) error {
	_, err := call(ctx, t, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}

// explain adds to an error what the caller can do, and its exit status.
func (t *target) explain(ctx context.Context, err error) error {
	var answer *client.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &answer):
		return t.explainAnswer(answer)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
		return cli.WithExitCode(exitUnreachable, fmt.Errorf(
			"no answer of %s (%s) within %v; --request-timeout allows more", t.APIURL, t.from, t.wait))
	case strings.Contains(err.Error(), "malformed HTTP"), strings.Contains(err.Error(), "readLoopPeekFail"):
		// The second one is net/http's word if the answer comes before the request was sent.
		return cli.WithExitCode(exitUnreachable, fmt.Errorf(
			"%s (%s) is not the HTTP API: it does not speak HTTP/1.1. The control port does not; the API is at the "+
				"allocator's --api-listen, 8081 by default. An address with TLS needs https://", t.APIURL, t.from))
	}
	var x *tls.CertificateVerificationError
	var outer *url.Error
	switch {
	case errors.As(err, &x):
		return cli.WithExitCode(exitUnreachable, fmt.Errorf("%s (%s): %w; name its CA with --ca-file", t.APIURL, t.from, x))
	case errors.As(err, &outer):
		return cli.WithExitCode(exitUnreachable, fmt.Errorf("the API at %s (%s) cannot be reached: %w%s",
			t.APIURL, t.from, outer.Err, t.otherAddresses()))
	}
	return err
}

// otherAddresses says how to name another API.
func (t *target) otherAddresses() string {
	if strings.HasPrefix(t.from, "development cluster") {
		return "; see berth-dev status"
	}
	return "; set BERTH_API_URL or --api-url, choose a context (berth context use), or start a development cluster " +
		"(berth-dev up)"
}

func (t *target) explainAnswer(e *client.Error) error {
	switch {
	case e.Reason == "" && e.Status >= http.StatusBadRequest && e.Status < http.StatusInternalServerError,
		e.Reason == "" && e.Status < http.StatusBadRequest:
		return fmt.Errorf("%s (%s) is not Berth's API: %w", t.APIURL, t.from, e)
	case e.Status == http.StatusUnauthorized && t.key == "":
		return cli.WithExitCode(exitRefused, fmt.Errorf(
			"%w; set %s or --api-key-file, or name the file in the context", e, keyVariable))
	case e.Status == http.StatusUnauthorized:
		return cli.WithExitCode(exitRefused, fmt.Errorf("%w; %s (%s) does not know this key", e, t.APIURL, t.from))
	case client.IsNotFound(e) && strings.HasPrefix(e.Reason, "sandbox_"):
		return cli.WithExitCode(exitNotFound, fmt.Errorf("%w; berth ls lists the sandboxes", e))
	case e.Reason == "snapshot_not_found":
		return cli.WithExitCode(exitNotFound, fmt.Errorf("%w; berth snapshot ls lists the snapshots", e))
	case client.IsNotFound(e):
		return cli.WithExitCode(exitNotFound, e)
	case e.Reason == "pool_empty":
		return cli.WithExitCode(exitRefused, fmt.Errorf("%w; berth pools diagnose shows what its pods wait for", e))
	case client.IsRefused(e) || client.IsLimit(e) || e.Status == http.StatusConflict:
		return cli.WithExitCode(exitRefused, e)
	case e.Status == http.StatusBadRequest:
		return cli.WithExitCode(cli.ExitUsage, e)
	case e.Status == http.StatusBadGateway || e.Status == http.StatusServiceUnavailable || e.Status == http.StatusGatewayTimeout:
		return cli.WithExitCode(exitUnreachable, e)
	}
	return e
}
