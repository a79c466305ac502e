package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/tracing"
)

type flags struct {
	Domain        string        `required:"" help:"Domain of the sandboxes, in lower case: hosts are <port>-<id>.<domain>."`
	GatewayHosts  []string      `help:"Further hosts at which the headers E2b-Sandbox-Id or X-Sandbox-Id (and -Port) name the sandbox, comma-separated. The domain itself is always one."`
	Paths         bool          `help:"At these hosts the path /sandboxes/<id>/<port>/rest names the sandbox, which gets /rest. Envoy needs the same setting."`
	E2BStatuses   bool          `name:"e2b-statuses" help:"Answer every client as E2B does, not only its SDKs: 502 for sandboxes that are unknown or have ended and for closed ports. Envoy needs the same setting."`
	Allocator     []string      `required:"" help:"Control addresses of the allocator's replicas, host:port, comma-separated, tried in turn."`
	PodCIDRs      []string      `name:"pod-cidrs" required:"" help:"Address ranges of pods, such as 10.0.0.0/8, comma-separated. Every destination must lie in one."`
	Socket        string        `default:"/run/berth/router.sock" help:"Unix socket for Envoy, a path of at most about 100 bytes. Its directory must belong to this gateway alone: routers keep their lock files there."`
	EnvoyAdmin    string        `default:"/run/berth/envoy-admin.sock" help:"Unix socket of Envoy's admin interface, which shows open requests: the --admin-socket of Envoy's configuration. While it does not answer, no sandbox is released for being idle."`
	AdminListen   string        `default:"127.0.0.1:9901" help:"Address of the admin listener, ip:port. It shows sandbox IDs: outside loopback it needs --admin-anywhere."`
	AdminAnywhere bool          `help:"Allow --admin-listen outside loopback. Every client that can connect can then read the IDs of all sandboxes, which give access to them, and take profiles."`
	HealthListen  string        `help:"Address of a listener, ip:port, with only /healthz, /readyz and /metrics, for probes from outside the pod. Empty: only the admin listener has them."`
	ControlTLSDir string        `name:"control-tls-dir" help:"Directory with tls.crt, tls.key and ca.crt for mutual TLS with allocators. Changed files are read again. Empty: no TLS, and allocators must be on loopback."`
	CacheSize     int           `default:"100000" placeholder:"ROUTES" help:"Maximum number of routes to keep, 1 or more."`
	MaxStale      time.Duration `default:"15m" help:"How long known routes are served without the allocator, 1s to 24h. It may differ from that of the allocators: fences wait for the longer one."`
	Requests      float64       `name:"sandbox-requests-per-second" default:"0" placeholder:"REQUESTS" help:"Requests per second that this router admits for one sandbox, 0.001 to 1,000,000. 2,000 may come at once, or those of 2s if that is more. Others get 429. 0: no limit."`
	OpenRequests  int           `name:"sandbox-open-requests" default:"0" placeholder:"REQUESTS" help:"Requests and WebSockets that one sandbox may have open at this gateway, by what Envoy held open at the newest look, as a rule a second ago. Further ones get 429. 0: no limit."`
	ShutdownAfter time.Duration `default:"10s" help:"How long a shutdown may take, above 0: requests in progress first, then Goodbye to the leader, which gets at least the last 2s, or half of a shutdown shorter than 4s. It should be longer than a failover of the allocator."`
	GRPCGo        bool          `name:"grpc-go" help:"Serve the socket with grpc-go instead of Berth's own HTTP/2 server. It takes about twice the CPU. Both answer the same."`
	TracesTo      string        `name:"traces-to" placeholder:"URL" help:"OTLP receiver (gRPC) of the spans of decisions about requests that Envoy traces, http://host:port or https://host:port. Empty: no traces."`
	LogLevel      string        `default:"info" help:"debug, info, warn or error."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`
}

func (f *flags) hosts() extproc.Hosts {
	return extproc.Hosts{Domain: f.Domain, Gateways: f.GatewayHosts, Paths: f.Paths}
}

// check returns the pod ranges, or all errors of the flags.
func (f *flags) check() ([]netip.Prefix, error) {
	var errs []error
	var cidrs []netip.Prefix
	for _, text := range f.PodCIDRs {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("--pod-cidrs %q: must be a range such as 10.0.0.0/8", text))
			continue
		}
		cidrs = append(cidrs, prefix.Masked())
	}
	hosts := f.hosts()
	if err := hosts.Check(); err != nil {
		errs = append(errs, fmt.Errorf("--domain, --gateway-hosts: %w", err))
	}
	for _, address := range f.Allocator {
		if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
			errs = append(errs, fmt.Errorf("--allocator %q: must be host:port", address))
		} else if f.ControlTLSDir == "" && !cli.Loopback(address) {
			errs = append(errs, fmt.Errorf("--allocator %q: outside loopback it needs --control-tls-dir, "+
				"because without TLS the network could choose where requests go", address))
		}
	}
	if !f.AdminAnywhere && !cli.Loopback(f.AdminListen) {
		errs = append(errs, fmt.Errorf("--admin-listen %q: outside loopback every client that can connect could read sandbox IDs: "+
			"use an address such as 127.0.0.1:9901, --health-listen for probes and metrics, or --admin-anywhere", f.AdminListen))
	}
	if f.CacheSize < 1 {
		errs = append(errs, fmt.Errorf("--cache-size %d: must be at least 1", f.CacheSize))
	}
	if f.MaxStale < time.Second || f.MaxStale > controlclient.MaxMaxStale {
		errs = append(errs, fmt.Errorf("--max-stale %v: must be 1s to %v", f.MaxStale, controlclient.MaxMaxStale))
	}
	if err := rate.Check(f.Requests); err != nil {
		errs = append(errs, fmt.Errorf("--sandbox-requests-per-second %v: %w", f.Requests, err))
	}
	if f.OpenRequests < 0 {
		errs = append(errs, fmt.Errorf("--sandbox-open-requests %d: must be at least 0", f.OpenRequests))
	}
	if err := tracing.CheckURL(f.TracesTo); f.TracesTo != "" && err != nil {
		errs = append(errs, fmt.Errorf("--traces-to %w", err))
	}
	if f.ShutdownAfter <= 0 {
		errs = append(errs, fmt.Errorf("--shutdown-after %v: must be positive", f.ShutdownAfter))
	}
	if _, err := cli.Logger(f.LogLevel, io.Discard); err != nil {
		errs = append(errs, err)
	}
	return cidrs, errors.Join(errs...)
}
