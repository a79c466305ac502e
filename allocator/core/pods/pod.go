package pods

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/taint"
)

// State is the state of a pod: see the package comment.
type State int

// The states of a pod.
const (
	Pending State = iota
	Warm
	Claiming
	Bound
	Claimed
	Released
	Recycling
	Going
)

// Withheld are the reasons why an idle pod is not handed out.
type Withheld uint

// The reasons.
const (
	Unready Withheld = 1 << iota
	Ending
	NodeBad
	Contested
	Tainted
	Quarantined
	NotProven
	Open
)

// Pod is one life of a pod. Only its Table changes it.
type Pod struct {
	seen  step.Pod // the latest observation
	group *Group
	node  *node
	state State
	gone  bool
	class Class // that it is counted by
	// sandbox is the ID of the one that has or had it, from bound on; empty: none has.
	sandbox string
	// away: its node became unusable after the creation of the pod was asked for. The pool creates another
	// pod for it. A pod that was asked for later is not away, because its template chooses such nodes, and
	// its replacement would be scheduled to the same node.
	away bool
	// quarantined: it was not granted and had an address while routers of an earlier journal may have served routes.
	// The pool creates no other pod for it until the session of that journal ends.
	quarantined bool
	proof       proof
	askedAt     time.Duration // boot clock: when its creation was asked for; 0: not known
	warmAt      time.Duration // boot clock: when it was warm for the first time; 0: never
	// unreadySince is when a node got it, or it was ready last, on the boot clock; 0: it is ready, or no node
	// has it.
	unreadySince time.Duration
	// synced is the Metadata that the last SyncPod was for since the pod is idle; nil: none was.
	synced *string
	addr   *taint.Pod[fact.PodKey]
}

// proof is how far the proof of a life has come that began with a restart.
type proof int

const (
	notAwaited proof = iota // the life has begun with the pod
	awaited
	proven
)

// Key names this life of the pod.
func (p *Pod) Key() fact.PodKey { return p.seen.Key }

// Seen is the latest observation.
func (p *Pod) Seen() *step.Pod { return &p.seen }

// Group has the pods of its pool.
func (p *Pod) Group() *Group { return p.group }

// State is its state.
func (p *Pod) State() State { return p.state }

// Gone reports whether this life has ended.
func (p *Pod) Gone() bool { return p.gone }

// Sandbox is the ID of the sandbox that has or had it; empty: none has.
func (p *Pod) Sandbox() string { return p.sandbox }

// AskedAt is when its creation was asked for, on the boot clock; 0: not known.
func (p *Pod) AskedAt() time.Duration { return p.askedAt }

// UnreadySince is since when it could become ready and is not, on the boot clock; 0: it is ready, or no node has it.
func (p *Pod) UnreadySince() time.Duration { return p.unreadySince }

// Withheld returns why the pod is not handed out; 0: it may be.
func (p *Pod) Withheld() (why Withheld) {
	for _, x := range [...]struct {
		reason Withheld
		holds  bool
	}{
		{Unready, !p.seen.Ready || !p.seen.IP.IsValid()},
		{Ending, p.seen.Deleting || p.seen.Finished || p.gone},
		{NodeBad, !p.node.usable},
		{Contested, p.addr.Contested()},
		{Tainted, p.addr.Tainted()},
		{Quarantined, p.quarantined},
		{NotProven, p.seen.Recycling},
		{Open, p.group.Agent.Egress && !p.seen.Egress},
	} {
		if x.holds {
			why |= x.reason
		}
	}
	return why
}

// Outdated reports whether the pod was made from another template than that which the pool has now.
func (p *Pod) Outdated() bool { return p.group.Template != "" && p.seen.Template != p.group.Template }

// Idle reports whether no claim and no sandbox has the pod, and it is not about to be deleted.
func (p *Pod) Idle() bool { return p.state == Pending || p.state == Warm }

// Stranded reports whether the pod is idle and the pool creates another pod for it.
func (p *Pod) Stranded() bool { return p.state == Pending && (p.away || p.addr.Tainted()) }

// Lost reports whether the pod is stranded because its node is not ready or is gone.
func (p *Pod) Lost() bool { return p.Stranded() && p.away && !p.node.cordoned }

// Cordoned reports whether its node is ready, and gets no more pods.
func (p *Pod) Cordoned() bool { return p.node.cordoned }

// Node is the name of its node; empty: it has none.
func (p *Pod) Node() string { return p.node.name }

// granted reports whether a claim was granted that got the pod.
func (p *Pod) granted() bool { return p.state > Bound && p.sandbox != "" }

// strayed reports whether the creation of the pod was asked for before its node became unusable.
func (p *Pod) strayed() bool { return !p.node.usable && p.askedAt != 0 && p.askedAt < p.node.lostAt }

// Removed returns why a pod that is being deleted, or is gone, was deleted. The cluster writes that into the
// status before it deletes a pod. Otherwise another client did, for reasons of its own.
func (p *Pod) Removed() fact.Cause {
	cause := p.seen.Cause
	switch {
	case p.seen.NoExecute && (p.seen.Ready || p.node.usable || p.node.cordoned):
		cause.Reason = fact.ReasonEvicted
	case p.seen.NoExecute: // Kubernetes marks the pods of a node that does not answer as not ready
		cause.Reason = fact.ReasonNodeLost
	case cause.Reason != fact.ReasonEvicted && cause.Reason != fact.ReasonNodeLost:
		return fact.Because(fact.ReasonPodDeleted)
	}
	return cause
}
