package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

type checkCommand struct {
	Gateway        string        `help:"host:port to connect to instead of what the names resolve to."`
	PlainGateway   bool          `help:"--gateway speaks plain HTTP although the public URL is https: TLS ends in front of it."`
	CAFile         string        `name:"ca-file" help:"File with certificates, in PEM, to trust besides the system's."`
	NoAPI          bool          `name:"no-api" help:"The gateway does not serve the API."`
	RequestTimeout time.Duration `default:"15s" help:"How long a request may take."`
	PublicURL      string        `arg:"" name:"public-url" help:"URL below which the sandboxes are, as the installation has it."`
}

// Help implements kong.HelpProvider.
func (*checkCommand) Help() string {
	return "It needs no key and changes nothing. A request for a sandbox that does not exist shows that the names resolve, that the " +
		"certificate is right, and that Envoy, its router and the leading allocator work together."
}

const (
	// noSandbox has the form of an ID.
	noSandbox = "checkcheckcheckcheck"
	// reasonHeader is in answers of Berth, and the gateway takes it out of what a sandbox answers.
	reasonHeader = "X-Berth-Reason"
)

// Run implements the command.
func (c *checkCommand) Run(ctx context.Context, o *output) error {
	public, err := url.Parse(c.PublicURL)
	if err != nil || public.Scheme != "http" && public.Scheme != "https" || public.Hostname() == "" || public.Path != "" {
		return usage("%q: must be a URL such as https://sandbox.example.com", c.PublicURL)
	}
	if c.Gateway != "" {
		if _, _, err := net.SplitHostPort(c.Gateway); err != nil {
			return usage("--gateway %q: must be host:port", c.Gateway)
		}
	} else if c.PlainGateway {
		return usage("--plain-gateway: needs --gateway")
	}
	t := &target{}
	t.Gateway = c.Gateway
	transport, err := newTransport(c.CAFile, t.gatewayDialer())
	if err != nil {
		return cli.WithExitCode(cli.ExitUsage, err)
	}
	through := &http.Client{Transport: transport, Timeout: c.RequestTimeout, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	if c.PlainGateway {
		through.Transport = plain{transport}
	}
	get := func(host, path string) (status int, reason string, err error) {
		u := url.URL{Scheme: public.Scheme, Host: host + "." + public.Host, Path: path}
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
		if err != nil {
			return 0, "", err
		}
		answer, err := through.Do(r)
		if err != nil {
			return 0, "", cli.WithExitCode(exitUnreachable, fmt.Errorf("%w%s", err, hint(err)))
		}
		_, _ = io.CopyN(io.Discard, answer.Body, 1<<16) // the status is all that counts
		if err := answer.Body.Close(); err != nil {
			return 0, "", cli.WithExitCode(exitUnreachable, err)
		}
		reason = answer.Header.Get(reasonHeader)
		fmt.Fprintf(o.out, "%s: %s\n", &u, cmp.Or(reason, answer.Status))
		return answer.StatusCode, reason, nil
	}
	_, reason, err := get(noSandbox, "/")
	switch {
	case err != nil:
		return err
	case reason == "":
		return cli.WithExitCode(exitUnreachable, errors.New(
			"the answer is not Berth's: the name leads somewhere else, or something in front refuses the request"))
	case reason != string(apierror.SandboxNotFound):
		return cli.WithExitCode(exitUnreachable, fmt.Errorf(
			"the answer for a sandbox that does not exist must be %s: docs/operations.md says what %s means", apierror.SandboxNotFound, reason))
	case c.NoAPI:
		return nil
	}
	status, _, err := get("api", "/health")
	if err == nil && status != http.StatusOK {
		err = cli.WithExitCode(exitUnreachable, errors.New("the API does not answer at the gateway; --no-api leaves this out"))
	}
	return err
}

// hint says what an error of a request means for who installs Berth.
func hint(err error) string {
	var name *net.DNSError
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.As(err, &name):
		return "; all names below the public URL's host must resolve to the gateway (a wildcard in DNS), or --gateway says where it is"
	case errors.As(err, &certificate):
		return "; the certificate must be for all names below the public URL's host (a wildcard), and --ca-file names its CA"
	}
	return ""
}
