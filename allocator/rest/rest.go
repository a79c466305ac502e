package rest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/credentials"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/allocator/webhooks"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/tracing"
)

// Bounds of what a client may send.
const (
	maxBody     = 512 << 10 // initbox.MaxValues in base64, and everything else
	maxMetadata = 2 << 10
	// defaultTimeout applies to a claim without a timeout, as E2B documents it.
	defaultTimeout    = 300 * time.Second
	maxTimeout        = 365 * 24 * time.Hour
	maxIdempotencyKey = 255
	// answerWait bounds a call in addition to its wait for a pod.
	answerWait = 10 * time.Second
	// sleepWait bounds a call that waits until a sandbox is asleep: the closing, the connect window, and the freeze.
	sleepWait = 45 * time.Second
	// networkWait bounds a call that waits until every egress gateway has new rules: the core waits for 10 s.
	networkWait = 10*time.Second + answerWait
	// wakeWait bounds a call that waits until a sandbox runs. One that is stopped waits for a pod, for its files, and for
	// the hook of its pool. It is woken also if that takes longer.
	wakeWait = agents.RestoreFor + 2*time.Minute
	// snapshotWait bounds a call that makes a snapshot or stops a sandbox: sleepWait, and what package snapshots allows
	// for an archive.
	snapshotWait = sleepWait + 16*time.Minute
	// snapshotsInFlight is how many of them there can be. Most wait for a sandbox to sleep.
	snapshotsInFlight = 64
	// defaultPage is the length of a page of the list of sandboxes, as E2B documents it.
	defaultPage = 100
)

// MaxWait is the longest time that a claim may wait for a pod.
const MaxWait = 5 * time.Minute

// Allocator is the control plane behind the API. Errors are *apierror.Error or the context's,
// unless something is broken. A sandbox that the context's caller (access.From) does not see is
// unknown. Its methods may be called concurrently.
type Allocator interface {
	// Leader returns what this replica knows of who leads.
	Leader() Leader
	// Serving ends when this replica shuts down, and Answering when it must have answered all calls.
	Serving() context.Context
	Answering() context.Context
	// Events returns the events of this term.
	Events() (*events.Ring, error)
	// EventLog returns the log of events across leaders, as this term writes it.
	EventLog() (*eventlog.Log, error)
	// History returns what happened in this term.
	History() (*history.Ring, error)
	// Webhooks returns the webhooks of this term.
	Webhooks() (*webhooks.Manager, error)
	// ClaimWait returns how long a claim waits for a pod if it does not say.
	ClaimWait() time.Duration
	// Claim takes a sandbox from the pool. It fills in c.Token and c.Pool.
	Claim(ctx context.Context, pool string, c core.Claim) (core.Sandbox, error)
	// ClaimBatch takes c.Count sandboxes, or at least c.AtLeast. It returns the live ones, and the IDs
	// of those that have ended since the first answer.
	ClaimBatch(ctx context.Context, pool string, c core.Claim) (live []core.Sandbox, ended []string, err error)
	// Release releases a sandbox. It returns the number of routers that have not acknowledged.
	Release(ctx context.Context, id, reason string) (core.CallStatus, int, error)
	// KeepAlive records activity of a sandbox. SetTimeout does too, and moves the end to lifetime
	// from now.
	KeepAlive(ctx context.Context, id string) (core.CallStatus, error)
	SetTimeout(ctx context.Context, id string, lifetime time.Duration) (core.CallStatus, error)
	// SetNetwork replaces what the claim of a sandbox lets it reach. CallOK: every egress gateway has the rules.
	// CallNotReady: they hold, and Why says how many gateways have not acknowledged them; without a Why they do not.
	// CallUnfit: nothing would enforce them.
	SetNetwork(ctx context.Context, id string, rules core.EgressRules) (core.SandboxCallAnswered, error)
	// Activities returns at most `most` of the live sandboxes that match, by ID, and the number of
	// omitted ones.
	Activities(ctx context.Context, filter Filter, most int) ([]core.ActivityStatus, int, error)
	// Extend is like SetTimeout, and never brings the end forward. wake: a sandbox that is asleep is woken.
	Extend(ctx context.Context, id string, lifetime time.Duration, wake bool) (core.SandboxCallAnswered, error)
	// Sleep has a sandbox fall asleep. stop: it is stopped then, as one that is asleep already is.
	Sleep(ctx context.Context, id string, stop bool) (core.SandboxCallAnswered, error)
	// MakeSnapshot makes a snapshot of a sandbox, with the name, tag, team and expiry of of. The snapshot counts if the
	// status of the answer is CallOK.
	MakeSnapshot(ctx context.Context, id string, of snapshots.Snapshot) (snapshots.Snapshot, core.SandboxCallAnswered, error)
	// Sandbox returns a sandbox, or false if it is unknown. List returns a page of sandboxes: fewer than
	// q.Most only if there are no more.
	Sandbox(ctx context.Context, id string) (core.Sandbox, bool, error)
	List(ctx context.Context, q Query) ([]core.Sandbox, error)
	// Route returns whether requests reach a sandbox, or false if it is unknown.
	Route(ctx context.Context, id string) (core.RouteStatus, bool, error)
	// Pool returns a pool, or false if there is none. Pools lists all by name. The caller must not
	// change them. Counts returns the pods of all pools by state, by the names of the pools.
	Pool(name string) (*v1alpha1.SandboxPool, bool)
	Pools() []*v1alpha1.SandboxPool
	Counts(ctx context.Context) (map[string]core.Counts, error)
	// Conditions returns the conditions of a pool that has these counts.
	Conditions(pool *v1alpha1.SandboxPool, counts core.Counts) []metav1.Condition
	// ScalePool changes the size of a pool and returns it.
	ScalePool(ctx context.Context, name string, s PoolScale) (*v1alpha1.SandboxPool, error)
	// Pod reads a pod from the API server; the error may be inspect.ErrGone. PendingPods returns at
	// most `most` pods of a pool that are not ready, and the number of omitted ones. PodFailures returns the
	// latest idle pods of a pool that have failed, the latest first.
	Pod(ctx context.Context, key core.PodKey) (inspect.Pod, error)
	PendingPods(ctx context.Context, pool string, most int) ([]core.PodKey, int, error)
	PodFailures(ctx context.Context, pool string) ([]core.PodFailure, error)
	// EgressUsage returns how a live sandbox uses the egress gateways, without its rules.
	EgressUsage(ctx context.Context, id string) (openapi.SandboxEgress, error)
	// LogLines returns the last lines of the log in the record of an ended sandbox.
	LogLines(ctx context.Context, s core.Sandbox) ([]string, error)
	// Logs opens the log of a container; the error may be inspect.ErrNoLogs or ErrGone. Usage returns
	// what sandboxes use, by their IDs; the error may be inspect.ErrNoMetrics.
	Logs(ctx context.Context, key core.PodKey, o inspect.LogOptions) (io.ReadCloser, error)
	Usage(ctx context.Context, sandboxes []core.Sandbox) (map[string]inspect.Usage, error)
	// UsageOver returns what a sandbox has used in the last hour, as far as that is known, the oldest first. The error may be
	// inspect.ErrNoMetrics.
	UsageOver(ctx context.Context, s core.Sandbox) ([]inspect.Usage, error)
	// Fences and Sessions return at most `most` entries and the number of omitted ones.
	Fences(ctx context.Context, most int) ([]core.FenceStatus, int, error)
	Sessions(ctx context.Context, most int) ([]core.SessionStatus, int, error)
	// Teams returns at most `most` teams by name: these, those with limits by name and those with live sandboxes. It
	// also returns the number of omitted ones.
	Teams(ctx context.Context, also []string, most int) ([]core.TeamStatus, int, error)
	// DeclareDead ends every wait for a router, because an operator states that it has ended. by is
	// the name of the operator's key.
	DeclareDead(ctx context.Context, session, by, reason string) (core.DeadDeclared, error)
}

// Leader is what a replica knows of who leads.
type Leader struct {
	// Here: this replica leads. Elected: it does not yet, and will when it has recovered.
	Here, Elected bool
	// Address is the host:port of the API of the replica that leads, "" if none is known or it is this one.
	Address string
	// Left tells this leader from an earlier and a later one at the same address. It ends some time after another one
	// has been elected. nil: none is known.
	Left context.Context
	// Changed is closed when there is something else to know.
	Changed <-chan struct{}
}

// Query is a page of a list of sandboxes.
type Query struct {
	// Pool and Team are names, "" for all that the caller sees.
	Pool, Team string
	// Live selects the starting and running sandboxes, Gone those that are released or ended and
	// are remembered.
	Live, Gone bool
	After      core.Mark
	Order      core.Order
	// Since selects what was claimed then or later, to a microsecond. Optional.
	Since time.Time
	// Keep selects further. Optional. It must not wait, and must not keep its argument.
	Keep func(*core.Sandbox) bool
	// Most bounds the page.
	Most int
}

// Keys are the API keys. Its methods may be called concurrently.
type Keys interface {
	// Caller returns who presents a key, access.ErrUnknownKey, or another error if it cannot tell yet.
	Caller(key string) (access.Caller, error)
	// Current returns a context that ends when a key is made, changed or revoked.
	Current() context.Context
	// Callers returns those of all keys, by team and name.
	Callers() []access.Caller
}

// Options configure the handler. All are required unless their comment says otherwise.
type Options struct {
	Allocator Allocator
	// Keys authenticate callers. Optional: without them every client that can connect may make every
	// call.
	Keys Keys
	// DialLeader connects to the API of another replica, with TLS if it speaks that. Optional: without
	// it the API of every replica speaks plain HTTP.
	DialLeader dial
	// AccessKey makes the credentials of sandboxes. Optional: without it every sandbox is public, and
	// a claim that asks for another access is refused.
	AccessKey *sandboxaccess.Key
	// PublicScheme and PublicHost form the URLs of sandboxes: <scheme>://<port>-<id>.<host>/.
	// PublicHost may have a port.
	PublicScheme, PublicHost string
	// MinIdleTimeout is the shortest idle timeout of a claim: the connect window.
	MinIdleTimeout time.Duration
	// ClaimQueue is how many claims of one pool may wait. Optional.
	ClaimQueue int
	// ReapDryRun is shown in answers: idle sandboxes are not released. Optional.
	ReapDryRun bool
	// Snapshots has the snapshots. Optional; nil: none are made. SnapshotsKept is how long one is kept; 0: for ever.
	Snapshots     *snapshots.Store
	SnapshotsKept time.Duration
	// KeyRate bounds the calls of each key. Optional: the zero Limit is none.
	KeyRate rate.Limit
	// Metrics takes the metrics of calls. Optional.
	Metrics prometheus.Registerer
	// Tracer gets the spans of calls. Optional: nil is off.
	Tracer *tracing.Tracer
	Log    *zap.Logger
}

type api struct {
	Options
	forwarder *httputil.ReverseProxy
	// slow has the calls that ask a kubelet or the API server.
	claims, others, networks, sleeps, wakes, snapshots, slow, streams *class
	answers                                                           *budget
	rates                                                             *keyRates
	counts                                                            *metrics
	audit                                                             audit
	operations                                                        map[string]string // IDs by the mux's pattern
	// sealer seals the headers that the egress gateway sets; nil: without a key none are taken.
	sealer *credentials.Sealer
}

// New returns the handler, or an error that names the missing options.
func New(o Options) (http.Handler, error) {
	if err := options.Require(o, "Allocator", "PublicScheme", "PublicHost", "MinIdleTimeout", "Log"); err != nil {
		return nil, err
	}
	trail := newAudit(o.Log.Named("audit"))
	o.Log = o.Log.Named("api")
	a := &api{
		Options: o, forwarder: newForwarder(o.DialLeader, o.Log), answers: newBudget(answerBytes), audit: trail, counts: newMetrics(), operations: map[string]string{},
		claims: newClass(claimSlots(o.ClaimQueue), MaxWait+answerWait+agents.RestoreFor), others: newClass(inFlight, answerWait), networks: newClass(inFlight, networkWait),
		sleeps: newClass(inFlight, snapshotWait), wakes: newClass(inFlight, wakeWait), snapshots: newClass(snapshotsInFlight, snapshotWait), slow: newClass(readsInFlight, answerWait), streams: newClass(maxStreams, streamLife),
	}
	if o.AccessKey != nil {
		a.sealer = credentials.NewSealer(o.AccessKey)
	}
	a.streams.slots.most = teamStreams
	a.rates = newKeyRates(o.KeyRate, o.Log)
	document, err := openapi.Load()
	if err != nil {
		return nil, err
	}
	mux, err := a.routes(document)
	if err != nil {
		return nil, err
	}
	if o.Metrics != nil {
		if err := a.register(o.Metrics); err != nil {
			return nil, fmt.Errorf("rest: register metrics: %w", err)
		}
	}
	return a.counted(mux, a.bounded(a.knownHost(a.home(a.origins(a.authenticated(mux)))))), nil
}
