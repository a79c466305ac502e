package history

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
)

// usedUntil is the end of a use. When a claim or a keep-alive had its effect is not known:
// not before the call began.
func (e *Event) usedUntil() time.Duration {
	if e.Kind == Received {
		return e.Ended
	}
	return e.Began
}

// lastUse is the latest moment, not after t, at which the sandbox was in use, and what
// used it. A claim, a keep-alive and what a pod received are uses.
func (s *sandbox) lastUse(t time.Duration) (last time.Duration, by *Event) {
	for _, u := range s.used {
		if u.Began > t {
			break
		}
		if until := min(t, u.usedUntil()); by == nil || until >= last {
			last, by = until, u
		}
	}
	return last, by
}

// reaped returns when a sandbox was released for being idle. It was not if ok is false, or
// its claim was not answered.
//
// The record's time is by the wall clock of some allocator. Of the moments that it can mean,
// one for each of Settings.Offsets, the first one that is after the claim is meant.
func (h *History) reaped(s *sandbox) (at time.Duration, ok bool) {
	r, claim := s.record(), s.claim()
	if r == nil || claim == nil || r.Released.IsZero() || r.Reason != core.ReasonIdle {
		return 0, false
	}
	for _, offset := range h.Settings.Offsets {
		moment := h.Start.Began + r.Released.Sub(h.Start.Wall) - offset
		if moment >= claim.Began && (!ok || moment < at) {
			at, ok = moment, true
		}
	}
	return at, ok
}

// quiet reports whether no fault was going on between two moments, nor for Settings.Settle
// before.
func (h *History) quiet(from, to time.Duration) bool {
	return !slices.ContainsFunc(h.faults, func(e *Event) bool {
		return e.Began <= to && e.Ended+h.Settings.Settle >= from
	})
}

// lastFaultBefore is the latest moment, not after t, at which a fault was going on.
func (h *History) lastFaultBefore(t time.Duration) (last time.Duration) {
	for _, e := range h.faults {
		if e.Began <= t {
			last = max(last, min(e.Ended, t))
		}
	}
	return last
}
