package history

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
)

// This file has the judges of idle sandboxes.

// FalseReap finds sandboxes that were released for being idle although they were in use at
// the moment of the record, or had been less than their idle timeout before; and requests
// that were answered that the sandbox is gone less than that after a use.
func FalseReap(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.claim == nil {
			continue
		}
		timeout := s.claim.IdleTimeout
		if last, by := s.lastUse(s.reaped); s.reaped != 0 && s.reaped-last < timeout {
			all.add("false reap", "sandbox %s, with an idle timeout of %v, was released at %v, %v after %s", s.id, timeout,
				s.reaped, s.reaped-last, use(by))
		}
		for _, r := range s.of[Request] {
			if last, by := s.lastUse(r.Ended); r.saysGone() && by != nil && r.Ended-last < timeout {
				all.add("false reap", "sandbox %s, with an idle timeout of %v: %s was answered that it is gone, %v after %s",
					s.id, timeout, use(r), r.Ended-last, use(by))
			}
		}
	}
	return all
}

// AfterReap finds uses of a sandbox that began after it was released for being idle.
func AfterReap(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		for _, u := range s.used {
			if s.reaped != 0 && u.Began > s.reaped {
				all.add("after the reap", "sandbox %s was released at %v, %v before %s", s.id, s.reaped, u.Began-s.reaped, use(u))
			}
		}
	}
	return all
}

// NeverReaped finds sandboxes on record that are not released, and those whose release for
// being idle was later than Settings.Guard after their deadline and after the last fault.
func NeverReaped(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.record != nil && !s.over() {
			all.add("never reaped", "sandbox %s", s.id)
		}
		if s.reaped == 0 {
			continue
		}
		last, _ := s.lastUse(s.reaped)
		from := last + s.claim.IdleTimeout
		for _, f := range h.of[Fault] {
			if f.Began <= s.reaped {
				from = max(from, min(f.Ended, s.reaped))
			}
		}
		if late := s.reaped - from; late > h.Settings.Guard {
			all.add("never reaped", "sandbox %s was released %v later than it could have been", s.id, late)
		}
	}
	return all
}

// OtherReason finds sandboxes that were released for anything but being idle. A sandbox
// that was never answered may have been given back because its caller had gone.
func OtherReason(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.over() && !s.idle() && (s.claim != nil || s.record.Reason != fact.ReasonCanceled) {
			all.add("other reason", "sandbox %s was released: %s", s.id, s.record.Reason)
		}
	}
	return all
}

// NotServed finds requests to an idle or used sandbox that got a wrong answer: "unknown" at
// any time; and, while no fault was going on and none had for Settings.Settle, anything but
// the sandbox's answer or "gone".
func NotServed(h *History) []Violation {
	var all found
	for _, r := range h.of[Request] {
		got := r.outcome()
		switch {
		case r.saysGone():
		case r.Code == http.StatusNotFound && r.Reason != "":
			all.add("unknown", "sandbox %s: %s was answered %s", r.Sandbox, use(r), got)
		case got != Answered && r.What != Abandoned && h.quiet(r.Began, r.Ended):
			all.add("error", "sandbox %s: %s was answered %s %s while nothing was wrong", r.Sandbox, use(r), got, r.Error)
		}
	}
	return all
}

// driftMost is how far the machine's clocks may drift apart in a run. Berth takes the end of
// a use to be later than it was by more than that.
const driftMost = 20 * time.Millisecond

// Clocks finds moments that show that the other judges know nothing: the machine's wall
// clock was set during the run, or a record's time can be from no allocator's clock.
func Clocks(h *History) []Violation {
	var all found
	for _, e := range h.of[Clock] {
		if drift := (e.Wall.Sub(h.Start.Wall) - (e.Began - h.Start.Began)).Abs(); drift > driftMost {
			all.add("clock", "the machine's wall clock has moved by %v", drift)
		}
	}
	for _, s := range h.sorted {
		if s.claim != nil && s.idle() && s.reaped == 0 {
			all.add("clock", "sandbox %s was released at %v, which is before its claim on every clock", s.id,
				s.record.Released)
		}
	}
	return all
}

// lastUse is the latest moment, not after t, at which the sandbox was in use, and what
// used it. A claim, a keep-alive and what a pod received are uses. When a claim or a
// keep-alive had its effect is not known: not before the call began.
func (s *sandbox) lastUse(t time.Duration) (last time.Duration, by *Event) {
	for _, u := range s.used {
		if u.Began > t {
			break
		}
		until := u.Began
		if u.Kind == Received {
			until = min(t, u.Ended)
		}
		if by == nil || until >= last {
			last, by = until, u
		}
	}
	return last, by
}

// quiet reports whether no fault was going on between two moments, nor for Settings.Settle
// before.
func (h *History) quiet(from, to time.Duration) bool {
	return !slices.ContainsFunc(h.of[Fault], func(e *Event) bool {
		return e.Began <= to && e.Ended+h.Settings.Settle >= from
	})
}

// saysGone reports whether a request was answered that its sandbox is gone.
func (e *Event) saysGone() bool {
	return e.Code == http.StatusGone && e.Reason == string(apierror.SandboxGone)
}

// outcome is the result of a request in a word or two.
func (e *Event) outcome() string {
	switch {
	case e.What == Abandoned:
		return Abandoned
	case e.Code == 0:
		return "no answer"
	case e.Reason != "":
		return fmt.Sprintf("%d %s", e.Code, e.Reason)
	case e.Error != "":
		return fmt.Sprintf("%d, cut short", e.Code)
	}
	return Answered
}

// use describes a use or a request.
func use(e *Event) string {
	what := fmt.Sprintf("request %s (%s) through %s", e.Request, e.What, e.Gateway)
	switch e.Kind {
	case Claim, KeepAlive:
		what = "its " + string(e.Kind)
	case Received:
		what = fmt.Sprintf("request %s (%s) in its %s", e.Request, e.What, podOf(e))
	}
	return fmt.Sprintf("%s from %v to %v", what, e.Began, e.Ended)
}
