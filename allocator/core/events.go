package core

import "time"

// Event is something that happened. Each type below is one.
type Event interface{ event() }

type (
	// PoolSeen is an observation of a pool.
	PoolSeen struct{ Pool Pool }
	// PoolGone: the pool's object is gone. Version is that of its last observation,
	// opaque.
	PoolGone struct {
		Key     PoolKey
		Version string
	}
	// PodSeen is an observation of a pod, from a watch or as the answer to a write.
	PodSeen struct{ Pod Pod }
	// PodGone: the pod's object is gone.
	PodGone struct{ Key PodKey }
	// NodeSeen is an observation of a node. Usable: it is ready and not cordoned.
	NodeSeen struct {
		Name   string
		Usable bool
	}
	// NodeGone: the node's object is gone.
	NodeGone struct{ Name string }
	// CreateFailed: the pod that a CreatePod asked for was not made, as far as
	// is known. It is asked for again under the same name.
	CreateFailed struct {
		Pool PoolKey
		Name string
	}

	// Claim asks for a pod. Token comes back in Claimed or ClaimRefused.
	Claim struct {
		Token   uint64
		Pool    PoolKey
		Binding Binding // ID, ClaimedAt and EndAt are filled in by the core
		// Lifetime is how long the sandbox may live. 0: for ever.
		Lifetime time.Duration
		// IdleTimeout is after how long without activity it is released, 0: never; nil:
		// what its pool says.
		IdleTimeout *time.Duration
		// MinBytes is how many bytes a minute must move over an open connection for it to
		// count, 0: it counts in any case; nil: what its pool says.
		MinBytes *uint64
		// Wait is how long the claim may wait for a pod, and its caller for the
		// pool's hook.
		Wait time.Duration
	}
	// ClaimAbandoned: the caller behind this token has gone.
	ClaimAbandoned struct{ Token uint64 }
	// IdleAvailable: a pod may be there for those who wait for one.
	IdleAvailable struct{ Pool PoolKey }
	// Started is the outcome of a StartSandbox: whether the sandbox may run.
	Started struct {
		ID string
		OK bool
	}
	// Pressure: what was journaled reaches the Sandbox objects too slowly, or does
	// no longer. While it is on, new claims are refused.
	Pressure struct{ On bool }

	// Closing: this leader is about to end. Those who wait for a pod are refused,
	// and nobody waits any more.
	Closing struct{}

	// Written: all facts of the last Write are durable. At is when that was known, on
	// the boot clock; 0: now.
	Written struct{ At time.Duration }
	// WriterReady: the next Write may be made.
	WriterReady struct{}

	// Release asks to end a sandbox. A Token other than 0 comes back in
	// ReleaseAnswered.
	Release struct {
		Token  uint64
		ID     string
		Reason string
	}
	// Recorded: the Sandbox object shows at least this revision.
	Recorded struct {
		ID       string
		Revision Revision
	}
	// RecordSeen is an observation of a Sandbox object.
	RecordSeen struct {
		ID       string
		Pool     PoolKey
		Revision Revision // zero: it is not of an allocator
		Deleting bool
	}
	// RecordGone: the Sandbox object is gone.
	RecordGone struct{ ID string }

	// KeepAlive counts as activity of a sandbox, SetTimeout does, too, and moves its end
	// to so long from now; what its LifetimeEnd is stands. Token comes back in Kept.
	KeepAlive struct {
		Token uint64
		ID    string
	}
	SetTimeout struct {
		Token    uint64
		ID       string
		Lifetime time.Duration
	}

	// SessionJoined: a router opened a stream. Stream numbers are never reused
	// within a term. From is its address, for people.
	SessionJoined struct {
		Session string
		Stream  uint64
		From    string
	}
	// EarlierSeen: a router may still serve what it knows from another journal, of this
	// ID. It comes before the router's SessionJoined, and also if the router is refused.
	EarlierSeen struct{ Journal string }
	// SessionLeft: that stream ended, for whatever cause.
	SessionLeft struct {
		Session string
		Stream  uint64
	}
	// SessionGoodbye: the router's process will admit nothing any more. Looked: its last
	// report shows what may go on at its Envoy. Its stream is closed when that is durable.
	SessionGoodbye struct {
		Session string
		Stream  uint64
		Looked  bool
	}
	// SessionDead: the process of a router is proven to have ended, by another one.
	// That one's later pings are answered when it is durable.
	SessionDead struct{ Session, By string }
	// DeclareDead: an operator says that a router and its Envoy have ended. Token comes
	// back in DeadDeclared.
	DeclareDead struct {
		Token      uint64
		Session    string
		By, Reason string
	}
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
	// Report: what is in use through a router, and what its newest look showed to be in use
	// no more; the first one on a stream has all that it remembers. Gateway names the place
	// that it has looked at; the look took Took, and began after the router had received the
	// pong to Nonce (0: none). Blind: it cannot tell what is open, and why. Of a report in
	// parts only the last one has Gateway or Blind.
	Report struct {
		Stream     uint64
		Activities []Activity
		Gateway    string
		Nonce      uint64
		Took       time.Duration
		Blind      string
	}
	// Quiesced: a router admits no request any more for the sandboxes of the SendQuiesce
	// of that number, and has looked twice since. It knows of no use of those that are not
	// in Activities. Blind: it cannot tell what is open.
	Quiesced struct {
		Stream     uint64
		Number     uint64
		Activities []Activity
		Blind      string
	}
	// Probed: whether the pod of a sandbox is busy, as far as the router of a SendProbe has
	// found out.
	Probed struct {
		Stream uint64
		ID     string
		Busy   bool
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
func (NodeSeen) event()       {}
func (NodeGone) event()       {}
func (CreateFailed) event()   {}
func (Claim) event()          {}
func (ClaimAbandoned) event() {}
func (IdleAvailable) event()  {}
func (Started) event()        {}
func (Pressure) event()       {}
func (Closing) event()        {}
func (Written) event()        {}
func (WriterReady) event()    {}
func (Release) event()        {}
func (Recorded) event()       {}
func (RecordSeen) event()     {}
func (RecordGone) event()     {}
func (SessionJoined) event()  {}
func (EarlierSeen) event()    {}
func (SessionLeft) event()    {}
func (SessionGoodbye) event() {}
func (SessionDead) event()    {}
func (DeclareDead) event()    {}
func (SessionPing) event()    {}
func (SessionAck) event()     {}
func (Resolve) event()        {}
func (KeepAlive) event()      {}
func (SetTimeout) event()     {}
func (Report) event()         {}
func (Quiesced) event()       {}
func (Probed) event()         {}
func (Tick) event()           {}
