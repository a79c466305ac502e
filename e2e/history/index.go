package history

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
)

// History is a complete history, sorted by what its events are about. It does not change
// and may be read concurrently.
type History struct {
	Events []Event
	// Start is the event of kind Run, and Settings are its settings.
	Start    Event
	Settings Settings

	of        map[Kind][]*Event
	sandboxes map[string]*sandbox
	sorted    []*sandbox          // by ID
	holder    map[string]*sandbox // on record, by the UID of its pod
	requests  map[string]*Event
	received  map[string][]*Event // by request
	claims    map[string][]*Event // answered with a sandbox, by name of the claim; in the order of the answers
	pods      map[string]*Event   // at the end, by UID
	pool      *Event              // at the end; nil: not recorded
	end       time.Duration       // after every event
}

// sandbox is what a history says about one sandbox. A moment is 0 if it is not known or
// never was.
type sandbox struct {
	id                    string
	of                    map[Kind][]*Event
	claims                []*Event // answers, in their order
	used                  []*Event // claims, keep-alives and receipts, by Began
	claim                 *Event   // the first answer that names the sandbox; nil: there is none
	record, listed, final *Event   // the last of each kind; nil: there is none
	// mayEnd is the earliest moment at which it can have ended.
	mayEnd time.Duration
	// gone is when every router refuses it at the latest.
	gone time.Duration
	// releaseAsked is when the first release began, releaseConfirmed when the first one was
	// answered with success, deleted when the test began to delete its pod.
	releaseAsked, releaseConfirmed, deleted time.Duration
	// reaped is when it was released for being idle, if its claim was answered.
	reaped time.Duration
}

// New sorts events as ParseEvents returns them. The caller must not change them after that.
func New(events []Event) *History {
	h := &History{
		Events: events, Start: events[0], Settings: *events[0].Settings, of: map[Kind][]*Event{},
		sandboxes: map[string]*sandbox{}, holder: map[string]*sandbox{}, requests: map[string]*Event{},
		received: map[string][]*Event{}, claims: map[string][]*Event{}, pods: map[string]*Event{},
	}
	for i := range events {
		e := &events[i]
		h.end = max(h.end, e.Began+1, e.Ended+1)
		h.of[e.Kind] = append(h.of[e.Kind], e)
		if e.Sandbox == "" {
			continue
		}
		s := h.sandboxes[e.Sandbox]
		if s == nil {
			s = &sandbox{id: e.Sandbox, of: map[Kind][]*Event{}}
			h.sandboxes[e.Sandbox] = s
		}
		s.of[e.Kind] = append(s.of[e.Kind], e)
	}
	for _, e := range h.of[Request] {
		h.requests[e.Request] = e
	}
	for _, e := range h.of[Received] {
		h.received[e.Request] = append(h.received[e.Request], e)
	}
	for _, e := range h.of[Pod] {
		h.pods[e.PodUID] = e
	}
	h.pool = last(h.of[Pool])
	deleted := map[string]time.Duration{} // by UID of the pod
	for _, e := range h.of[Delete] {
		deleted[e.PodUID] = earliest(deleted[e.PodUID], e.Began)
	}
	for _, id := range slices.Sorted(maps.Keys(h.sandboxes)) {
		s := h.sandboxes[id]
		h.sorted = append(h.sorted, s)
		h.complete(s, deleted)
	}
	for _, all := range h.claims {
		slices.SortStableFunc(all, byEnd)
	}
	return h
}

// complete sets what follows from the events of a sandbox, and adds it to the tables.
func (h *History) complete(s *sandbox, deleted map[string]time.Duration) {
	s.record, s.listed, s.final = last(s.of[Record]), last(s.of[Listed]), last(s.of[Final])
	for _, r := range s.of[Record] {
		h.holder[r.PodUID] = s
	}
	if s.record != nil {
		s.deleted = deleted[s.record.PodUID]
	}
	s.mayEnd = s.deleted
	for _, e := range s.of[Claim] {
		if e.Code != http.StatusCreated {
			continue
		}
		s.claims = append(s.claims, e)
		h.claims[e.Claim] = append(h.claims[e.Claim], e)
		if e.Timeout > 0 {
			s.mayEnd = earliest(s.mayEnd, e.Began+e.Timeout)
		}
	}
	slices.SortStableFunc(s.claims, byEnd)
	if len(s.claims) > 0 {
		s.claim = s.claims[0]
	}
	s.used = slices.Concat(s.claims, s.of[Received])
	for _, e := range s.of[KeepAlive] {
		if e.Code == http.StatusNoContent {
			s.used = append(s.used, e)
		}
	}
	slices.SortStableFunc(s.used, byBegin)
	for _, e := range s.of[Release] {
		s.mayEnd = earliest(s.mayEnd, e.Began)
		s.releaseAsked = earliest(s.releaseAsked, e.Began)
		if e.Code == http.StatusNoContent {
			s.releaseConfirmed = earliest(s.releaseConfirmed, e.Ended)
		}
		switch {
		case e.acknowledged():
			s.gone = earliest(s.gone, e.Ended)
		case e.released():
			s.gone = earliest(s.gone, e.Ended+h.Settings.MaxStale)
		}
	}
	s.reaped = h.reaped(s)
}

// reaped returns when a sandbox was released for being idle; 0: it was not, or its claim
// was not answered.
//
// The record's time is by the wall clock of some allocator. Of the moments that it can mean,
// one for each of Settings.Offsets, the first one that is after the claim is meant.
func (h *History) reaped(s *sandbox) (at time.Duration) {
	if !s.idle() || s.claim == nil {
		return 0
	}
	for _, offset := range h.Settings.Offsets {
		if moment := h.Start.Began + s.record.Released.Sub(h.Start.Wall) - offset; moment >= s.claim.Began {
			at = earliest(at, moment)
		}
	}
	return at
}

func byBegin(a, b *Event) int { return cmp.Compare(a.Began, b.Began) }
func byEnd(a, b *Event) int   { return cmp.Compare(a.Ended, b.Ended) }

// earliest is the earlier one of two moments, of which 0 stands for none.
func earliest(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

func last(all []*Event) *Event {
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1]
}

// idle reports whether the record says that the sandbox was released for being idle.
func (s *sandbox) idle() bool { return s.over() && s.record.Reason == fact.ReasonIdleTimeout }

// over reports whether the record says that the sandbox was released.
func (s *sandbox) over() bool { return s.record != nil && !s.record.Released.IsZero() }

// overAt reports whether the sandbox may have ended by then.
func (s *sandbox) overAt(moment time.Duration) bool { return s.mayEnd != 0 && s.mayEnd <= moment }

// inPhase reports whether the record names a phase.
func (s *sandbox) inPhase(phase string) bool { return s.record != nil && s.record.Phase == phase }

// after reports whether a request was sent after its sandbox was gone for every router.
func (h *History) after(e *Event) bool {
	s := h.sandboxes[e.Sandbox]
	return s != nil && s.gone != 0 && e.Began > s.gone
}

// released reports whether the answer to a release says that the sandbox is released.
func (e *Event) released() bool {
	return e.Code == http.StatusNoContent || e.Code == http.StatusNotFound && e.Reason == string(apierror.SandboxGone)
}

// acknowledged reports whether all routers had acknowledged a release by its answer.
func (e *Event) acknowledged() bool { return e.Code == http.StatusNoContent && e.Outstanding == 0 }

// binding names the pod of a sandbox: its record, or in a history without records the
// answer to its claim. nil: not known.
func (h *History) binding(id string) *Event {
	s := h.sandboxes[id]
	switch {
	case s == nil:
		return nil
	case len(h.holder) == 0:
		return s.claim
	}
	return s.record
}

// describe names a sandbox with its pod and the time of its end.
func (h *History) describe(id string) string {
	b := h.binding(id)
	if b == nil {
		return fmt.Sprintf("sandbox %s (not on record)", id)
	}
	return fmt.Sprintf("sandbox %s (%s, can have ended from %v on)", id, podOf(b), h.sandboxes[id].mayEnd)
}

// podOf names the pod of an event.
func podOf(e *Event) string {
	var names []string
	for _, n := range [][2]string{{"", e.Pod}, {"UID ", e.PodUID}, {"at ", e.Address}} {
		if n[1] != "" {
			names = append(names, n[0]+n[1])
		}
	}
	return "pod " + cmp.Or(strings.Join(names, ", "), "unknown")
}

// podsOf names the pods that received a request, and when.
func podsOf(receipts []*Event) string {
	var all []string
	for _, r := range receipts {
		all = append(all, fmt.Sprintf("%s at %v", podOf(r), r.Began))
	}
	return cmp.Or(strings.Join(all, "; "), "no pod")
}
