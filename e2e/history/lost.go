package history

// Lost finds sandboxes that were answered and have no record, or whose record names another
// pod than the answer.
func Lost(h *History) []Violation {
	var all found
	for _, s := range h.sorted {
		r := s.record()
		for _, e := range s.claims {
			switch {
			case r == nil:
				all.add("lost", "sandbox %s, answered to claim %s, has no Sandbox object", s.id, e.Claim)
			case e.Pod != "" && r.Pod != e.Pod:
				all.add("lost", "sandbox %s was answered as pod %s, and its record names pod %s", s.id, e.Pod, r.Pod)
			}
		}
	}
	return all
}
