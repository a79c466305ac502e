package history

// CameBack finds requests that reached a pod although they were sent after their sandbox
// was gone for every router. That is from the moment at which a release was answered with no
// router outstanding, else from Settings.MaxStale after its answer.
func CameBack(h *History) []Violation {
	var all found
	for i := range h.Events {
		e := &h.Events[i]
		if !h.after(e) {
			continue
		}
		if receipts := h.received[e.Request]; e.served() || len(receipts) > 0 {
			gone := h.sandboxes[e.Sandbox].gone
			all.add("came back",
				"request %s for %s, sent by %s at %v, %v after it was gone for every router, was answered %d and received by %s",
				e.Request, h.describe(e.Sandbox), e.Gateway, e.Began, e.Began-gone, e.Code, podsOf(receipts))
		}
	}
	return all
}

// after reports whether a request was sent after its sandbox was gone for every router.
func (h *History) after(e *Event) bool {
	s := h.sandboxes[e.Sandbox]
	return e.Kind == Request && s != nil && s.gone != 0 && e.Began > s.gone
}
