package core

// Event is something that happened. Each type below is one.
type Event interface{ event() }

type (
	// PoolSeen is an observation of a pool.
	PoolSeen struct{ Pool Pool }
	// PoolGone: the pool's object is gone.
	PoolGone struct{ Key PoolKey }
	// PodSeen is an observation of a pod, from a watch or as the answer to a write.
	PodSeen struct{ Pod Pod }
	// PodGone: the pod's object is gone.
	PodGone struct{ Key PodKey }
	// CreateFailed: the pod that a CreatePod asked for was not made, as far as
	// is known. It is asked for again under the same name.
	CreateFailed struct {
		Pool PoolKey
		Name string
	}
	// DeleteFailed: the pod of a DeletePod has changed since it was observed,
	// and stands. It is tried again once the change is seen.
	DeleteFailed struct{ Key PodKey }

	// Claim asks for a pod. Token comes back in Claimed or ClaimRefused.
	Claim struct {
		Token   uint64
		Pool    PoolKey
		Binding Binding // ID and ClaimedAt are filled in by the core
	}
	// ClaimAbandoned: nobody waits for the answer to this claim any more.
	ClaimAbandoned struct{ Token uint64 }
	// BindDone is the known outcome of a BindPod: written, or the pod was not
	// free any more.
	BindDone struct {
		Pod   PodKey
		ID    string
		Bound bool
	}

	// Release asks to end a sandbox. A Token other than 0 comes back in
	// ReleaseAnswered.
	Release struct {
		Token  uint64
		ID     string
		Reason string
	}
	// ReleaseDone: the release is written, or the pod is gone.
	ReleaseDone struct{ ID string }
	// Recorded: the Sandbox object shows at least this revision.
	Recorded struct {
		ID       string
		Revision Revision
	}

	// SessionJoined: a router opened a stream. Stream numbers are never reused
	// within a term.
	SessionJoined struct {
		Session string
		Stream  uint64
	}
	// SessionLeft: that stream ended, for whatever cause.
	SessionLeft struct {
		Session string
		Stream  uint64
	}
	// SessionGoodbye: the router's process will admit nothing any more.
	SessionGoodbye struct{ Session string }
	// SessionPing: the router asked for freshness.
	SessionPing struct {
		Session string
		Stream  uint64
		Nonce   uint64
	}
	// SessionAck: every message of the stream up to Sequence has taken effect.
	SessionAck struct {
		Session  string
		Stream   uint64
		Sequence uint64
	}
	// Resolve: a router asks about an ID.
	Resolve struct {
		Session string
		Stream  uint64
		ID      string
	}

	// Tick lets time pass.
	Tick struct{}
)

func (PoolSeen) event()       {}
func (PoolGone) event()       {}
func (PodSeen) event()        {}
func (PodGone) event()        {}
func (CreateFailed) event()   {}
func (DeleteFailed) event()   {}
func (Claim) event()          {}
func (ClaimAbandoned) event() {}
func (BindDone) event()       {}
func (Release) event()        {}
func (ReleaseDone) event()    {}
func (Recorded) event()       {}
func (SessionJoined) event()  {}
func (SessionLeft) event()    {}
func (SessionGoodbye) event() {}
func (SessionPing) event()    {}
func (SessionAck) event()     {}
func (Resolve) event()        {}
func (Tick) event()           {}
