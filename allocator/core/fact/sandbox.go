package fact

import (
	"cmp"
	"crypto/sha256"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Workload is what runs in a pod, for people.
type Workload struct {
	// Images are those of the containers.
	Images []string
	// Requests and Limits are the sums over the containers. A limit that one container does not have is
	// empty.
	Requests, Limits Resources
}

// Resources are quantities in the notation of Kubernetes; empty: none.
type Resources struct{ CPU, Memory string }

// Binding is what a claim asks for and gets.
type Binding struct {
	ID        string
	ClaimedAt time.Time
	// EndAt is when the sandbox is released, in use or not. SetTimeout moves it. LifetimeEnd is
	// the same and is fixed. StartBy is when it is released if it is still starting. Zero: never.
	// The earliest of these and IdleTimeout counts.
	EndAt, LifetimeEnd, StartBy time.Time
	// IdleTimeout is after how long without activity it is released; 0: never.
	IdleTimeout time.Duration
	// MinBytes is how many bytes a minute must move over an open connection for it to count as
	// activity. 0: it counts in any case.
	MinBytes uint64
	Metadata map[string]string
	// Team claimed it, on behalf of User, as far as the caller said.
	Team, User string
	// Access says who may send requests to it.
	Access Access
	// Agent is that of its pod.
	Agent Agent
	// MaskHost is the host that its pod sees, with "${PORT}" for the port of the request. Empty: that
	// of the request.
	MaskHost string
	// HTTPSPorts are the ports to which Envoy speaks TLS, in ascending order. The slice is shared and
	// must not be changed.
	HTTPSPorts []uint16
	// IdempotencyKey, if not "", makes every claim of the team with this key and
	// a body of this hash the same claim. See InternalKeys.
	IdempotencyKey string
	RequestHash    [sha256.Size]byte
	// Batch, if not "", is the ID of the batch that it was claimed with.
	Batch string
	// Lifetime is what the claim has asked for: how long after its claim, and after a wake by a request, it ends; 0: never.
	Lifetime time.Duration
	// Sleep says when it falls asleep instead of being released.
	Sleep SleepPolicy
	// Network is what its claim lets it reach, within what its pool does. SetNetwork replaces it. It has no meaning
	// unless Agent.Egress is set.
	Network EgressRules
}

// EgressRules say what may be reached: see package egress/policy. Without a rule everything may. The slices are shared
// and must not be changed.
type EgressRules struct {
	Allow, Deny []string
	// Headers are what the gateway sets on requests, sealed for the sandbox: see package credentials. Those of a claim are
	// not there before it has an ID. A pool has none.
	Headers []byte
}

// Equal reports whether two lists of rules are the same.
func (r EgressRules) Equal(other EgressRules) bool {
	return slices.Equal(r.Allow, other.Allow) && slices.Equal(r.Deny, other.Deny) && slices.Equal(r.Headers, other.Headers)
}

// PoolEgress is what a pool lets its sandboxes reach. It is shared and must not be changed.
type PoolEgress struct {
	EgressRules
	// Ports are in ascending order; empty: 80 and 443.
	Ports []uint16
	// Credentials are the headers that the gateway sets. CredentialsUnknown: some cannot be read, so no request may go out
	// that may need one.
	Credentials        []EgressCredential
	CredentialsUnknown bool
}

// EgressCredential is a header that the gateway sets on requests to one host. Value is the name of its value.
type EgressCredential struct {
	Host   string
	Port   uint16
	Header string
	Value  string
}

// Equal reports whether two pools let their sandboxes reach the same; nil: what they do is not known.
func (e *PoolEgress) Equal(other *PoolEgress) bool {
	if e == nil || other == nil {
		return e == other
	}
	return e.EgressRules.Equal(other.EgressRules) && slices.Equal(e.Ports, other.Ports) &&
		slices.Equal(e.Credentials, other.Credentials) && e.CredentialsUnknown == other.CredentialsUnknown
}

// SleepPolicy says when a sandbox falls asleep instead of being released: WhenIdle after its IdleTimeout, AtEnd at its
// EndAt. WakeOnTraffic: a request wakes it, whatever it fell asleep for. StopAfter is how long it is asleep until it is
// stopped; 0: no time stops it.
type SleepPolicy struct {
	WhenIdle, AtEnd, WakeOnTraffic bool
	StopAfter                      time.Duration
}

// InternalKeys begin the idempotency keys that replicas give to claims without one, so that they can repeat such a claim
// at the next leader. Such a key holds until the release of the sandbox. Otherwise the claim counts as one without a key.
const InternalKeys = "berth/"

// Keyed reports whether the caller of the claim gave it an idempotency key. The key then holds after the release of the
// sandbox, and the sandbox stays if its caller has gone.
func (b *Binding) Keyed() bool {
	return b.IdempotencyKey != "" && !strings.HasPrefix(b.IdempotencyKey, InternalKeys)
}

// Grant is the ID of what the claim got that has made the sandbox.
func (b *Binding) Grant() string { return cmp.Or(b.Batch, b.ID) }

// Agent is the agent in a pod, which is configured once, for the sandbox that the pod holds. Port 0:
// there is none.
type Agent struct {
	Port uint16
	// Public: requests to it need no token.
	Public bool
	// Egress: what leaves the pod goes through an egress gateway, whose routers have the rules of the sandbox. In that of
	// a pool: no other pod is handed out.
	Egress bool
}

// Access says who may send requests to a sandbox. A higher value admits fewer clients.
type Access int

// The kinds of access, with the numbers that the journal and the control stream have.
const (
	// AccessPublic: every client that has the sandbox ID.
	AccessPublic Access = iota
	// AccessToken: clients with a credential of the sandbox.
	AccessToken
	// AccessTeam: clients with an API key of its team, or with a link.
	AccessTeam
)

var accessWords = [...]string{"public", "token", "team"}

// AccessOf returns the access of a word of the API. The empty word is public.
func AccessOf(word string) (Access, bool) {
	i := slices.Index(accessWords[:], cmp.Or(word, accessWords[AccessPublic]))
	return Access(max(i, 0)), i >= 0
}

// Known reports whether this version knows the access.
func (a Access) Known() bool { return a >= 0 && int(a) < len(accessWords) }

// String returns the word for an access that is known.
func (a Access) String() string { return accessWords[a] }

// Phase is where a sandbox is in its life.
type Phase int

// The phases of a sandbox.
const (
	// Starting: claimed, and its pool's hook has not been answered yet.
	Starting Phase = iota + 1
	Running
	// FallingAsleep: it is closed, and its processes may be stopped.
	FallingAsleep
	// Asleep: its processes are stopped.
	Asleep
	// Waking: its processes may be stopped, and are continued.
	Waking
	// Stopped: its files are in its Archive. Its pod serves it no more, and is deleted.
	Stopped
	// Releasing: as before, but its release is on its way into the journal.
	Releasing
	Released
	Ended
)

// Sandbox is the state of one sandbox.
type Sandbox struct {
	Binding
	Pool PoolKey
	Pod  PodKey
	IP   netip.Addr
	// DefaultPort and Ports are those of its pool; for a live sandbox the current ones.
	DefaultPort uint16
	Ports       []uint16
	// PoolEgress is what its pool lets it reach. Unlike its ports it is not in the journal. nil: it is not known, or the
	// sandbox has no egress rules.
	PoolEgress *PoolEgress
	// Restarts are those of the pod before the claim.
	Restarts int
	Phase    Phase
	// StartedAt is when it began to run; zero: it has not.
	StartedAt time.Time
	// AsleepAt is when it fell asleep, also if it was stopped since; zero: it is awake. Wakeable: a request may wake it.
	AsleepAt time.Time
	Wakeable bool
	// Incarnation is how often it was stopped before it got its pod. Archive names the files that it is to get, or that
	// its pod was given; empty: it was never stopped.
	Incarnation int
	Archive     string
	// Cause and ReleasedAt are set from Released on.
	Cause
	ReleasedAt time.Time
	// Workload is what its pod runs. Objects show it, and it is not in the journal: the next leader takes it
	// from the pod if the object does not exist. nil: not known.
	Workload *Workload
	// LastActive is a lower bound of its last activity, as its object shows it. It is not in the
	// journal. Zero: none was written yet.
	LastActive time.Time
	// Revision orders the writes about it. A lower one never overwrites a higher one.
	Revision Revision
}

// Cause is why a sandbox ends, as it was observed. The zero Cause is no cause.
type Cause struct {
	// Reason is one of those that core lists in Reasons.
	Reason string
	// Message has details for people, such as the words of the kubelet; empty: there are none. It is bounded.
	Message string
	// ExitCode is that of the container whose end is the cause; nil: it was not the end of a container. The
	// value is shared and must not be changed.
	ExitCode *int32
}
