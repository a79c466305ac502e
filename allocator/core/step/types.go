package step

import (
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
)

// Instant is a moment on two clocks.
type Instant struct {
	// Boot is monotonic and counts suspended time. Everything within a term uses it.
	Boot time.Duration
	// Wall is the time in records and for people.
	Wall time.Time
}

// BootOf converts a time of the wall clock to the boot clock.
func (now Instant) BootOf(t time.Time) time.Duration { return now.Boot + t.Sub(now.Wall) }

// Pool is what a SandboxPool asks for.
type Pool struct {
	Key     fact.PoolKey
	Warm    int
	MaxWarm int // how many warm pods the demand may ask for; without effect if it is not above Warm
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
	// Egress is what its sandboxes may reach that are behind an egress gateway; nil: it does not say.
	Egress *fact.PoolEgress
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
	Agent fact.Agent
	// KeepOnRestart: a sandbox goes on when a container of its pod restarts, unless the pod has an agent.
	KeepOnRestart bool
	// Hold is how long a request for a sandbox that is starting may wait for it.
	Hold time.Duration
	// IdleTimeout and MinBytes are the defaults of claims; 0: none.
	IdleTimeout time.Duration
	MinBytes    uint64
	BusyProbe   BusyProbe
	// Sleep is the default of claims.
	Sleep fact.SleepPolicy
	// MaxAsleep is how many of its sandboxes may be asleep: of those above that some are stopped; 0: no bound.
	MaxAsleep int
	// CannotSleep says why sandboxes with a pod of this template cannot sleep; empty: they can.
	CannotSleep string
	// MaxLifetime bounds the life of a sandbox, StartupTimeout the time for which it is starting;
	// 0: no bound.
	MaxLifetime, StartupTimeout time.Duration
	// Access is the least strict access of its sandboxes.
	Access fact.Access
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
	Key fact.PodKey
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
	// Egress: its network policy lets it reach the egress gateway only.
	Egress bool
	// CPURequest is what it requests while its sandbox is awake; empty: always. Lowered: it requests less now. Deferred:
	// its node has no room for what it requests now.
	CPURequest        string
	Lowered, Deferred bool
	// Recyclable: it can begin another life after this one. Recycling: it began this life by a restart of all
	// containers that is not proven yet. It is not Ready before.
	Recyclable, Recycling bool
	// Reason is why it is not ready or has ended: one of PodReasons; empty: not known. Why says it for
	// people, in the words of the kubelet, the scheduler or the API server.
	Reason, Why string
	// Cause is what its status says of its end, or of the latest end of one of its containers; zero: nothing.
	Cause fact.Cause
	// NoExecute: it is deleted for a taint of its node.
	NoExecute bool
	// Workload is what runs in it; nil: not known. It is shared and must not be changed.
	Workload *fact.Workload
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
	Pool fact.PoolKey
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

// Trouble says why a pool delays the creation of pods, in text for people. The zero value means
// that it does not.
type Trouble struct {
	// Pod is the last one that ended early, Reason one of PodReasons, Why what is known of its end.
	Pod, Reason, Why string
	// Retry is when the replacement is created, in whole seconds; zero: it was.
	Retry time.Time
}

// End is why and when a sandbox ended, as far as every client with its ID may know: zero unless it was
// public.
type End struct {
	Reason string
	At     time.Time
}

// How the recycling of a pod can end.
const (
	Recycled  = "Recycled"  // the next life is proven
	NotNeeded = "NotNeeded" // the pool has as many idle pods as it keeps
	NotFit    = "NotFit"    // the pod, or the pool's template, has changed, or the sandbox failed or ended because of the pod
	NotProven = "NotProven" // the kubelet did not report the restart of all containers in time, or the pod could not be cleaned
)
