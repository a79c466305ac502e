package history

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/envoy"
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
	// Sleeps are the calls that had a sandbox sleep.
	Sleeps = "sleeps"
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
	for range h.of[Record] {
		t.Add(Records, "")
	}
	for _, e := range h.of[Received] {
		t.Add(Receipts, e.What)
		if !h.rightPod(e) && h.stray(e, e.Began) {
			t.Add(Strays, "")
		}
	}
	at := h.byAddress()
	for _, all := range at {
		for range all[1:] {
			t.Add(Reuses, "")
		}
	}
	for _, e := range h.of[Request] {
		t.Add(Requests, e.outcome())
		t.Add(Sent, e.What)
		if h.after(e) {
			t.Add(After, "")
		}
		if s := h.sandboxes[e.Sandbox]; s != nil && s.tempts(e, at) {
			t.Add(Tempted, "")
		}
	}
	for _, e := range h.of[Sleep] {
		if e.Code == http.StatusNoContent {
			t.Add(Sleeps, "")
		}
	}
	for _, e := range h.of[Fault] {
		if e.Error != "" {
			t.Add(FailedFaults, e.What)
			continue
		}
		t.Add(Faults, e.What)
		if strings.HasPrefix(e.What, EnvoyPaused) && e.Ended-e.Began > h.Settings.StallBudget {
			t.Add(Stalled, "")
		}
	}
	for _, s := range h.sorted {
		t.sandbox(h, s)
	}
	return t
}

// tempts reports whether the sandbox was over and another one lived at its address when a
// request for it was sent.
func (s *sandbox) tempts(e *Event, at map[string][]*sandbox) bool {
	return s.record != nil && s.overAt(e.Began) &&
		slices.ContainsFunc(at[s.record.Address], func(other *sandbox) bool {
			return other != s && other.claim.Ended <= e.Began && !other.overAt(e.Began)
		})
}

// near reports whether a request began near the deadline of a sandbox whose last use counts until then. A request
// counts for a connect window at least: see package lastactive.
func (s *sandbox) near(r *Event, until time.Duration) bool {
	return (r.Began - until - s.claim.IdleTimeout).Abs() <= near
}

// sandbox counts what was done with a sandbox, its reap and the requests near that.
func (t Tally) sandbox(h *History, s *sandbox) {
	for _, e := range s.of[Release] {
		if known := s.claim != nil || s.record != nil; known && e.acknowledged() {
			t.Add(Releases, Acknowledged)
		} else if known && e.released() {
			t.Add(Releases, Outstanding)
		}
	}
	for _, u := range s.used {
		switch {
		case u.Kind == Claim:
			t.Add(Claims, "")
		case u.Kind == KeepAlive:
			t.Add(KeepAlives, "")
		case s.reaped != 0 && u.Ended-u.Began > s.claim.IdleTimeout:
			t.Add(LongUses, "")
		}
	}
	if s.claim == nil || s.claim.IdleTimeout == 0 {
		return
	}
	for _, r := range s.of[Request] {
		last, by := s.lastUse(r.Began)
		if by != nil && last < r.Began && (s.near(r, last) || s.near(r, max(last, by.Began+envoy.ConnectWindow))) {
			t.Add(NearDeadline, r.outcome())
		}
		if s.reaped != 0 && (r.Began-s.reaped).Abs() <= near {
			t.Add(NearReap, r.outcome())
		}
	}
	if s.reaped == 0 {
		return
	}
	last, _ := s.lastUse(s.reaped)
	if !h.quiet(last, s.reaped) {
		t.Add(Reaps, Troubled)
		return
	}
	t.Add(Reaps, Quiet)
	for _, bound := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, time.Minute} {
		if s.reaped-last-s.claim.IdleTimeout < bound {
			t.Add(Late, fmt.Sprintf("less than %v", bound))
			return
		}
	}
	t.Add(Late, "a minute or more")
}
