package history

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
)

// History is a complete history, sorted by what its events are about. It does not change
// and may be read concurrently.
type History struct {
	Events []Event
	// Start is the event of kind Run, and Settings are its settings.
	Start    Event
	Settings Settings

	sandboxes map[string]*sandbox
	// sorted are the sandboxes by ID.
	sorted   []*sandbox
	holder   map[string]string // sandbox on record, by the UID of its pod
	requests map[string]*Event
	received map[string][]*Event // by request
	claims   map[string][]*Event // answered with a sandbox, by name of the claim; in the order of the answers
	faults   []*Event
	pods     map[string]*Event // at the end, by UID
	pool     *Event            // at the end; nil: not recorded
	end      time.Duration     // after every event
}

// sandbox is what a history says about one sandbox.
type sandbox struct {
	id      string
	records []*Event
	claims  []*Event // answers, in their order
	listed  *Event
	final   *Event
	calls   []*Event // Read and Release
	used    []*Event // see uses.go
	asked   []*Event // requests of clients
	// mayEnd is the earliest moment at which it can have ended; 0: nothing ends it.
	mayEnd time.Duration
	// gone is when every router refuses it at the latest; 0: not known.
	gone time.Duration
	// releaseAsked is when the first release began, releaseConfirmed when the first one was
	// answered with success, deleted when the test began to delete its pod. 0: never.
	releaseAsked, releaseConfirmed, deleted time.Duration
}

// New sorts events as ParseEvents returns them. The caller must not change them after that.
func New(events []Event) *History {
	h := &History{
		Events: events, Start: events[0], Settings: *events[0].Settings,
		sandboxes: map[string]*sandbox{}, holder: map[string]string{}, requests: map[string]*Event{},
		received: map[string][]*Event{}, claims: map[string][]*Event{}, pods: map[string]*Event{},
	}
	deleted := map[string]time.Duration{} // by UID of the pod
	for i := range events {
		e := &events[i]
		h.end = max(h.end, e.Began, e.Ended)
		if e.Kind == Delete {
			first(deleted, e.PodUID, e.Began)
		}
		h.sort(e)
	}
	h.end++
	byEnd := func(a, b *Event) int { return cmp.Compare(a.Ended, b.Ended) }
	for _, all := range h.claims {
		slices.SortStableFunc(all, byEnd)
	}
	for _, id := range slices.Sorted(maps.Keys(h.sandboxes)) {
		s := h.sandboxes[id]
		h.sorted = append(h.sorted, s)
		slices.SortStableFunc(s.claims, byEnd)
		slices.SortStableFunc(s.used, func(a, b *Event) int { return cmp.Compare(a.Began, b.Began) })
		if r := s.record(); r != nil {
			s.deleted = deleted[r.PodUID]
			s.endsAt(s.deleted)
		}
		h.ends(s)
	}
	return h
}

// first sets all[key] to the earlier one of itself and at.
func first(all map[string]time.Duration, key string, at time.Duration) {
	if old, ok := all[key]; !ok || at < old {
		all[key] = at
	}
}

// sort adds an event to the tables.
func (h *History) sort(e *Event) {
	switch e.Kind {
	case Fault:
		h.faults = append(h.faults, e)
	case Pod:
		h.pods[e.PodUID] = e
	case Pool:
		h.pool = e
	case Request:
		h.requests[e.Request] = e
	case Received:
		h.received[e.Request] = append(h.received[e.Request], e)
	}
	if e.Sandbox == "" {
		return
	}
	s := h.sandboxes[e.Sandbox]
	if s == nil {
		s = &sandbox{id: e.Sandbox}
		h.sandboxes[e.Sandbox] = s
	}
	switch e.Kind {
	case Claim:
		if e.Code == http.StatusCreated {
			s.claims = append(s.claims, e)
			s.used = append(s.used, e)
			h.claims[e.Claim] = append(h.claims[e.Claim], e)
		}
	case Read, Release:
		s.calls = append(s.calls, e)
	case KeepAlive:
		if e.Code == http.StatusNoContent {
			s.used = append(s.used, e)
		}
	case Request:
		s.asked = append(s.asked, e)
	case Received:
		s.used = append(s.used, e)
	case Record:
		s.records = append(s.records, e)
		h.holder[e.PodUID] = e.Sandbox
	case Listed:
		s.listed = e
	case Final:
		s.final = e
	}
}

// ends finds out when a sandbox can have ended, and when it was gone.
func (h *History) ends(s *sandbox) {
	for _, e := range s.claims {
		if e.Timeout > 0 {
			s.endsAt(e.Began + e.Timeout)
		}
	}
	earlier := func(at *time.Duration, moment time.Duration) {
		if *at == 0 || moment < *at {
			*at = moment
		}
	}
	for _, e := range s.calls {
		if e.Kind != Release {
			continue
		}
		s.endsAt(e.Began)
		earlier(&s.releaseAsked, e.Began)
		if e.Code == http.StatusNoContent {
			earlier(&s.releaseConfirmed, e.Ended)
		}
		switch {
		case acknowledged(e):
			earlier(&s.gone, e.Ended)
		case released(e):
			earlier(&s.gone, e.Ended+h.Settings.MaxStale)
		}
	}
}

// released reports whether the answer to a release says that the sandbox is released.
func released(e *Event) bool {
	return e.Code == http.StatusNoContent || e.Code == http.StatusNotFound && e.Reason == string(apierror.SandboxGone)
}

// acknowledged reports whether all routers had acknowledged a release by its answer.
func acknowledged(e *Event) bool { return e.Code == http.StatusNoContent && e.Outstanding == 0 }

func (s *sandbox) endsAt(moment time.Duration) {
	if moment != 0 && (s.mayEnd == 0 || moment < s.mayEnd) {
		s.mayEnd = moment
	}
}

// overAt reports whether the sandbox may have ended by then.
func (s *sandbox) overAt(moment time.Duration) bool { return s.mayEnd != 0 && s.mayEnd <= moment }

func (s *sandbox) record() *Event {
	if len(s.records) == 0 {
		return nil
	}
	return s.records[len(s.records)-1]
}

// claim is the first answer that names the sandbox; nil: there is none.
func (s *sandbox) claim() *Event {
	if len(s.claims) == 0 {
		return nil
	}
	return s.claims[0]
}

// claimedBy are the names of the claims that were answered with the sandbox.
func (s *sandbox) claimedBy() []string {
	names := map[string]bool{}
	for _, e := range s.claims {
		names[e.Claim] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// binding names the pod of a sandbox: its record, or in a history without records the
// answer to its claim. nil: not known.
func (h *History) binding(s *sandbox) *Event {
	if s == nil {
		return nil
	}
	if len(h.holder) == 0 {
		return s.claim()
	}
	return s.record()
}

// describe names a sandbox with its pod and the time of its end.
func (h *History) describe(id string) string {
	s := h.sandboxes[id]
	b := h.binding(s)
	if b == nil {
		return fmt.Sprintf("sandbox %s (not on record)", id)
	}
	return fmt.Sprintf("sandbox %s (pod %s, UID %s, at %s, can have ended from %v on)", id, b.Pod, b.PodUID, b.Address,
		s.mayEnd)
}
