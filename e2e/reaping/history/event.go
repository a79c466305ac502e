// Package history is what a test of idle timeouts writes down, and the judge of it.
//
// Judge reads nothing but the events, knows nothing of how they came about, and finds
// the same however often it is asked.
//
// All times are nanoseconds since the machine was booted, suspended time included, which
// all processes of a machine read alike. The one exception is what is on record: it has
// the wall clock of the allocator that led then, which is off by one of Run.Offsets. These
// are so far apart that only one of them can be meant, see Judge.
//
// # What would be a mismatch
//
//   - false reap: a sandbox was released for being idle although something was in
//     progress at its pod, or had been less than its idle timeout before, at the moment that
//     is on record; or a request was answered that it is gone although it had been in
//     use less than its idle timeout before the answer came. A claim and a keep-alive are
//     uses too.
//   - after the verdict: its pod received a request after that moment.
//   - wrong pod: a pod received a request for a sandbox that it does not hold, or answered
//     one.
//   - lost: an answered claim has no record; unknown: a router does not know a sandbox that
//     is claimed.
//   - other reason: a sandbox was released for anything but being idle: nobody asked for it.
//     One of which no answer arrived may have been given back because its caller had gone.
//   - never reaped: a sandbox is not released although it is silent, or was later than
//     Run.Guard after it might have been, and after the last fault.
//   - error: a request that began and ended while nothing was wrong, and nothing had been
//     for Run.Settle, was answered neither by its sandbox nor with "gone".
//   - clock: what is on record can be from no allocator; or the wall clock of the machine has
//     been set meanwhile, so that nothing is known.
package history

import "time"

// Run is what events are to be judged by.
type Run struct {
	Seed uint64 `json:"seed"`
	// Boot and Wall are one moment on both clocks.
	Boot time.Duration `json:"boot"`
	Wall time.Time     `json:"wall"`
	// Offsets are by how much the wall clocks of allocators are off. They differ by more
	// than a sandbox lives.
	Offsets []time.Duration `json:"offsets"`
	// Settle is for how long after a fault nothing is taken to be wrong.
	Settle time.Duration `json:"settle"`
	// Guard is in which time a silent sandbox is released.
	Guard time.Duration `json:"guard"`
}

// Kind says what an Event is about.
type Kind string

const (
	// Claim is an answered claim: Sandbox, IdleTimeout.
	Claim Kind = "claim"
	// Request is what a client sent and was answered: Request, Sandbox, Gateway, What,
	// Code, Reason, Error; if a pod answered Address, and Answered: the sandbox that it
	// was taken for.
	Request Kind = "request"
	// Received is what was in progress at a pod: Request, Sandbox, Address, What.
	Received Kind = "received"
	// KeepAlive is a call: Sandbox, Code.
	KeepAlive Kind = "keepalive"
	// Record is a Sandbox object as it was found at the end: Sandbox, Address,
	// IdleTimeout; if it was released Reason and Released.
	Record Kind = "record"
	// Fault is what was done to Process: What, Error.
	Fault Kind = "fault"
	// Clock is one moment on both clocks: Began, Wall.
	Clock Kind = "clock"
)

// Event is something that happened. Began is before the first of it, Ended after the last.
// Of a Received, Ended is just before the last of it was sent.
type Event struct {
	Kind     Kind          `json:"kind"`
	Began    time.Duration `json:"began,omitempty"`
	Ended    time.Duration `json:"ended,omitempty"`
	Sandbox  string        `json:"sandbox,omitempty"`
	Address  string        `json:"address,omitempty"`
	Request  uint64        `json:"request,omitempty"`
	Gateway  string        `json:"gateway,omitempty"`
	Process  string        `json:"process,omitempty"`
	What     string        `json:"what,omitempty"`
	Code     int           `json:"code,omitempty"`
	Reason   string        `json:"reason,omitempty"`
	Error    string        `json:"error,omitempty"`
	Answered string        `json:"answered,omitempty"`

	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// Released is by the wall clock of an allocator.
	Released time.Time `json:"released,omitzero"`
	Wall     time.Time `json:"wall,omitzero"`
}
