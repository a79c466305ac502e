package history

import (
	"maps"
	"net/http"
	"slices"
)

// Double finds what may exist once and exists twice: one claim with two sandboxes, one
// sandbox of two claims, two sandboxes that hold or held one pod, two records of one
// sandbox, and two live sandboxes on one pod.
func Double(h *History) []Violation {
	var all found
	for _, name := range slices.Sorted(maps.Keys(h.claims)) {
		h.doubleAnswers(name, &all)
	}
	holder, shown := map[string]string{}, map[string]string{} // by UID and by name of the pod
	for _, s := range h.sorted {
		if names := s.claimedBy(); len(names) > 1 {
			all.add("double", "sandbox %s was answered to several claims: %q", s.id, names)
		}
		for i, r := range s.records {
			if i > 0 {
				all.add("double", "sandbox %s is on record as %s and as %s", s.id, podOf(s.records[0]), podOf(r))
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
		if got := h.claims[s.listed.Owner]; len(got) > 0 && len(s.claims) == 0 {
			all.add("double", "sandbox %s is live for claim %s, which was answered with %s", s.id, s.listed.Owner,
				got[0].Sandbox)
		}
	}
	for i := range h.Events {
		e := &h.Events[i]
		if got := h.claims[e.Claim]; e.Kind == Claim && e.Code == http.StatusGone && len(got) > 0 &&
			got[0].Sandbox != e.Sandbox {
			all.add("double", "claim %s was answered with sandbox %s, and then that %s is gone", e.Claim, got[0].Sandbox,
				e.Sandbox)
		}
	}
	return all
}

// doubleAnswers looks at the sandboxes that one claim was answered with.
func (h *History) doubleAnswers(claim string, all *found) {
	ids := map[string]bool{}
	for _, e := range h.claims[claim] {
		ids[e.Sandbox] = true
	}
	if len(ids) > 1 {
		all.add("double", "claim %s was answered with several sandboxes: %q", claim, slices.Sorted(maps.Keys(ids)))
	}
}

// Owners finds claims that were answered with a sandbox that was made for another claim.
func Owners(h *History) []Violation {
	var all found
	for _, name := range slices.Sorted(maps.Keys(h.claims)) {
		for _, e := range h.claims[name] {
			if e.Owner != name {
				all.add("double", "claim %s was answered with sandbox %s, which was made for claim %q", name, e.Sandbox, e.Owner)
			}
		}
	}
	return all
}
