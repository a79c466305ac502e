package history

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
)

// What Count counts, and by what.
const (
	Requests = "requests" // that clients sent, by outcome
	Sent     = "sent"     // the same requests, by kind
	Receipts = "received" // by kind
	Claims   = "claims answered"
	Records  = "sandboxes on record"
	Releases = "releases" // by Acknowledged or Outstanding
	// Reuses are how often an address had another sandbox.
	Reuses = "addresses used again"
	// After are requests that were sent when their sandbox was gone for every router. Tempted
	// are those for a sandbox that was over while another one lived at its address: a route that
	// was kept would have taken them to the wrong pod.
	After   = "sent after the end"
	Tempted = "sent after the end with another sandbox at the address"
	// Strays are requests that reached a pod that never held a sandbox, see WrongPod.
	Strays = "strays"
	// Reaps are releases for being idle with a known last use, by Quiet or Troubled.
	Reaps = "reaps"
	// Late are the quiet reaps, by how long the sandbox was idle beyond its timeout.
	Late = "reaped late by"
	// NearDeadline are requests that were sent within 200 ms of the moment at which their
	// sandbox would have been idle for its timeout, by outcome.
	NearDeadline = "sent near a deadline"
	// NearReap are requests that were sent within 200 ms of the release, by outcome.
	NearReap   = "sent near a reap"
	LongUses   = "received for longer than the idle timeout"
	KeepAlives = "keep-alives"
	// Faults are those that were done, by kind.
	Faults = "faults"
	// FailedFaults are those that could not be done, by kind.
	FailedFaults = "failed faults"
	// Stalled are pauses of an Envoy that took longer than the stall budget, for which Berth
	// promises nothing. A test means to make none.
	Stalled = "pauses beyond the stall budget"
)

// By what Releases and Reaps are counted.
const (
	Acknowledged = "acknowledged by all routers"
	Outstanding  = "a router outstanding"
	// Quiet reaps had no fault with effects between the last use and the release.
	Quiet    = "quiet"
	Troubled = "while a fault had effects"
	// Answered is the outcome of a request that its sandbox has answered completely.
	Answered = "answered"
)

// near is how near to a deadline a request counts as sent near it.
const near = 200 * time.Millisecond

// Tally has counts by name, and by what else is counted.
type Tally map[string]map[string]int

// Add counts one more.
func (t Tally) Add(name, what string) {
	if t[name] == nil {
		t[name] = map[string]int{}
	}
	t[name][what]++
}

// Total is the count of a name.
func (t Tally) Total(name string) (sum int) {
	for _, n := range t[name] {
		sum += n
	}
	return sum
}

// String is a line for each name.
func (t Tally) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(t)) {
		fmt.Fprintf(&b, "%s: %d", name, t.Total(name))
		for _, what := range slices.Sorted(maps.Keys(t[name])) {
			if what != "" {
				fmt.Fprintf(&b, ", %s %d", what, t[name][what])
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Count counts what happened in a history.
func Count(h *History) Tally {
	t := Tally{}
	at := h.byAddress()
	for i := range h.Events {
		t.event(h, &h.Events[i], at)
	}
	for _, all := range at {
		for range all[1:] {
			t.Add(Reuses, "")
		}
	}
	for _, s := range h.sorted {
		t.sandbox(h, s)
	}
	return t
}

func (t Tally) event(h *History, e *Event, at map[string][]*sandbox) {
	s := h.sandboxes[e.Sandbox]
	switch e.Kind {
	case Claim:
		if e.Code == http.StatusCreated {
			t.Add(Claims, "")
		}
	case KeepAlive:
		if e.Code == http.StatusNoContent {
			t.Add(KeepAlives, "")
		}
	case Release:
		if known := s.claim() != nil || s.record() != nil; known && acknowledged(e) {
			t.Add(Releases, Acknowledged)
		} else if known && released(e) {
			t.Add(Releases, Outstanding)
		}
	case Record:
		t.Add(Records, "")
	case Request:
		t.Add(Requests, e.outcome())
		t.Add(Sent, e.What)
		if h.after(e) {
			t.Add(After, "")
		}
		if s != nil && s.tempts(e, at) {
			t.Add(Tempted, "")
		}
	case Received:
		t.Add(Receipts, e.What)
		if !h.rightPod(e) && h.stray(e) {
			t.Add(Strays, "")
		}
	case Fault:
		name := Faults
		if e.Error != "" {
			name = FailedFaults
		} else if strings.HasPrefix(e.What, EnvoyPaused) && e.Ended-e.Began > h.Settings.StallBudget {
			t.Add(Stalled, "")
		}
		t.Add(name, e.What)
	}
}

// tempts reports whether the sandbox was over and another one lived at its address when a
// request for it was sent.
func (s *sandbox) tempts(e *Event, at map[string][]*sandbox) bool {
	return s.record() != nil && s.overAt(e.Began) &&
		slices.ContainsFunc(at[s.record().Address], func(other *sandbox) bool {
			return other != s && other.claim().Ended <= e.Began && !other.overAt(e.Began)
		})
}

// sandbox counts the reap of a sandbox with an idle timeout, and the requests near it.
func (t Tally) sandbox(h *History, s *sandbox) {
	claim := s.claim()
	if claim == nil || claim.IdleTimeout == 0 {
		return
	}
	at, reaped := h.reaped(s)
	for _, r := range s.asked {
		last, by := s.lastUse(r.Began)
		if by != nil && last < r.Began && (r.Began-last-claim.IdleTimeout).Abs() <= near {
			t.Add(NearDeadline, r.outcome())
		}
		if reaped && (r.Began-at).Abs() <= near {
			t.Add(NearReap, r.outcome())
		}
	}
	if !reaped {
		return
	}
	for _, u := range s.used {
		if u.Kind == Received && u.Ended-u.Began > claim.IdleTimeout {
			t.Add(LongUses, "")
		}
	}
	last, _ := s.lastUse(at)
	if !h.quiet(last, at) {
		t.Add(Reaps, Troubled)
		return
	}
	t.Add(Reaps, Quiet)
	for _, bound := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, time.Minute} {
		if at-last-claim.IdleTimeout < bound {
			t.Add(Late, fmt.Sprintf("less than %v", bound))
			return
		}
	}
	t.Add(Late, "a minute or more")
}
