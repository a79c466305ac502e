package step

import (
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// Effect is something that the caller of Step has to do. Each type below is one. Effects that
// write to Kubernetes may be carried out concurrently. Effects for one stream must reach it in
// their order.
type Effect interface{ effect() }

type (
	// CreatePod creates a pod from the pool's template under this name. PodSeen or CreateFailed
	// answers it.
	CreatePod struct {
		Pool fact.PoolKey
		Name string
	}
	// Write commits facts to the journal, in their order. Written answers it when all of them are
	// durable, and WriterReady later. Core emits no other Write before.
	Write struct{ Facts []fact.Fact }
	// Settle: the journal may drop this fact.
	Settle struct {
		fact.Thing
		Revision fact.Revision
	}
	// DeletePod deletes the pod. PodGone follows.
	DeletePod struct{ Pod fact.PodKey }
	// RecyclePod ends this life of a pod and begins the next one, or deletes the pod if that cannot be
	// done. PodSeen of the next life or PodGone follows.
	RecyclePod struct {
		Pod  fact.PodKey
		Pool fact.PoolKey
	}
	// SyncPod: an idle pod gets the labels and annotations of its pool's template.
	SyncPod struct {
		Pod  fact.PodKey
		Pool fact.PoolKey
	}
	// LabelPod labels a pod with its pool and, unless ID is empty, with its sandbox and whether
	// that was released. Core does not depend on it. Only the latest of several for one pod
	// counts. Restored: the pool's label was removed or changed.
	LabelPod struct {
		Pod      fact.PodKey
		Pool     string
		ID       string
		Released bool
		Restored bool
	}
	// ResizePod lowers the CPU request of a pod whose sandbox is asleep, or raises it to CPURequest, if this version of
	// the pod is still the latest. PodSeen follows.
	ResizePod struct {
		Pod        fact.PodKey
		Version    string
		Lower      bool
		CPURequest string
	}
	// Configure has the agent in the pod of a sandbox configured, with the Values of the claim. One that was stopped has
	// an Archive: the agent is given its files and its earlier configuration. Configured answers it. Ask: a leader of an earlier term may have done that, and the agent is asked
	// whether it is so.
	Configure struct {
		Sandbox fact.Sandbox
		Values  Values
		Ask     bool
	}
	// Freeze has the agent in the pod of a sandbox stop all processes. Frozen answers it. Keep: the sandbox is asleep,
	// and the agent must not continue them by itself. The order has the revision of the sandbox.
	Freeze struct {
		Sandbox fact.Sandbox
		Keep    bool
	}
	// Thaw has the agent continue all processes. Thawed answers it.
	Thaw struct{ Sandbox fact.Sandbox }
	// WriteArchive has the files of a sandbox archived, whose processes are stopped. The Values are those of its call.
	// ArchiveWritten answers it, with its Token. Token 0: the sandbox is to be stopped. The archive then has its
	// configuration too, sealed, and there are no Values. Cause is why it is to be stopped.
	WriteArchive struct {
		Token   uint64
		Sandbox fact.Sandbox
		Values  Values
		Cause   StopCause
	}
	// DropArchive deletes the Archive of a sandbox. No record names it any more, so it does not matter how late that is.
	DropArchive struct{ Sandbox fact.Sandbox }
	// StartSandbox calls the pool's postStart hook. Started answers it.
	StartSandbox struct{ Sandbox fact.Sandbox }
	// WriteObject writes the Sandbox object. ObjectWritten answers it. Only the latest of several for one
	// ID counts. Touch: only the last activity has changed, and a missing object is not created,
	// because a deposed leader would bring a deleted one back. LogLines are added to the object; nil: the
	// object keeps those that it has.
	WriteObject struct {
		Sandbox  fact.Sandbox
		Touch    bool
		LogLines []string
	}
	// ReadLog: a sandbox ended by itself or failed, and its pod exists. LogRead answers with the last lines of
	// its log, if the pool wants them and they can be read. Core waits for nothing.
	ReadLog struct{ Sandbox fact.Sandbox }
	// DeleteObject deletes the Sandbox object of a sandbox that ended long ago, unless it shows a later
	// revision.
	DeleteObject struct {
		Pool     fact.PoolKey
		ID       string
		Revision fact.Revision
	}
	// IdlePodFailed: an idle pod has failed, and the pool replaces it.
	IdlePodFailed struct {
		Pod     fact.PodKey
		Pool    fact.PoolKey
		Failure PodFailure
	}
	// RecycleEnded: a pool that recycles has its pod back after a sandbox, or the pod is deleted. Outcome is
	// Recycled, NotNeeded, NotFit or NotProven.
	RecycleEnded struct{ Outcome string }
	// PoolDrained: a pool that is being deleted has no pods left.
	PoolDrained struct{ Key fact.PoolKey }

	// Claimed answers a Claim.
	Claimed struct {
		Token   uint64
		Sandbox fact.Sandbox
	}
	// BatchClaimed answers a Claim of a batch. Sandboxes are the live ones, in no order; Ended are
	// the IDs of those that have ended since the first answer, or have not started.
	BatchClaimed struct {
		Token     uint64
		Sandboxes []fact.Sandbox
		Ended     []string
	}
	// ClaimGranted: a claim got its sandboxes, Wait after it came. Waited: not all of its pods were warm then,
	// or one of them was lost. A claim that is refused before has a ClaimRefused.
	ClaimGranted struct {
		Pool   fact.PoolKey
		Waited bool
		Wait   time.Duration
	}
	// ClaimCanceled: all callers of a claim left before it got its sandboxes.
	ClaimCanceled struct{ Pool fact.PoolKey }
	// ClaimRefused answers a Claim.
	ClaimRefused struct {
		Token uint64
		// Pool is that of the claim; zero: there is no such pool, or the claim was granted before.
		Pool fact.PoolKey
		Why  Refusal
		// Counts are the pool's. Warm, MaxPods, Paused and Problem are what it asks for, and why it is
		// refused: see Pool. For NotConfigured Problem is why the last agent was not configured.
		Counts        Counts
		Warm, MaxPods int
		Paused        bool
		Problem       string
		// Excess is the limit of the team, for OverLimit.
		Excess teams.Excess
		// Wait is for how long still, for Quarantined.
		Wait time.Duration
		// Sandbox is the one that the idempotency key stands for, for KeyEnded, or
		// that did not start, for StartFailed.
		Sandbox fact.Sandbox
	}
	// ReleaseAnswered answers a Release.
	ReleaseAnswered struct {
		Token  uint64
		Status CallStatus
		// Outstanding is the number of sessions that have not acknowledged.
		Outstanding int
	}

	// SandboxCallAnswered answers a KeepAlive, a SetTimeout, a SetNetwork, a Sleep or an Archive with the sandbox. CallGone: it was released, or
	// its release is on its way into the journal. Why says for people why a sandbox does not sleep, or has no new rules.
	// Err is that of ArchiveWritten, if that is why.
	SandboxCallAnswered struct {
		Token   uint64
		Status  CallStatus
		Sandbox fact.Sandbox
		Why     string
		Err     error
		// Woken: it was asleep.
		Woken bool
	}
	// WouldReap: a sandbox is idle, and is not released because Config.DryRun is set.
	WouldReap struct {
		Sandbox fact.Sandbox
		Idle    time.Duration
	}

	// DeadDeclared answers a DeclareDead.
	DeadDeclared struct {
		Token  uint64
		Status DeclareStatus
		// Fences is how many fences waited for the session.
		Fences int
		// Wait is how much longer it must be silent, for DeclareHeard.
		Wait time.Duration
	}
	// SessionDeclaredDead: an operator's declaration is durable, so no fence waits for the session
	// any more.
	SessionDeclaredDead struct {
		Session, From string
		Declaration   fact.Declaration
		Fences        int
	}

	// SendSnapshot sends all routes as the first message of a stream.
	SendSnapshot struct {
		Stream   uint64
		Sequence uint64
		Routes   []fact.Sandbox
	}
	// SendRoute sends the route of a sandbox.
	SendRoute struct {
		Stream   uint64
		Sequence uint64
		Sandbox  fact.Sandbox
	}
	// SendRelease sends the releases that became durable in one step. Ends are in the order of IDs.
	SendRelease struct {
		Stream   uint64
		Sequence uint64
		IDs      []string
		Ends     []End
	}
	// SendClose has a router forget the route of a sandbox that is about to sleep.
	SendClose struct {
		Stream   uint64
		Sequence uint64
		ID       string
	}
	// SendResolved answers a Resolve.
	SendResolved struct {
		Stream uint64
		ID     string
		// Sleeper is set if the sandbox is asleep. Its route says who may wake it, if it is Wakeable. Busy: too many
		// others are waking, in all or of its team.
		Sleeper *fact.Sandbox
		Busy    bool
		// Sandbox is set if it is running. Gone: it was released, with this end.
		Sandbox *fact.Sandbox
		Gone    bool
		End     End
		// Starting: it was claimed, and no request may be sent to it yet. A request may wait
		// for it for Hold.
		Starting bool
		Hold     time.Duration
	}
	// SendQuiesce asks a router whether sandboxes are idle. Quiesced answers it.
	SendQuiesce struct {
		Stream    uint64
		Number    uint64
		Questions []Question
	}
	// SendProbe has a router ask a pod whether it is busy. Probed answers it.
	SendProbe struct {
		Stream uint64
		Number uint64
		ID     string
		To     netip.AddrPort
		Path   string
	}
	// SendResume: requests for these sandboxes may be admitted again.
	SendResume struct {
		Stream uint64
		IDs    []string
	}
	// SendPong answers a SessionPing. Keep: the router has reported the death of a router that is still
	// connected, and must keep its proof.
	SendPong struct {
		Stream uint64
		Nonce  uint64
		Keep   bool
	}
	// CloseStream ends a stream that was replaced by a newer one, or whose session has ended.
	// Banned: the session was declared dead and must not join again. Left: the Goodbye of its
	// router is durable.
	CloseStream struct {
		Stream uint64
		Banned bool
		Left   bool
	}

	// SandboxCreated: the claim of a sandbox is durable. It comes once for each sandbox, or never if
	// the leader ends in that moment.
	SandboxCreated struct{ Sandbox fact.Sandbox }
	// SandboxReady: requests reach the sandbox from now on. It comes once for each sandbox, or never if
	// the leader ends in that moment.
	SandboxReady struct{ Sandbox fact.Sandbox }
	// SandboxAsleep: the sandbox is asleep. SandboxAwake: requests reach it again, after it has slept for Slept; Took is the
	// time since it was to wake.
	SandboxAsleep struct{ Sandbox fact.Sandbox }
	SandboxAwake  struct {
		Sandbox     fact.Sandbox
		Slept, Took time.Duration
	}
	// SandboxStopped: the sandbox is stopped, or is so again. What was under way in its pod is over.
	SandboxStopped struct{ Sandbox fact.Sandbox }
	// SandboxReleased: the sandbox has been released, and its pod is not reused or deleted yet. It comes
	// once for each sandbox. Late is how long after its end or its idle timeout the release was durable; 0: neither was
	// the reason.
	SandboxReleased struct {
		Sandbox fact.Sandbox
		Late    time.Duration
	}
	// Acknowledged: every router that could know the route of a released sandbox has
	// acknowledged its release, said Goodbye, was found dead or has expired. It comes
	// once for each sandbox that was released in this term while there were routers.
	// Took is the time since the release was durable.
	Acknowledged struct {
		ID   string
		Took time.Duration
	}
	// Repaired: something was found that must not be, and what is done about it, unless
	// this leader is deposed meanwhile.
	Repaired struct {
		Pod  fact.PodKey
		What string
	}
)

// Refusal is why a claim was refused.
type Refusal int

// The refusals of a claim.
const (
	// NoPool: there is no such pool, or it is being deleted.
	NoPool Refusal = iota + 1
	// PoolEmpty: no pod came in time, or, of a batch, too few.
	PoolEmpty
	// TooMany: MaxPods of the pool is less than the sandboxes that the batch needs at least.
	TooMany
	// KeyReused: the idempotency key stands for a claim with another body.
	KeyReused
	// KeyEnded: the idempotency key stands for a sandbox that was released.
	KeyEnded
	// Overloaded: the journal, or what is written from it, does not keep up.
	Overloaded
	// StartFailed: the sandbox was released before it was running.
	StartFailed
	// Ending: no pod was there at once, and this leader is about to end.
	Ending
	// Quarantined: routers of an earlier journal may still send requests to any address.
	Quarantined
	// LineFull: as many callers wait for a pod of the pool as may (--claim-queue), or a claim of
	// another team took the place.
	LineFull
	// OverLimit: the team has reached a limit.
	OverLimit
	// NotConfigured: the agents of several pods, one after the other, could not be configured; the pod that
	// is next has no agent for the values of the claim; or it is not known yet whether an earlier leader has
	// configured the agent of the sandbox.
	NotConfigured
	// NotAccepted: no pod may be made from the pool's template, and none is warm.
	NotAccepted
)

// StopCause is why a sandbox is stopped.
type StopCause string

// Why a sandbox is stopped.
const (
	StopCalled      StopCause = "call"       // a call has asked for it
	StopAfter       StopCause = "stopAfter"  // it has slept for so long
	StopForPressure StopCause = "maxAsleep"  // more sandboxes of its pool are asleep than may be
	StopOfCordon    StopCause = "cordon"     // its node gets no more pods, and those there are about to be evicted
	StopOfDeletion  StopCause = "podDeleted" // its pod is being deleted by others, as by an eviction
)

// CallStatus is the outcome of a Release, a KeepAlive, a SetTimeout, a SetNetwork, a Sleep or an Archive.
type CallStatus int

// The outcomes of a call about a sandbox.
const (
	CallUnknown CallStatus = iota // no such sandbox
	CallGone                      // it was released before
	CallOK
	CallAsleep   // it is asleep, or about to be
	CallNotReady // it starts, or a router that may send it requests, or has its rules, does not answer
	CallRefused  // its processes could not be stopped, or its archive was not written
	CallUnfit    // its pod cannot sleep, or reaches no egress gateway
)

// DeclareStatus is the outcome of a DeclareDead.
type DeclareStatus int

// The outcomes of a DeclareDead.
const (
	DeclareUnknown   DeclareStatus = iota // no such session, or it has ended
	DeclareConnected                      // it is connected, so it lives
	DeclareHeard                          // it was heard a short while ago, or may have been
	DeclareOK
)

func (CreatePod) effect()           {}
func (Write) effect()               {}
func (Settle) effect()              {}
func (LabelPod) effect()            {}
func (ResizePod) effect()           {}
func (SyncPod) effect()             {}
func (StartSandbox) effect()        {}
func (Freeze) effect()              {}
func (Thaw) effect()                {}
func (WriteArchive) effect()        {}
func (DropArchive) effect()         {}
func (SendClose) effect()           {}
func (SandboxAsleep) effect()       {}
func (SandboxAwake) effect()        {}
func (SandboxStopped) effect()      {}
func (Configure) effect()           {}
func (SandboxCreated) effect()      {}
func (SandboxReady) effect()        {}
func (Repaired) effect()            {}
func (DeletePod) effect()           {}
func (IdlePodFailed) effect()       {}
func (RecyclePod) effect()          {}
func (RecycleEnded) effect()        {}
func (WriteObject) effect()         {}
func (ReadLog) effect()             {}
func (DeleteObject) effect()        {}
func (PoolDrained) effect()         {}
func (Claimed) effect()             {}
func (BatchClaimed) effect()        {}
func (ClaimGranted) effect()        {}
func (ClaimCanceled) effect()       {}
func (ClaimRefused) effect()        {}
func (ReleaseAnswered) effect()     {}
func (SendSnapshot) effect()        {}
func (SendRoute) effect()           {}
func (SendRelease) effect()         {}
func (Acknowledged) effect()        {}
func (SendResolved) effect()        {}
func (SendPong) effect()            {}
func (SendQuiesce) effect()         {}
func (SendProbe) effect()           {}
func (SendResume) effect()          {}
func (SandboxCallAnswered) effect() {}
func (WouldReap) effect()           {}
func (CloseStream) effect()         {}
func (SandboxReleased) effect()     {}

func (DeadDeclared) effect()        {}
func (SessionDeclaredDead) effect() {}
