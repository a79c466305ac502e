package allocator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/leaderelection"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/allocator/webhooks"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/tracing"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Options configure an Allocator. All are required unless their comment says otherwise.
type Options struct {
	Clients *kube.Clients
	// Namespace holds the pools, their pods, the Sandbox objects and the lease.
	Namespace string
	// Name is the name of this replica's pod. People read in the Lease which one leads. Optional.
	Name string
	// ControlAddress is the host:port at which routers reach this replica's control server.
	ControlAddress string
	// APIAddress is the host:port at which other replicas reach this replica's HTTP API. They
	// forward calls to the leader's.
	APIAddress string
	// Keys authenticate callers of the HTTP API, and clients of the sandboxes of their teams. Optional:
	// without them every client that can connect may call the API, and no key opens a sandbox.
	Keys Keys
	// DialLeader connects to the HTTP API of another replica, for APIs that speak TLS. Optional.
	DialLeader func(ctx context.Context, network, address string) (net.Conn, error)
	// AccessKey makes the credentials of sandboxes. Optional: without it every sandbox is public, and
	// a claim that asks for another access is refused. It must be the same for all replicas.
	AccessKey *sandboxaccess.Key
	// AgentImage has the agent's program, for pools that ask for an agent and name no image. Optional.
	AgentImage string
	// EgressProxy is the address at which pods reach the egress gateway: http://<host>:<port>, see agents.CheckProxy.
	// Optional: without it pools of the egress mode Gateway are refused.
	EgressProxy string
	// Credentials are the values of the headers that pools have egress gateways set. Optional.
	Credentials controlserver.Credentials
	// EgressUnchecked: pods behind the gateway do not try whether they reach more. Optional.
	EgressUnchecked bool
	// EgressPublic has the addresses outside the cluster, ip:port, that such pods must not reach by TCP. Optional.
	EgressPublic []string
	// Snapshots has the snapshots. Optional; nil: none are made.
	Snapshots *snapshots.Store
	// SnapshotsKept is how long a snapshot is kept. Optional; 0: until it is deleted.
	SnapshotsKept time.Duration
	// AsleepCPU is what a pod requests while its sandbox is asleep. Optional; 0: as before.
	AsleepCPU resource.Quantity
	// agentKey is the text of the public key with which agents know this allocator; empty without AccessKey.
	agentKey string
	// LeaseDuration, RenewDeadline and RetryPeriod are the timings of the leader election;
	// CheckElection checks them. They must be the same for all replicas. Defaults: 4 s, 3 s and 300
	// ms.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// MaxStale is how long a fence waits for a router that sends no pings. For a router that serves its
	// routes for longer it waits for longer. ConnectWindow is how long
	// an admitted request may need to open its connection: at least envoy.ConnectWindow. It is also the
	// shortest idle timeout.
	MaxStale, ConnectWindow time.Duration
	// ReapDryRun only logs which idle sandboxes would be released. Ends and lifetimes still apply.
	// Optional.
	ReapDryRun bool
	// PublicScheme and PublicHost form the URLs of sandboxes.
	PublicScheme, PublicHost string
	// Policy limits what pools may ask for.
	Policy pools.Policy
	// ClaimWait is how long a claim waits for a pod if it does not say. 0 means not at all.
	ClaimWait time.Duration
	// MaxWaiting bounds the waiting claims of each pool. Default 1,000.
	MaxWaiting int
	// TeamLimits is a file with the limits of the teams: see teamLimits. It is read again when it
	// changes. Optional: without it there are none.
	TeamLimits string
	// KeyRate bounds the calls of each API key at this replica. Optional: the zero Limit is none.
	KeyRate rate.Limit
	// JournalBytesPerSecond bounds the rate of writes to the journal. etcd keeps every version
	// until its compaction, five minutes by default. Default 1 MiB.
	JournalBytesPerSecond int
	// Webhooks says where webhooks may lead. Optional: the default is https and public addresses.
	Webhooks webhooks.Guard
	// OnSandboxReady, if set, is called once for each sandbox that can receive requests, and OnSandboxReleased
	// once for each sandbox whose release is durable. They observe the events that /v1/events streams: the calls are
	// made one after the other, in the order of the events, and no fence waits for them. A call is lost if this process
	// ends at that moment, or if events.Size events happen during earlier calls. ctx ends with the term.
	OnSandboxReady, OnSandboxReleased func(ctx context.Context, sandboxID string)
	// WallClock stamps records. The clocks of different replicas may differ. Optional: the default
	// is time.Now.
	WallClock func() time.Time
	// Tracer gets the spans of calls. Optional: nil is off.
	Tracer  *tracing.Tracer
	Metrics prometheus.Registerer
	Log     *zap.Logger
}

// Keys are the API keys. *access.Keys implements it.
type Keys interface {
	rest.Keys
	controlserver.Keys
}

// Allocator is one replica.
type Allocator struct {
	o       Options
	lock    *timedLock
	control *controlserver.Server
	api     http.Handler
	metrics *metrics
	traces  claimTraces
	watches *watches
	inspect *inspect.Reader
	// serving ends at Close. answering ends at the limit of Close, or when no replica takes the lease that this one has
	// given back.
	serving, answering         context.Context
	stopServing, stopAnswering context.CancelFunc
	limits                     *teamLimits
	violations                 []time.Time // when terms have ended because of one, as the journal had it

	mu       sync.Mutex
	leader   replica // the holder of the lease, empty if unknown
	term     *term   // set while this replica leads, after recovery
	resigned bool    // Close was called: no call begins in the term any more
	over     error   // why this replica can no longer lead
	// holder is the name of the last holder that was known. left ends, by leave, some time after another replica has the lease.
	holder string
	left   context.Context
	leave  context.CancelFunc
	// changed is closed and made anew when one of leader, term and resigned changes.
	changed chan struct{}
}

// New returns a replica that is not running yet, or an error that names the missing and wrong
// options.
func New(o Options) (*Allocator, error) {
	if err := options.Require(o, "Clients", "Namespace", "ControlAddress", "APIAddress",
		"MaxStale", "ConnectWindow", "Policy", "Metrics", "Log"); err != nil {
		return nil, err
	}
	if o.WallClock == nil {
		o.WallClock = time.Now
	}
	o.LeaseDuration = cmp.Or(o.LeaseDuration, 4*time.Second)
	o.RenewDeadline = cmp.Or(o.RenewDeadline, 3*time.Second)
	o.RetryPeriod = cmp.Or(o.RetryPeriod, 300*time.Millisecond)
	if err := CheckElection(o.LeaseDuration, o.RenewDeadline, o.RetryPeriod); err != nil {
		return nil, fmt.Errorf("allocator: Options.LeaseDuration, RenewDeadline, RetryPeriod: %w", err)
	}
	o.MaxWaiting = cmp.Or(o.MaxWaiting, 1000)
	o.JournalBytesPerSecond = cmp.Or(o.JournalBytesPerSecond, 1<<20)
	if o.AccessKey != nil {
		sealer, err := agents.SealerOf(o.AccessKey)
		if err != nil {
			return nil, fmt.Errorf("allocator: Options.AccessKey: %w", err)
		}
		o.agentKey = sealer.PublicKey().String()
	}
	a := &Allocator{o: o, inspect: inspect.New(o.Clients.Kubernetes), changed: make(chan struct{})}
	a.serving, a.stopServing = context.WithCancel(context.Background())
	a.answering, a.stopAnswering = context.WithCancel(context.Background())
	a.lock = newTimedLock(o.Clients.Kubernetes.CoordinationV1(), o.Namespace,
		a.self().identity(o.Name+"-"+rand.String(10)), o.LeaseDuration)
	a.lock.onClockSkew = func(holder string, ahead time.Duration) {
		o.Log.Warn("the wall clocks of the leader and of this replica differ: sandboxes end early or late by the difference when this replica leads; synchronise the clocks",
			zap.String("leader", replicaOf(holder).api), zap.Duration("thisOneIsAheadBy", ahead))
	}
	var err error
	a.control, err = controlserver.New(controlserver.Options{
		MaxStale: o.MaxStale, LeaderAddress: func() string { return a.leading().control }, AccessKey: o.AccessKey, Keys: o.Keys, Credentials: o.Credentials,
		Log: o.Log.Named("control"), Metrics: o.Metrics,
	})
	if err != nil {
		return nil, err
	}
	a.traces.tracer = o.Tracer
	if a.api, err = rest.New(rest.Options{
		Allocator: a, Keys: o.Keys, DialLeader: o.DialLeader, AccessKey: o.AccessKey, PublicScheme: o.PublicScheme, PublicHost: o.PublicHost,
		MinIdleTimeout: o.ConnectWindow, ReapDryRun: o.ReapDryRun, ClaimQueue: o.MaxWaiting, Log: o.Log,
		Snapshots: o.Snapshots, SnapshotsKept: o.SnapshotsKept,
		KeyRate: o.KeyRate, Metrics: o.Metrics, Tracer: o.Tracer,
	}); err != nil {
		return nil, err
	}
	if a.limits, err = newTeamLimits(o.TeamLimits, o.Log.Named("limits")); err != nil {
		return nil, fmt.Errorf("limits of the teams: %w", err)
	}
	if a.watches, err = newWatches(&a.o); err != nil {
		return nil, err
	}
	if a.metrics, err = newMetrics(o.Metrics, a); err != nil {
		return nil, fmt.Errorf("allocator: register metrics: %w", err)
	}
	return a, nil
}

// API returns the handler of the HTTP API. While this replica does not lead, it forwards calls to
// the leader, and holds them while none is known.
func (a *Allocator) API() http.Handler { return a.api }

// Control returns the control server, for registration with a gRPC server.
func (a *Allocator) Control() *controlserver.Server { return a.control }

// endWait bounds the two parts of the end of Run: the end of the term, then that of the election,
// which gives the lease back, and of the watches.
const endWait = 5 * time.Second

// MaxShutdown is the longest time that Run takes to return after its context or the election has
// ended.
const MaxShutdown = 2 * endWait

// Run stands for election and leads when elected, until ctx ends; it then gives the lease back and
// returns nil. It returns ErrLeaseLost when the lease was lost: the process must end. Run does not
// wait longer than MaxShutdown for a part that does not end, such as a callback of the embedding
// program; it gives the lease back all the same, and its error says so. Run must be called once.
func (a *Allocator) Run(ctx context.Context) (err error) {
	defer func() { a.ends(err) }()
	// The election outlives ctx, because the lease is given back only after the term has ended.
	electing, stopElecting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopElecting()
	leading, stopLeading := context.WithCancel(ctx)
	defer stopLeading()

	var leadErr error // of lead; read after led is closed
	led := make(chan struct{})
	// Set first by the start of leading, or by the end of Run, which prevents a late start. The
	// election starts its callback in a goroutine of its own.
	var decided atomic.Bool
	elector, err := a.newElector(func(context.Context) {
		if decided.CompareAndSwap(false, true) {
			defer close(led)
			leadErr = a.lead(leading)
		}
	}, stopLeading)
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	elected := make(chan struct{})
	go func() {
		defer close(elected)
		elector.Run(electing)
	}()
	// The watches end last, because the term may need their events until its end.
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWatching()
	var watchErr error // read after watched is closed
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		watchErr = a.watches.run(watching)
	}()

	var cause error
	select {
	case <-ctx.Done():
	case <-elected:
		cause = ErrLeaseLost
	case <-led:
		// leadErr is nil if the lease was lost and the election has not ended yet.
		if cause = leadErr; cause == nil {
			cause = ErrLeaseLost
		}
	case <-watched: // only if a watch could not start
		cause = watchErr
	}
	if ctx.Err() == nil {
		a.ends(cause)
	}
	stopLeading()
	if !decided.CompareAndSwap(false, true) {
		if !closedWithin(endWait, led) {
			cause = errors.Join(cause, errEndTimeout)
		} else if leadErr != nil && (cause == nil || errors.Is(cause, ErrLeaseLost)) {
			cause = leadErr
		}
	}
	stopElecting()
	stopWatching()
	if !closedWithin(endWait, elected, watched) {
		cause = errors.Join(cause, errEndTimeout)
	} else if watchErr != nil {
		a.o.Log.Warn("a watch ended with an error", zap.Error(watchErr))
	}
	return cause
}

// newElector returns the election of this replica, which calls begin in a goroutine of its own, and end when the lease is
// lost or given back.
func (a *Allocator) newElector(begin func(context.Context), end func()) (*leaderelection.LeaderElector, error) {
	return leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: a.lock, Name: leaseName, ReleaseOnCancel: true,
		LeaseDuration: a.o.LeaseDuration, RenewDeadline: a.o.RenewDeadline, RetryPeriod: a.o.RetryPeriod,
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: begin, OnStoppedLeading: end, OnNewLeader: a.setLeader},
	})
}

// closedWithin reports whether all channels are closed within limit.
func closedWithin(limit time.Duration, all ...<-chan struct{}) bool {
	over := time.NewTimer(limit)
	defer over.Stop()
	for _, ended := range all {
		select {
		case <-ended:
		case <-over.C:
			return false
		}
	}
	return true
}

// ends records why this replica can no longer lead. The first reason stays.
func (a *Allocator) ends(why error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over == nil {
		a.over = why
	}
}

// Healthy returns nil while this replica leads or can be elected, else the reason why its process
// must be restarted.
func (a *Allocator) Healthy() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.over
}

func (a *Allocator) self() replica {
	return replica{control: a.o.ControlAddress, api: a.o.APIAddress}
}

// lateAnswers is how long a leader that has been replaced may still answer a call that was forwarded to it. One that
// ends in order has answered all of them before it gives the lease back.
const lateAnswers = time.Second

// setLeader records the holder of the lease.
func (a *Allocator) setLeader(identity string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	leader := replicaOf(identity)
	if leader == a.leader && identity == a.holder {
		return
	}
	if a.leader = leader; leader != (replica{}) && identity != a.holder {
		if a.leave != nil {
			time.AfterFunc(lateAnswers, a.leave)
		}
		a.holder = identity
		a.left, a.leave = context.WithCancel(context.Background())
	}
	a.tellChanged()
}

// tellChanged wakes the calls that are held. a.mu is locked.
func (a *Allocator) tellChanged() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// Follow reads who holds the lease until ctx ends. It is for a replica whose Run has returned, and that still forwards
// calls. It may be called once.
func (a *Allocator) Follow(ctx context.Context) {
	began := time.Now()
	for {
		held, _, err := a.lock.LeaseLock.Get(ctx)
		switch {
		case err != nil || held.HolderIdentity == a.lock.Identity():
		case held.HolderIdentity == "" && time.Since(began) > aloneAfter:
			a.stopAnswering()
			return
		default:
			a.setLeader(held.HolderIdentity)
		}
		if !wait.Sleep(ctx, a.o.RetryPeriod) {
			return
		}
	}
}

// aloneAfter is when a replica that has given the lease back takes itself for the only one. Another one takes the
// lease within a second.
const aloneAfter = 5 * time.Second

// leading returns the addresses of the leader, as far as this replica knows.
func (a *Allocator) leading() replica {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leader
}

// Ready returns nil when this replica or the leader that it knows answers calls.
func (a *Allocator) Ready() error {
	switch l := a.Leader(); {
	case a.serving.Err() != nil:
		return errResigned
	case !l.Here && l.Address == "":
		return errors.New("no leader is known, or this replica leads and has not recovered yet")
	}
	return nil
}

// Leads returns nil when this replica leads and has recovered.
func (a *Allocator) Leads() error {
	_, err := a.leadingTerm()
	return err
}

// leadingTerm returns the term of this replica, or an error while it does not certainly lead.
func (a *Allocator) leadingTerm() (*term, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.currentTerm()
}

// currentTerm is leadingTerm. a.mu is locked.
func (a *Allocator) currentTerm() (*term, error) {
	switch {
	case a.resigned:
		return nil, errResigned
	case a.term == nil:
		return nil, errors.New("this replica does not lead")
	case !a.lock.valid():
		return nil, errors.New("this replica is not certain to hold the lease")
	}
	return a.term, nil
}

func (a *Allocator) setTerm(t *term) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.term = t
	a.tellChanged()
}
