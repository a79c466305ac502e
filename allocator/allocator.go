package allocator

import (
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
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/leaderelection"

	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/rest"
)

// Options configure an Allocator. All are required unless they say otherwise.
type Options struct {
	Clients *kube.Clients
	// Namespace holds the pools, their pods, the Sandbox objects and the lease.
	Namespace string
	// ControlAddress is where routers reach this replica's control server,
	// host:port.
	ControlAddress string
	// APIAddress is where other replicas reach this replica's HTTP API,
	// host:port: they pass calls on to the leader's.
	APIAddress string
	// Keys open the HTTP API. Optional: without them everybody who can connect
	// may call it.
	Keys *rest.Keys
	// LeaseDuration, RenewDeadline and RetryPeriod are the election's timings, which
	// CheckElection judges. The same for all replicas. Defaults 4 s, 3 s and 0.3 s.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// MaxStale is for how long a router that is not heard of is waited for: at least
	// what each router has. One that has more is refused. Window is envoy.ConnectWindow, or more;
	// no idle timeout is shorter.
	MaxStale, Window time.Duration
	// ReapDryRun: sandboxes that are idle are not released, and the log says which
	// would be. Ends and lifetimes count all the same. Optional.
	ReapDryRun bool
	// PublicScheme and PublicHost make the URLs of sandboxes.
	PublicScheme, PublicHost string
	// Policy says what pools may ask for.
	Policy pools.Policy
	// ClaimWait is how long a claim waits for a pod when its pool has none and it
	// does not say. 0: not at all.
	ClaimWait time.Duration
	// MaxWaiting bounds the claims that wait, by pool. Default 1,000.
	MaxWaiting int
	// JournalBytesPerSecond bounds what is written to the journal: etcd keeps all
	// of it until it is compacted, every five minutes. Default 1 MiB.
	JournalBytesPerSecond int
	// DialPod connects to a pod, for postStart hooks. Optional: the default is the
	// machine's own network.
	DialPod func(ctx context.Context, network, address string) (net.Conn, error)
	// OnSandboxReady, if set, is called once for each sandbox when requests reach
	// it, or never if this process ends in that moment. It may be called
	// concurrently; ctx ends with the term.
	OnSandboxReady func(ctx context.Context, sandboxID string)
	// OnSandboxReleased, if set, is called once for each sandbox whose release is
	// durable, or never if this process ends in that moment. We delete its pod no
	// sooner than the window after that. It may be called concurrently; ctx ends with
	// the term.
	OnSandboxReleased func(ctx context.Context, sandboxID string)
	// WallClock is the time that records are stamped with. Those of different replicas
	// may differ. Optional: the default is time.Now.
	WallClock func() time.Time
	Metrics   prometheus.Registerer
	Log       *zap.Logger
}

// Allocator is one replica.
type Allocator struct {
	o       Options
	lock    *timedLock
	control *controlserver.Server
	api     http.Handler
	metrics *metrics
	watches *watches

	mu     sync.Mutex
	leader replica // the one that leads, empty if that is not known
	term   *term   // set while this replica leads and has recovered
	over   error   // why this replica will not lead any more
}

// New checks the options and returns a replica that does nothing yet.
func New(o Options) (*Allocator, error) {
	var errs []error
	for _, required := range []struct {
		name    string
		missing bool
	}{
		{"Clients", o.Clients == nil}, {"Namespace", o.Namespace == ""}, {"ControlAddress", o.ControlAddress == ""}, {"APIAddress", o.APIAddress == ""},
		{"MaxStale", o.MaxStale <= 0}, {"Window", o.Window <= 0}, {"Policy", o.Policy == pools.Policy{}}, {"Metrics", o.Metrics == nil}, {"Log", o.Log == nil},
	} {
		if required.missing {
			errs = append(errs, fmt.Errorf("allocator: Options.%s is required", required.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.WallClock == nil {
		o.WallClock = time.Now
	}
	if o.LeaseDuration == 0 {
		o.LeaseDuration = 4 * time.Second
	}
	if o.RenewDeadline == 0 {
		o.RenewDeadline = 3 * time.Second
	}
	if o.RetryPeriod == 0 {
		o.RetryPeriod = 300 * time.Millisecond
	}
	if err := CheckElection(o.LeaseDuration, o.RenewDeadline, o.RetryPeriod); err != nil {
		return nil, fmt.Errorf("allocator: Options.LeaseDuration, RenewDeadline, RetryPeriod: %w", err)
	}
	if o.MaxWaiting == 0 {
		o.MaxWaiting = 1000
	}
	if o.JournalBytesPerSecond == 0 {
		o.JournalBytesPerSecond = 1 << 20
	}
	a := &Allocator{o: o}
	a.lock = newTimedLock(o.Clients.Kubernetes.CoordinationV1(), o.Namespace,
		a.self().identity(rand.String(10)), o.LeaseDuration)
	a.lock.clocksApart = func(holder string, ahead time.Duration) {
		o.Log.Warn("the wall clocks of the leader and of this replica are apart: sandboxes end early or late by that when this one leads; synchronise the clocks",
			zap.String("leader", replicaOf(holder).api), zap.Duration("thisOneIsAheadBy", ahead))
	}
	a.control = controlserver.New(o.MaxStale, func() string { return a.leading().control }, o.Log.Named("control"))
	var err error
	if a.api, err = rest.New(rest.Options{
		Allocator: a, Keys: o.Keys, PublicScheme: o.PublicScheme, PublicHost: o.PublicHost,
		MinIdleTimeout: o.Window, ReapDryRun: o.ReapDryRun, Log: o.Log.Named("api"),
	}); err != nil {
		return nil, err
	}
	if a.watches, err = newWatches(&a.o); err != nil {
		return nil, err
	}
	if a.metrics, err = newMetrics(o.Metrics, a); err != nil {
		return nil, fmt.Errorf("allocator: register metrics: %w", err)
	}
	return a, nil
}

// API is the HTTP API. It answers "not the leader" while this replica does not lead.
func (a *Allocator) API() http.Handler { return a.api }

// Control is the control server, to be registered with a gRPC server.
func (a *Allocator) Control() *controlserver.Server { return a.control }

// endWait bounds what Run waits for at its end: first for what this replica does as
// the leader, then for the election, which gives the lease back, and for the watches.
const endWait = 5 * time.Second

// EndMost is how long Run takes at most to return once its context has ended or the
// election is over.
const EndMost = 2 * endWait

// Run stands for election and leads when elected, until ctx ends; it then gives
// the lease back and returns nil. It returns ErrLeaseLost when the lease was
// lost: the process must end. What does not end in time, a callback of the embedding
// program for example, is abandoned: Run gives the lease back all the same, returns
// within EndMost, and its error says so. It must not be called again.
func (a *Allocator) Run(ctx context.Context) (err error) {
	defer func() { a.ends(err) }()
	// The election outlives ctx: the lease is given back only when everything
	// this replica does as the leader has come to an end.
	electing, stopElecting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopElecting()
	leading, stopLeading := context.WithCancel(ctx)
	defer stopLeading()

	var leadErr error // of lead; read after led is closed
	led := make(chan struct{})
	// Whoever sets it first: leading has begun, or never will. The election
	// starts its callback in a goroutine of its own, which may come late.
	var decided atomic.Bool
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: a.lock, Name: leaseName, ReleaseOnCancel: true,
		LeaseDuration: a.o.LeaseDuration, RenewDeadline: a.o.RenewDeadline, RetryPeriod: a.o.RetryPeriod,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) {
				if !decided.CompareAndSwap(false, true) {
					return
				}
				defer close(led)
				leadErr = a.lead(leading)
			},
			OnStoppedLeading: stopLeading,
			OnNewLeader: func(identity string) {
				a.mu.Lock()
				defer a.mu.Unlock()
				a.leader = replicaOf(identity)
			},
		},
	})
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	elected := make(chan struct{})
	go func() {
		defer close(elected)
		elector.Run(electing)
	}()
	// The watches end last: until then they may have something for the term.
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
		// Its error, or nil if the lease was lost and the election has not ended yet.
		if cause = leadErr; cause == nil {
			cause = ErrLeaseLost
		}
	case <-watched: // which it does before it begins only
		cause = watchErr
	}
	if ctx.Err() == nil {
		a.ends(cause)
	}
	stopLeading()
	if !decided.CompareAndSwap(false, true) {
		if !endsWithin(endWait, led) {
			cause = errors.Join(cause, errAbandoned)
		} else if leadErr != nil && (cause == nil || errors.Is(cause, ErrLeaseLost)) {
			cause = leadErr
		}
	}
	stopElecting()
	stopWatching()
	if !endsWithin(endWait, elected, watched) {
		cause = errors.Join(cause, errAbandoned)
	} else if watchErr != nil {
		a.o.Log.Warn("a watch has ended", zap.Error(watchErr))
	}
	return cause
}

// endsWithin reports whether all of these are closed before the time is over.
func endsWithin(limit time.Duration, all ...<-chan struct{}) bool {
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

// ends notes why this replica will not lead any more.
func (a *Allocator) ends(why error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over == nil {
		a.over = why
	}
}

// Healthy returns nil while this replica leads or may come to lead, or why it cannot:
// its process is about to end then, and has to be started again.
func (a *Allocator) Healthy() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.over
}

func (a *Allocator) self() replica {
	return replica{control: a.o.ControlAddress, api: a.o.APIAddress}
}

// leading returns the replica that leads, as far as is known here.
func (a *Allocator) leading() replica {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leader
}

// Ready returns nil when calls to this replica are answered, by itself or by the
// leader that it knows, or why they are not.
func (a *Allocator) Ready() error {
	leads, leader := a.Leading()
	if !leads && leader == "" {
		return errors.New("no replica is known to lead, or this one does and has not yet read what is there")
	}
	return nil
}

// Leads returns nil when this replica leads and has recovered, or why not.
func (a *Allocator) Leads() error {
	_, err := a.leadingTerm()
	return err
}

// leadingTerm returns the term this replica leads, or why it does not.
func (a *Allocator) leadingTerm() (*term, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.term == nil:
		return nil, errors.New("this replica does not lead")
	case !a.lock.valid():
		return nil, errors.New("this replica cannot tell that it still leads")
	}
	return a.term, nil
}

func (a *Allocator) setTerm(t *term) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.term = t
}
