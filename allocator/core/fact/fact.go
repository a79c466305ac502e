package fact

import (
	"crypto/sha256"
	"net/netip"
	"time"
)

// Fact is the whole journaled state of one thing.
type Fact struct {
	Revision Revision
	// Joined: it is durable together with the fact before it, or not at all.
	Joined bool
	Subject
}

// MaxStale is that of the router, if the fact is about a session.
func (f Fact) MaxStale() time.Duration {
	if s, ok := f.Subject.(*SessionFact); ok {
		return s.MaxStale
	}
	return 0
}

// Subject is a *SandboxFact, a *SessionFact or a *RetirementFact. It is not changed after it was committed.
type Subject interface {
	// Thing is what the fact is about. A later fact about the same thing replaces this one.
	Thing() Thing
	subject()
}

// Thing is a SandboxID, a SessionID or the PodKey of a retirement.
type Thing interface{ thing() }

type (
	// SandboxID names a sandbox.
	SandboxID string
	// SessionID names the session of a router.
	SessionID string
)

func (SandboxID) thing() {}
func (SessionID) thing() {}
func (PodKey) thing()    {}

// SandboxFact is the state of a sandbox, which is Starting, Running or Released. Its Revision is that of the fact.
type SandboxFact struct {
	Sandbox
	// Ungranted is set while its claim was not granted yet, because agents are configured first. It is how many
	// sandboxes the claim needs.
	Ungranted int
}

// SessionFact is the session of a router, or its end.
type SessionFact struct {
	ID string
	// From is the address it joined from.
	From string
	// Left: its router can route to nothing any more. Declared is set if it has left because an operator declared
	// it dead.
	Left     bool
	Declared *Declaration
	// Earlier: it stands for all routers of an earlier journal.
	Earlier bool
	// MaxStale is that of the router. Its routes are stale after this or after the MaxStale of the leader,
	// whichever is longer.
	MaxStale time.Duration
	// Assumed: the router has not said MaxStale. An earlier version has journaled the session without it.
	Assumed bool
	// Longer: MaxStale is longer than that of the leader that wrote the fact, and not Assumed. An allocator that
	// does not know MaxStale must not lead while the journal has this fact.
	Longer bool
	// Gateway is that of the router.
	Gateway Gateway
	// Egress: it is an egress router. It has the rules of sandboxes whose Agent has Egress, and no route.
	Egress bool
}

// RetirementFact is the intent to delete a pod, which is never handed out again. After is set if conflicting records
// named the pod for that sandbox, at the addresses At: the pod is then not deleted before the fence of the sandbox
// is complete.
type RetirementFact struct {
	Pod   PodKey
	After string
	At    []netip.Addr
}

// Thing returns the sandbox.
func (f *SandboxFact) Thing() Thing { return SandboxID(f.ID) }

// Thing returns the session.
func (f *SessionFact) Thing() Thing { return SessionID(f.ID) }

// Thing returns the pod.
func (f *RetirementFact) Thing() Thing { return f.Pod }

func (*SandboxFact) subject()    {}
func (*SessionFact) subject()    {}
func (*RetirementFact) subject() {}

// Gateway names a gateway by the hash of its secret. The zero Gateway is none.
type Gateway [sha256.Size]byte

// Declaration is an operator's statement that a router and its Envoy have ended.
type Declaration struct {
	// By is the name of the API key; empty if none was required.
	By, Reason string
	At         time.Time
}
