package chart

import "github.com/berth-sandbox/berth/api/openapi"

// OfUsage returns the charts of what a sandbox has used in the hour before the latest of its measurements, of which the
// oldest is the first. One measurement is no history: there are no charts of it.
func OfUsage(measured []openapi.SandboxMetric) []Chart {
	if len(measured) < 2 {
		return nil
	}
	const column = span / Columns
	// The time is that of the sandbox's node, whose clock may differ from the one here.
	to := measured[len(measured)-1].Timestamp.Truncate(column).Add(column)
	from := to.Add(-span)
	cpu, memory := unknown("CPUs"), unknown("memory")
	var known [Columns]bool
	counts := map[int]float64{}
	for i := range measured {
		m := &measured[i]
		at, ok := columnOf(m.Timestamp, from)
		if !ok {
			continue
		}
		n := counts[at]
		used := m.CPUUsedPct / 100 * float64(max(1, m.CPUCount))
		cpu.Values[at] = (cmpNaN(cpu.Values[at], 0)*n + used) / (n + 1)
		memory.Values[at] = max(cmpNaN(memory.Values[at], 0), float64(m.MemUsed))
		counts[at], known[at] = n+1, true
	}
	all := []Chart{
		{ID: "chart-cpu", Title: "CPUs in use", Unit: Count, Lines: []Line{cpu}},
		{ID: "chart-memory", Title: "Memory in use", Unit: Bytes, Lines: []Line{memory}, Peak: true},
	}
	for i := range all {
		all[i].From, all[i].To, all[i].Known = from, to, known
	}
	return all
}
