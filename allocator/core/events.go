package core

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// Event is something that happened. Each type below is one.
type Event interface{ event() }

type (
	// PoolSeen is an observation of a pool.
	PoolSeen struct{ Pool Pool }
	// PoolGone: the pool's object was deleted. Version is that of its last observation, opaque.
	PoolGone struct {
		Key     PoolKey
		Version string
	}
	// PodSeen is an observation of a pod, from a watch or as the answer to a write. It ends every other
	// life of the pod.
	PodSeen struct{ Pod Pod }
	// PodGone: the pod's object was deleted. Key is that of the whole pod.
	PodGone struct{ Key PodKey }
	// NodeSeen is an observation of a node. Usable: it is ready and not cordoned. Cordoned: it is ready, and
	// it is cordoned or being deleted.
	NodeSeen struct {
		Name             string
		Usable, Cordoned bool
	}
	// NodeGone: the node's object was deleted.
	NodeGone struct{ Name string }
	// CreateFailed: a CreatePod failed. The pod may exist all the same, so it is created again
	// under the same name. Taken: a pod that is not of the pool has the name, so another one is used.
	CreateFailed struct {
		Pool  PoolKey
		Name  string
		Taken bool
	}

	// Claim asks for a pod. Claimed, BatchClaimed or ClaimRefused answers it.
	Claim claims.Ask
	// TeamLimits replaces the limits of the teams. Without it there are none.
	TeamLimits struct{ Settings teams.Settings }
	// ClaimAbandoned: the caller with this token has gone.
	ClaimAbandoned struct{ Token uint64 }
	// Started is the outcome of a StartSandbox for that incarnation: whether the sandbox may run. Why says for people
	// why not. It is bounded, and quotes nothing that the pod has sent.
	Started struct {
		ID          string
		Incarnation int
		OK          bool
		Why         string
	}
	// Configured is the outcome of a Configure: whether the agent is configured for this sandbox. A
	// Configure with Ask is answered when the agent has answered. Why is as in Started. Hopeless: the agents of other pods
	// will not be either.
	Configured struct {
		ID       string
		OK       bool
		Why      string
		Hopeless bool
	}
	// Frozen is the outcome of a Freeze, and Thawed that of a Thaw, with the revision of the order. Why is as in Started.
	Frozen struct {
		ID       string
		Revision Revision
		OK       bool
		Why      string
	}
	Thawed struct {
		ID       string
		Revision Revision
		OK       bool
		Why      string
	}
	// ArchiveWritten is the outcome of a WriteArchive. Err is why there is no archive. Archive names what was written of a
	// sandbox that is to be stopped, and Order is the revision that it had in the WriteArchive.
	ArchiveWritten struct {
		ID      string
		Token   uint64
		Order   Revision
		Err     error
		Archive string
	}
	// Pressure: journaled changes reach the Sandbox objects too slowly, or not at all. While it is
	// on, new claims are refused.
	Pressure struct{ On bool }

	// Closing: this leader is about to end. Claims that wait for a pod are refused, and no new
	// wait begins.
	Closing struct{}

	// Written: all facts of the last Write are durable. At is when the writer learned it, on the
	// boot clock; 0: now.
	Written struct{ At time.Duration }
	// WriterReady: the writer takes the next Write.
	WriterReady struct{}

	// Release asks to end a sandbox. A Token other than 0 comes back in
	// ReleaseAnswered. A sandbox outside of Scope is unknown; so it is in KeepAlive and SetTimeout.
	Release struct {
		Token  uint64
		Scope  Scope
		ID     string
		Reason string
	}
	// ObjectWritten: the Sandbox object shows at least this revision.
	ObjectWritten struct {
		ID       string
		Revision Revision
	}
	// LogRead has the last lines of the log of a released sandbox. Core does not keep them.
	LogRead struct {
		ID    string
		Lines []string
	}
	// ObjectSeen is an observation of a Sandbox object.
	ObjectSeen struct {
		ID       string
		Pool     PoolKey
		Revision Revision // zero: no allocator has written it
		Deleting bool
	}
	// ObjectGone: the Sandbox object was deleted.
	ObjectGone struct{ ID string }

	// KeepAlive counts as activity of a sandbox. SetTimeout does too, and moves EndAt to Lifetime
	// from now, unless Extend is set and EndAt is later; LifetimeEnd does not change. Wake: a sandbox that is asleep is
	// woken first. Token comes back in SandboxCallAnswered.
	KeepAlive struct {
		Token uint64
		Scope Scope
		ID    string
	}
	SetTimeout struct {
		Token    uint64
		Scope    Scope
		ID       string
		Lifetime time.Duration
		Extend   bool
		Wake     bool
	}
	// SetNetwork replaces what the claim of a sandbox lets it reach. SandboxCallAnswered comes when every egress router
	// has the new rules.
	SetNetwork struct {
		Token uint64
		Scope Scope
		ID    string
		Rules EgressRules
	}
	// Sleep has a sandbox fall asleep. A Token other than 0 comes back in SandboxCallAnswered when it is asleep. Stop has
	// it stopped then; so it is with one that is asleep.
	Sleep struct {
		Token uint64
		Scope Scope
		ID    string
		Stop  bool
	}
	// Archive has the files of a sandbox archived while its processes are stopped. One that runs does so afterwards.
	// SandboxCallAnswered answers it. The core passes the Values to WriteArchive.
	Archive struct {
		Token  uint64
		Scope  Scope
		ID     string
		Values Values
	}

	// SessionJoined: a router opened a stream. Stream numbers are not reused within a term. From
	// is its address, for people. MaxStale is its own. Gateway is the hash of the secret of its gateway;
	// zero: it has none. Egress: it is an egress router, which it stays.
	SessionJoined struct {
		Session  string
		Stream   uint64
		From     string
		MaxStale time.Duration
		Gateway  Gateway
		Egress   bool
	}
	// EarlierSeen: a router may still serve routes of another journal, with this ID. MaxStale is
	// that of the router. It comes before the router's SessionJoined.
	EarlierSeen struct {
		Journal  string
		MaxStale time.Duration
	}
	// SessionLeft: that stream ended, for any cause.
	SessionLeft struct {
		Session string
		Stream  uint64
	}
	// SessionGoodbye: the router admits no request any more. Gateway is that of its SessionJoined, which may
	// have been refused. Looked: its last report shows what is
	// still open at its Envoy. Its stream is closed when the end is durable.
	SessionGoodbye struct {
		Session string
		Stream  uint64
		Looked  bool
		Gateway Gateway
		Egress  bool
	}
	// SessionDead: the router By reports that the process of another router has ended. Gateway is the
	// hash of the secret that By has shown; zero: none. Later pings of By are answered when the end is
	// durable.
	SessionDead struct {
		Session, By string
		Gateway     Gateway
	}
	// DeclareDead: an operator declares that a router and its Envoy have ended. Token comes back
	// in DeadDeclared.
	DeclareDead struct {
		Token      uint64
		Session    string
		By, Reason string
	}
	// SessionPing: the router asks how long it may serve its routes.
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
	// Report: what is in use through a router, and what its newest look showed as no longer in
	// use. The first report on a stream has everything that the router remembers. Gateway is the
	// gateway it looked at. The look took Took, and began after the router had received the pong
	// to Nonce (0: none). Blind says why the router cannot tell what is open. Of a report in
	// parts only the last part has Gateway or Blind.
	Report struct {
		Stream     uint64
		Activities []Activity
		Gateway    string
		Nonce      uint64
		Took       time.Duration
		Blind      string
	}
	// Quiesced: a router admits no request for the sandboxes of the SendQuiesce of that number,
	// and has taken two looks since. It knows of no use of a sandbox that is not in Activities.
	// Blind says why it cannot tell what is open.
	Quiesced struct {
		Stream     uint64
		Number     uint64
		Activities []Activity
		Blind      string
	}
	// Probed: what the router of a SendProbe found out about the pod of a sandbox.
	Probed struct {
		Stream uint64
		Number uint64
		ID     string
		Busy   bool
	}
	// Resolve: a router asks about an ID. Wake: a request that may reach the sandbox waits for it.
	Resolve struct {
		Session string
		Stream  uint64
		ID      string
		Wake    bool
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
func (TeamLimits) event()     {}
func (ClaimAbandoned) event() {}
func (Started) event()        {}
func (Configured) event()     {}
func (Frozen) event()         {}
func (Thawed) event()         {}
func (Sleep) event()          {}
func (Archive) event()        {}
func (ArchiveWritten) event() {}
func (Pressure) event()       {}
func (Closing) event()        {}
func (Written) event()        {}
func (WriterReady) event()    {}
func (Release) event()        {}
func (ObjectWritten) event()  {}
func (LogRead) event()        {}
func (ObjectSeen) event()     {}
func (ObjectGone) event()     {}
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
func (SetNetwork) event()     {}
func (Report) event()         {}
func (Quiesced) event()       {}
func (Probed) event()         {}
func (Tick) event()           {}
