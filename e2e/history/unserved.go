package history

import "net/http"

// Unserved finds requests that failed although nothing was wrong. Before its release each
// request for a sandbox is answered by it. From then on 410 is right too, and 502 for a
// request that was sent before the release was answered: it was admitted, and the pod ended
// while it was under way.
func Unserved(h *History) []Violation {
	var all found
	for i := range h.Events {
		e := &h.Events[i]
		if e.Kind != Request {
			continue
		}
		if e.Error != "" {
			all.add("unserved", "request %s for sandbox %s failed: %s", e.Request, e.Sandbox, e.Error)
			continue
		}
		s := h.sandboxes[e.Sandbox]
		released := s != nil && s.gone != 0
		switch {
		case e.Code == http.StatusOK:
		case e.Code == http.StatusGone && released:
		case e.Code == http.StatusBadGateway && released && !h.after(e):
		default:
			all.add("unserved", "request %s for sandbox %s, sent at %v, was answered %d %s (released: %v, sent after that: %v)",
				e.Request, e.Sandbox, e.Began, e.Code, e.Reason, released, h.after(e))
		}
	}
	return all
}
