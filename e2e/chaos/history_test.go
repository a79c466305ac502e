package chaos

import (
	"bytes"
	"encoding/json"
	"sync"
	"sync/atomic"
	"time"
)

// op is what was done.
type op string

const (
	opClaim   op = "claim"
	opRead    op = "read"
	opRelease op = "release"
	// opDeletePod is the test's own: the pod of this name and UID was deleted, or
	// may have been.
	opDeletePod op = "delete-pod"
	// opProcess is what the test did to a process; for people.
	opProcess op = "process"
)

// event is one line of the history: a call with its answer, or something that
// the test did.
type event struct {
	Op op
	// Caller is who asked, by a name that is the claim's own: a claim without a
	// key has another name each time it is made again, because it is another one
	// each time. The sandbox carries it in its metadata.
	Caller string `json:",omitempty"`
	Key    string `json:",omitempty"`
	// ID was asked for, or is what was answered.
	ID string `json:",omitempty"`
	// Replica is the address that was asked.
	Replica string `json:",omitempty"`
	// Began and Ended are places in the order of everything that happened.
	Began, Ended uint64
	// At is when it ended.
	At time.Time
	// Code is the status of the answer, 0 without one; Reason and Error say more.
	Code   int    `json:",omitempty"`
	Reason string `json:",omitempty"`
	Error  string `json:",omitempty"`
	// Pod and PodUID are the pod's; an answer says the name alone. For is whom
	// the answered sandbox says that it was claimed by, EndAt when it ends.
	Pod    string    `json:",omitempty"`
	PodUID string    `json:",omitempty"`
	For    string    `json:",omitempty"`
	EndAt  time.Time `json:",omitzero"`
	// Process and Did are for opProcess.
	Process string `json:",omitempty"`
	Did     string `json:",omitempty"`
}

// history is written by many and judged at the end.
type history struct {
	clock atomic.Uint64

	mu     sync.Mutex
	events []event
	// arrivals are the callers whose claims waited, in the order in which they
	// are known to have come.
	arrivals []string
}

// tick is the next place in the order.
func (h *history) tick() uint64 { return h.clock.Add(1) }

// add writes down what has ended just now.
func (h *history) add(e event) event {
	h.mu.Lock()
	defer h.mu.Unlock()
	e.Ended, e.At = h.tick(), time.Now()
	if e.Began == 0 {
		e.Began = e.Ended
	}
	h.events = append(h.events, e)
	return e
}

// did writes down what was done to a process.
func (h *history) did(process, what string) {
	h.add(event{Op: opProcess, Process: process, Did: what})
}

func (h *history) arrived(caller string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.arrivals = append(h.arrivals, caller)
}

// read returns what was written so far.
func (h *history) read() (events []event, arrivals []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.events[:len(h.events):len(h.events)], h.arrivals[:len(h.arrivals):len(h.arrivals)]
}

// lines is the history as evidence, a line of JSON each.
func (h *history) lines() []byte {
	events, _ := h.read()
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	for _, e := range events {
		_ = encoder.Encode(e) // plain fields
	}
	return b.Bytes()
}
