package history

import (
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Leaked finds, at the end, sandboxes that are live and that no caller has or can still
// get, sandboxes that are over and still hold something, pods that are neither warm nor a
// sandbox's, and wrong counts in the pool's status.
//
// A claim under a key can be repeated, so its caller can still get the sandbox. A claim
// without a key that was never answered cannot: it lives no longer than its timeout.
func Leaked(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		h.leakedOver(s, &all)
	}
	h.leakedSandboxes(&all)
	h.leakedPods(&all)
	return all
}

// leakedOver judges an answered sandbox that is over.
func (h *History) leakedOver(s *sandbox, all *found) {
	claim, r := s.claim(), s.record()
	if claim == nil || h.pool == nil || !s.excused(h.end, h.pool.Wall) {
		return
	}
	if s.shown() && s.releaseConfirmed == 0 { // else Revived reports it
		all.add("leaked",
			"sandbox %s, answered to %s, is over (release asked at %v, pod deleted at %v, end %v), and still live",
			s.id, claim.Claim, s.releaseAsked, s.deleted, claim.EndAt)
	}
	if r == nil {
		return
	}
	if r.Phase == string(v1alpha1.SandboxRunning) {
		all.add("leaked", "sandbox %s is over, and its object says %s", s.id, r.Phase)
	}
	if h.pods[r.PodUID] != nil && r.Phase == string(v1alpha1.SandboxEnded) {
		all.add("leaked", "sandbox %s has ended, and its pod %s is there", s.id, r.Pod)
	}
}

// leakedSandboxes judges the API's list against the claims and the records.
func (h *History) leakedSandboxes(all *found) {
	keys := map[string]string{} // by claim
	for i := range h.Events {
		if e := &h.Events[i]; e.Kind == Claim {
			keys[e.Claim] = e.Key
		}
	}
	for _, s := range h.sorted {
		r := s.record()
		if s.listed == nil {
			if r != nil && r.Phase == string(v1alpha1.SandboxRunning) {
				all.add("leaked", "the object of sandbox %s says %s, and it is not in the list", s.id, r.Phase)
			}
			continue
		}
		key, asked := keys[s.listed.Owner]
		switch {
		case !asked:
			all.add("leaked", "sandbox %s is live, and no caller has claimed it: %q", s.id, s.listed.Owner)
		case len(s.claims) == 0 && key == "":
			all.add("leaked", "sandbox %s is live, and %s, who has no key, was never answered", s.id, s.listed.Owner)
		}
		if r == nil || r.Phase != string(v1alpha1.SandboxRunning) {
			all.add("lost", "sandbox %s is in the list, and its object does not say %s", s.id, v1alpha1.SandboxRunning)
		}
	}
}

// leakedPods judges the pods of the pool, and its status.
func (h *History) leakedPods(all *found) {
	if h.pool == nil {
		return
	}
	warm, listed := 0, 0
	for _, s := range h.sorted {
		if s.listed != nil {
			listed++
		}
	}
	for i := range h.Events {
		p := &h.Events[i]
		if p.Kind != Pod {
			continue
		}
		id, held := h.holder[p.PodUID]
		switch {
		case held && (h.sandboxes[id].listed != nil || h.sandboxes[id].record().Phase == string(v1alpha1.SandboxReleased)):
		case held:
			all.add("leaked", "pod %s held sandbox %s, which is %s, and is still there", p.Pod, id,
				h.sandboxes[id].record().Phase)
		case !p.Deleting && p.Ready:
			warm++
		default:
			all.add("leaked", "pod %s is neither warm nor a sandbox's", p.Pod)
		}
	}
	if c := h.pool.Counts; warm != c.Warm || warm != c.Wanted {
		all.add("leaked", "%d pods are warm, the pool's status says %d, and it asks for %d", warm, c.Warm, c.Wanted)
	}
	if c := h.pool.Counts; listed != c.Claimed {
		all.add("leaked", "%d sandboxes are listed, and the pool's status says %d", listed, c.Claimed)
	}
}
