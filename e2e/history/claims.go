package history

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// This file has the judges of what callers of the API get, and of what there is at the end.

// Double finds what may exist once and exists twice: one claim with two sandboxes, one
// sandbox of two claims, two sandboxes that hold or held one pod, two records of one
// sandbox, and two live sandboxes on one pod.
func Double(h *History) []Violation {
	var all found
	for _, name := range slices.Sorted(maps.Keys(h.claims)) {
		if ids := distinct(h.claims[name], func(e *Event) string { return e.Sandbox }); len(ids) > 1 {
			all.add("double", "claim %s was answered with several sandboxes: %q", name, ids)
		}
	}
	holder, shown := map[string]string{}, map[string]string{} // by UID and by name of the pod
	for _, s := range h.sorted {
		if names := distinct(s.claims, func(e *Event) string { return e.Claim }); len(names) > 1 {
			all.add("double", "sandbox %s was answered to several claims: %q", s.id, names)
		}
		for i, r := range s.of[Record] {
			if i > 0 {
				all.add("double", "sandbox %s is on record as %s and as %s", s.id, podOf(s.of[Record][0]), podOf(r))
			}
			if other, held := holder[r.PodUID]; held {
				all.add("double", "pod %s (UID %s) holds or held sandboxes %s and %s", r.Pod, r.PodUID, other, s.id)
			}
			holder[r.PodUID] = s.id
		}
		if s.listed == nil {
			continue
		}
		if other, held := shown[s.listed.Pod]; held {
			all.add("double", "sandboxes %s and %s are both live on pod %s", other, s.id, s.listed.Pod)
		}
		shown[s.listed.Pod] = s.id
		if got := h.claims[s.listed.Owner]; len(got) > 0 && s.claim == nil {
			all.add("double", "sandbox %s is live for claim %s, which was answered with %s", s.id, s.listed.Owner,
				got[0].Sandbox)
		}
	}
	for _, e := range h.of[Claim] {
		if got := h.claims[e.Claim]; e.Code == http.StatusGone && len(got) > 0 && got[0].Sandbox != e.Sandbox {
			all.add("double", "claim %s was answered with sandbox %s, and then that %s is gone", e.Claim, got[0].Sandbox,
				e.Sandbox)
		}
	}
	return all
}

// distinct returns the different names in some events, sorted.
func distinct(all []*Event, name func(*Event) string) []string {
	names := map[string]bool{}
	for _, e := range all {
		names[name(e)] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// Owners finds claims that were answered with a sandbox that was made for another claim.
func Owners(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		for _, e := range s.claims {
			if e.Owner != e.Claim {
				all.add("double", "claim %s was answered with sandbox %s, which was made for claim %q", e.Claim, s.id, e.Owner)
			}
		}
	}
	return all
}

// Lost finds sandboxes that were answered and have no record, or whose record names another
// pod than the answer.
func Lost(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		for _, e := range s.claims {
			switch {
			case s.record == nil:
				all.add("lost", "sandbox %s, answered to claim %s, has no Sandbox object", s.id, e.Claim)
			case e.Pod != "" && s.record.Pod != e.Pod:
				all.add("lost", "sandbox %s was answered as pod %s, and its record names pod %s", s.id, e.Pod, s.record.Pod)
			}
		}
	}
	return all
}

// Alive finds sandboxes that were not there although they had to be. From its answer on a
// sandbox is live until a release was asked for, its time is over, or the test has deleted
// its pod: to everyone who asks, and at the end in the API's list, as an object and as a pod.
func Alive(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.claim == nil {
			continue
		}
		for _, e := range s.of[Read] {
			if e.Code == http.StatusNotFound && !s.excused(e.Ended, e.Ended, e.Wall) {
				all.lost(s, "was not found at %v: %s", e.Ended, e.Reason)
			}
		}
		for _, e := range s.of[Release] {
			// Another release must have begun before.
			if e.Code == http.StatusNotFound &&
				(e.Reason == string(apierror.SandboxNotFound) || !s.excused(e.Began, e.Ended, e.Wall)) {
				all.lost(s, "was not there to be released at %v: %s", e.Ended, e.Reason)
			}
		}
		if h.pool != nil && !s.excused(h.end, h.end, h.pool.Wall) {
			h.stillThere(s, &all)
		}
	}
	for _, e := range h.of[Claim] {
		if got := h.claims[e.Claim]; e.Code == http.StatusGone && len(got) > 0 {
			if s := h.sandboxes[got[0].Sandbox]; !s.excused(e.Ended, e.Ended, e.Wall) {
				all.lost(s, "is gone by a later answer to %s at %v: %s", e.Claim, e.Ended, e.Error)
			}
		}
	}
	return all
}

// lost adds an answered sandbox that was not there.
func (f *found) lost(s *sandbox, format string, args ...any) {
	f.add("lost", "sandbox %s, answered to %s, %s", s.id, s.claim.Claim, fmt.Sprintf(format, args...))
}

// excused reports whether the sandbox may have ended when an event ended, at a moment of both
// clocks: a release was asked for before asked, or there was another cause. A cause that
// began only after that is no excuse.
func (s *sandbox) excused(asked, ended time.Duration, wall time.Time) bool {
	before := func(at, moment time.Duration) bool { return at != 0 && at < moment }
	end := s.claim.EndAt
	return before(s.releaseAsked, asked) || before(s.deleted, ended) || !end.IsZero() && !wall.Before(end)
}

// stillThere looks for a live sandbox in all places that show it.
func (h *History) stillThere(s *sandbox, all *found) {
	if s.final == nil || s.final.Code != http.StatusOK {
		all.lost(s, "is not there in the end: %+v", s.final)
	}
	if s.listed == nil {
		all.lost(s, "is not in the list")
	}
	if s.record == nil {
		return // Lost reports it
	}
	if !s.inPhase(running) {
		all.lost(s, "is %q in its object: %s", s.record.Phase, s.record.Reason)
	}
	if p := h.pods[s.record.PodUID]; p == nil || p.Deleting {
		all.lost(s, "has lost its pod %s", s.claim.Pod)
	}
}

const running = string(v1alpha1.SandboxRunning)

// Revived finds sandboxes that the API shows, or that their key claims, after their release
// was confirmed.
func Revived(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.claim == nil || s.releaseConfirmed == 0 {
			continue
		}
		back := func(format string, args ...any) {
			all.add("back", "%s, after the release of sandbox %s had been confirmed at %v", fmt.Sprintf(format, args...), s.id,
				s.releaseConfirmed)
		}
		for _, e := range s.of[Read] {
			if e.Code == http.StatusOK && e.Began > s.releaseConfirmed {
				back("sandbox %s was seen live at %v", s.id, e.Began)
			}
		}
		for _, e := range s.claims {
			if e.Began > s.releaseConfirmed {
				back("claim %s was answered at %v", e.Claim, e.Ended)
			}
		}
		if s.shown() {
			back("sandbox %s, answered to %s, is still live", s.id, s.claim.Claim)
		}
	}
	return all
}

// shown reports whether the API shows the sandbox at the end.
func (s *sandbox) shown() bool {
	return s.listed != nil || s.final != nil && s.final.Code == http.StatusOK
}

// Leaked finds, at the end, sandboxes that are live and that no caller has or can still
// get, sandboxes that are over and still hold something, pods that are neither warm nor a
// sandbox's, and wrong counts in the pool's status.
//
// A claim under a key can be repeated, so its caller can still get the sandbox. A claim
// without a key that was never answered cannot: it lives no longer than its timeout.
func Leaked(h *History) []Violation {
	var all found
	keys := map[string]string{} // by claim
	for _, e := range h.of[Claim] {
		keys[e.Claim] = e.Key
	}
	for _, s := range h.sorted {
		if s.claim != nil && h.pool != nil && s.excused(h.end, h.end, h.pool.Wall) {
			h.leakedOver(s, &all)
		}
		if s.listed == nil {
			if s.inPhase(running) {
				all.add("leaked", "the object of sandbox %s says %s, and it is not in the list", s.id, running)
			}
			continue
		}
		key, asked := keys[s.listed.Owner]
		switch {
		case !asked:
			all.add("leaked", "sandbox %s is live, and no caller has claimed it: %q", s.id, s.listed.Owner)
		case s.claim == nil && key == "":
			all.add("leaked", "sandbox %s is live, and %s, who has no key, was never answered", s.id, s.listed.Owner)
		}
		if !s.inPhase(running) {
			all.add("lost", "sandbox %s is in the list, and its object does not say %s", s.id, running)
		}
	}
	if h.pool != nil {
		h.leakedPods(&all)
	}
	return all
}

// leakedOver judges an answered sandbox that is over.
func (h *History) leakedOver(s *sandbox, all *found) {
	if s.shown() && s.releaseConfirmed == 0 { // else Revived reports it
		all.add("leaked",
			"sandbox %s, answered to %s, is over (release asked at %v, pod deleted at %v, end %v), and still live",
			s.id, s.claim.Claim, s.releaseAsked, s.deleted, s.claim.EndAt)
	}
	if s.inPhase(running) {
		all.add("leaked", "sandbox %s is over, and its object says %s", s.id, running)
	}
	if s.inPhase(string(v1alpha1.SandboxEnded)) && h.pods[s.record.PodUID] != nil {
		all.add("leaked", "sandbox %s has ended, and its pod %s is there", s.id, s.record.Pod)
	}
}

// leakedPods judges the pods of the pool, and its status.
func (h *History) leakedPods(all *found) {
	warm := 0
	for _, p := range h.of[Pod] {
		s := h.holder[p.PodUID]
		switch {
		case s != nil && (s.listed != nil || s.inPhase(string(v1alpha1.SandboxReleased))):
		case s != nil:
			all.add("leaked", "pod %s held sandbox %s, which is %s, and is still there", p.Pod, s.id, s.record.Phase)
		case !p.Deleting && p.Ready:
			warm++
		default:
			all.add("leaked", "pod %s is neither warm nor a sandbox's", p.Pod)
		}
	}
	c := h.pool.Counts
	if warm != c.Warm || warm != c.Wanted {
		all.add("leaked", "%d pods are warm, the pool's status says %d, and it asks for %d", warm, c.Warm, c.Wanted)
	}
	if listed := len(distinct(h.of[Listed], func(e *Event) string { return e.Sandbox })); listed != c.Claimed {
		all.add("leaked", "%d sandboxes are listed, and the pool's status says %d", listed, c.Claimed)
	}
}

// Order finds claims that waited and were answered before one that had waited for longer,
// or not at all.
func Order(h *History) []Violation {
	var all found
	var last *Event
	for _, w := range slices.SortedStableFunc(slices.Values(h.of[Waiting]), byBegin) {
		got := h.claims[w.Claim]
		if len(got) == 0 {
			all.add("order", "claim %s has waited and was never answered", w.Claim)
			continue
		}
		if last != nil && got[0].Ended < last.Ended {
			all.add("order", "claim %s came after %s and was answered before it", w.Claim, last.Claim)
		}
		last = got[0]
	}
	return all
}

// expected are the answers that a caller of the API may get, whatever happens to allocators,
// beside none and 503.
var expected = map[Kind][]int{
	Claim:   {http.StatusCreated, http.StatusGone, http.StatusTooManyRequests},
	Read:    {http.StatusOK, http.StatusNotFound},
	Release: {http.StatusNoContent, http.StatusNotFound},
}

// Refused finds calls that were answered with a status which no caller must get.
func Refused(h *History) []Violation {
	var all found
	for _, kind := range slices.Sorted(maps.Keys(expected)) {
		for _, e := range h.of[kind] {
			if e.Code != 0 && e.Code != http.StatusServiceUnavailable && !slices.Contains(expected[kind], e.Code) {
				all.add("refused", "%s of %s%s at %v was answered %d: %s", kind, e.Claim, e.Sandbox, e.Ended, e.Code, e.Error)
			}
		}
	}
	return all
}
