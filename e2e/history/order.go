package history

import (
	"cmp"
	"slices"
)

// Order finds claims that waited and were answered before one that had waited for longer,
// or not at all.
func Order(h *History) []Violation {
	var waited []*Event
	for i := range h.Events {
		if h.Events[i].Kind == Waiting {
			waited = append(waited, &h.Events[i])
		}
	}
	slices.SortStableFunc(waited, func(a, b *Event) int { return cmp.Compare(a.Began, b.Began) })
	var all found
	var last *Event
	for _, w := range waited {
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
