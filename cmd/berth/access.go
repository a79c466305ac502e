package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// place is a port and path of a sandbox, as an argument: ID[:PORT][/PATH].
type place struct {
	id   string
	port uint16 // 0: the default port
	path string
}

func parsePlace(text string) (p place, err error) {
	name, path, rooted := strings.Cut(text, "/")
	if rooted {
		p.path = "/" + path
	}
	id, port, ported := strings.Cut(name, ":")
	if ported {
		if p.port, err = parsePort(port); err != nil {
			return p, err
		}
	}
	if p.id = id; id == "" {
		return p, usage("%q: must be ID[:PORT][/PATH]", text)
	}
	return p, nil
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, usage("port %q: must be 1 to 65535", text)
	}
	return uint16(n), nil
}

// gatewayFlags say how to reach sandboxes.
type gatewayFlags struct {
	apiFlags
	Gateway string `env:"BERTH_GATEWAY" help:"host:port to connect to for sandboxes, where their names do not resolve."`
}

// located is a place of a sandbox.
type located struct {
	*target
	place   place
	sandbox *openapi.Sandbox
	url     *url.URL
}

// tokenHeader names the header with the token of a sandbox.
const tokenHeader = "e2b-traffic-access-token"

// token returns the token that requests need, "" for none.
func (l *located) token() (string, error) {
	switch l.sandbox.Access {
	case openapi.AccessTeam:
		return "", cli.WithExitCode(exitRefused, fmt.Errorf(
			"%s has the access team: use berth open, or send an API key of its team in the header X-API-Key", l.place.id))
	case openapi.AccessToken:
		token := deref(l.sandbox.TrafficAccessToken)
		if token == "" {
			return "", cli.WithExitCode(exitRefused, fmt.Errorf(
				"%s needs a token, which the API does not show to this key; a key with the role member sees it", l.place.id))
		}
		return token, nil
	}
	return "", nil
}

// locate finds the installation, the sandbox and the address of a place.
func (f *gatewayFlags) locate(ctx context.Context, text string) (*located, error) {
	p, err := parsePlace(text)
	if err != nil {
		return nil, err
	}
	t, err := f.target()
	if err != nil {
		return nil, err
	}
	if t.Gateway = cmp.Or(f.Gateway, t.Gateway); t.Gateway != "" {
		if _, _, err := net.SplitHostPort(t.Gateway); err != nil {
			return nil, usage("--gateway %q: must be host:port", t.Gateway)
		}
	}
	s, err := readOnce(ctx, t, p.id)
	if err != nil {
		return nil, err
	}
	address, err := addressOf(s, p.port, p.path)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(address)
	return &located{t, p, s, u}, err
}

type openCommand struct {
	gatewayFlags
	Place string `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox; ID:PORT/PATH for a port and a path."`
	Print bool   `help:"Print the address, and open nothing."`
}

// Run implements the command.
func (c *openCommand) Run(ctx context.Context, o *output) error {
	l, err := c.locate(ctx, c.Place)
	if err != nil {
		return err
	}
	u := l.url.String()
	if l.sandbox.Access == openapi.AccessToken || l.sandbox.Access == openapi.AccessTeam {
		if u, err = l.link(ctx); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintln(o.out, u); err != nil || c.Print {
		return err
	}
	return browse(ctx, u)
}

// browse opens an address, which was printed, in the browser.
func browse(ctx context.Context, u string) error {
	name := "xdg-open"
	if runtime.GOOS == "darwin" {
		name = "open"
	}
	if browser := os.Getenv("BROWSER"); browser != "" {
		name = browser
	}
	if err := exec.CommandContext(ctx, name, u).Run(); err != nil {
		return fmt.Errorf("%s: %w; open the address above by hand, or set BROWSER to a program", name, err)
	}
	return nil
}

// link makes a link to the place, which a browser can open without a token.
func (l *located) link(ctx context.Context) (string, error) {
	var link openapi.NewLink
	if l.place.port != 0 {
		link.Port = new(int64(l.place.port))
	}
	if l.place.path != "" {
		link.Path = new(l.place.path)
	}
	made, err := call(ctx, l.target, func(ctx context.Context) (*openapi.Link, error) {
		return l.api.Link(ctx, l.place.id, link)
	})
	if err != nil {
		return "", err
	}
	return made.URL, nil
}

type curlCommand struct {
	gatewayFlags
	Place string   `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox; ID:PORT/PATH for a port and a path."`
	Args  []string `arg:"" optional:"" passthrough:"" name:"curl-argument" help:"Arguments for curl, such as -d '{}'."`
}

// Run implements the command. The exit status is curl's.
func (c *curlCommand) Run(ctx context.Context, o *output) error {
	l, err := c.locate(ctx, c.Place)
	if err != nil {
		return err
	}
	token, err := l.token()
	if err != nil {
		return err
	}
	var args []string
	if l.Gateway != "" {
		args = append(args, "--connect-to", "::"+l.Gateway)
	}
	if l.CAFile != "" {
		args = append(args, "--cacert", l.CAFile)
	}
	if token != "" { // not as an argument, which others on the machine can see
		args = append(args, "--config", "/dev/fd/3")
	}
	if !terminal(o.raw.out) || !terminal(o.raw.err) {
		args = append(args, "--silent", "--show-error")
	}
	rest := c.Args
	if len(rest) > 0 && rest[0] == "--" {
		rest = rest[1:]
	}
	cmd := exec.CommandContext(ctx, "curl", append(append(args, rest...), l.url.String())...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, o.raw.out, o.raw.err
	if token != "" {
		read, write, err := os.Pipe()
		if err != nil {
			return err
		}
		defer read.Close()
		cmd.ExtraFiles = []*os.File{read}
		_, err = fmt.Fprintf(write, "header = \"%s: %s\"\n", tokenHeader, token) // less than a pipe holds
		if err = errors.Join(err, write.Close()); err != nil {
			return err
		}
	}
	err = cmd.Run()
	var failed *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%w; install curl, or use berth port-forward", err)
	case errors.As(err, &failed):
		return cli.WithExitCode(failed.ExitCode(), fmt.Errorf("curl %s: %w", l.url, err))
	}
	return err
}

type portForwardCommand struct {
	gatewayFlags
	ID    string `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
	Ports string `arg:"" optional:"" help:"LOCAL:PORT, PORT for both, or :PORT for any local port. Left out: any local port, and the sandbox's default port."`
}

// Help implements kong.HelpProvider.
func (*portForwardCommand) Help() string {
	return "HTTP and WebSocket pass, with the Host that the gateway expects. Other protocols over TCP do not: the gateway " +
		"refuses CONNECT. The sandbox sees the host of its address, not the local one."
}

// forwardHeader bounds the wait for the header of a local request.
const forwardHeader = 10 * time.Second

// Run implements the command. It forwards until ctx ends.
func (c *portForwardCommand) Run(ctx context.Context, o *output) error {
	local, remote, paired := strings.Cut(c.Ports, ":")
	if !paired {
		remote = local
	}
	place := c.ID
	if remote != "" {
		place += ":" + remote
	}
	if local != "" {
		if _, err := parsePort(local); err != nil {
			return err
		}
	}
	l, err := c.locate(ctx, place)
	if err != nil {
		return err
	}
	token, err := l.token()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", cmp.Or(local, "0")))
	if err != nil {
		return fmt.Errorf("%w; :PORT takes any local port", err)
	}
	transport, err := newTransport(l.CAFile, l.gatewayDialer())
	if err != nil {
		return err
	}
	transport.DisableKeepAlives = false
	defer transport.CloseIdleConnections()
	server := &http.Server{Handler: forwarder(l.url, token, transport), ReadHeaderTimeout: forwardHeader, ErrorLog: log.New(io.Discard, "", 0)}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if _, err := fmt.Fprintf(o.out, "forwarding from http://%s to %s\n", listener.Addr(), l.url); err != nil {
		return errors.Join(err, listener.Close())
	}
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// gatewayDialer connects to the gateway, if one is set, for every host.
func (t *target) gatewayDialer() dial {
	direct := t.dialer()
	if t.Gateway == "" {
		return direct
	}
	return func(ctx context.Context, network, _ string) (net.Conn, error) { return direct(ctx, network, t.Gateway) }
}

// forwarder passes requests on to the origin of u, with a token unless it is "".
func forwarder(u *url.URL, token string, transport http.RoundTripper) http.Handler {
	origin := &url.URL{Scheme: u.Scheme, Host: u.Host}
	proxy := &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(origin)
			r.Out.Host = origin.Host
			if token != "" {
				r.Out.Header.Set(tokenHeader, token)
			}
		},
		FlushInterval: -1, // an answer may be a stream
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, fmt.Sprintf("berth port-forward: %s cannot be reached: %v", origin, err), http.StatusBadGateway)
		},
		ErrorLog: log.New(io.Discard, "", 0),
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect {
			http.Error(w, "berth port-forward: CONNECT does not pass: the gateway refuses it", http.StatusMethodNotAllowed)
			return
		}
		proxy.ServeHTTP(w, r)
	})
}
