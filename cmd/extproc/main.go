// Command extproc is the router: the ExtProc server that stands beside one Envoy.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/admin"
	"github.com/berth-sandbox/berth/extproc/busy"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/extproc/instance"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/controltls"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

type flags struct {
	Domain        string        `required:"" help:"Domain of the sandboxes: hosts are <port>-<id>.<domain>."`
	GatewayHosts  []string      `help:"Hosts beside the domain itself at which the headers E2b-Sandbox-Id or X-Sandbox-Id (and -Port) name the sandbox; several with commas."`
	Paths         bool          `help:"At those hosts /sandboxes/<id>/<port>/rest names the sandbox, which gets /rest. Envoy must be told, too."`
	Allocator     []string      `required:"" help:"Control addresses of the allocator's replicas, host:port, tried in turn; several with commas."`
	PodCIDRs      []string      `name:"pod-cidrs" required:"" help:"Ranges that destinations may lie in, as 10.0.0.0/8; several with commas."`
	Socket        string        `default:"/run/berth/router.sock" help:"Unix socket for Envoy. In its directory, which is this Envoy's alone, routers keep their lock files."`
	EnvoyAdmin    string        `default:"/run/berth/envoy-admin.sock" help:"Unix socket of Envoy's admin page, which says what requests are open. It must be the --admin-socket that Envoy was configured with. While it does not answer, no sandbox is released for being idle."`
	AdminListen   string        `default:"127.0.0.1:9901" help:"Address of the admin listener. It shows sandbox IDs: outside loopback it needs --admin-anywhere."`
	AdminAnywhere bool          `help:"--admin-listen may be outside loopback. Everybody who can connect to it then reads the IDs of all sandboxes, which open them, and can take profiles."`
	HealthListen  string        `help:"Address that answers only /healthz, /readyz and /metrics, for probes from outside the pod. Empty: only the admin listener answers them."`
	ControlTLSDir string        `name:"control-tls-dir" help:"Directory with tls.crt, tls.key and ca.crt for mutual TLS with allocators; read again when they change. Empty: no TLS, allocators must be on loopback."`
	CacheSize     int           `default:"100000" help:"Routes to keep, 1 or more."`
	NegativeTTL   time.Duration `name:"negative-ttl" default:"1s" help:"How long an unknown sandbox ID is remembered as unknown."`
	MaxStale      time.Duration `default:"15m" help:"How long known routes are served without the allocator. Must not be more than the allocators' --max-stale, or they refuse this router."`
	LookupTimeout time.Duration `default:"2s" help:"How long a request waits for the allocator's answer, at most 4s."`
	ShutdownAfter time.Duration `default:"10s" help:"How long a shutdown may take: requests in progress, and then finding a leader to say Goodbye to, which gets the last 2s at least. A failover should fit in."`
	LogLevel      string        `default:"info" help:"debug, info, warn or error."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`
}

// socketWait is how long a router waits for its routes before it listens all the same. It
// is shorter than Envoy goes on asking.
const socketWait = 2 * time.Second

// goodbyeLeast is how much of a shutdown is kept for the Goodbye, whatever requests are in
// progress. Of a shorter shutdown than twice that it is half.
const goodbyeLeast = 2 * time.Second

func main() { cli.MainOfService(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags
	if _, err := cli.Parse(&f, "extproc", "The router: answers Envoy where each request goes.", "BERTH_ROUTER", args, stdout, stderr); err != nil {
		return err
	}
	cidrs, err := f.check()
	if err != nil {
		return err
	}
	log, err := cli.Logger(f.LogLevel, stderr)
	if err != nil {
		return err
	}
	defer log.Sync() //nolint:errcheck // stderr has nothing to sync

	security := insecure.NewCredentials()
	if f.ControlTLSDir != "" {
		var stop func()
		if security, stop, err = controltls.Client(f.ControlTLSDir); err != nil {
			return fmt.Errorf("--control-tls-dir: %w", err)
		}
		defer stop()
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var l *controlclient.Client
	cache, err := routecache.New(routecache.Options{
		Size: f.CacheSize, NegativeTTL: f.NegativeTTL, Now: bootclock.Now,
		Ask: func(id string) bool { return l.Ask(id) },
	})
	if err != nil {
		return err
	}
	answers := extproc.NewAnswers()
	var server *extproc.Server
	reader, err := look.New(f.EnvoyAdmin, func() int { return server.Connections() })
	if err != nil {
		return err
	}
	looked := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_router_look_seconds", Help: "How long it took to read what requests Envoy holds open. One that fails is not counted.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2},
	})
	tracker, err := lastactive.New(lastactive.Options{
		Window: envoy.Window, Now: bootclock.Now,
		Look: func(ctx context.Context) (look.Look, error) {
			began := time.Now()
			l, err := reader.Look(ctx)
			if err == nil {
				looked.Observe(time.Since(began).Seconds())
			}
			return l, err
		},
	})
	if err != nil {
		return err
	}
	self, err := instance.New(filepath.Dir(f.Socket))
	if err != nil {
		return fmt.Errorf("router socket: the directory of --socket: %w", err)
	}
	l, err = controlclient.New(controlclient.Options{
		Allocators: f.Allocator, InstanceID: self.ID(), MaxStale: f.MaxStale,
		Probe: func(ctx context.Context, addr netip.AddrPort, path string) bool {
			inRange := slices.ContainsFunc(cidrs, func(p netip.Prefix) bool { return p.Contains(addr.Addr()) }) // as for requests
			return inRange && busy.Ask(ctx, addr, path)
		},
		Cache: cache, Activity: tracker, Answers: answers, Neighbours: self, Now: bootclock.Now, Log: log.Named("control"),
		Dial: []grpc.DialOption{
			grpc.WithTransportCredentials(security),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		},
	})
	if err != nil {
		return err
	}
	defer func() { _ = self.Close(answers.Unread() == 0) }()
	if err := errors.Join(registerCacheMetrics(metrics, cache, tracker), metrics.Register(looked)); err != nil {
		return err
	}
	server, err = extproc.New(extproc.Options{
		Socket: f.Socket, Hosts: f.hosts(), PodCIDRs: cidrs, LookupTimeout: f.LookupTimeout,
		Routes: cache, Activity: tracker, Answers: answers, Metrics: metrics, Log: log.Named("request"),
	})
	if err != nil {
		return err
	}
	pages, err := admin.New(admin.Options{
		AnyHost: !cli.Loopback(f.AdminListen), Cache: cache, Tracker: tracker, Metrics: metrics, Now: time.Now,
		Ready: func() error {
			switch {
			case ctx.Err() != nil:
				return errors.New("stopping")
			case !cache.Fresh():
				return errors.New("routes are not fresh: the allocator has not been reached for too long, or not yet")
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	adminServer, err := cli.Listen("--admin-listen", f.AdminListen, cli.AdminConns)
	if err != nil {
		return err
	}
	listening := []zap.Field{zap.String("session", self.ID()), zap.String("socket", f.Socket), zap.Stringer("admin", adminServer.Addr()), zap.String("domain", f.Domain)}
	var healthServer *cli.HTTPServer
	if f.HealthListen != "" {
		if healthServer, err = cli.Listen("--health-listen", f.HealthListen, cli.AdminConns); err != nil {
			return err
		}
		listening = append(listening, zap.Stringer("health", healthServer.Addr()))
	}

	// The session ends after the server: its Goodbye says that this process
	// admits nothing any more. It is said until last ends.
	last, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	linked, endLink := context.WithCancel(last)
	defer endLink()
	left := make(chan struct{})
	all, failed := errgroup.WithContext(ctx)
	all.Go(func() error { tracker.Run(last); return nil })
	all.Go(func() error { defer close(left); return l.Run(linked, last) })
	all.Go(func() error {
		// Meanwhile a predecessor answers Envoy, or Envoy asks again: what is asked here
		// earlier would be refused.
		select {
		case <-l.Served():
		case <-time.After(socketWait):
		case <-failed.Done():
		}
		socket, err := server.Listen(failed)
		switch {
		case errors.Is(err, context.Canceled):
			return nil // this process ends
		case err != nil:
			return err
		}
		log.Info("listening", listening...)
		return server.Serve(socket)
	})
	all.Go(func() error { return adminServer.Serve(pages.Admin()) })
	if healthServer != nil {
		all.Go(func() error { return healthServer.Serve(pages.Health()) })
	}
	all.Go(func() error {
		<-failed.Done() // a signal, or one of the others failed
		log.Info("stopping")
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.ShutdownAfter)
		defer cancel()
		// A request may be held for longer than all of it.
		serving, cut := context.WithTimeout(limit, f.ShutdownAfter-min(goodbyeLeast, f.ShutdownAfter/2))
		defer cut()
		server.Stop(serving)
		endLink()
		select {
		case <-left:
		case <-limit.Done():
		}
		giveUp()
		adminServer.Stop(limit)
		if healthServer != nil {
			healthServer.Stop(limit)
		}
		return nil
	})
	return all.Wait()
}

func (f *flags) hosts() extproc.Hosts {
	return extproc.Hosts{Domain: f.Domain, Gateways: f.GatewayHosts, Paths: f.Paths}
}

// check returns the pod ranges, or everything that is wrong with the flags.
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
			errs = append(errs, fmt.Errorf("--allocator %q: outside loopback it needs --control-tls-dir, or anybody on the way could say where requests go", address))
		}
	}
	if !f.AdminAnywhere && !cli.Loopback(f.AdminListen) {
		errs = append(errs, fmt.Errorf("--admin-listen %q: outside loopback everybody who can connect could read sandbox IDs: use an address such as 127.0.0.1:9901, --health-listen for probes and metrics, or say --admin-anywhere", f.AdminListen))
	}
	if f.CacheSize < 1 {
		errs = append(errs, fmt.Errorf("--cache-size %d: must be at least 1", f.CacheSize))
	}
	if f.NegativeTTL <= 0 {
		errs = append(errs, fmt.Errorf("--negative-ttl %v: must be positive", f.NegativeTTL))
	}
	if f.MaxStale < time.Second {
		errs = append(errs, fmt.Errorf("--max-stale %v: must be at least 1s", f.MaxStale))
	}
	if f.LookupTimeout <= 0 || f.LookupTimeout > extproc.AnswerMost {
		errs = append(errs, fmt.Errorf("--lookup-timeout %v: must be above 0 and at most %v, because Envoy waits %v", f.LookupTimeout, extproc.AnswerMost, envoy.MessageTimeout))
	}
	if f.ShutdownAfter <= 0 {
		errs = append(errs, fmt.Errorf("--shutdown-after %v: must be positive", f.ShutdownAfter))
	}
	if _, err := cli.Logger(f.LogLevel, io.Discard); err != nil {
		errs = append(errs, err)
	}
	return cidrs, errors.Join(errs...)
}

func registerCacheMetrics(reg prometheus.Registerer, cache *routecache.Cache, tracker *lastactive.Tracker) error {
	var errs []error
	counter := func(name, help string, value func(routecache.Stats) uint64) {
		errs = append(errs, reg.Register(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help},
			func() float64 { return float64(value(cache.Stats())) })))
	}
	gauge := func(name, help string, value func() float64) {
		errs = append(errs, reg.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)))
	}
	counter("berth_routecache_hits_total", "Lookups answered from the cache.", func(s routecache.Stats) uint64 { return s.Hits })
	counter("berth_routecache_misses_total", "Lookups that waited for the allocator.", func(s routecache.Stats) uint64 { return s.Misses })
	counter("berth_routecache_questions_total", "Questions put to the allocator.", func(s routecache.Stats) uint64 { return s.Questions })
	counter("berth_routecache_evictions_total", "Routes dropped for want of room.", func(s routecache.Stats) uint64 { return s.Evictions })
	gauge("berth_routecache_routes", "Routes held.", func() float64 { return float64(cache.Stats().Routes) })
	gauge("berth_routecache_quiesced", "Sandboxes whose requests are held because the allocator asks whether they are idle.", func() float64 { return float64(cache.Stats().Quiesced) })
	gauge("berth_routecache_fresh", "1 while routes may be served.", func() float64 {
		if cache.Fresh() {
			return 1
		}
		return 0
	})
	gauge("berth_lastactive_sandboxes", "Sandboxes whose last activity is remembered.", func() float64 { return float64(tracker.Len()) })
	gauge("berth_router_blind", "1 while this router cannot tell what requests Envoy holds open, so that no sandbox is released for being idle. Its page /admin/last-active says why.", func() float64 {
		if tracker.Blind() != "" {
			return 1
		}
		return 0
	})
	return errors.Join(errs...)
}
