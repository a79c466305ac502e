// Package history is what a soak writes down, and the judge of it.
//
// A history is a file with a line of JSON for everything that somebody asked and was
// answered, that a pod received, that is on record, and that was done to processes
// and pods. Judge reads nothing else, knows nothing of how the history came about,
// and finds the same however often it is asked.
//
// All times are of one clock, that of the machine since it was booted, which counts
// suspended time and which all processes of a machine read alike. "Began" is before
// somebody did the first thing about something, "Ended" after he had seen the last of
// it: so what ended before another thing began was before it.
//
// # What would be a mismatch
//
//   - wrong pod: a pod received a request for a sandbox that it does not hold, and is or
//     was or became another one's; or a client was answered by such a pod. So is every
//     pod that is reached for a sandbox while that lives. A pod that was never given to
//     anybody, at the address of one that was deleted by force, is a stray and counted:
//     routers may know the route until they hear of it, and nothing of a sandbox is in
//     such a pod, before or after.
//   - twice: a request was received more than once: by a second pod after a retry, or
//     again by the same one.
//   - came back: a request reached a pod although it was sent after its sandbox was
//     gone for every router. That is when a release has been answered with no router
//     outstanding, else max-stale after it was answered.
//   - too early: an address had another sandbox before the window had passed since the
//     first thing happened that can have ended the one before.
//   - double: a pod was given to two sandboxes, one claim was answered with two
//     sandboxes, or one sandbox for two claims.
//   - lost: an answered sandbox has no record, or its record names another pod.
//   - unheard of: a pod received a request that nobody has sent, or a client was
//     answered by a pod that has not received its request. The first would be
//     a request that was changed on its way; either can be a fault of the soak.
package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Kind says what an Event is about.
type Kind string

const (
	// Run is the first event: what the rest is to be judged by. Seed, MaxStale,
	// Window, StallBudget.
	Run Kind = "run"
	// Claim is a call that asks for a sandbox. Key, Code, Reason; if it got one
	// Sandbox, Pod and Timeout.
	Claim Kind = "claim"
	// Release is a call that gives a sandbox back. Sandbox, Code, Reason, Outstanding.
	Release Kind = "release"
	// Request is what a client sent to a sandbox, and was answered. Request, Sandbox,
	// Gateway, What, Code, Reason; if a pod said who it is PodUID.
	Request Kind = "request"
	// Received is what a pod received: Request, Sandbox, Pod, PodUID, What. Began alone.
	Received Kind = "received"
	// Record is a Sandbox object as it was at the end: Sandbox, Pod, PodUID, Address,
	// Reason. It has no time.
	Record Kind = "record"
	// Delete is the deletion of a pod by the soak: Pod, PodUID, What, Error.
	Delete Kind = "delete"
	// Fault is what was done to Process: What, Error.
	Fault Kind = "fault"
)

// Event is a line of the history. A field is empty where Kind does not name it.
type Event struct {
	Kind  Kind          `json:"kind"`
	Began time.Duration `json:"began,omitempty"` // nanoseconds since boot, as Ended
	Ended time.Duration `json:"ended,omitempty"`

	Sandbox string `json:"sandbox,omitempty"` // ID
	Pod     string `json:"pod,omitempty"`     // name
	PodUID  string `json:"podUID,omitempty"`
	Address string `json:"address,omitempty"` // the pod's
	Request string `json:"request,omitempty"` // its own name, in a header
	Gateway string `json:"gateway,omitempty"`
	Process string `json:"process,omitempty"`
	Key     string `json:"key,omitempty"`
	// What says more about Kind in a word or two; faults are counted by it.
	What string `json:"what,omitempty"`
	// Code is an HTTP status, 0 without an answer. Reason is set if Berth and not a
	// sandbox answered.
	Code   int    `json:"code,omitempty"`
	Reason string `json:"reason,omitempty"`
	Error  string `json:"error,omitempty"`
	// Outstanding is how many routers had not acknowledged a release.
	Outstanding int `json:"outstanding,omitempty"`
	// Timeout is the end that a claim has asked for, from then on; 0: none.
	Timeout time.Duration `json:"timeout,omitempty"`

	Seed        uint64        `json:"seed,omitempty"`
	MaxStale    time.Duration `json:"maxStale,omitempty"`
	Window      time.Duration `json:"window,omitempty"`
	StallBudget time.Duration `json:"stallBudget,omitempty"`
}

// Writer writes a history. Its methods may be called concurrently.
type Writer struct {
	mu  sync.Mutex
	out *bufio.Writer
	err error
}

// NewWriter writes to w, through a buffer.
func NewWriter(w io.Writer) *Writer { return &Writer{out: bufio.NewWriter(w)} }

// Add writes one event. An error is told by Flush.
func (w *Writer) Add(e Event) {
	line, err := json.Marshal(e)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		_, err = w.out.Write(append(line, '\n'))
	}
	w.err = errors.Join(w.err, err)
}

// Flush writes what is in the buffer, and returns the first error there was.
func (w *Writer) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.err, w.out.Flush())
}

// Read reads a history.
func Read(r io.Reader) ([]Event, error) {
	var all []Event
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("history: line %d: %w", len(all)+1, err)
		}
		all = append(all, e)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("history: after line %d: %w", len(all), err)
	}
	if len(all) == 0 || all[0].Kind != Run {
		return nil, errors.New("history: it does not begin with what was run")
	}
	return all, nil
}
