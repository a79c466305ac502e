package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/control"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/admin"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/extproc/busy"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/extproc/lockfile"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/controltls"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/tracing"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

const (
	// socketWait bounds how long a router waits for its routes before it binds its socket. It
	// is shorter than the time for which Envoy repeats a question.
	socketWait = 2 * time.Second
	// minGoodbyeTime is the part of a shutdown that is reserved for the Goodbye, even if
	// requests are in progress. A shutdown shorter than twice that reserves half of it.
	minGoodbyeTime = 2 * time.Second
)

// router has the parts of the process.
type router struct {
	flags  flags
	ranges ranges
	log    *zap.Logger

	stopTLS   func() // nil: no TLS
	lock      *lockfile.File
	gate      controlclient.Gate   // sandboxes or egress
	sandboxes *admission.Sandboxes // nil with --mode=Egress
	egress    *control.Sandboxes   // nil with --mode=Ingress
	teamKeys  extproc.TeamKeys
	client    *controlclient.Client
	server    server
	pages     *admin.Pages
	tracer    *tracing.Tracer // nil: off
	// adminHTTP and healthHTTP are bound to their addresses. healthHTTP may be nil.
	adminHTTP, healthHTTP *cli.HTTPServer
}

// server answers Envoy. *extproc.Server and *egress.Server are ones.
type server interface {
	Listen(ctx context.Context) (net.Listener, error)
	Serve(l net.Listener) error
	Connections() int
	Stop(ctx context.Context)
}

// program is the one whose metrics the router has.
func (r *router) program() metric.Program {
	if r.flags.egress() {
		return metric.Egress
	}
	return metric.Router
}

// wire makes the parts and binds the HTTP listeners. ctx is the one that serve gets. close
// must be called even after an error.
func (r *router) wire(ctx context.Context, metrics *metric.Registry) error {
	gateway := r.wireIngress
	if r.flags.egress() {
		gateway = r.wireEgress
	}
	if err := gateway(ctx, metrics); err != nil {
		return err
	}
	return r.wireHTTP(ctx, metrics)
}

// wireIngress makes the parts of a gateway for requests to sandboxes.
func (r *router) wireIngress(ctx context.Context, metrics prometheus.Registerer) error {
	if err := r.wireSandboxes(metrics); err != nil {
		return err
	}
	if err := r.wireClient(metrics, metric.PingSeconds); err != nil {
		return err
	}
	if err := r.register(metrics); err != nil {
		return err
	}
	if err := r.wireTraces(ctx); err != nil {
		return err
	}
	s, err := extproc.New(extproc.Options{
		Trace:  r.trace(),
		Socket: r.flags.Socket, GRPCGo: r.flags.GRPCGo, Hosts: r.flags.hosts(), PodCIDRs: r.ranges.pods, E2BStatuses: r.flags.E2BStatuses,
		Routes: r.sandboxes.Routes(), Sandboxes: r.sandboxes, TeamKeys: &r.teamKeys, Metrics: metrics, Log: r.log.Named("request"),
	})
	if err != nil {
		return err
	}
	r.server = s
	return nil
}

// wireEgress makes the parts of a gateway for requests of sandboxes.
func (r *router) wireEgress(_ context.Context, metrics prometheus.Registerer) error {
	resolvConf, err := os.ReadFile("/etc/resolv.conf")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	s, err := egress.New(egress.Options{
		ClusterDomain: clusterDomain(resolvConf),
		Socket:        r.flags.Socket, Resolver: r.flags.resolver(), MaxConnections: r.flags.MaxConnections, MaxOpen: r.flags.OpenRequests, MaxRate: r.flags.Requests,
		Fresh: func() bool { return r.egress.Fresh() }, Ask: func(id string) bool { return r.client.Ask(id, false) },
		Metrics: metrics, Log: r.log.Named("request"),
	})
	if err != nil {
		return err
	}
	r.egress, err = control.New(control.Options{Server: s, Reach: r.ranges.reach, Now: bootclock.Now, Log: r.log.Named("rules")})
	if err != nil {
		return err
	}
	r.server, r.gate = s, r.egress
	if err := r.wireClient(metrics, metric.EgressPingSeconds); err != nil {
		return err
	}
	return r.registerEgress(metrics)
}

func (r *router) wireTraces(ctx context.Context) error {
	host, err := os.Hostname() // in a container: the name of its pod
	if err != nil {
		return fmt.Errorf("name of this machine: %w", err)
	}
	if r.tracer, err = tracing.New(ctx, tracing.Options{
		To: r.flags.TracesTo, Service: "berth-router", Version: cli.Version(), Instance: host, Log: r.log.Named("traces"),
	}); err != nil {
		return fmt.Errorf("--traces-to: %w", err)
	}
	return nil
}

// trace returns what makes a span of a decision, nil if there are no traces.
func (r *router) trace() func(extproc.Traced) {
	if r.tracer == nil {
		return nil
	}
	return func(t extproc.Traced) {
		attributes := [][2]string{{"berth.outcome", t.Outcome}, {"berth.sandbox", t.SandboxID}, {"berth.request", t.RequestID}}
		if t.WakeWait > 0 {
			attributes = append(attributes, [2]string{"berth.wake_wait", t.WakeWait.String()})
		}
		r.tracer.Tell("route", t.Parent, t.Began, t.Ended, attributes...)
	}
}

func (r *router) wireSandboxes(metrics prometheus.Registerer) error {
	reader, err := look.New(r.flags.EnvoyAdmin, func() int { return r.server.Connections() })
	if err != nil {
		return err
	}
	seconds := metric.LookSeconds.New()
	if err := metrics.Register(seconds); err != nil {
		return err
	}
	r.sandboxes, err = admission.New(admission.Options{
		Routes: routecache.Options{
			Size: r.flags.CacheSize, Now: bootclock.Now,
			Ask: func(id string, wake bool) bool { return r.client.Ask(id, wake) },
		},
		Uses: lastactive.Options{
			ConnectWindow: envoy.ConnectWindow, Now: bootclock.Now, Rate: rate.PerSecond(r.flags.Requests), MaxOpen: r.flags.OpenRequests,
			Look: func(ctx context.Context) (look.Look, error) {
				began := time.Now()
				l, err := reader.Look(ctx)
				if err == nil {
					seconds.Observe(time.Since(began).Seconds())
				}
				return l, err
			},
		},
	})
	r.gate = r.sandboxes
	return err
}

// wireClient creates the lock file of this process and the client of the allocator.
func (r *router) wireClient(metrics prometheus.Registerer, took metric.Histogram) error {
	security, err := r.security()
	if err != nil {
		return err
	}
	pings := took.New()
	if err := metrics.Register(pings); err != nil {
		return err
	}
	r.lock, err = lockfile.New(filepath.Dir(r.flags.Socket))
	if err != nil {
		return fmt.Errorf("router socket: the directory of --socket: %w", err)
	}
	o := controlclient.Options{
		Allocators: r.flags.Allocator, RouterID: r.lock.ID(), MaxStale: r.flags.MaxStale, DeadRouters: r.lock, GatewaySecret: r.lock.Secret(),
		OnPong: func(took time.Duration) { pings.Observe(took.Seconds()) }, Now: bootclock.Now, Log: r.log.Named("control"),
		Dial: []grpc.DialOption{
			grpc.WithTransportCredentials(security),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		},
	}
	if r.egress != nil {
		o.Egress = r.egress
	} else {
		o.Sandboxes, o.Uses, o.Keys, o.Probe = r.sandboxes, r.sandboxes.Uses(), &r.teamKeys, r.probe
	}
	r.client, err = controlclient.New(o)
	return err
}

func (r *router) security() (credentials.TransportCredentials, error) {
	if r.flags.ControlTLSDir == "" {
		return insecure.NewCredentials(), nil
	}
	role := controltls.RouterName
	if r.flags.egress() {
		role = controltls.EgressName
	}
	security, stop, err := controltls.Client(r.flags.ControlTLSDir, role)
	if err != nil {
		return nil, fmt.Errorf("--control-tls-dir: %w", err)
	}
	r.stopTLS = stop
	return security, nil
}

// probe asks a sandbox whether it is busy. An address outside the pod ranges gets no
// connection, as for requests.
func (r *router) probe(ctx context.Context, addr netip.AddrPort, path string) bool {
	inRange := slices.ContainsFunc(r.ranges.pods, func(p netip.Prefix) bool { return p.Contains(addr.Addr()) })
	return inRange && busy.Ask(ctx, addr, path)
}

func (r *router) wireHTTP(ctx context.Context, metrics prometheus.Gatherer) error {
	var err error
	o := admin.Options{
		AnyHost: !cli.Loopback(r.flags.AdminListen), Metrics: metrics, Now: time.Now,
		Envoy: envoy.AdminClient(r.flags.EnvoyAdmin),
		Ready: func() error {
			switch {
			case ctx.Err() != nil:
				return errors.New("stopping")
			case !r.gate.Fresh():
				return errors.New("routes are not fresh: the allocator has not answered for too long, or not yet")
			}
			return nil
		},
	}
	if r.egress != nil {
		o.Cache = r.egress
	} else {
		o.Cache, o.Tracker = r.sandboxes.Routes(), r.sandboxes.Uses()
	}
	if r.pages, err = admin.New(o); err != nil {
		return err
	}
	if r.adminHTTP, err = cli.Listen("--admin-listen", r.flags.AdminListen, cli.AdminConns); err != nil {
		return err
	}
	if r.flags.HealthListen != "" {
		r.healthHTTP, err = cli.Listen("--health-listen", r.flags.HealthListen, cli.AdminConns)
	}
	return err
}

// close releases what wire has made and serve does not stop.
func (r *router) close() {
	if r.lock != nil {
		_ = r.lock.Close(r.gate.Unread() == 0)
	}
	if r.stopTLS != nil {
		r.stopTLS()
	}
}

// serve runs all parts until ctx ends or one of them fails, and then shuts them down.
func (r *router) serve(ctx context.Context) error {
	// The session ends after the server, because Goodbye means that this process admits
	// nothing any more. goodbyeCtx ends the attempts to send it.
	goodbyeCtx, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	sessionCtx, endSession := context.WithCancel(goodbyeCtx)
	defer endSession()
	sessionEnded := make(chan struct{})
	// stopping ends with ctx, or when a part fails.
	all, stopping := errgroup.WithContext(ctx)
	if r.sandboxes != nil {
		all.Go(func() error { r.sandboxes.Run(goodbyeCtx); return nil })
	}
	all.Go(func() error { defer close(sessionEnded); return r.client.Run(sessionCtx, goodbyeCtx) })
	all.Go(func() error { return r.serveEnvoy(stopping) })
	all.Go(func() error { return r.adminHTTP.Serve(r.pages.Admin()) })
	if r.healthHTTP != nil {
		all.Go(func() error { return r.healthHTTP.Serve(r.pages.Health()) })
	}
	all.Go(func() error {
		<-stopping.Done()
		r.log.Info("stopping")
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.flags.ShutdownAfter)
		defer cancel()
		// A held request may take longer than the whole shutdown.
		requestTime := r.flags.ShutdownAfter - min(minGoodbyeTime, r.flags.ShutdownAfter/2)
		requests, cancelRequests := context.WithTimeout(limit, requestTime)
		defer cancelRequests()
		r.server.Stop(requests)
		endSession()
		select {
		case <-sessionEnded:
		case <-limit.Done():
		}
		giveUp()
		r.tracer.Close(limit)
		r.adminHTTP.Stop(limit)
		if r.healthHTTP != nil {
			r.healthHTTP.Stop(limit)
		}
		return nil
	})
	return all.Wait()
}

// serveEnvoy binds the socket once there are routes, and answers on it until the server
// stops. Before that a predecessor answers Envoy, or Envoy repeats its question: without
// routes this process could only refuse.
func (r *router) serveEnvoy(stopping context.Context) error {
	select {
	case <-r.client.Ready():
	case <-time.After(socketWait):
	case <-stopping.Done():
	}
	socket, err := r.server.Listen(stopping)
	switch {
	case errors.Is(err, context.Canceled):
		return nil // the process ends
	case err != nil:
		return err
	}
	listening := []zap.Field{
		zap.String("router", r.lock.ID()), zap.String("socket", r.flags.Socket),
		zap.Stringer("admin", r.adminHTTP.Addr()), zap.String("domain", r.flags.Domain),
	}
	if r.healthHTTP != nil {
		listening = append(listening, zap.Stringer("health", r.healthHTTP.Addr()))
	}
	r.log.Info("listening", listening...)
	var resuming sync.WaitGroup
	defer resuming.Wait()
	resuming.Go(func() { r.resumeEnvoy(stopping) })
	return r.server.Serve(socket)
}

// resumeEnvoy undoes a drain of Envoy. A kubelet that restarts the router alone begins one, because it runs the preStop
// action of that container. Without an Envoy there is nothing to undo, and the Envoy of another gateway has no such page.
func (r *router) resumeEnvoy(ctx context.Context) {
	err := envoy.Resume(ctx, envoy.AdminClient(r.flags.EnvoyAdmin))
	if err != nil && ctx.Err() == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
		r.log.Warn("an earlier drain of Envoy may go on", zap.Error(err))
	}
}
