// Command allocator is the control plane: one replica of it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/alecthomas/kong"
	"github.com/go-logr/zapr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/berth-sandbox/berth/allocator"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pools"
	apirest "github.com/berth-sandbox/berth/allocator/rest"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/controltls"
)

type flags struct {
	PublicURL        string        `name:"public-url" required:"" help:"Where clients reach Envoy: http(s)://<domain>[:port]. Sandboxes are at <port>-<id>. before the domain."`
	Namespace        string        `default:"default" help:"Namespace of the pools, their pods, the Sandbox objects and the lease."`
	Kubeconfig       string        `help:"Kubeconfig file. Empty: the service account of the pod this runs in."`
	APIListen        string        `name:"api-listen" default:"127.0.0.1:8081" help:"Address of the HTTP API. Outside loopback it needs --api-keys-dir."`
	APIAdvertise     string        `name:"api-advertise" help:"Address at which other replicas reach this replica's API, to pass calls on to the leader. Empty: the one it listens on."`
	APIKeysDir       string        `name:"api-keys-dir" help:"Directory of API keys, one file each, as a mounted Secret has them; read again when it changes. Empty: no key is needed."`
	ControlListen    string        `default:"127.0.0.1:9090" help:"Address of the control server for routers. Outside loopback it needs --control-tls-dir."`
	ControlAdvertise string        `help:"Address at which routers reach this replica's control server. Empty: the one it listens on."`
	ControlTLSDir    string        `name:"control-tls-dir" help:"Directory with tls.crt, tls.key and ca.crt for mutual TLS with routers; read again when they change. Empty: no TLS."`
	AdminListen      string        `default:"127.0.0.1:9902" help:"Address for /healthz, /readyz, /leaderz and /metrics."`
	KubeQPS          float32       `name:"kube-qps" default:"0" help:"Requests per second to the API server. 0: no limit of our own; the API server's priority and fairness is the limit."`
	KubeBurst        int           `default:"100" help:"Burst for --kube-qps."`
	MaxStale         time.Duration `default:"15m" help:"How long a router that is not heard of is waited for before its routes count as forgotten. Routers whose own --max-stale is larger are refused: raise it here first, lower it there first."`
	PodSecurity      string        `default:"baseline" help:"What a pool's pods may ask for: baseline (the Pod Security Standard of that name, and no service account token) or privileged (anything)."`
	Window           time.Duration `default:"5s" help:"How long an admitted request may go on opening connections: at least as long as Envoy's retries take. No idle timeout is shorter. A pod that others delete serves for longer than that and a failover (--lease-duration); a change replaces idle pods."`
	ReapDryRun       bool          `help:"Sandboxes that are idle are not released, and the log says which would be. Ends and lifetimes count all the same."`
	ClaimWait        time.Duration `default:"10s" help:"How long a claim waits for a pod when its pool has none, unless it says; 0: not at all."`
	ClaimQueue       int           `default:"1000" help:"How many claims may wait, by pool."`
	JournalBytes     int           `name:"journal-bytes-per-second" default:"1048576" help:"Bound of what is written to the journal; etcd keeps all of it until it is compacted, every 5 minutes by default."`
	LeaseDuration    time.Duration `default:"4s" help:"How long a leader that is not heard from keeps the lease: whole seconds, 1s to 1m. A pod that somebody else deletes serves for longer than a failover takes; so a change replaces idle pods. The same for all replicas."`
	LeaseRenew       time.Duration `default:"3s" help:"How long a leader tries to renew the lease before it gives up; less than --lease-duration."`
	LeaseRetry       time.Duration `default:"300ms" help:"Pause between attempts at the lease; a replica that does not lead makes it up to 2.2 times as long."`
	ShutdownAfter    time.Duration `default:"10s" help:"How long calls in progress may take at shutdown."`
	LogLevel         string        `default:"info" help:"debug, info, warn or error."`

	WallClockOffset time.Duration `default:"0s" hidden:"" help:"For tests: what this process takes for the wall clock is off by this."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`
}

func main() { cli.MainOfService(run) }

var kubernetesLog sync.Once

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags
	if _, err := cli.Parse(&f, "allocator", "The control plane: keeps pools warm, hands out sandboxes, tells the routers.", "BERTH_ALLOCATOR", args, stdout, stderr); err != nil {
		return err
	}
	public, err := f.check()
	if err != nil {
		return err
	}
	log, err := cli.Logger(f.LogLevel, stderr)
	if err != nil {
		return err
	}
	defer log.Sync() //nolint:errcheck // stderr has nothing to sync

	// What client-go has to say, about the election for example, in the same form. Its
	// logger is the process's, and must not change under those who use it.
	kubernetesLog.Do(func() { klog.SetLogger(zapr.NewLogger(log.Named("kubernetes"))) })

	config, err := f.restConfig()
	if err != nil {
		return err
	}
	clients, err := kube.NewClients(config, f.KubeQPS, f.KubeBurst)
	if err != nil {
		return err
	}
	policy, err := pools.NewPolicy(f.PodSecurity)
	if err != nil {
		return fmt.Errorf("--pod-security: %w", err)
	}
	var keys *apirest.Keys // none: the API is open
	if f.APIKeysDir != "" {
		if keys, err = apirest.NewKeys(f.APIKeysDir, time.Now, log.Named("api")); err != nil {
			return fmt.Errorf("--api-keys-dir: %w", err)
		}
	}
	security := insecure.NewCredentials()
	if f.ControlTLSDir != "" {
		var stop func()
		if security, stop, err = controltls.Server(f.ControlTLSDir); err != nil {
			return fmt.Errorf("--control-tls-dir: %w", err)
		}
		defer stop()
	}
	controlListener, err := net.Listen("tcp", f.ControlListen)
	if err != nil {
		return fmt.Errorf("--control-listen: %w", err)
	}
	api, err := cli.Listen("--api-listen", f.APIListen, apirest.MaxConns)
	if err != nil {
		return err
	}
	admin, err := cli.Listen("--admin-listen", f.AdminListen, cli.AdminConns)
	if err != nil {
		return err
	}
	if f.ControlAdvertise == "" {
		f.ControlAdvertise = controlListener.Addr().String()
	}
	if f.APIAdvertise == "" {
		f.APIAdvertise = api.Addr().String()
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	a, err := allocator.New(allocator.Options{
		Clients: clients, Namespace: f.Namespace, ControlAddress: f.ControlAdvertise, APIAddress: f.APIAdvertise, Keys: keys,
		LeaseDuration: f.LeaseDuration, RenewDeadline: f.LeaseRenew, RetryPeriod: f.LeaseRetry,
		ClaimWait: f.ClaimWait, MaxWaiting: f.ClaimQueue, JournalBytesPerSecond: f.JournalBytes,
		ReapDryRun: f.ReapDryRun,
		MaxStale:   f.MaxStale, Window: f.Window, Policy: policy, PublicScheme: public.Scheme, PublicHost: public.Host,
		WallClock: func() time.Time { return time.Now().Add(f.WallClockOffset) },
		Metrics:   metrics, Log: log,
	})
	if err != nil {
		return err
	}
	control := grpc.NewServer(
		grpc.Creds(security),
		// A router that stands still must not hold a stream for ever.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second}),
		// Nor must a peer that connects and says nothing: Stop waits for it.
		grpc.ConnectionTimeout(connectMost),
	)
	controlv1.RegisterControlServer(control, a.Control())
	log.Info("listening", zap.Stringer("api", api.Addr()), zap.Stringer("control", controlListener.Addr()), zap.Stringer("admin", admin.Addr()))

	// The leader's work ends after the calls it is in the middle of.
	running, stopRunning := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRunning()
	all, failed := errgroup.WithContext(ctx)
	all.Go(func() error { return a.Run(running) })
	all.Go(func() error {
		if err := control.Serve(controlListener); !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
			return err
		}
		return nil
	})
	all.Go(func() error { return api.Serve(a.API()) })
	all.Go(func() error { return admin.Serve(adminHandler(a, metrics)) })
	all.Go(func() error {
		<-failed.Done() // a signal, or one of the others failed
		log.Info("stopping")
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.ShutdownAfter)
		defer cancel()
		a.Close() // else the claims that wait would keep the next leader waiting
		api.Stop(limit)
		a.Control().Stop()
		stopRunning() // what may still be connected does not keep the lease
		control.Stop()
		admin.Stop(limit)
		return nil
	})
	return await(failed, f.ShutdownAfter+allocator.EndMost, all.Wait)
}

// connectMost is how long a router may take to connect: TLS and HTTP/2 handshakes.
const connectMost = 5 * time.Second

// await returns what wait returns, but once stopping has ended it waits no longer than
// most: a process that may not lead any more must end, whatever still hangs in it.
func await(stopping context.Context, most time.Duration, wait func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	select {
	case err := <-ended:
		return err
	case <-stopping.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(most):
		return fmt.Errorf("not everything has ended within %v, and the rest is cut off: %w", most, context.Cause(stopping))
	}
}

// check returns the public URL, or everything that is wrong with the flags.
func (f *flags) check() (*url.URL, error) {
	var errs []error
	public, err := url.Parse(f.PublicURL)
	if err != nil || public.Scheme != "http" && public.Scheme != "https" || public.Host == "" || public.Path != "" && public.Path != "/" || public.User != nil || public.RawQuery != "" || public.Fragment != "" {
		errs = append(errs, fmt.Errorf("--public-url %q: must be http(s)://<domain>[:port]", f.PublicURL))
	}
	for _, listen := range []struct{ name, address, advertised, protection, dir, risk string }{
		{"api", f.APIListen, f.APIAdvertise, "--api-keys-dir", f.APIKeysDir, "everybody could claim and release sandboxes"},
		{"control", f.ControlListen, f.ControlAdvertise, "--control-tls-dir", f.ControlTLSDir, "everybody could be a router"},
	} {
		if listen.dir == "" && !cli.Loopback(listen.address) {
			errs = append(errs, fmt.Errorf("--%s-listen %q: outside loopback it needs %s, or %s; otherwise use an address such as 127.0.0.1:8081", listen.name, listen.address, listen.protection, listen.risk))
		}
		if listen.advertised == "" && !cli.Advertisable(listen.address) {
			errs = append(errs, fmt.Errorf("--%s-advertise: needed, because nobody elsewhere can connect to %q", listen.name, listen.address))
		} else if listen.advertised != "" && !cli.Advertisable(listen.advertised) {
			errs = append(errs, fmt.Errorf("--%s-advertise %q: must be host:port at which others reach this replica", listen.name, listen.advertised))
		}
	}
	if f.PodSecurity != pools.PolicyBaseline && f.PodSecurity != pools.PolicyPrivileged {
		errs = append(errs, fmt.Errorf("--pod-security %q: must be %s or %s", f.PodSecurity, pools.PolicyBaseline, pools.PolicyPrivileged))
	}
	if f.MaxStale < time.Second {
		errs = append(errs, fmt.Errorf("--max-stale %v: must be at least 1s", f.MaxStale))
	}
	if f.Window < envoy.ConnectWindow {
		errs = append(errs, fmt.Errorf("--window %v: must be at least %v, which is what Envoy's retries and a stall may take", f.Window, envoy.ConnectWindow))
	}
	if f.ClaimWait < 0 || f.ClaimWait > apirest.MaxWait {
		errs = append(errs, fmt.Errorf("--claim-wait %v: must be 0s to %v", f.ClaimWait, apirest.MaxWait))
	}
	if f.ClaimQueue < 1 {
		errs = append(errs, fmt.Errorf("--claim-queue %d: must be at least 1", f.ClaimQueue))
	}
	if f.JournalBytes < 64<<10 {
		errs = append(errs, fmt.Errorf("--journal-bytes-per-second %d: must be at least %d", f.JournalBytes, 64<<10))
	}
	if err := allocator.CheckElection(f.LeaseDuration, f.LeaseRenew, f.LeaseRetry); err != nil {
		errs = append(errs, fmt.Errorf("--lease-duration %v, --lease-renew %v, --lease-retry %v: %w", f.LeaseDuration, f.LeaseRenew, f.LeaseRetry, err))
	}
	if f.ShutdownAfter <= 0 {
		errs = append(errs, fmt.Errorf("--shutdown-after %v: must be positive", f.ShutdownAfter))
	}
	if _, err := cli.Logger(f.LogLevel, io.Discard); err != nil {
		errs = append(errs, err)
	}
	return public, errors.Join(errs...)
}

func (f *flags) restConfig() (*rest.Config, error) {
	if f.Kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("--kubeconfig: not set, and not in a cluster: %w", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", f.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return config, nil
}

func adminHandler(a *allocator.Allocator, metrics *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	check := func(failure func() error) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if err := failure(); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		}
	}
	mux.HandleFunc("GET /healthz", check(a.Healthy))
	mux.HandleFunc("GET /readyz", check(a.Ready))
	mux.HandleFunc("GET /leaderz", check(a.Leads))
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	return mux
}
