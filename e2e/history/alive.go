package history

import (
	"net/http"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Alive finds sandboxes that were not there although they had to be. From its answer on a
// sandbox is live until a release was asked for, its time is over, or the test has deleted
// its pod: to everyone who asks, and at the end in the API's list, as an object and as a pod.
func Alive(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.claim() == nil {
			continue
		}
		for _, e := range s.calls {
			if e.Code != http.StatusNotFound {
				continue
			}
			switch {
			case e.Kind == Read && !s.excused(e.Ended, e.Wall):
				all.add("lost", "sandbox %s, answered to %s, was not found at %v: %s", s.id, s.claim().Claim, e.Ended, e.Reason)
			case e.Kind == Release && (e.Reason == string(apierror.SandboxNotFound) || !s.excusedRelease(e)):
				all.add("lost", "sandbox %s, answered to %s, was not there to be released at %v: %s",
					s.id, s.claim().Claim, e.Ended, e.Reason)
			}
		}
		if h.pool != nil && !s.excused(h.end, h.pool.Wall) {
			h.stillThere(s, &all)
		}
	}
	for i := range h.Events {
		e := &h.Events[i]
		if e.Kind != Claim || e.Code != http.StatusGone || len(h.claims[e.Claim]) == 0 {
			continue
		}
		if s := h.sandboxes[h.claims[e.Claim][0].Sandbox]; !s.excused(e.Ended, e.Wall) {
			all.add("lost", "claim %s was answered with sandbox %s, and at %v that it is gone: %s", e.Claim, s.id, e.Ended,
				e.Error)
		}
	}
	return all
}

// excused reports whether the sandbox may have ended when an event ended: at a moment of
// both clocks. A cause that began only after that is no excuse.
func (s *sandbox) excused(ended time.Duration, wall time.Time) bool {
	return before(s.releaseAsked, ended) || s.excusedOtherwise(ended, wall)
}

// excusedRelease is excused for the answer to a release: another one must have begun before.
func (s *sandbox) excusedRelease(e *Event) bool {
	return before(s.releaseAsked, e.Began) || s.excusedOtherwise(e.Ended, e.Wall)
}

func (s *sandbox) excusedOtherwise(ended time.Duration, wall time.Time) bool {
	end := s.claim().EndAt
	return before(s.deleted, ended) || !end.IsZero() && !wall.Before(end)
}

// before reports whether something happened, and before a moment.
func before(at, moment time.Duration) bool { return at != 0 && at < moment }

// stillThere looks for a live sandbox in all places that show it.
func (h *History) stillThere(s *sandbox, all *found) {
	claim := s.claim()
	if s.final == nil || s.final.Code != http.StatusOK {
		all.add("lost", "sandbox %s, answered to %s, is not there in the end: %+v", s.id, claim.Claim, s.final)
	}
	if s.listed == nil {
		all.add("lost", "sandbox %s, answered to %s, is not in the list", s.id, claim.Claim)
	}
	r := s.record()
	if r == nil {
		return // Lost reports it
	}
	if r.Phase != string(v1alpha1.SandboxRunning) {
		all.add("lost", "sandbox %s, answered to %s, is %q in its object: %s", s.id, claim.Claim, r.Phase, r.Reason)
	}
	if p := h.pods[r.PodUID]; p == nil || p.Deleting {
		all.add("lost", "sandbox %s, answered to %s, has lost its pod %s", s.id, claim.Claim, claim.Pod)
	}
}
