// Package history keeps what happened in each of the last 360 steps of 10 s, an hour in all, in a ring of fixed size.
//
// # Guarantees
//
//   - A Ring never has more than Size points, about 25 KB.
//   - A step that was not measured is a gap and not a 0.
//
// # What breaks them
//
// Counters that begin anew: a series that has decreased counts from 0.
package history

import (
	"sync"
	"time"
)

const (
	// Step is the time that a point covers.
	Step = 10 * time.Second
	// Size is the number of points of a Ring.
	Size = 360
)

// Point is what happened in one step. The zero Point is a gap.
type Point struct {
	Measured bool
	// Claims, by their answers: Failed has a status of 500 or more, Refused a lower one.
	Claimed, Refused, Failed uint32
	// Warm claims got pods that were warm when they came, and Waited ones waited for a pod. Empty ones were refused
	// because the pool had none.
	Warm, Waited, Empty uint32
	// Released sandboxes: Called by a call, Idle ones after their idle timeout, and Others.
	Called, Idle, Other uint32
	// PodsFailed is the number of idle pods that failed.
	PodsFailed uint32
	// ClaimP50 and ClaimP99 are quantiles of the time of claims that were answered with a sandbox. AcknowledgedP99 is
	// that of the time until all routers had acknowledged a release. In seconds, NaN if there was none.
	ClaimP50, ClaimP99, AcknowledgedP99 float64
	// Live is the number of live sandboxes at the end of the step, -1 if it is not known.
	Live int
}

// Ring has the latest points. Its methods may be called concurrently.
type Ring struct {
	since time.Time
	mu    sync.Mutex
	next  int // number of the next step since the beginning
	ring  [Size]Point
}

// New returns a Ring whose first step begins at since.
func New(since time.Time) *Ring { return &Ring{since: since} }

// Put adds the point of a step, by its number since the beginning. Steps between it and the latest one are gaps. A step
// that is not later than the latest one becomes the next one.
func (r *Ring) Put(step int, p Point) {
	r.mu.Lock()
	defer r.mu.Unlock()
	step = max(step, r.next)
	for n := max(r.next, step-Size); n < step; n++ {
		r.ring[n%Size] = Point{}
	}
	p.Measured = true
	r.ring[step%Size] = p
	r.next = step + 1
}

// Points returns the points, the oldest first, when the history began, and when the last step ended.
func (r *Ring) Points() (all []Point, since, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all = make([]Point, 0, min(r.next, Size))
	for n := max(0, r.next-Size); n < r.next; n++ {
		all = append(all, r.ring[n%Size])
	}
	return all, r.since, r.since.Add(time.Duration(r.next) * Step)
}
