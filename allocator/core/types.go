package core

import (
	"cmp"
	"crypto/sha256"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/member"
)

// PodKey identifies one life of a pod. Names are used again, UIDs are not. The UID of a pod that can be
// recycled ends with "/" and the number of the life: see recycle.go.
type PodKey struct{ Namespace, Name, UID string }

// Whole returns the key of the pod in all of its lives.
func (k PodKey) Whole() PodKey {
	k.UID, _, _ = strings.Cut(k.UID, "/")
	return k
}

// PoolKey names a pool.
type PoolKey struct{ Namespace, Name string }

// Instant is a moment on two clocks.
type Instant struct {
	// Boot is monotonic and counts suspended time. Everything within a term uses it.
	Boot time.Duration
	// Wall is the time in records and for people.
	Wall time.Time
}

// Pool is what a SandboxPool asks for.
type Pool struct {
	Key     PoolKey
	Warm    int
	MaxWarm int // how many warm pods the demand may ask for; at most Warm: the pool has Warm
	MaxPods int // 0: no bound
	// MaxSurge bounds the pods that start; 0: no bound. MaxUnavailable is how many warm pods may be missing
	// while a change of the template replaces them.
	MaxSurge, MaxUnavailable int
	// Paused: idle pods are neither created nor deleted.
	Paused bool
	// ReadyWithin is how long a pod may take to become ready after it was scheduled, until the pool replaces
	// it; 0: no bound.
	ReadyWithin time.Duration
	DefaultPort uint16
	// Ports can be reached from outside, in ascending order; empty: all. The slice is shared
	// and must not be changed, like that of a Sandbox.
	Ports []uint16
	// Template identifies the pod template. Pods made from another one are
	// replaced while they are warm.
	Template string
	// Metadata identifies the labels and annotations that idle pods have from the template. A change of them
	// alone replaces no pod.
	Metadata string
	// Version is the resource version of this observation, opaque.
	Version string
	// PostStart: sandboxes are starting until Started answers StartSandbox.
	PostStart bool
	// Agent is what new pods get. A pod of an older template may have another one, or none.
	Agent Agent
	// KeepOnRestart: a sandbox goes on when a container of its pod restarts, unless the pod has an agent.
	KeepOnRestart bool
	// Hold is how long a request for a sandbox that is starting may wait for it.
	Hold time.Duration
	// IdleTimeout and MinBytes are the defaults of claims; 0: none.
	IdleTimeout time.Duration
	MinBytes    uint64
	BusyProbe   BusyProbe
	// MaxLifetime bounds the life of a sandbox, StartupTimeout the time for which it is starting;
	// 0: no bound.
	MaxLifetime, StartupTimeout time.Duration
	// Access is the least strict access of its sandboxes.
	Access Access
	// Recycle: the pod of a released sandbox becomes warm again instead of being deleted, if the pool lacks one.
	Recycle bool
	// Refused says why its template may not be used; empty: it may. No pod is created from a
	// refused one, and idle pods that were are deleted. Warm pods of an earlier template are kept.
	Refused string
	// Deleting: release its sandboxes and delete its pods. KeepSandboxes: the sandboxes go on until they end,
	// while the pool's object exists.
	Deleting, KeepSandboxes bool
}

// Pod is an observation of a pod.
type Pod struct {
	Key PodKey
	// Pool is its owner; empty: none. A pod without an owner is ignored unless it is known
	// already or on record.
	Pool     string
	Node     string // "" until it is scheduled
	IP       netip.Addr
	Template string
	// Metadata identifies the labels and annotations that it has from the template.
	Metadata string
	// CreatedAt orders the pods of a pool by age. It is the API server's clock.
	CreatedAt time.Time
	// Version is the resource version of this observation, opaque.
	Version string
	Ready   bool
	// Used: its labels say that it is not warm, or cannot be read. Such a pod is an orphan if no
	// record has it, and is never handed out.
	Used bool
	// Mislabelled: its label does not name Pool.
	Mislabelled bool
	// Deleting: it has a deletion timestamp.
	Deleting bool
	// Finished: it succeeded or failed and will not run again.
	Finished bool
	// Restarts is how often its containers have restarted.
	Restarts int
	// AgentPort is that of its agent; 0: it has none. With one, a claim is granted when Configured has
	// answered Configure.
	AgentPort uint16
	// Recyclable: it can begin another life after this one. Recycling: it began this life by a restart of all
	// containers that is not proven yet. It is not Ready before.
	Recyclable, Recycling bool
	// Reason is why it is not ready or has ended: one of PodReasons; empty: not known. Why says it for
	// people, in the words of the kubelet, the scheduler or the API server.
	Reason, Why string
	// Cause is what its status says of its end, or of the latest end of one of its containers; zero: nothing.
	Cause Cause
	// NoExecute: it is deleted for a taint of its node.
	NoExecute bool
	// Workload is what runs in it; nil: not known. It is shared and must not be changed.
	Workload *Workload
}

// Why a pod is not ready or has ended.
const (
	PodUnschedulable = "Unschedulable"   // the scheduler finds no node for it
	PodImagePull     = "ImagePullFailed" // a container waits for its image
	PodNotStarted    = "StartFailed"     // a container cannot be created or started
	PodCrashLoop     = "CrashLoop"       // a container ends again and again
	PodOOMKilled     = "OOMKilled"       // a container needed more memory than its limit
	PodFailed        = "Failed"          // its containers have ended, or its node refused it
	PodEvicted       = "Evicted"         // by its kubelet, or through the eviction API
	PodPreempted     = "Preempted"       // by a pod of higher priority
	PodNodeLost      = "NodeLost"        // its node was not reachable, is gone or shuts down
	PodDeleted       = "Deleted"         // by another client before it was ready
	PodNeverReady    = "NeverReady"      // it was not ready in time
)

// PodReasons are all of them.
var PodReasons = []string{
	PodUnschedulable, PodImagePull, PodNotStarted, PodCrashLoop, PodOOMKilled, PodFailed, PodEvicted, PodPreempted, PodNodeLost,
	PodDeleted, PodNeverReady,
}

// Workload is what runs in a pod, for people.
type Workload struct {
	// Images are those of the containers.
	Images []string
	// Requests and Limits are the sums over the containers. A limit that one container does not have is
	// empty.
	Requests, Limits Resources
}

// Resources are quantities in the notation of Kubernetes; empty: none.
type Resources struct{ CPU, Memory string }

// Binding is what a claim asks for and gets.
type Binding struct {
	ID        string
	ClaimedAt time.Time
	// EndAt is when the sandbox is released, in use or not. SetTimeout moves it. LifetimeEnd is
	// the same and is fixed. StartBy is when it is released if it is still starting. Zero: never.
	// The earliest of these and IdleTimeout counts.
	EndAt, LifetimeEnd, StartBy time.Time
	// IdleTimeout is after how long without activity it is released; 0: never.
	IdleTimeout time.Duration
	// MinBytes is how many bytes a minute must move over an open connection for it to count as
	// activity. 0: it counts in any case.
	MinBytes uint64
	Metadata map[string]string
	// Team claimed it, on behalf of User, as far as the caller said.
	Team, User string
	// Access says who may send requests to it.
	Access Access
	// Agent is that of its pod.
	Agent Agent
	// MaskHost is the host that its pod sees, with "${PORT}" for the port of the request. Empty: that
	// of the request.
	MaskHost string
	// HTTPSPorts are the ports to which Envoy speaks TLS, in ascending order. The slice is shared and
	// must not be changed.
	HTTPSPorts []uint16
	// IdempotencyKey, if not "", makes every claim of the team with this key and
	// a body of this hash the same claim.
	IdempotencyKey string
	RequestHash    [sha256.Size]byte
	// Batch, if not "", is the ID of the batch that it was claimed with.
	Batch string
}

// Agent is the agent in a pod, which is configured once, for the sandbox that the pod holds. Port 0:
// there is none.
type Agent struct {
	Port uint16
	// Public: requests to it need no token.
	Public bool
}

// Values are what a claim brings for the agent. Core does not look into them.
type Values interface {
	// String does not show them, so that no log does.
	String() string
}

// Scope is which sandboxes exist for a caller: those of a team, or all. The zero Scope is the team
// "".
type Scope struct {
	// All: the sandboxes of every team. Team has no meaning then.
	All  bool
	Team string
}

// Sees reports whether the sandboxes of a team exist for the caller.
func (s Scope) Sees(team string) bool { return s.All || s.Team == team }

// Selection is a part of the live sandboxes: those of a scope and, unless it is zero, of one pool.
type Selection struct {
	Scope
	Pool PoolKey
}

// Access says who may send requests to a sandbox. A higher value admits fewer clients.
type Access int

// The kinds of access, with the numbers that the journal and the control stream have.
const (
	// AccessPublic: every client that has the sandbox ID.
	AccessPublic Access = iota
	// AccessToken: clients with a credential of the sandbox.
	AccessToken
	// AccessTeam: clients with an API key of its team, or with a link.
	AccessTeam
)

var accessWords = [...]string{"public", "token", "team"}

// AccessOf returns the access of a word of the API. The empty word is public.
func AccessOf(word string) (Access, bool) {
	i := slices.Index(accessWords[:], cmp.Or(word, accessWords[AccessPublic]))
	return Access(max(i, 0)), i >= 0
}

// Known reports whether this version knows the access.
func (a Access) Known() bool { return a >= 0 && int(a) < len(accessWords) }

// String returns the word for an access that is known.
func (a Access) String() string { return accessWords[a] }

// Phase is where a sandbox is in its life.
type Phase int

// The phases of a sandbox.
const (
	// Starting: claimed, and its pool's hook has not been answered yet.
	Starting Phase = iota + 1
	Running
	// Releasing: as before, but its release is on its way into the journal.
	Releasing
	Released
	Ended
)

// Sandbox is the state of one sandbox.
type Sandbox struct {
	Binding
	Pool PoolKey
	Pod  PodKey
	IP   netip.Addr
	// DefaultPort and Ports are those of its pool; for a live sandbox the current ones.
	DefaultPort uint16
	Ports       []uint16
	// Restarts are those of the pod before the claim.
	Restarts int
	Phase    Phase
	// StartedAt is when it began to run; zero: it has not.
	StartedAt time.Time
	// Cause and ReleasedAt are set from Released on.
	Cause
	ReleasedAt time.Time
	// Workload is what its pod runs. Objects show it, and it is not in the journal: the next leader takes it
	// from the pod if the object does not exist. nil: not known.
	Workload *Workload
	// LastActive is a lower bound of its last activity, as its object shows it. It is not in the
	// journal. Zero: none was written yet.
	LastActive time.Time
	// Revision orders the writes about it. A lower one never overwrites a higher one.
	Revision Revision
}

// End is why and when a sandbox ended, as far as every client with its ID may know: zero unless it was
// public.
type End struct {
	Reason string
	At     time.Time
}

func (s *Sandbox) end() End {
	if s.Access != AccessPublic {
		return End{}
	}
	return End{s.Reason, s.ReleasedAt}
}

// MaxTerm bounds terms that are read from Sandbox objects and routers. Terms count changes
// of leaders, so a higher one is an error. The next leader has a higher term than any it has
// read, and a term must fit into an int64.
const MaxTerm = 1 << 53

// Revision is a term and a counter within it.
type Revision struct{ Term, Counter uint64 }

// Less reports whether r is older than o.
func (r Revision) Less(o Revision) bool {
	return r.Term < o.Term || r.Term == o.Term && r.Counter < o.Counter
}

// Fact is the whole journaled state of one thing: a sandbox, which is Starting, Running or
// Released; the session of a router; or the intent to delete an idle pod.
type Fact struct {
	Revision Revision
	// Sandbox is set for a sandbox. Its Revision is this one.
	Sandbox *Sandbox
	// Ungranted is set for a sandbox whose claim was not granted yet, because agents are configured first.
	// It is how many sandboxes the claim needs.
	Ungranted int
	// Joined: it is durable together with the fact before it, or not at all.
	Joined bool
	// Session is set for a session. From is the address it joined from. Left: its router can
	// route to nothing any more.
	Session string
	From    string
	Left    bool
	// Declared: it has left because an operator declared it dead.
	Declared *Declaration
	// Earlier: it stands for all routers of an earlier journal: see EarlierSession.
	Earlier bool
	// MaxStale is set for a session, its end and its declaration: that of the router. Its routes
	// are stale after this or after the MaxStale of the leader, whichever is longer.
	MaxStale time.Duration
	// Assumed: the router has not said MaxStale. An earlier version has journaled the session without it.
	Assumed bool
	// Longer: MaxStale is longer than that of the leader that wrote the fact, and not Assumed. An
	// allocator that does not know MaxStale must not lead while the journal has this fact.
	Longer bool
	// Gateway is set for a session: the hash of the secret of the gateway; zero: it has none.
	Gateway Gateway
	// Retired is a pod that is never handed out again. After is set if conflicting records named
	// the pod for that sandbox, at the addresses At: the pod is then not deleted before the fence
	// of the sandbox is complete.
	Retired PodKey
	After   string
	At      []netip.Addr
}

// Gateway names a gateway by the hash of its secret.
type Gateway = member.Gateway

// Declaration is an operator's statement that a router and its Envoy have ended.
type Declaration struct {
	// By is the name of the API key; empty if none was required.
	By, Reason string
	At         time.Time
}

// BusyProbe is where a pod answers whether it is busy: port 0 for none.
type BusyProbe struct {
	Port uint16
	Path string
}

// Activity is what one router reports about the use of one sandbox.
type Activity = idle.Activity

// Question asks whether a sandbox is idle.
type Question struct {
	ID       string
	MinBytes uint64
}

// Counts are a pool's pods by state, and the claims that wait for one.
type Counts struct {
	Pending, Warm, Claimed, Releasing, Waiting int
	// Outdated are those of Pending and Warm that were created from an older template. Stranded are those
	// of Pending that the pool has replaced already, because their nodes are not usable.
	Outdated, Stranded int
	// Target is how many warm pods the pool asks for, Wanted how many of them there is room for. Stuck says
	// why pending pods are not ready, Trouble why the creation of others is delayed. View.Counts adds these.
	Target int
	Wanted int
	// Lacking and Spare are the other parts of the target of the demand: see demand.Target. Start is the start
	// time of pods that it counts with; 0: none was measured. View.Counts adds these too.
	Lacking, Spare int
	Start          time.Duration
	// Retiring are those of Releasing that no sandbox had and that are of the current template. Full: MaxPods
	// leaves room for no other pod. Fenced are then those of Releasing that wait for a router that is not
	// connected, FencedBy is one such router. Quarantine is when the pods are handed out that routers of an earlier
	// journal may have routes to, by whole minutes; zero: no pod is kept back. View.Counts adds these too.
	Retiring   int
	Full       bool
	Fenced     int
	FencedBy   string
	Quarantine time.Time
	Stuck      Stuck
	Trouble    Trouble
	// Failed is the last idle pod that failed; View.Counts adds it.
	Failed PodFailure
}

// PodFailure is an idle pod that ended by itself, was deleted by another client, or did not become ready in
// time. Reason is one of PodReasons. At is the time of the leader that saw it, in whole seconds.
type PodFailure struct {
	Pod, Reason, Why string
	At               time.Time
}

// Stuck is the most frequent reason for which pending pods of a pool are not ready. The zero value: there is
// none.
type Stuck struct {
	// Reason is one of PodReasons. Pod is one of Pods pods that have it, Why is that pod's.
	Reason, Pod, Why string
	Pods             int
}
