package core

import (
	"net/netip"
	"time"
)

// PodKey names one pod for ever: names repeat, UIDs do not.
type PodKey struct{ Namespace, Name, UID string }

// PoolKey names a pool.
type PoolKey struct{ Namespace, Name string }

// Instant is a moment on two clocks.
type Instant struct {
	// Boot is monotonic and counts suspended time. Fences and sessions use it.
	Boot time.Duration
	// Wall is what people and records see.
	Wall time.Time
}

// Pool is what a SandboxPool asks for.
type Pool struct {
	Key         PoolKey
	Warm        int
	MaxPods     int // 0: no bound
	DefaultPort uint16
	// Ports may be reached from outside: ascending, empty means all. Like those
	// of a Sandbox they are shared and must not be changed.
	Ports []uint16
	// Template identifies the pod template. Pods made from another one are
	// replaced while they are warm.
	Template string
	// Refused: its template may not be used. No pod is made from it, and idle
	// ones that were are deleted; warm ones of an earlier template are kept.
	Refused bool
	// Deleting: release its sandboxes and delete its pods.
	Deleting bool
}

// Pod is an observation of a pod.
type Pod struct {
	Key      PodKey
	Pool     string
	IP       netip.Addr
	Template string
	// Version is the resource version of this observation, opaque.
	Version string
	Ready   bool
	// Free: its phase label says warm, so a claim can be written to it.
	Free bool
	// Deleting: it has a deletion timestamp.
	Deleting bool
	// Finished: it succeeded or failed and will not run again.
	Finished bool
	// Binding is the claim written to the pod, nil if there is none.
	Binding *Binding
	// Released: the release was written to the pod, with this reason.
	Released      bool
	ReleaseReason string
	ReleasedAt    time.Time
}

// Binding is a claim.
type Binding struct {
	ID        string
	ClaimedAt time.Time
	// EndAt is when the sandbox is released at the latest. Zero: never.
	EndAt    time.Time
	Metadata map[string]string
}

// Phase is where a sandbox is in its life.
type Phase int

// The phases of a sandbox.
const (
	Running Phase = iota
	Releasing
	Released
	Ended
)

// Sandbox is what is known of one sandbox.
type Sandbox struct {
	Binding
	Pool PoolKey
	Pod  PodKey
	IP   netip.Addr
	// DefaultPort and Ports are what its pool says, of a live sandbox what it
	// says now.
	DefaultPort uint16
	Ports       []uint16
	Phase       Phase
	Reason      string
	EndedAt     time.Time
	// Revision orders what is written about it: a lower one never overwrites a
	// higher one.
	Revision Revision
}

// Revision is a term and a counter within it.
type Revision struct{ Term, Counter uint64 }

// Less reports whether r is older than o.
func (r Revision) Less(o Revision) bool {
	return r.Term < o.Term || r.Term == o.Term && r.Counter < o.Counter
}

// Reasons a sandbox is released.
const (
	ReasonKilled      = "Killed"
	ReasonTimeout     = "Timeout"
	ReasonAbandoned   = "Abandoned" // the caller had gone before the claim was answered
	ReasonPodDeleted  = "PodDeleted"
	ReasonPodGone     = "PodGone"
	ReasonPodFailed   = "PodFailed"
	ReasonPodMoved    = "PodMoved" // its address changed
	ReasonPoolDeleted = "PoolDeleted"
)

// Counts are a pool's pods by state.
type Counts struct{ Pending, Warm, Claimed, Releasing int }
