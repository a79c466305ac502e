package routecache

import (
	"fmt"
	"net/netip"
	"time"
)

// Route says which pod holds a sandbox.
type Route struct {
	// Addr is the pod's IP address.
	Addr netip.Addr
	// DefaultPort is the port of a request whose host names none. 0: unknown.
	DefaultPort uint16
	// Ports are the ports that requests may reach.
	Ports Ports
	// MinBytes is how many bytes per minute must move over an open connection for the
	// connection to count as use of the sandbox. 0: an open connection always counts.
	// The cache only stores it.
	MinBytes uint64
	// Pool is that of the sandbox, for metrics. Empty: unknown. The cache only stores it.
	Pool string
	// Terms say who may send requests, and how Envoy sends them. nil: everybody, as they come. They
	// are never changed. Two routes with different pointers are different routes.
	Terms *Terms
}

// Terms are what a claim fixed about requests to its sandbox. The cache only stores them.
type Terms struct {
	Access Access
	// Secret verifies the sandbox's credentials. Zero: there are none.
	Secret [32]byte
	// Team is the team whose API keys open the sandbox, if Access is Team. Empty: no key does.
	Team string
	// AgentPort is the port of the agent in the pod; 0: there is none. Requests to it need the agent token,
	// unless AgentPublic is set.
	AgentPort   uint16
	AgentPublic bool
	// MaskHost is the host that the pod sees, with "${PORT}" for the port. Empty: that of the
	// request.
	MaskHost string
	// HTTPSPorts are the ports to which Envoy speaks TLS. Unlike Ports, an empty set has no port.
	HTTPSPorts Ports
}

// Access says who may send requests to a sandbox.
type Access int

// The kinds of access. A router of this version refuses all requests to a sandbox of another kind.
const (
	// Public: every client that has the ID.
	Public Access = iota
	// Token: clients with a credential of the sandbox.
	Token
	// Team: clients with an API key of the sandbox's team, or with any credential of the sandbox but
	// the token.
	Team
	// Closed: no client.
	Closed
)

// Status is what is known about a sandbox ID.
type Status int

// The statuses that a Lookup can return.
const (
	// Unknown: the allocator knows no such sandbox.
	Unknown Status = iota
	// Routable: the route is valid.
	Routable
	// Gone: the sandbox has been released.
	Gone
	// Starting: the sandbox exists and does not take requests yet.
	Starting
	// Quiesced: requests for the sandbox must be held, because the allocator may release
	// it for being idle. See Quiesce.
	Quiesced
	// Asleep: the sandbox exists, and its processes are stopped, or about to be. See Wake.
	Asleep
)

func (s Status) String() string {
	if names := [...]string{"unknown", "routable", "gone", "starting", "quiesced", "asleep"}; s >= 0 && int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("Status(%d)", int(s))
}

// Answer is the result of a Lookup.
type Answer struct {
	Status Status
	// Route is set when Status is Routable. When it is Asleep, it says which requests may reach the sandbox when it is
	// awake. No request may be sent by it.
	Route Route
	// Wakeable and Busy may be set when Status is Asleep: Wake wakes the sandbox, but not if too many others are waking.
	Wakeable, Busy bool
	// Hold is set when Status is Starting: how long a request may wait for the sandbox.
	// See Await.
	Hold time.Duration
	// End is set when Status is Gone.
	End End
}

// End is why and when a sandbox ended. Zero: clients may not know it.
type End struct {
	// Reason is a word.
	Reason string
	// AtUnix is in seconds since 1970, by the allocator's clock.
	AtUnix int64
}
