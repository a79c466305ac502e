package history

import "net/http"

// Revived finds sandboxes that the API shows, or that their key claims, after their release
// was confirmed.
func Revived(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		if s.claim() == nil || s.releaseConfirmed == 0 {
			continue
		}
		for _, e := range s.calls {
			if e.Kind == Read && e.Code == http.StatusOK && e.Began > s.releaseConfirmed {
				all.add("back", "sandbox %s was seen live at %v, after its release had been confirmed at %v", s.id, e.Began,
					s.releaseConfirmed)
			}
		}
		for _, e := range s.claims {
			if e.Began > s.releaseConfirmed {
				all.add("back", "claim %s was answered with sandbox %s at %v, after its release had been confirmed at %v",
					e.Claim, s.id, e.Ended, s.releaseConfirmed)
			}
		}
		if s.shown() {
			all.add("back", "sandbox %s, answered to %s, is still live, and its release was confirmed at %v", s.id,
				s.claim().Claim, s.releaseConfirmed)
		}
	}
	return all
}

// shown reports whether the API shows the sandbox at the end.
func (s *sandbox) shown() bool {
	return s.listed != nil || s.final != nil && s.final.Code == http.StatusOK
}
