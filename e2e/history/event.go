package history

import "time"

// Kind says what an Event is about. Each comment names the fields that are set.
type Kind string

// What happened while the test ran.
const (
	// Run is the first event: the test begins. Began and Wall are one moment on both
	// clocks. Settings.
	Run Kind = "run"
	// Claim is a call that asks for a sandbox: Claim, Key, Process, Code, Reason, Error,
	// Timeout, IdleTimeout; with code 201 also Sandbox, Pod, Owner and EndAt; with code 410
	// Sandbox.
	Claim Kind = "claim"
	// Waiting says that Claim is known to wait for a pod since Began.
	Waiting Kind = "waiting"
	// Read is a call that asks for a sandbox's state: Sandbox, Process, Code, Reason, Error.
	Read Kind = "read"
	// Release is a call that ends a sandbox: Sandbox, Process, Code, Reason, Error,
	// Outstanding.
	Release Kind = "release"
	// KeepAlive is a call that keeps a sandbox from being idle: Sandbox, Process, Code.
	KeepAlive Kind = "keepalive"
	// Sleep is a call that has a sandbox sleep: Sandbox, Process, Code, Reason, Error.
	Sleep Kind = "sleep"
	// Request is a client's request to a sandbox: Request, Sandbox, Gateway, What, Code,
	// Reason, Error; if a pod answered also Pod, PodUID or Address, and Answered.
	Request Kind = "request"
	// Received is a request as a pod saw it: Request, Sandbox, What; Pod and PodUID, or
	// Address. Ended is set only if the pod's answer is recorded: just before the last of
	// it was sent.
	Received Kind = "received"
	// Delete is the deletion of a pod by the test: Pod, PodUID, What, Error.
	Delete Kind = "delete"
	// Fault is what the test did to Process: What, Error.
	Fault Kind = "fault"
	// Clock is one moment on both clocks: Began, Wall.
	Clock Kind = "clock"
)

// What there was at the end. These events have no Began and Ended.
const (
	// Record is a Sandbox object: Sandbox, Pod, PodUID, Address, Phase, Reason,
	// IdleTimeout, Released.
	Record Kind = "record"
	// Listed is a sandbox in the API's list: Sandbox, Pod, Owner.
	Listed Kind = "listed"
	// Final is the answer to a Read at the end: Sandbox, Code.
	Final Kind = "final"
	// Pod is a pod of the pool: Pod, PodUID, Ready, Deleting.
	Pod Kind = "pod"
	// Pool is the pool: Counts. Wall is before anything else of the end was read.
	Pool Kind = "pool"
)

// Event is a line of a history. A field is empty where its Kind does not name it.
type Event struct {
	Kind  Kind          `json:"kind"`
	Began time.Duration `json:"began,omitempty"`
	Ended time.Duration `json:"ended,omitempty"`
	// Wall is the wall clock at Ended, if a judge needs it.
	Wall time.Time `json:"wall,omitzero"`

	Sandbox string `json:"sandbox,omitempty"` // ID
	Pod     string `json:"pod,omitempty"`     // name
	PodUID  string `json:"podUID,omitempty"`
	Address string `json:"address,omitempty"` // the pod's IP
	// Claim is the name of a claim. All calls that repeat one claim under its key have one
	// name. A claim without a key has another name each time, because each is another claim.
	Claim string `json:"claim,omitempty"`
	Key   string `json:"key,omitempty"` // Idempotency-Key
	// Owner is the claim for which a sandbox says that it was made.
	Owner   string `json:"owner,omitempty"`
	Request string `json:"request,omitempty"` // unique, sent in a header
	Gateway string `json:"gateway,omitempty"`
	// Process is the program that was called or that a fault was done to.
	Process string `json:"process,omitempty"`
	// What is the kind of a request, a deletion or a fault.
	What string `json:"what,omitempty"`
	// Code is an HTTP status, 0 without an answer. Reason is the word of api/apierror if
	// Berth, and not a sandbox, answered; of a Record the reason of the end.
	Code   int    `json:"code,omitempty"`
	Reason string `json:"reason,omitempty"`
	Error  string `json:"error,omitempty"`
	// Outstanding is how many routers had not acknowledged a release.
	Outstanding int `json:"outstanding,omitempty"`
	// Answered is the sandbox for which a pod says that it answered.
	Answered string `json:"answered,omitempty"`
	Phase    string `json:"phase,omitempty"` // of a Record
	Ready    bool   `json:"ready,omitempty"`
	Deleting bool   `json:"deleting,omitempty"`

	// Timeout is the lifetime that a claim asked for; 0: not known.
	Timeout     time.Duration `json:"timeout,omitempty"`
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// EndAt is when the sandbox ends, as its claim was answered.
	EndAt time.Time `json:"endAt,omitzero"`
	// Released is when a Record was released; zero: it was not.
	Released time.Time `json:"released,omitzero"`

	Settings *Settings `json:"settings,omitempty"`
	Counts   *Counts   `json:"counts,omitempty"`
}

// Settings are what a history is judged by.
type Settings struct {
	// Suite names the judges.
	Suite Suite  `json:"suite"`
	Seed  uint64 `json:"seed"`
	// MaxStale is how long a router serves without news from a leader.
	MaxStale time.Duration `json:"maxStale,omitempty"`
	// Window is the connect window.
	Window time.Duration `json:"window,omitempty"`
	// StallBudget is how long an Envoy may stand still.
	StallBudget time.Duration `json:"stallBudget,omitempty"`
	// Settle is how long after a fault its effects may last.
	Settle time.Duration `json:"settle,omitempty"`
	// Guard is how long the release of an idle sandbox may take.
	Guard time.Duration `json:"guard,omitempty"`
	// Offsets are by how much the wall clocks of allocators are off. They differ by more
	// than a sandbox lives.
	Offsets []time.Duration `json:"offsets,omitempty"`
}

// Counts are what a pool asks for and what its status says.
type Counts struct {
	Wanted  int `json:"wanted"`
	Warm    int `json:"warm"`
	Claimed int `json:"claimed"`
}

const (
	// EnvoyPaused begins What of faults in which an Envoy stands still, from Began at the
	// latest until Ended at the earliest.
	EnvoyPaused = "envoy-pause"
	// Abandoned is What of requests whose client does not wait for the end.
	Abandoned = "abandoned"
)
