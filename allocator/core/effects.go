package core

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
	// BindPod writes the claim to the pod, on condition that the pod is warm.
	// It is answered by one BindDone, once the outcome is known.
	BindPod struct {
		Pod     PodKey
		Binding Binding
	}
	// MarkReleased writes the release to the pod. It is repeated until it is
	// answered by ReleaseDone.
	MarkReleased struct {
		Pod    PodKey
		ID     string
		Reason string
	}
	// DeletePod deletes the pod. With IfVersion, only if it has not changed
	// since; a change is answered by DeleteFailed. Success shows as PodGone.
	DeletePod struct {
		Pod       PodKey
		IfVersion string
	}
	// Record writes the Sandbox object. Answered by Recorded. Only the latest
	// of several for one ID matters.
	Record struct{ Sandbox Sandbox }
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
	// ClaimRefused answers a Claim: there is no such pool, or no warm pod in it.
	ClaimRefused struct {
		Token  uint64
		NoPool bool
		Counts Counts
	}
	// ReleaseAnswered answers a Release.
	ReleaseAnswered struct {
		Token  uint64
		Status ReleaseStatus
		// Outstanding is the number of sessions that have not acknowledged.
		Outstanding int
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
	// SendRelease tells a stream that a sandbox is gone.
	SendRelease struct {
		Stream   uint64
		Sequence uint64
		ID       string
	}
	// SendResolved answers a Resolve.
	SendResolved struct {
		Stream uint64
		ID     string
		// Sandbox is set when it is running; Gone when there was one.
		Sandbox *Sandbox
		Gone    bool
	}
	// SendPong answers a SessionPing.
	SendPong struct {
		Stream uint64
		Nonce  uint64
	}
	// CloseStream ends a stream that was replaced by a newer one.
	CloseStream struct{ Stream uint64 }

	// SandboxReleased fires OnSandboxReleased: the sandbox has been released, and its pod is not
	// reused or deleted yet. It comes once for each sandbox.
	SandboxReleased struct{ Sandbox Sandbox }
)

// ReleaseStatus is the outcome of a Release.
type ReleaseStatus int

// The outcomes of a Release.
const (
	ReleaseUnknown ReleaseStatus = iota // no such sandbox
	ReleaseGone                         // it was released before
	ReleaseOK
)

func (CreatePod) effect()       {}
func (BindPod) effect()         {}
func (MarkReleased) effect()    {}
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
func (SendResolved) effect()    {}
func (SendPong) effect()        {}
func (CloseStream) effect()     {}
func (SandboxReleased) effect() {}
