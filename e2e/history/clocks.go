package history

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
)

// driftMost is how far the machine's clocks may drift apart in a run. Berth takes the end of
// a use to be later than it was by more than that.
const driftMost = 20 * time.Millisecond

// Clocks finds moments that show that the other judges know nothing: the machine's wall
// clock was set during the run, or a record's time can be from no allocator's clock.
func Clocks(h *History) []Violation {
	var all found
	for i := range h.Events {
		e := &h.Events[i]
		if e.Kind != Clock {
			continue
		}
		if drift := (e.Wall.Sub(h.Start.Wall) - (e.Began - h.Start.Began)).Abs(); drift > driftMost {
			all.add("clock", "the machine's wall clock has moved by %v", drift)
		}
	}
	for _, s := range h.sorted {
		r := s.record()
		if s.claim() == nil || r == nil || r.Released.IsZero() || r.Reason != core.ReasonIdle {
			continue
		}
		if _, ok := h.reaped(s); !ok {
			all.add("clock", "sandbox %s was released at %v, which is before its claim on every clock", s.id, r.Released)
		}
	}
	return all
}
