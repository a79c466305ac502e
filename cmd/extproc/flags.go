package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/tracing"
)

type flags struct {
	Mode           string        `enum:"Ingress,Egress" default:"Ingress" help:"Ingress: the router of a gateway for requests to sandboxes. Egress: that of a gateway for requests of sandboxes to others."`
	Domain         string        `help:"Domain of the sandboxes, in lower case: hosts are <port>-<id>.<domain>. Required with --mode=Ingress."`
	GatewayHosts   []string      `help:"Further hosts at which the headers E2b-Sandbox-Id or X-Sandbox-Id (and -Port) name the sandbox, comma-separated. The domain itself is always one."`
	Paths          bool          `help:"At these hosts the path /sandboxes/<id>/<port>/rest names the sandbox, which gets /rest. Envoy needs the same setting."`
	E2BStatuses    bool          `name:"e2b-statuses" help:"Answer every client as E2B does, not only its SDKs: 502 for sandboxes that are unknown or have ended and for closed ports. Envoy needs the same setting."`
	Allocator      []string      `required:"" help:"Control addresses of the allocator's replicas, host:port, comma-separated, tried in turn."`
	PodCIDRs       []string      `name:"pod-cidrs" required:"" help:"Address ranges of pods, such as 10.0.0.0/8, comma-separated. Every destination must lie in one. With --mode=Egress none may."`
	InsideCIDRs    []string      `name:"inside-cidrs" help:"With --mode=Egress: further address ranges, or addresses, that no sandbox may reach, comma-separated, such as public addresses of nodes. Those that are not public need not be named."`
	OutsideCIDRs   []string      `name:"outside-cidrs" help:"With --mode=Egress: address ranges that are not public and that sandboxes may reach all the same, if their rules allow it, comma-separated. --pod-cidrs and --inside-cidrs win, and KUBERNETES_SERVICE_HOST."`
	NameServer     string        `help:"With --mode=Egress: the name server that looks up what sandboxes name, ip:port. Empty: those of /etc/resolv.conf."`
	Socket         string        `default:"/run/berth/router.sock" help:"Unix socket for Envoy, a path of at most about 100 bytes. Its directory must belong to this gateway alone: routers keep their lock files there."`
	EnvoyAdmin     string        `default:"/run/berth/envoy-admin.sock" help:"Unix socket of Envoy's admin interface, which shows open requests: the --admin-socket of Envoy's configuration. While it does not answer, no sandbox is released for being idle."`
	AdminListen    string        `default:"127.0.0.1:9901" help:"Address of the admin listener, ip:port. It shows sandbox IDs: outside loopback it needs --admin-anywhere."`
	AdminAnywhere  bool          `help:"Allow --admin-listen outside loopback. Every client that can connect can then read the IDs of all sandboxes, which give access to them, and take profiles."`
	HealthListen   string        `help:"Address of a listener, ip:port, with only /healthz, /readyz and /metrics, for probes from outside the pod. Empty: only the admin listener has them."`
	ControlTLSDir  string        `name:"control-tls-dir" help:"Directory with tls.crt, tls.key and ca.crt for mutual TLS with allocators. Changed files are read again. Empty: no TLS, and allocators must be on loopback."`
	CacheSize      int           `default:"100000" placeholder:"ROUTES" help:"Maximum number of routes to keep, 1 or more."`
	MaxStale       time.Duration `placeholder:"15m" help:"How long known routes are served without the allocator, 1s to 24h. It may differ from that of the allocators: fences wait for the longer one. 0: 15m. With --mode=Egress it is how long known rules are used, 20s to that of the allocators, and 0 is 30s."`
	Requests       float64       `name:"sandbox-requests-per-second" default:"0" placeholder:"REQUESTS" help:"Requests per second that this router admits for one sandbox, 0.001 to 1,000,000. 2,000 may come at once, or those of 2s if that is more. Others get 429. 0: no limit, or 200 with --mode=Egress."`
	OpenRequests   int           `name:"sandbox-open-requests" default:"0" placeholder:"REQUESTS" help:"Requests and WebSockets that one sandbox may have open at this gateway, by what Envoy held open at the newest look, as a rule a second ago. Further ones get 429. 0: no limit, or a 50th of --max-connections with --mode=Egress, which counts exactly."`
	MaxConnections int           `default:"0" placeholder:"CONNECTIONS" help:"With --mode=Egress: the bound on the connections of sandboxes to Envoy, whose configuration needs the same, 500 or more. One address gets at most a 40th of those that are free. 0: 5,000."`
	ShutdownAfter  time.Duration `default:"10s" help:"How long a shutdown may take, above 0: requests in progress first, then Goodbye to the leader, which gets at least the last 2s, or half of a shutdown shorter than 4s. It should be longer than a failover of the allocator."`
	GRPCGo         bool          `name:"grpc-go" help:"Serve the socket with grpc-go instead of Berth's own HTTP/2 server. It takes about twice the CPU. Both answer the same."`
	TracesTo       string        `name:"traces-to" placeholder:"URL" help:"OTLP receiver (gRPC) of the spans of decisions about requests that Envoy traces, http://host:port or https://host:port. Empty: no traces."`
	LogLevel       string        `default:"info" help:"debug, info, warn or error."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`
}

// The defaults and bounds of an egress router.
const (
	ingressMaxStale, egressMaxStale = 15 * time.Minute, 30 * time.Second
	egressRequests                  = 200
	defaultCacheSize                = 100_000
)

func (f *flags) egress() bool { return f.Mode == "Egress" }

func (f *flags) hosts() extproc.Hosts {
	return extproc.Hosts{Domain: f.Domain, Gateways: f.GatewayHosts, Paths: f.Paths}
}

// ranges are those of the flags.
type ranges struct {
	pods  []netip.Prefix
	reach *policy.Reach // with --mode=Egress
}

// check sets what depends on the mode, and returns the ranges, or all errors of the flags.
func (f *flags) check() (ranges, error) {
	var errs []error
	parse := func(flag string, all []string) (cidrs []netip.Prefix) {
		for _, text := range all {
			prefix, err := netip.ParsePrefix(text)
			if addr, notAddr := netip.ParseAddr(text); flag == "--inside-cidrs" && notAddr == nil && addr.Zone() == "" {
				prefix, err = netip.PrefixFrom(addr, addr.BitLen()), nil
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s %q: must be a range such as 10.0.0.0/8", flag, text))
				continue
			}
			cidrs = append(cidrs, prefix.Masked())
		}
		return cidrs
	}
	r := ranges{pods: parse("--pod-cidrs", f.PodCIDRs)}
	minMaxStale := time.Second
	if f.egress() {
		errs = append(errs, f.checkEgress()...)
		minMaxStale = controlv1.MinEgressMaxStale
		var err error
		never := slices.Concat(r.pods, parse("--inside-cidrs", f.InsideCIDRs))
		if api, noAddr := netip.ParseAddr(os.Getenv("KUBERNETES_SERVICE_HOST")); noAddr == nil { // some clusters give a name
			never = append(never, netip.PrefixFrom(api, api.BitLen()))
		}
		if r.reach, err = policy.NewReach(parse("--outside-cidrs", f.OutsideCIDRs), never); err != nil {
			errs = append(errs, fmt.Errorf("--outside-cidrs, --inside-cidrs, --pod-cidrs: %w", err))
		}
	} else {
		errs = append(errs, f.checkIngress()...)
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
	if f.MaxStale < minMaxStale || f.MaxStale > controlclient.MaxMaxStale {
		errs = append(errs, fmt.Errorf("--max-stale %v: must be %v to %v with --mode=%s", f.MaxStale, minMaxStale, controlclient.MaxMaxStale, f.Mode))
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
	return r, errors.Join(errs...)
}

// checkIngress sets and checks what an ingress router has by itself.
func (f *flags) checkIngress() (errs []error) {
	f.MaxStale = cmp.Or(f.MaxStale, ingressMaxStale)
	if hosts := f.hosts(); f.Domain == "" {
		errs = append(errs, errors.New("--domain: is required"))
	} else if err := hosts.Check(); err != nil {
		errs = append(errs, fmt.Errorf("--domain, --gateway-hosts: %w", err))
	}
	return append(errs, f.unused(map[string]bool{
		"--inside-cidrs": len(f.InsideCIDRs) > 0, "--outside-cidrs": len(f.OutsideCIDRs) > 0, "--name-server": f.NameServer != "",
		"--max-connections": f.MaxConnections != 0,
	})...)
}

// checkEgress sets and checks what an egress router has by itself.
func (f *flags) checkEgress() (errs []error) {
	f.MaxStale = cmp.Or(f.MaxStale, egressMaxStale)
	f.Requests = cmp.Or(f.Requests, egressRequests)
	if f.MaxConnections = cmp.Or(f.MaxConnections, egress.DefaultConnections); f.MaxConnections < egress.MinConnections {
		errs = append(errs, fmt.Errorf("--max-connections %d: must be at least %d", f.MaxConnections, egress.MinConnections))
	}
	if _, err := netip.ParseAddrPort(f.NameServer); f.NameServer != "" && err != nil {
		errs = append(errs, fmt.Errorf("--name-server %q: must be ip:port", f.NameServer))
	}
	return append(errs, f.unused(map[string]bool{
		"--domain": f.Domain != "", "--gateway-hosts": len(f.GatewayHosts) > 0, "--paths": f.Paths, "--e2b-statuses": f.E2BStatuses,
		"--cache-size": f.CacheSize != defaultCacheSize, "--grpc-go": f.GRPCGo, "--traces-to": f.TracesTo != "",
	})...)
}

// unused names the flags that are set and have no meaning in the mode.
func (f *flags) unused(set map[string]bool) (errs []error) {
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if set[name] {
			errs = append(errs, fmt.Errorf("%s: has no meaning with --mode=%s: leave it out", name, f.Mode))
		}
	}
	return errs
}

// clusterDomain returns the domain of the cluster, by the search domains that the kubelet gives each pod:
// <namespace>.svc.<domain>, svc.<domain> and <domain>. Empty: they name none.
func clusterDomain(resolvConf []byte) string {
	for line := range strings.Lines(string(resolvConf)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "search" {
			continue
		}
		for _, domain := range fields[1:] {
			if domain, ok := strings.CutPrefix(strings.TrimSuffix(domain, "."), "svc."); ok {
				return strings.ToLower(domain)
			}
		}
	}
	return ""
}

// resolver looks up what sandboxes name.
func (f *flags) resolver() *net.Resolver {
	r := &net.Resolver{PreferGo: true}
	if f.NameServer != "" {
		var dialer net.Dialer
		r.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, f.NameServer)
		}
	}
	return r
}
