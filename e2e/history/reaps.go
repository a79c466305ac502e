package history

import (
	"fmt"
	"net/http"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
)

// FalseReap finds sandboxes that were released for being idle although they were in use at
// the moment of the record, or had been less than their idle timeout before; and requests
// that were answered that the sandbox is gone less than that after a use.
func FalseReap(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if at, ok := h.reaped(s); ok {
			last, by := s.lastUse(at)
			if timeout := s.claim().IdleTimeout; at-last < timeout {
				all.add("false reap", "sandbox %s, with an idle timeout of %v, was released at %v, %v after %s", s.id, timeout, at,
					at-last, use(by))
			}
		}
		for _, r := range s.asked {
			if s.claim() == nil || !r.saysGone() {
				continue
			}
			last, by := s.lastUse(r.Ended)
			if timeout := s.claim().IdleTimeout; by != nil && r.Ended-last < timeout {
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
		at, ok := h.reaped(s)
		for _, u := range s.used {
			if ok && u.Began > at {
				all.add("after the reap", "sandbox %s was released at %v, %v before %s", s.id, at, u.Began-at, use(u))
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
		if r := s.record(); r != nil && r.Released.IsZero() {
			all.add("never reaped", "sandbox %s", s.id)
		}
		at, ok := h.reaped(s)
		if !ok {
			continue
		}
		last, _ := s.lastUse(at)
		from := max(last+s.claim().IdleTimeout, h.lastFaultBefore(at))
		if late := at - from; late > h.Settings.Guard {
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
		r := s.record()
		if r == nil || r.Released.IsZero() || r.Reason == core.ReasonIdle || s.claim() == nil &&
			r.Reason == core.ReasonAbandoned {
			continue
		}
		all.add("other reason", "sandbox %s was released: %s", s.id, r.Reason)
	}
	return all
}

// NotServed finds requests to an idle or used sandbox that got a wrong answer: "unknown" at
// any time; and, while no fault was going on and none had for Settings.Settle, anything but
// the sandbox's answer or "gone".
func NotServed(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		for _, r := range s.asked {
			got := r.outcome()
			switch {
			case r.saysGone():
			case r.Code == http.StatusNotFound && r.Reason != "":
				all.add("unknown", "sandbox %s: %s was answered %s", s.id, use(r), got)
			case got != Answered && r.What != Abandoned && h.quiet(r.Began, r.Ended):
				all.add("error", "sandbox %s: %s was answered %s %s while nothing was wrong", s.id, use(r), got, r.Error)
			}
		}
	}
	return all
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
	switch e.Kind {
	case Claim:
		return fmt.Sprintf("its claim from %v to %v", e.Began, e.Ended)
	case KeepAlive:
		return fmt.Sprintf("a keep-alive from %v to %v", e.Began, e.Ended)
	case Received:
		return fmt.Sprintf("its pod %s had request %s (%s) from %v to %v", e.Address, e.Request, e.What, e.Began, e.Ended)
	}
	return fmt.Sprintf("request %s (%s) through %s from %v to %v", e.Request, e.What, e.Gateway, e.Began, e.Ended)
}
