package history

import (
	"cmp"
	"fmt"
	"strings"
)

// Twice finds requests that were received more than once: by a second pod after a retry, or
// again by the same pod.
func Twice(h *History) []Violation {
	var all found
	for i := range h.Events {
		e := &h.Events[i]
		if receipts := h.received[e.Request]; e.Kind == Request && len(receipts) > 1 {
			all.add("twice", "request %s for sandbox %s was received %d times: %s", e.Request, e.Sandbox, len(receipts),
				podsOf(receipts))
		}
	}
	return all
}

// Unmatched finds requests that a pod received and no client had sent to that sandbox, and
// answers of sandboxes to requests that no pod received. The first would be a request that
// was changed on its way. Either can be a fault of the test.
func Unmatched(h *History) []Violation {
	var all found
	for i := range h.Events {
		switch e := &h.Events[i]; e.Kind {
		case Request:
			if e.served() && len(h.received[e.Request]) == 0 {
				all.add("unmatched", "request %s for sandbox %s was answered %d by %s, and no pod has received it",
					e.Request, e.Sandbox, e.Code, podOf(e))
			}
		case Received:
			if r := h.requests[e.Request]; r == nil || r.Sandbox != e.Sandbox || r.Began > e.Began {
				all.add("unmatched", "%s received request %q for sandbox %s at %v, and no client had sent it",
					podOf(e), e.Request, e.Sandbox, e.Began)
			}
		}
	}
	return all
}

// served reports whether a sandbox, and not Berth, answered.
func (e *Event) served() bool { return e.Code != 0 && e.Reason == "" }

// podOf names the pod of an event.
func podOf(e *Event) string {
	var names []string
	if e.Pod != "" {
		names = append(names, e.Pod)
	}
	if e.PodUID != "" {
		names = append(names, "UID "+e.PodUID)
	}
	if e.Address != "" {
		names = append(names, "at "+e.Address)
	}
	return cmp.Or(strings.TrimSpace("pod "+strings.Join(names, ", ")), "no pod")
}

// podsOf names the pods that received a request, and when.
func podsOf(receipts []*Event) string {
	var all []string
	for _, r := range receipts {
		all = append(all, fmt.Sprintf("%s at %v", podOf(r), r.Began))
	}
	return cmp.Or(strings.Join(all, "; "), "no pod")
}
