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
	"time"

	"github.com/alecthomas/kong"
	"github.com/go-logr/zapr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/berth-sandbox/berth/allocator"
	"github.com/berth-sandbox/berth/allocator/kube"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/envoy"
)

type flags struct {
	PublicURL        string        `name:"public-url" required:"" help:"Where clients reach Envoy: http(s)://<domain>[:port]. Sandboxes are at <port>-<id>. before the domain."`
	Namespace        string        `default:"default" help:"Namespace of the pools, their pods, the Sandbox objects and the lease."`
	Kubeconfig       string        `help:"Kubeconfig file. Empty: the service account of the pod this runs in."`
	APIListen        string        `name:"api-listen" default:"127.0.0.1:8081" help:"Address of the HTTP API. It has no access control yet, so it must be on loopback."`
	ControlListen    string        `default:"127.0.0.1:9090" help:"Address of the control server for routers. It is not encrypted yet, so it must be on loopback."`
	ControlAdvertise string        `help:"Address at which routers reach this replica's control server. Empty: the one it listens on."`
	AdminListen      string        `default:"127.0.0.1:9902" help:"Address for /healthz, /readyz and /metrics."`
	KubeQPS          float32       `name:"kube-qps" default:"0" help:"Requests per second to the API server. 0: no limit of our own; the API server's priority and fairness is the limit."`
	KubeBurst        int           `default:"100" help:"Burst for --kube-qps."`
	MaxStale         time.Duration `default:"15m" help:"How long routers serve known routes without the allocator. Must be the routers'."`
	Window           time.Duration `default:"5s" help:"Time after which an admitted request opens no connection any more; at least what Envoy's retries need."`
	LeaseDuration    time.Duration `default:"15s" help:"How long a leader that is not heard from keeps the lease."`
	LeaseRenew       time.Duration `default:"10s" help:"How long a leader tries to renew the lease before it gives up; less than --lease-duration."`
	LeaseRetry       time.Duration `default:"500ms" help:"Pause between attempts at the lease."`
	ShutdownAfter    time.Duration `default:"10s" help:"How long calls in progress may take at shutdown."`
	LogLevel         string        `default:"info" help:"debug, info, warn or error."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`
}

func main() { cli.Main(run) }

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

	// What client-go has to say, about the election for example, in the same form.
	klog.SetLogger(zapr.NewLogger(log.Named("kubernetes")))

	config, err := f.restConfig()
	if err != nil {
		return err
	}
	clients, err := kube.NewClients(config, f.KubeQPS, f.KubeBurst)
	if err != nil {
		return err
	}
	controlListener, err := net.Listen("tcp", f.ControlListen)
	if err != nil {
		return fmt.Errorf("--control-listen: %w", err)
	}
	if f.ControlAdvertise == "" {
		f.ControlAdvertise = controlListener.Addr().String()
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	a, err := allocator.New(allocator.Options{
		Clients: clients, Namespace: f.Namespace, ControlAddress: f.ControlAdvertise,
		LeaseDuration: f.LeaseDuration, RenewDeadline: f.LeaseRenew, RetryPeriod: f.LeaseRetry,
		MaxStale: f.MaxStale, Window: f.Window, PublicScheme: public.Scheme, PublicHost: public.Host,
		Metrics: metrics, Log: log,
	})
	if err != nil {
		return err
	}
	control := grpc.NewServer(
		// A router that stands still must not hold a stream for ever.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second}),
	)
	controlv1.RegisterControlServer(control, a.Control())
	api, err := cli.Listen("--api-listen", f.APIListen, a.API())
	if err != nil {
		return err
	}
	admin, err := cli.Listen("--admin-listen", f.AdminListen, adminHandler(a, metrics))
	if err != nil {
		return err
	}
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
	all.Go(api.Serve)
	all.Go(admin.Serve)
	all.Go(func() error {
		<-failed.Done() // a signal, or one of the others failed
		log.Info("stopping")
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.ShutdownAfter)
		defer cancel()
		api.Stop(limit)
		a.Control().Stop()
		control.Stop()
		stopRunning()
		admin.Stop(limit)
		return nil
	})
	return all.Wait()
}

// check returns the public URL, or everything that is wrong with the flags.
func (f *flags) check() (*url.URL, error) {
	var errs []error
	public, err := url.Parse(f.PublicURL)
	if err != nil || public.Scheme != "http" && public.Scheme != "https" || public.Host == "" || public.Path != "" && public.Path != "/" || public.User != nil || public.RawQuery != "" || public.Fragment != "" {
		errs = append(errs, fmt.Errorf("--public-url %q: must be http(s)://<domain>[:port]", f.PublicURL))
	}
	for _, listen := range []struct{ flag, address string }{{"--api-listen", f.APIListen}, {"--control-listen", f.ControlListen}} {
		if !cli.Loopback(listen.address) {
			errs = append(errs, fmt.Errorf("%s %q: must be a loopback address such as 127.0.0.1:8081, because it has no access control yet", listen.flag, listen.address))
		}
	}
	if f.MaxStale < time.Second {
		errs = append(errs, fmt.Errorf("--max-stale %v: must be at least 1s", f.MaxStale))
	}
	if f.Window < envoy.Window {
		errs = append(errs, fmt.Errorf("--window %v: must be at least %v, which is what Envoy's retries and a stall may take", f.Window, envoy.Window))
	}
	if f.LeaseRetry <= 0 || f.LeaseRenew <= 2*f.LeaseRetry || f.LeaseDuration <= f.LeaseRenew {
		errs = append(errs, fmt.Errorf("--lease-duration %v, --lease-renew %v, --lease-retry %v: each must be larger than the next, and --lease-renew more than twice --lease-retry", f.LeaseDuration, f.LeaseRenew, f.LeaseRetry))
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
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := a.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	return mux
}
