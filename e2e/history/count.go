package history

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Total adds up counts.
func Total(m map[string]int) (sum int) {
	for _, n := range m {
		sum += n
	}
	return sum
}

// list prints counts by name.
func list(m map[string]int) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, fmt.Sprintf("%s %d", k, m[k]))
	}
	return strings.Join(all, ", ")
}

// countFaults counts faults by what was done, and those of them that failed.
func (h *History) countFaults() (all, failed map[string]int) {
	all, failed = map[string]int{}, map[string]int{}
	for _, e := range h.faults {
		all[e.What]++
		if e.Error != "" {
			failed[e.What]++
		}
	}
	return all, failed
}

// printFaults prints what countFaults has counted.
func printFaults(b *strings.Builder, all, failed map[string]int) {
	fmt.Fprintf(b, "faults      %s\n", list(all))
	if len(failed) > 0 {
		fmt.Fprintf(b, "failed      %s\n", list(failed))
	}
}

// Summary is what happened in a history, for people: how much of what its suite counts.
func (h *History) Summary() string {
	switch h.Settings.Suite {
	case Soak:
		return CountTraffic(h).String()
	case Reaping:
		return CountReaps(h).String()
	}
	kinds, outcomes := map[string]int{}, map[string]int{}
	for i := range h.Events {
		e := &h.Events[i]
		kinds[string(e.Kind)]++
		if e.Kind == Request {
			outcomes[e.outcome()]++
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "events      %s\n", list(kinds))
	if len(outcomes) > 0 {
		fmt.Fprintf(&b, "requests    %s\n", list(outcomes))
	}
	if all, failed := h.countFaults(); len(all) > 0 {
		printFaults(&b, all, failed)
	}
	return b.String()
}
