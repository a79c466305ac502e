package history

import (
	"cmp"
	"time"
)

// WrongPod finds requests that reached a pod which does not hold their sandbox: what the
// pod received, and what the client was answered.
//
// One case is no violation but a stray: after the sandbox can have ended, a pod that never
// held any sandbox has its address. That pod was warm when a pod was deleted by force, and
// holds nothing of a sandbox, before or after. Count counts strays.
func WrongPod(h *History) []Violation {
	var all found
	for i := range h.Events {
		e := &h.Events[i]
		if e.Kind != Request && e.Kind != Received || h.rightPod(e) || h.stray(e) {
			continue
		}
		if e.Kind == Received {
			all.add("wrong pod", "request %s for %s was received by %s at %v", e.Request, h.describe(e.Sandbox), podOf(e),
				e.Began)
			continue
		}
		all.add("wrong pod", "request %s for %s, through %s from %v to %v, was answered by %s for sandbox %s",
			e.Request, h.describe(e.Sandbox), e.Gateway, e.Began, e.Ended, podOf(e), cmp.Or(e.Answered, e.Sandbox))
	}
	return all
}

// rightPod reports whether no part of the event names another pod, or another sandbox, than
// the one that was asked for.
func (h *History) rightPod(e *Event) bool {
	if e.Pod == "" && e.PodUID == "" && e.Address == "" {
		return true // no pod
	}
	b := h.binding(h.sandboxes[e.Sandbox])
	if b == nil {
		return false
	}
	same := func(said, known string) bool { return said == "" || known == "" || said == known }
	return same(e.PodUID, b.PodUID) && same(e.Pod, b.Pod) && same(e.Address, b.Address) && same(e.Answered, e.Sandbox)
}

// stray reports whether a pod that never held a sandbox was reached for one that may have
// ended.
func (h *History) stray(e *Event) bool {
	s := h.sandboxes[e.Sandbox]
	_, held := h.holder[e.PodUID]
	return e.PodUID != "" && !held && s != nil && s.record() != nil && s.overAt(e.seen())
}

// seen is when a request was at its pod, at the latest.
func (e *Event) seen() time.Duration {
	if e.Kind == Received {
		return e.Began
	}
	return e.Ended
}
