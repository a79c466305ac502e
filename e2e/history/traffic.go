package history

import (
	"cmp"
	"maps"
	"net/http"
	"slices"
	"time"
)

// This file has the judges of requests and addresses.

// WrongPod finds requests that reached a pod which does not hold their sandbox: what the
// pod received, and what the client was answered.
//
// One case is no violation but a stray: after the sandbox can have ended, a pod that never
// held any sandbox has its address. That pod was warm when a pod was deleted by force, and
// holds nothing of a sandbox, before or after. Count counts strays.
func WrongPod(h *History) []Violation {
	var all found
	for _, e := range h.of[Received] {
		if !h.rightPod(e) && !h.stray(e, e.Began) {
			all.add("wrong pod", "request %s for %s was received by %s at %v", e.Request, h.describe(e.Sandbox), podOf(e),
				e.Began)
		}
	}
	for _, e := range h.of[Request] {
		if !h.rightPod(e) && !h.stray(e, e.Ended) {
			all.add("wrong pod", "request %s for %s, through %s from %v to %v, was answered by %s for sandbox %s",
				e.Request, h.describe(e.Sandbox), e.Gateway, e.Began, e.Ended, podOf(e), cmp.Or(e.Answered, e.Sandbox))
		}
	}
	return all
}

// rightPod reports whether no part of the event names another pod, or another sandbox, than
// the one that was asked for.
func (h *History) rightPod(e *Event) bool {
	if e.Pod == "" && e.PodUID == "" && e.Address == "" {
		return true // no pod
	}
	b := h.binding(e.Sandbox)
	if b == nil {
		return false
	}
	same := func(said, known string) bool { return said == "" || known == "" || said == known }
	return same(e.PodUID, b.PodUID) && same(e.Pod, b.Pod) && same(e.Address, b.Address) && same(e.Answered, e.Sandbox)
}

// stray reports whether a pod that never held a sandbox was reached, at the latest then, for
// a sandbox that may have ended.
func (h *History) stray(e *Event, then time.Duration) bool {
	s := h.sandboxes[e.Sandbox]
	return e.PodUID != "" && h.holder[e.PodUID] == nil && s != nil && s.record != nil && s.overAt(then)
}

// Twice finds requests that were received more than once: by a second pod after a retry, or
// again by the same pod.
func Twice(h *History) []Violation {
	var all found
	for _, e := range h.of[Request] {
		if receipts := h.received[e.Request]; len(receipts) > 1 {
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
	for _, e := range h.of[Request] {
		if e.served() && len(h.received[e.Request]) == 0 {
			all.add("unmatched", "request %s for sandbox %s was answered %d by %s, and no pod has received it",
				e.Request, e.Sandbox, e.Code, podOf(e))
		}
	}
	for _, e := range h.of[Received] {
		if r := h.requests[e.Request]; r == nil || r.Sandbox != e.Sandbox || r.Began > e.Began {
			all.add("unmatched", "%s received request %q for sandbox %s at %v, and no client had sent it",
				podOf(e), e.Request, e.Sandbox, e.Began)
		}
	}
	return all
}

// served reports whether a sandbox, and not Berth, answered.
func (e *Event) served() bool { return e.Code != 0 && e.Reason == "" }

// CameBack finds requests that reached a pod although they were sent after their sandbox
// was gone for every router. That is from the moment at which a release was answered with no
// router outstanding, else from Settings.MaxStale after its answer.
func CameBack(h *History) []Violation {
	var all found
	for _, e := range h.of[Request] {
		if receipts := h.received[e.Request]; h.after(e) && (e.served() || len(receipts) > 0) {
			all.add("came back",
				"request %s for %s, sent by %s at %v, %v after it was gone for every router, was answered %d and received by %s",
				e.Request, h.describe(e.Sandbox), e.Gateway, e.Began, e.Began-h.sandboxes[e.Sandbox].gone, e.Code,
				podsOf(receipts))
		}
	}
	return all
}

// causes are the reasons of an end whose cause the history shows, so that it is known since
// when the sandbox may have been over.
var causes = []string{"", "Killed", "EndTime", "PodDeleted"}

// EarlyReuse finds addresses that had another sandbox before the connect window had passed
// since the first event that can have ended the sandbox before it.
func EarlyReuse(h *History) []Violation {
	var all found
	at := h.byAddress()
	for _, address := range slices.Sorted(maps.Keys(at)) {
		for i, later := range at[address] {
			got := later.claim.Ended
			for _, earlier := range at[address][:i] {
				switch reason := earlier.record.Reason; {
				case !slices.Contains(causes, reason):
				case earlier.mayEnd == 0:
					all.add("too early", "sandbox %s got address %s at %v, and nothing has ended sandbox %s there", later.id, address,
						got, earlier.id)
				case got < earlier.mayEnd+h.Settings.Window:
					all.add("too early",
						"sandbox %s got address %s at %v, %v after sandbox %s there can have ended (%s); the connect window is %v",
						later.id, address, got, got-earlier.mayEnd, earlier.id, reason, h.Settings.Window)
				}
			}
		}
	}
	return all
}

// byAddress are the sandboxes on record that were answered, by address, in the order of the
// answers.
func (h *History) byAddress() map[string][]*sandbox {
	at := map[string][]*sandbox{}
	for _, s := range h.sorted {
		if s.record != nil && s.claim != nil {
			at[s.record.Address] = append(at[s.record.Address], s)
		}
	}
	for _, all := range at {
		slices.SortStableFunc(all, func(a, b *sandbox) int { return byEnd(a.claim, b.claim) })
	}
	return at
}

// Unserved finds requests that failed although nothing was wrong. Before its release each
// request for a sandbox is answered by it. From then on 410 is right too, and 502 for a
// request that was sent before the release was answered: it was admitted, and the pod ended
// while it was under way.
func Unserved(h *History) []Violation {
	var all found
	for _, e := range h.of[Request] {
		s := h.sandboxes[e.Sandbox]
		released := s != nil && s.gone != 0
		switch {
		case e.Error != "":
		case e.Code == http.StatusOK,
			e.Code == http.StatusGone && released,
			e.Code == http.StatusBadGateway && released && !h.after(e):
			continue
		}
		all.add("unserved",
			"request %s for sandbox %s, sent at %v, was answered %d %s %s (released: %v, sent after that: %v)",
			e.Request, e.Sandbox, e.Began, e.Code, e.Reason, e.Error, released, h.after(e))
	}
	return all
}
