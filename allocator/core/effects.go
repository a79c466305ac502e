package core

import (
	"net/netip"
	"time"
)

// Effect is something to do. Each type below is one. Effects are handed out in
// order; those that write to Kubernetes may run side by side, those for one
// session must reach it in order.
type Effect interface{ effect() }

type (
	// CreatePod makes a pod from the pool's template under this name. It is
	// answered by PodSeen or CreateFailed.
	CreatePod struct {
		Pool PoolKey
		Name string
	}
	// Write commits facts to the journal, in their order. It is answered by Written
	// when all of them are durable, later by WriterReady. No other Write is made
	// before.
	Write struct{ Facts []Fact }
	// Settle: the journal need not keep this state of a sandbox, a session, or the
	// intent to delete a pod, any longer. One of the three is set.
	Settle struct {
		ID       string
		Session  string
		Pod      PodKey
		Revision Revision
	}
	// DeletePod deletes the pod. Success shows as PodGone.
	DeletePod struct{ Pod PodKey }
	// LabelPod shows on a pod which pool it is of, and, unless ID is "", that it holds
	// that sandbox, or that this was released. The core does not depend on it. Only the
	// latest of several for one pod matters. Restored: the pool's label was taken away
	// or changed.
	LabelPod struct {
		Pod      PodKey
		Pool     string
		ID       string
		Released bool
		Restored bool
	}
	// StartSandbox calls the pool's postStart hook. It is answered by Started.
	StartSandbox struct{ Sandbox Sandbox }
	// Record writes the Sandbox object. Answered by Recorded. Only the latest
	// of several for one ID matters. Touch: only its last activity has changed, and an
	// object that is not there is not made: a leader that was deposed would bring it back.
	Record struct {
		Sandbox Sandbox
		Touch   bool
	}
	// ForgetRecord deletes the Sandbox object of a sandbox that ended long ago.
	ForgetRecord struct {
		Pool PoolKey
		ID   string
	}
	// PoolDrained: a pool that is being deleted has no pods left.
	PoolDrained struct{ Key PoolKey }

	// Claimed answers a Claim.
	Claimed struct {
		Token   uint64
		Sandbox Sandbox
	}
	// ClaimRefused answers a Claim.
	ClaimRefused struct {
		Token uint64
		Why   Refusal
		// Counts are the pool's, for PoolEmpty.
		Counts Counts
		// Wait is for how long still, for Quarantined.
		Wait time.Duration
		// Sandbox is the one that the idempotency key stands for, for KeyEnded, or
		// that did not start, for StartFailed.
		Sandbox Sandbox
	}
	// ReleaseAnswered answers a Release.
	ReleaseAnswered struct {
		Token  uint64
		Status ReleaseStatus
		// Outstanding is the number of sessions that have not acknowledged.
		Outstanding int
	}

	// Kept answers a KeepAlive or a SetTimeout: the sandbox as it is now. ReleaseGone:
	// it has been released, or is about to be.
	Kept struct {
		Token   uint64
		Status  ReleaseStatus
		Sandbox Sandbox
	}
	// WouldReap: a sandbox is idle, and would be released if Config.DryRun were not set.
	WouldReap struct {
		Sandbox Sandbox
		Idle    time.Duration
	}

	// DeadDeclared answers a DeclareDead.
	DeadDeclared struct {
		Token  uint64
		Status DeclareStatus
		// Fences is how many fences waited for the session.
		Fences int
		// Wait is how long it must be silent still, for DeclareHeard.
		Wait time.Duration
	}
	// SessionDeclaredDead: a session is waited for no more, because an operator says
	// that it has ended, which is durable now.
	SessionDeclaredDead struct {
		Session, From string
		Declaration   Declaration
		Fences        int
	}

	// SendSnapshot sends all routes to a stream that has just joined.
	SendSnapshot struct {
		Stream   uint64
		Sequence uint64
		Routes   []Sandbox
	}
	// SendRoute tells a stream where a sandbox is.
	SendRoute struct {
		Stream   uint64
		Sequence uint64
		Sandbox  Sandbox
	}
	// SendRelease tells a stream that sandboxes are gone: all whose releases became
	// durable in one step, unless a route comes between them.
	SendRelease struct {
		Stream   uint64
		Sequence uint64
		IDs      []string
	}
	// SendResolved answers a Resolve.
	SendResolved struct {
		Stream uint64
		ID     string
		// Sandbox is set when it is running; Gone when there was one.
		Sandbox *Sandbox
		Gone    bool
		// Starting: it was claimed, and nobody may be sent to it yet. A request may wait
		// for it for as long as Hold.
		Starting bool
		Hold     time.Duration
	}
	// SendQuiesce asks a stream whether sandboxes are idle. It is answered by Quiesced.
	SendQuiesce struct {
		Stream    uint64
		Number    uint64
		Questions []Question
	}
	// SendProbe has a router ask a pod whether it is busy. It is answered by Probed.
	SendProbe struct {
		Stream uint64
		ID     string
		To     netip.AddrPort
		Path   string
	}
	// SendResume: requests for these sandboxes may be admitted again.
	SendResume struct {
		Stream uint64
		IDs    []string
	}
	// SendPong answers a SessionPing.
	SendPong struct {
		Stream uint64
		Nonce  uint64
	}
	// CloseStream ends a stream that was replaced by a newer one, or whose session has
	// ended. Banned: that session was declared dead, and must not come back. Left: its
	// router has said Goodbye, which is durable now.
	CloseStream struct {
		Stream uint64
		Banned bool
		Left   bool
	}

	// SandboxReady fires OnSandboxReady: requests reach the sandbox from now on.
	// It comes once for each sandbox, or never if the leader ends in that moment.
	SandboxReady struct{ Sandbox Sandbox }
	// SandboxReleased fires OnSandboxReleased: the sandbox has been released, and its pod is not
	// reused or deleted yet. It comes once for each sandbox.
	SandboxReleased struct{ Sandbox Sandbox }
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
		Pod  PodKey
		What string
	}
)

// Refusal is why a claim was refused.
type Refusal int

// The refusals of a claim.
const (
	// NoPool: there is no such pool, or it is being deleted.
	NoPool Refusal = iota + 1
	// PoolEmpty: no pod came in time, none will come, or too many wait already.
	PoolEmpty
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
)

// ReleaseStatus is the outcome of a Release.
type ReleaseStatus int

// The outcomes of a Release.
const (
	ReleaseUnknown ReleaseStatus = iota // no such sandbox
	ReleaseGone                         // it was released before
	ReleaseOK
)

// DeclareStatus is the outcome of a DeclareDead.
type DeclareStatus int

// The outcomes of a DeclareDead.
const (
	DeclareUnknown   DeclareStatus = iota // no such session, or nobody waits for it any more
	DeclareConnected                      // it is connected, so it lives
	DeclareHeard                          // it was heard a short while ago, or may have been
	DeclareOK
)

func (CreatePod) effect()       {}
func (Write) effect()           {}
func (Settle) effect()          {}
func (LabelPod) effect()        {}
func (StartSandbox) effect()    {}
func (SandboxReady) effect()    {}
func (Repaired) effect()        {}
func (DeletePod) effect()       {}
func (Record) effect()          {}
func (ForgetRecord) effect()    {}
func (PoolDrained) effect()     {}
func (Claimed) effect()         {}
func (ClaimRefused) effect()    {}
func (ReleaseAnswered) effect() {}
func (SendSnapshot) effect()    {}
func (SendRoute) effect()       {}
func (SendRelease) effect()     {}
func (Acknowledged) effect()    {}
func (SendResolved) effect()    {}
func (SendPong) effect()        {}
func (SendQuiesce) effect()     {}
func (SendProbe) effect()       {}
func (SendResume) effect()      {}
func (Kept) effect()            {}
func (WouldReap) effect()       {}
func (CloseStream) effect()     {}
func (SandboxReleased) effect() {}

func (DeadDeclared) effect()        {}
func (SessionDeclaredDead) effect() {}
