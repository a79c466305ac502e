// Package events keeps the latest events of sandboxes for the streams of the HTTP API and the callbacks of the program
// that embeds the allocator.
//
// A Ring belongs to one term of one leader. It has the last Size events. The ID of an event is the
// term and a counter within it, which starts at 1 and has no gaps: "7.42". A reader keeps the
// counter of the last event that it has passed on, and needs no other state: the ring is the queue
// of all readers. A reader that falls behind by more than Size events learns that it has lost some.
//
// # Guarantees
//
//   - Within a term a reader that continues with its last counter gets each event once and in order,
//     or learns that events are lost.
//   - A reader never delays Publish or another reader.
//
// # What breaks them
//
// The next leader starts with an empty ring, because events are not in the journal. A reader that
// continues with the ID of an earlier term must take events as lost: Continue says so.
package events

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Size is the number of events that a ring keeps.
const Size = 8192

// Type is the kind of an event.
type Type string

// The types of events.
const (
	Created  Type = "created"  // the claim is durable
	Ready    Type = "ready"    // routers send requests to the sandbox
	Asleep   Type = "asleep"   // its sleep is durable
	Awake    Type = "awake"    // routers send requests to the sandbox again
	Released Type = "released" // the release is durable
)

// Event is what happened to a sandbox.
type Event struct {
	// Number counts the events of the term.
	Number uint64
	Type   Type
	// At is the leader's wall clock.
	At                          time.Time
	SandboxID, Pool, Team, User string
	// Reason is that of a release.
	Reason string
}

// Ring keeps the latest events of a term. Its methods may be called concurrently.
type Ring struct {
	term uint64
	over chan struct{} // closed by Close

	mu      sync.Mutex
	last    uint64  // number of the latest event
	kept    []Event // event n is at (n-1) % Size
	changed chan struct{}
	closed  bool
}

// New returns an empty ring of a term.
func New(term uint64) *Ring { return &Ring{term: term, over: make(chan struct{})} }

// Publish adds an event and sets its number.
func (r *Ring) Publish(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	e.Number = r.last
	if len(r.kept) < Size {
		r.kept = append(r.kept, e)
	} else {
		r.kept[(e.Number-1)%Size] = e
	}
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// Close ends all readers.
func (r *Ring) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		close(r.over)
		r.closed = true
	}
}

// Over is closed when no event follows.
func (r *Ring) Over() <-chan struct{} { return r.over }

// After returns at most `most` events that follow a number, oldest first. lost is the number of
// events between that the ring does not have any more. Without an event it returns a channel that
// is closed when there is one.
func (r *Ring) After(number uint64, most int) (next []Event, lost uint64, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if number >= r.last {
		if r.changed == nil {
			r.changed = make(chan struct{})
		}
		return nil, 0, r.changed
	}
	first := number + 1
	if oldest := r.last - uint64(len(r.kept)) + 1; first < oldest {
		first, lost = oldest, oldest-first
	}
	for n := first; n <= r.last && len(next) < most; n++ {
		next = append(next, r.kept[(n-1)%Size])
	}
	return next, lost, nil
}

// ID returns the ID of the event with a number.
func (r *Ring) ID(number uint64) string { return fmt.Sprintf("%d.%d", r.term, number) }

// Continue returns the number after which a reader continues that has got the event of an ID last;
// "" for none. ok is false if events after it may be lost: it is of another term, or this ring has
// not given it. The reader then gets all events that the ring has. The error says that the text is
// no ID.
func (r *Ring) Continue(id string) (number uint64, ok bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if id == "" {
		return r.last, true, nil
	}
	left, right, _ := strings.Cut(id, ".")
	term, err1 := strconv.ParseUint(left, 10, 64)
	number, err2 := strconv.ParseUint(right, 10, 64)
	switch {
	case err1 != nil || err2 != nil:
		return 0, false, fmt.Errorf("%q: must be the ID of an event, such as 7.42", id)
	case term != r.term || number > r.last:
		return 0, false, nil
	}
	return number, true, nil
}
