package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/cmd/internal/mcpserver"
)

type mcpCommand struct {
	gatewayFlags
	HTTP         string `name:"http" placeholder:"IP:PORT" help:"Serve streamable HTTP at this address instead of standard input and output. Without an IP: on loopback."`
	PlainGateway bool   `help:"--gateway speaks plain HTTP although the addresses of sandboxes are https: TLS ends in front of it."`
	KillOnExit   bool   `help:"Kill the sandboxes that the client has created when it ends. Not with --http."`
}

// Help implements kong.HelpProvider.
func (*mcpCommand) Help() string {
	return "The client of standard input acts with the API key of this command. With --http each request brings its own key, " +
		"in X-API-Key or as a bearer token, and the key of this command is not used."
}

// mcpStop bounds how long calls in progress may go on when the server ends.
const mcpStop = 15 * time.Second

// Run implements the command.
func (c *mcpCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	t.http.Timeout = c.RequestTimeout
	if t.Gateway = cmp.Or(c.Gateway, t.Gateway); t.Gateway != "" {
		if _, _, err := net.SplitHostPort(t.Gateway); err != nil {
			return usage("--gateway %q: must be host:port", t.Gateway)
		}
	} else if c.PlainGateway {
		return usage("--plain-gateway: needs --gateway")
	}
	transport, err := newTransport(t.CAFile, t.gatewayDialer())
	if err != nil {
		return cli.WithExitCode(cli.ExitUsage, err)
	}
	if t.CAFile != "" {
		reread(transport, t.CAFile)
	}
	transport.DisableKeepAlives, transport.IdleConnTimeout = false, time.Minute
	defer transport.CloseIdleConnections()
	sandboxes := &http.Client{Transport: transport}
	if c.PlainGateway {
		sandboxes.Transport = plain{transport}
	}
	if c.HTTP == "" {
		return mcpserver.Stdio(ctx, cli.Version(), t.api, sandboxes, c.KillOnExit, os.Stdin, stdout{o})
	}
	if c.KillOnExit {
		return usage("--kill-on-exit: not with --http, where no session ends; give sandboxes a timeout")
	}
	return c.serve(ctx, o, t, sandboxes)
}

func (c *mcpCommand) serve(ctx context.Context, o *output, t *target, sandboxes *http.Client) error {
	host, port, err := net.SplitHostPort(c.HTTP)
	if err != nil {
		return usage("--http %q: must be ip:port, such as 127.0.0.1:8090", c.HTTP)
	}
	calls, err := newTransport(t.CAFile, t.dialer())
	if err != nil {
		return cli.WithExitCode(cli.ExitUsage, err)
	}
	calls.DisableKeepAlives, calls.IdleConnTimeout = false, time.Minute
	defer calls.CloseIdleConnections()
	server, err := cli.Listen("--http", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port), mcpserver.MaxConns)
	if err != nil {
		return err
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mcpStop)
		defer cancel()
		server.Stop(ctx)
	})
	fmt.Fprintf(o.err, "serving MCP at http://%s%s for %s (%s)\n", server.Addr(), mcpserver.Path, t.APIURL, t.from)
	err = server.Serve(mcpserver.Handler(mcpserver.HTTPOptions{
		Version: cli.Version(), Sandboxes: sandboxes,
		API: func(key string, from []string) (*client.Client, error) {
			return client.New(client.Options{URL: t.APIURL, Key: key, HTTP: &http.Client{
				Transport: forwardedFor{calls, from}, CheckRedirect: t.http.CheckRedirect, Timeout: c.RequestTimeout,
			}})
		},
	}))
	if !stop() {
		<-stopped
	}
	return err
}

// stdout is where data goes. It is not closed.
type stdout struct{ *output }

func (s stdout) Write(b []byte) (int, error) { return s.raw.out.Write(b) }

// Close implements io.Closer.
func (stdout) Close() error { return nil }

// forwardedFor names the client of a call to the API.
type forwardedFor struct {
	http.RoundTripper
	from []string
}

func (f forwardedFor) RoundTrip(r *http.Request) (*http.Response, error) {
	if len(f.from) > 0 {
		r = r.Clone(r.Context())
		r.Header["X-Forwarded-For"] = slices.Clone(f.from)
	}
	return f.RoundTripper.RoundTrip(r)
}

// plain sends requests without TLS.
type plain struct{ http.RoundTripper }

func (p plain) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = "http"
	return p.RoundTripper.RoundTrip(r)
}
