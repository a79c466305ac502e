package history

import (
	"cmp"
	"maps"
	"slices"
)

// causes are the reasons of an end whose cause the history shows, so that it is known since
// when the sandbox may have been over.
var causes = []string{"", "Killed", "Timeout", "PodDeleted", "PodGone"}

// EarlyReuse finds addresses that had another sandbox before the connect window had passed
// since the first event that can have ended the sandbox before it.
func EarlyReuse(h *History) []Violation {
	var all found
	at := h.byAddress()
	for _, address := range slices.Sorted(maps.Keys(at)) {
		for i, later := range at[address] {
			got := later.claim().Ended
			for _, earlier := range at[address][:i] {
				reason := earlier.record().Reason
				switch {
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
		if r := s.record(); r != nil && s.claim() != nil {
			at[r.Address] = append(at[r.Address], s)
		}
	}
	for _, all := range at {
		slices.SortStableFunc(all, func(a, b *sandbox) int { return cmp.Compare(a.claim().Ended, b.claim().Ended) })
	}
	return at
}
