package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/alecthomas/kong"
	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"github.com/berth-sandbox/berth/allocator"
	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/credentials"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pools"
	apirest "github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	_ "github.com/berth-sandbox/berth/allocator/snapshots/drivers" // those of --snapshots
	"github.com/berth-sandbox/berth/allocator/webhooks"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/console"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/adminpages"
	"github.com/berth-sandbox/berth/internal/controltls"
	"github.com/berth-sandbox/berth/internal/localhost"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/tracing"
)

type flags struct {
	PublicURL        string        `name:"public-url" required:"" help:"URL at which clients reach Envoy: http(s)://<domain>[:port]. A sandbox is at <port>-<id>.<domain>."`
	Namespace        string        `default:"default" help:"Namespace of the pools, their pods, the Sandbox objects and the lease."`
	Kubeconfig       string        `help:"Kubeconfig file. Empty: the service account of the pod."`
	APIListen        string        `name:"api-listen" default:"127.0.0.1:8081" help:"Address of the HTTP API. Outside loopback it needs --api-keys-namespace."`
	APIAdvertise     string        `name:"api-advertise" help:"Address at which other replicas reach this replica's API, to forward calls to the leader. Empty: the address of --api-listen."`
	APIKeysNamespace string        `name:"api-keys-namespace" help:"Namespace of the Secrets of type berth.sh/api-key, which \"berth keys\" makes; a change counts at once. Empty: no key is needed."`
	APITLSCert       string        `name:"api-tls-cert" help:"Certificate of the HTTP API in PEM form; reloaded when it changes. Needs --api-tls-key, and --control-tls-dir, whose certificates replicas use among each other. Empty: plain HTTP."`
	APITLSKey        string        `name:"api-tls-key" help:"Private key of --api-tls-cert in PEM form; reloaded when it changes."`
	AccessKeyFile    string        `name:"access-key-file" help:"File with the key of the tokens of sandboxes that are not public: 32 bytes or more, the same for all replicas. Another key makes all tokens and links invalid, and stopped sandboxes cannot be woken until the earlier one is back. Empty: every sandbox is public."`
	AgentImage       string        `placeholder:"IMAGE" help:"Image of Berth's agent, for pools that ask for an agent and name no image. Empty: such pools are refused. A change replaces their idle pods."`
	AsleepCPU        string        `name:"asleep-cpu" default:"20m" placeholder:"CPU" help:"What the container of a sandbox requests of CPU while the sandbox is asleep, 0 to 1000 cores. Its wake takes longer on a busy node if this is less. 0, or more than its own request: the request stays."`
	EgressProxy      string        `name:"egress-proxy" placeholder:"URL" help:"Address at which pods reach the egress gateway, http://<host>:<port>. This replica looks the host up, because the pods reach no DNS. Empty: pools with egress.mode Gateway are refused."`
	EgressUnchecked  bool          `name:"egress-unchecked" help:"Pods of pools with egress.mode Gateway do not try whether the network closes every other way: only for development. A change replaces their idle pods."`
	EgressPublic     []string      `name:"egress-public" default:"1.1.1.1:443,[2606:4700:4700::1111]:443" placeholder:"ADDRESS" help:"Public addresses, ip:port, comma-separated, at most 8, at which something accepts TCP connections. A pod of a pool with egress.mode Gateway tries each when it starts, and must reach none. Where the network lets no pod reach them they show nothing. Empty: none. A change applies to new pods."`
	SnapshotStore    string        `name:"snapshots" placeholder:"URL" help:"Object store for snapshots of sandboxes and for the files of stopped ones (docs/snapshots.md, docs/sleep.md): s3://BUCKET?region=REGION, gs://BUCKET, azblob://CONTAINER, or file:///DIRECTORY for development. Empty: snapshots and stops are refused. A change loses the snapshots in the other store, and sandboxes whose files are there stay stopped."`
	SnapshotsKept    time.Duration `name:"snapshots-kept" default:"720h" help:"How long a snapshot is kept, 1m to 87600h. 0: until it is deleted. A change applies to later snapshots."`
	SnapshotsPerTeam int           `name:"snapshots-per-team" default:"100" placeholder:"SNAPSHOTS" help:"How many snapshots a team may have, 1 to 10,000."`
	SnapshotBytes    string        `name:"snapshot-bytes-per-team" default:"100Gi" placeholder:"BYTES" help:"How many bytes the archives of all snapshots and stopped sandboxes of a team may have together, as a quantity such as 100Gi."`
	ConsoleListen    string        `name:"console-listen" help:"Address of the web console (docs/console.md). Outside loopback it needs --api-keys-namespace. Empty: there is no console."`
	ConsoleURL       string        `name:"console-url" help:"URL at which browsers reach the console through something that ends TLS: https://<host>[:port], not below the domain of --public-url. Empty: only browsers on the machine of the console reach it, or through a port-forward."`
	ControlListen    string        `default:"127.0.0.1:9090" help:"Address of the control server for routers. Outside loopback it needs --control-tls-dir."`
	ControlAdvertise string        `help:"Address at which routers reach this replica's control server. Empty: the address of --control-listen."`
	ControlTLSDir    string        `name:"control-tls-dir" help:"Directory with tls.crt, tls.key and ca.crt for mutual TLS with routers; reloaded when they change. Empty: no TLS."`
	AdminListen      string        `default:"127.0.0.1:9902" help:"Address of /healthz, /readyz, /leaderz, /metrics and, for connections to a loopback address, /debug/pprof."`
	KubeQPS          float32       `name:"kube-qps" default:"0" placeholder:"REQUESTS-PER-SECOND" help:"Client-side limit of requests per second to the API server. 0: none; the API server's priority and fairness applies."`
	KubeBurst        int           `default:"100" placeholder:"REQUESTS" help:"Burst for --kube-qps."`
	MaxStale         time.Duration `default:"15m" help:"How long a fence waits for a router that sends no pings, 1s to 24h. For a router whose own --max-stale is longer it waits for that one."`
	PodSecurity      string        `default:"baseline" help:"What a pool's pods may ask for: baseline (the Pod Security Standard of that name, and no service account token) or privileged (anything)."`
	ConnectWindow    time.Duration `default:"5s" help:"How long an admitted request may need to open its connection: at least as long as Envoy's retries take. It is also the shortest idle timeout. A pod that another client deletes serves on for longer than this and a failover (--lease-duration); a change replaces idle pods."`
	ReapDryRun       bool          `help:"Only log which idle sandboxes would be released. Ends and lifetimes still apply."`
	ClaimWait        time.Duration `default:"10s" help:"How long a claim waits for a pod if it does not say; 0: not at all."`
	ClaimQueue       int           `default:"1000" placeholder:"CLAIMS" help:"How many claims of one pool may wait."`
	TeamLimits       string        `placeholder:"FILE" help:"YAML file with the limits of the teams (docs/api.md); reloaded when it changes. Empty: no limits."`
	KeyCalls         float64       `name:"key-calls-per-second" default:"0" placeholder:"CALLS" help:"Calls of the HTTP API per second and API key that a replica allows, those that other replicas pass on included: 0.001 to 1,000,000. 2,000 may come at once, or those of 2s if that is more. 0: no limit."`
	JournalBytes     int           `name:"journal-bytes-per-second" default:"1048576" placeholder:"BYTES-PER-SECOND" help:"Limit of the bytes written to the journal. etcd keeps all of them until its compaction, every 5 minutes by default."`
	WebhookAllow     []string      `placeholder:"CIDR" help:"Networks to which webhooks may lead although their addresses are not public; may be repeated."`
	WebhookDeny      []string      `placeholder:"CIDR" help:"Networks to which webhooks may not lead, such as public addresses of pods, Services and nodes of this cluster; may be repeated."`
	WebhookAllowHTTP bool          `name:"webhook-allow-http" help:"Webhooks may have http URLs too. The bodies have the metadata of sandboxes: only for development."`
	LeaseDuration    time.Duration `default:"4s" help:"How long a leader keeps the lease without renewing it: whole seconds, 1s to 1m. The same for all replicas. A pod that another client deletes serves on for longer than a failover, so a change replaces idle pods."`
	LeaseRenew       time.Duration `default:"3s" help:"How long a leader retries a renewal before it gives the lease up; less than --lease-duration."`
	LeaseRetry       time.Duration `default:"300ms" help:"Pause between attempts at the lease. A follower extends it by up to a factor of 2.2."`
	ShutdownAfter    time.Duration `default:"10s" help:"How long calls in progress may take at shutdown."`
	TracesTo         string        `name:"traces-to" placeholder:"URL" help:"OTLP receiver (gRPC) of the spans of calls, http://host:port or https://host:port. Empty: no traces."`
	TracePercent     float64       `default:"1" placeholder:"PERCENT" help:"Share of the calls of the HTTP API that are traced, 0 to 100. A call with the header Berth-Trace: 1 is traced too, up to 100 a second."`
	LogLevel         string        `default:"info" help:"debug, info, warn or error."`

	WallClockOffset time.Duration `default:"0s" hidden:"" help:"For tests: offset of this process's wall clock."`

	Version kong.VersionFlag `env:"-" help:"Print the version."`

	asleepCPU     resource.Quantity // of AsleepCPU
	snapshotBytes int64             // of SnapshotBytes
}

// maxSnapshotsKept is ten years.
const maxSnapshotsKept = 10 * 8760 * time.Hour

// maxEgressPublic bounds the addresses that each pod behind the egress gateway tries.
const maxEgressPublic = 8

var maxAsleepCPU = resource.MustParse("1000")

func main() { cli.MainOfService(run) }

var kubernetesLog sync.Once

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags
	if _, err := cli.Parse(&f, "allocator", "The control plane: keeps pools of warm pods, hands out sandboxes and updates the routers.", "BERTH_ALLOCATOR", args, stdout, stderr); err != nil {
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
	// client-go logs in the same form, for example about the election. Its logger is global
	// and must be set before its first use.
	kubernetesLog.Do(func() { klog.SetLogger(zapr.NewLogger(log.Named("kubernetes"))) })

	s := &service{flags: &f, log: log}
	stop, err := s.wire(public)
	if err != nil {
		return err
	}
	defer stop()
	return s.serve(ctx)
}

// service holds the parts of one replica. Its listeners are bound before it serves.
type service struct {
	*flags
	log             *zap.Logger
	allocator       *allocator.Allocator
	metrics         *metric.Registry
	tracer          *tracing.Tracer     // nil: off
	keys            *access.Keys        // nil: the API needs no key
	credentials     *credentials.Values // nil: there is no egress gateway, or no namespace for them
	api, admin      *cli.HTTPServer
	console         *cli.HTTPServer // nil: there is none
	pages           *console.Console
	control         *grpc.Server
	controlListener net.Listener
}

// wire builds the parts and binds the listeners. stop frees what serve does not.
func (s *service) wire(public *url.URL) (stop func(), err error) {
	config, err := kube.Config(s.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	clients, err := kube.NewClients(config, s.KubeQPS, s.KubeBurst)
	if err != nil {
		return nil, err
	}
	policy, err := pools.NewPolicy(s.PodSecurity)
	if err != nil {
		return nil, fmt.Errorf("--pod-security: %w", err)
	}
	var stops []func()
	stopAll := func() {
		for _, f := range stops {
			f()
		}
	}
	defer func() {
		if err != nil {
			stopAll()
		}
	}()
	var accessKey *sandboxaccess.Key
	if s.AccessKeyFile != "" {
		if accessKey, err = sandboxaccess.ReadKey(s.AccessKeyFile); err != nil {
			return nil, fmt.Errorf("--access-key-file: %w", err)
		}
	}
	var snapshotStore *snapshots.Store
	if s.SnapshotStore != "" {
		if snapshotStore, err = snapshots.Open(context.Background(), s.SnapshotStore, snapshots.Options{MaxPerTeam: s.SnapshotsPerTeam, MaxBytesPerTeam: s.snapshotBytes}); err != nil {
			return nil, fmt.Errorf("--snapshots: %w", err)
		}
		stops = append(stops, func() { _ = snapshotStore.Close() })
	}
	security := insecure.NewCredentials()
	if s.ControlTLSDir != "" {
		c, stopped, err := controltls.Server(s.ControlTLSDir)
		if err != nil {
			return nil, fmt.Errorf("--control-tls-dir: %w", err)
		}
		security, stops = c, append(stops, stopped)
	}
	if err := s.listen(); err != nil {
		return nil, err
	}
	callers, err := s.access(clients)
	if err != nil {
		return nil, err
	}
	stops = append(stops, callers.stop)
	host, err := os.Hostname() // in a container: the name of its pod
	if err != nil {
		return nil, fmt.Errorf("name of this machine: %w", err)
	}
	if s.tracer, err = tracing.New(context.Background(), tracing.Options{
		To: s.TracesTo, Percent: s.TracePercent, Service: "berth-allocator", Version: cli.Version(), Instance: host, Log: s.log.Named("traces"),
	}); err != nil {
		return nil, fmt.Errorf("--traces-to: %w", err)
	}
	s.metrics = metric.NewRegistry(metric.Allocator)
	if s.allocator, err = allocator.New(allocator.Options{
		Clients: clients, Namespace: s.Namespace, Name: host, ControlAddress: s.ControlAdvertise, APIAddress: s.APIAdvertise, Keys: callers.keys, DialLeader: callers.dialLeader, AccessKey: accessKey, AgentImage: s.AgentImage, AsleepCPU: s.asleepCPU, EgressProxy: s.EgressProxy, Credentials: callers.credentials, EgressUnchecked: s.EgressUnchecked, EgressPublic: s.EgressPublic, Snapshots: snapshotStore, SnapshotsKept: s.SnapshotsKept,
		LeaseDuration: s.LeaseDuration, RenewDeadline: s.LeaseRenew, RetryPeriod: s.LeaseRetry,
		ClaimWait: s.ClaimWait, MaxWaiting: s.ClaimQueue, TeamLimits: s.TeamLimits, KeyRate: rate.PerSecond(s.KeyCalls), JournalBytesPerSecond: s.JournalBytes,
		Webhooks: s.webhooks(), ReapDryRun: s.ReapDryRun, MaxStale: s.MaxStale, ConnectWindow: s.ConnectWindow, Policy: policy,
		PublicScheme: public.Scheme, PublicHost: public.Host,
		WallClock: func() time.Time { return time.Now().Add(s.WallClockOffset) },
		Tracer:    s.tracer, Metrics: s.metrics, Log: s.log,
	}); err != nil {
		return nil, err
	}
	if s.console != nil {
		if s.pages, err = s.newConsole(accessKey); err != nil {
			return nil, err
		}
	}
	s.control = newControlServer(security)
	controlv1.RegisterControlServer(s.control, s.allocator.Control())
	return stopAll, nil
}

// newConsole returns the pages of the web console, which calls the API of this replica.
func (s *service) newConsole(accessKey *sandboxaccess.Key) (*console.Console, error) {
	o := console.Options{
		API: console.Handler(s.allocator.API()), APIURL: "http://localhost", Open: s.keys == nil, Log: s.log.Named("console"),
	}
	if s.ConsoleURL != "" {
		o.URL, _ = url.Parse(s.ConsoleURL) // check has accepted it
	}
	if accessKey != nil { // else each replica has a key of its own
		o.Sealing = accessKey.Derive("console session")
	}
	return console.New(o)
}

func newControlServer(security grpccredentials.TransportCredentials) *grpc.Server {
	return grpc.NewServer(
		grpc.Creds(security),
		// A router that hangs must not hold a stream for ever.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second}),
		// Stop waits for handshakes, so a silent peer must not prolong one.
		grpc.ConnectionTimeout(maxHandshake),
	)
}

// apiAccess is who may call the HTTP API, and how replicas reach each other's.
type apiAccess struct {
	keys        allocator.Keys            // nil: no key is needed
	credentials controlserver.Credentials // nil: pools can have none
	dialLeader  func(ctx context.Context, network, address string) (net.Conn, error)
	stop        func()
}

// access makes the keys and, if it is asked for, has the bound API speak TLS.
func (s *service) access(clients *kube.Clients) (a apiAccess, err error) {
	a.stop = func() {}
	if s.APIKeysNamespace != "" {
		if s.keys, err = access.NewKeys(access.Options{
			Client: clients.Kubernetes, Namespace: s.APIKeysNamespace, Log: s.log.Named("keys"),
		}); err != nil {
			return a, err
		}
		a.keys = s.keys
	}
	if s.APIKeysNamespace != "" && s.EgressProxy != "" {
		if s.credentials, err = credentials.NewValues(credentials.Options{
			Client: clients.Kubernetes, Namespace: s.APIKeysNamespace, Log: s.log.Named("credentials"),
		}); err != nil {
			return a, err
		}
		a.credentials = s.credentials
	}
	if s.APITLSCert != "" {
		t, err := controltls.NewAPI(s.APITLSCert, s.APITLSKey, s.ControlTLSDir)
		if err != nil {
			return a, fmt.Errorf("--api-tls-cert: %w", err)
		}
		s.api.UseTLS(t.Config())
		a.dialLeader, a.stop = t.DialReplica, t.Close
	}
	return a, nil
}

// listen binds the listeners. It fills in the advertised addresses that no flag gives.
func (s *service) listen() (err error) {
	if s.controlListener, err = net.Listen("tcp", s.ControlListen); err != nil {
		return fmt.Errorf("--control-listen: %w", err)
	}
	if s.api, err = cli.Listen("--api-listen", s.APIListen, apirest.MaxConns(s.ClaimQueue)); err != nil {
		return err
	}
	if s.admin, err = cli.Listen("--admin-listen", s.AdminListen, cli.AdminConns); err != nil {
		return err
	}
	if s.ConsoleListen != "" {
		if s.console, err = cli.Listen("--console-listen", s.ConsoleListen, console.MaxConns); err != nil {
			return err
		}
	}
	if s.ControlAdvertise == "" {
		s.ControlAdvertise = s.controlListener.Addr().String()
	}
	if s.APIAdvertise == "" {
		s.APIAdvertise = s.api.Addr().String()
	}
	return nil
}

// serve runs all parts until ctx ends or one of them fails, and shuts them down.
func (s *service) serve(ctx context.Context) error {
	listening := []zap.Field{zap.Stringer("api", s.api.Addr()), zap.Stringer("control", s.controlListener.Addr()), zap.Stringer("admin", s.admin.Addr())}
	if s.console != nil {
		listening = append(listening, zap.Stringer("console", s.console.Addr()))
	}
	s.log.Info("listening", listening...)
	// The term outlives ctx, so that calls in progress can finish.
	running, stopRunning := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRunning()
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	ran := make(chan struct{})
	all, failed := errgroup.WithContext(ctx)
	all.Go(func() error {
		defer close(ran)
		return s.allocator.Run(running)
	})
	all.Go(func() error {
		if err := s.control.Serve(s.controlListener); !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
			return err
		}
		return nil
	})
	all.Go(func() error { return s.api.Serve(s.allocator.API()) })
	if s.console != nil {
		all.Go(func() error { return s.console.Serve(s.pages) })
	}
	all.Go(func() error { return s.admin.Serve(s.adminHandler()) })
	if s.keys != nil {
		all.Go(func() error { s.keys.Run(serving); return nil })
	}
	if s.credentials != nil {
		all.Go(func() error { s.credentials.Run(serving); return nil })
	}
	all.Go(func() error {
		<-failed.Done() // a signal, or the failure of another part
		s.shutDown(serving, func() { stopRunning(); <-ran })
		stopServing()
		return nil
	})
	return await(failed, s.ShutdownAfter+allocator.MaxShutdown, all.Wait)
}

// lastUses is how long the API is served at least, so that clients which use their connections hear that they must open
// others. lastAnswers is the time for the answers when --shutdown-after is over.
const (
	lastUses    = time.Second
	lastAnswers = time.Second
)

// shutDown ends the parts: the calls of the term, then the term, which gives the lease back, then the calls that are
// forwarded to the next leader. ctx must not end before.
func (s *service) shutDown(ctx context.Context, stopRunning func()) {
	s.log.Info("stopping")
	limit, cancel := context.WithTimeout(ctx, s.ShutdownAfter)
	defer cancel()
	used, over := context.WithTimeout(ctx, min(lastUses, s.ShutdownAfter))
	defer over()
	last, end := context.WithTimeout(ctx, s.ShutdownAfter+lastAnswers)
	defer end()
	s.allocator.Close(limit)
	s.allocator.Control().Stop()
	stopRunning()
	s.log.Info("the term has ended; calls are forwarded to the next leader")
	var following sync.WaitGroup
	following.Go(func() { s.allocator.Follow(limit) })
	s.api.Idle(used)
	s.api.Stop(last)
	if s.console != nil {
		s.console.Stop(last)
	}
	cancel()
	following.Wait()
	s.control.Stop()
	s.tracer.Close(last)
	s.admin.Stop(last)
}

// maxHandshake bounds the TLS and HTTP/2 handshakes of a router.
const maxHandshake = 5 * time.Second

// await returns the result of wait. Once stopping has ended it waits for at most limit: a
// process that may no longer lead must end even if a part of it hangs.
func await(stopping context.Context, limit time.Duration, wait func() error) error {
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
	case <-time.After(limit):
		return fmt.Errorf("parts did not end within %v and were cut off: %w", limit, context.Cause(stopping))
	}
}

func noAddrPort(s string) bool {
	at, err := netip.ParseAddrPort(s)
	return err != nil || at.Port() == 0 || at.Addr().Zone() != ""
}

// check returns the public URL, or one error that names all wrong flags.
func (f *flags) check() (*url.URL, error) {
	var errs []error
	public, err := url.Parse(f.PublicURL)
	if err != nil || public.Scheme != "http" && public.Scheme != "https" || public.Host == "" || public.Path != "" && public.Path != "/" || public.User != nil || public.RawQuery != "" || public.Fragment != "" {
		errs = append(errs, fmt.Errorf("--public-url %q: must be http(s)://<domain>[:port]", f.PublicURL))
	}
	for _, listen := range []struct{ name, address, advertised, protection, dir, risk string }{
		{"api", f.APIListen, f.APIAdvertise, "--api-keys-namespace", f.APIKeysNamespace, "every client could claim and release sandboxes"},
		{"control", f.ControlListen, f.ControlAdvertise, "--control-tls-dir", f.ControlTLSDir, "every client could act as a router"},
	} {
		if listen.dir == "" && !cli.Loopback(listen.address) {
			errs = append(errs, fmt.Errorf("--%s-listen %q: outside loopback it needs %s, because otherwise %s; or use an address such as 127.0.0.1:8081", listen.name, listen.address, listen.protection, listen.risk))
		}
		if listen.advertised == "" && !cli.Advertisable(listen.address) {
			errs = append(errs, fmt.Errorf("--%s-advertise: required, because other hosts cannot connect to %q", listen.name, listen.address))
		} else if listen.advertised != "" && !cli.Advertisable(listen.advertised) {
			errs = append(errs, fmt.Errorf("--%s-advertise %q: must be a host:port at which other hosts reach this replica", listen.name, listen.advertised))
		}
	}
	errs = append(errs, f.checkConsole(public))
	if (f.APITLSCert == "") != (f.APITLSKey == "") {
		errs = append(errs, errors.New("--api-tls-cert and --api-tls-key: give both or none"))
	} else if f.APITLSCert != "" && f.ControlTLSDir == "" {
		errs = append(errs, errors.New("--api-tls-cert: needs --control-tls-dir, because replicas that forward calls verify each other with its certificates"))
	}
	if f.PodSecurity != pools.PolicyBaseline && f.PodSecurity != pools.PolicyPrivileged {
		errs = append(errs, fmt.Errorf("--pod-security %q: must be %s or %s", f.PodSecurity, pools.PolicyBaseline, pools.PolicyPrivileged))
	}
	if err := tracing.CheckURL(f.TracesTo); f.TracesTo != "" && err != nil {
		errs = append(errs, fmt.Errorf("--traces-to %w", err))
	}
	if !(f.TracePercent >= 0 && f.TracePercent <= 100) {
		errs = append(errs, fmt.Errorf("--trace-percent %v: must be 0 to 100", f.TracePercent))
	}
	if f.MaxStale < time.Second || f.MaxStale > controlserver.MaxMaxStale {
		errs = append(errs, fmt.Errorf("--max-stale %v: must be 1s to %v", f.MaxStale, controlserver.MaxMaxStale))
	}
	if cpu, err := resource.ParseQuantity(f.AsleepCPU); err != nil || cpu.Sign() < 0 || cpu.Cmp(maxAsleepCPU) > 0 {
		errs = append(errs, fmt.Errorf("--asleep-cpu %q: must be 0 to 1000 cores, such as 20m", f.AsleepCPU))
	} else {
		f.asleepCPU = cpu
	}
	if n := len(f.EgressPublic); n > maxEgressPublic {
		errs = append(errs, fmt.Errorf("--egress-public: has %d addresses: at most %d", n, maxEgressPublic))
	} else if bad := slices.IndexFunc(f.EgressPublic, noAddrPort); bad >= 0 {
		errs = append(errs, fmt.Errorf("--egress-public %q: must be ip:port, such as 1.1.1.1:443 or [2606:4700:4700::1111]:443", f.EgressPublic[bad]))
	}
	if f.SnapshotsKept != 0 && (f.SnapshotsKept < time.Minute || f.SnapshotsKept > maxSnapshotsKept) {
		errs = append(errs, fmt.Errorf("--snapshots-kept %v: must be 0, for ever, or 1m to %v", f.SnapshotsKept, maxSnapshotsKept))
	}
	if most := 10_000; f.SnapshotsPerTeam < 1 || f.SnapshotsPerTeam > most {
		errs = append(errs, fmt.Errorf("--snapshots-per-team %d: must be 1 to %d", f.SnapshotsPerTeam, most))
	}
	if size, err := resource.ParseQuantity(f.SnapshotBytes); err != nil || size.Value() < 1 {
		errs = append(errs, fmt.Errorf("--snapshot-bytes-per-team %q: must be a quantity of bytes, such as 100Gi", f.SnapshotBytes))
	} else {
		f.snapshotBytes = size.Value()
	}
	if f.EgressProxy != "" {
		if err := agents.CheckProxy(f.EgressProxy); err != nil {
			errs = append(errs, fmt.Errorf("--egress-proxy %w", err))
		}
		if f.AccessKeyFile == "" {
			errs = append(errs, errors.New("--egress-proxy: needs --access-key-file, with which the credentials of sandboxes are made"))
		}
	}
	if f.SnapshotStore != "" && f.AccessKeyFile == "" {
		errs = append(errs, errors.New("--snapshots: needs --access-key-file, with which orders to agents are sealed"))
	}
	if f.ConnectWindow < envoy.ConnectWindow {
		errs = append(errs, fmt.Errorf("--connect-window %v: must be at least %v, the time that Envoy's retries and a stall may take", f.ConnectWindow, envoy.ConnectWindow))
	}
	if f.ClaimWait < 0 || f.ClaimWait > apirest.MaxWait {
		errs = append(errs, fmt.Errorf("--claim-wait %v: must be 0s to %v", f.ClaimWait, apirest.MaxWait))
	}
	if f.ClaimQueue < 1 {
		errs = append(errs, fmt.Errorf("--claim-queue %d: must be at least 1", f.ClaimQueue))
	}
	if err := rate.Check(f.KeyCalls); err != nil {
		errs = append(errs, fmt.Errorf("--key-calls-per-second %v: %w", f.KeyCalls, err))
	}
	if f.JournalBytes < 64<<10 {
		errs = append(errs, fmt.Errorf("--journal-bytes-per-second %d: must be at least %d", f.JournalBytes, 64<<10))
	}
	if err := allocator.CheckElection(f.LeaseDuration, f.LeaseRenew, f.LeaseRetry); err != nil {
		errs = append(errs, fmt.Errorf("--lease-duration %v, --lease-renew %v, --lease-retry %v: %w", f.LeaseDuration, f.LeaseRenew, f.LeaseRetry, err))
	}
	_, err1 := networks("--webhook-allow", f.WebhookAllow)
	_, err2 := networks("--webhook-deny", f.WebhookDeny)
	errs = append(errs, err1, err2)
	if f.ShutdownAfter <= 0 {
		errs = append(errs, fmt.Errorf("--shutdown-after %v: must be positive", f.ShutdownAfter))
	}
	if _, err := cli.Logger(f.LogLevel, io.Discard); err != nil {
		errs = append(errs, err)
	}
	return public, errors.Join(errs...)
}

// checkConsole returns an error for wrong flags of the console. A sandbox below the host of the console could set cookies for
// it, and its pages would be of the same site.
func (f *flags) checkConsole(public *url.URL) error {
	if f.ConsoleListen == "" {
		if f.ConsoleURL != "" {
			return errors.New("--console-url: needs --console-listen")
		}
		return nil
	}
	var errs []error
	if f.APIKeysNamespace == "" && !cli.Loopback(f.ConsoleListen) {
		errs = append(errs, fmt.Errorf("--console-listen %q: outside loopback it needs --api-keys-namespace, because otherwise every browser could claim and release sandboxes; or use an address such as 127.0.0.1:8082", f.ConsoleListen))
	}
	if f.ConsoleURL == "" {
		return errors.Join(errs...)
	}
	u, err := url.Parse(f.ConsoleURL)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.Path != "" && u.Path != "/" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return errors.Join(append(errs, fmt.Errorf("--console-url %q: must be https://<host>[:port]", f.ConsoleURL))...)
	}
	if public != nil {
		host, domain := localhost.Hostname(u.Host), localhost.Hostname(public.Host)
		if host == domain || strings.HasSuffix(host, "."+domain) {
			errs = append(errs, fmt.Errorf("--console-url %q: its host must not be %s or below it, because pages of sandboxes there are of the same site", f.ConsoleURL, domain))
		}
	}
	return errors.Join(errs...)
}

// networks reads the values of a flag.
func networks(flag string, texts []string) (all []netip.Prefix, err error) {
	for _, text := range texts {
		p, wrong := netip.ParsePrefix(text)
		if wrong != nil {
			err = errors.Join(err, fmt.Errorf("%s %q: must be a network such as 10.0.0.0/8", flag, text))
		}
		all = append(all, p.Masked())
	}
	return all, err
}

// webhooks says where webhooks may lead. check has accepted the flags.
func (f *flags) webhooks() webhooks.Guard {
	allowed, _ := networks("", f.WebhookAllow)
	denied, _ := networks("", f.WebhookDeny)
	return webhooks.Guard{AllowHTTP: f.WebhookAllowHTTP, Allowed: allowed, Denied: denied}
}

// adminHandler answers probes, metrics and, on loopback only, profiles.
func (s *service) adminHandler() http.Handler {
	a := s.allocator
	ready := a.Ready
	if s.keys != nil {
		ready = func() error { return errors.Join(a.Ready(), s.keys.Ready()) }
	}
	mux := adminpages.New(adminpages.Checks{"/healthz": a.Healthy, "/readyz": ready, "/leaderz": a.Leads}, s.metrics,
		"/healthz, /readyz, /leaderz, /metrics or, at a loopback address, /debug/pprof/")
	adminpages.AddProfiles(mux, adminpages.LoopbackOnly)
	return mux
}
