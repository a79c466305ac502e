package chart

import (
	"math"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
)

// span is the time that the charts of a history show.
const span = time.Hour

// Of returns the charts of what happened in the hour before now.
func Of(h *openapi.History, now time.Time) []Chart {
	const column = span / Columns
	// The end of a column, so that a point does not move between columns as time passes.
	to := now.Truncate(column).Add(column)
	g := grid{h: h, from: to.Add(-span)}
	rate := func(name string, counts []*int) Line { return g.means(name, float64(h.StepSeconds), counts) }
	errors := func(name string, counts []*int) Line { return g.means(name, float64(h.StepSeconds)/60, counts) }
	measured := g.means("", 1, h.ClaimsClaimed)
	all := []Chart{
		{ID: "chart-claims", Title: "Claims", Unit: PerSecond, Lines: []Line{
			rate("granted", h.ClaimsClaimed), rate("waited for a pod", h.PoolWaited), rate("refused", h.ClaimsRefused),
		}},
		{ID: "chart-claim-time", Title: "Time of a claim", Unit: Seconds, Peak: true, Lines: []Line{
			g.peaks("half of them", h.ClaimP50Seconds), g.peaks("99 of 100", h.ClaimP99Seconds),
		}},
		{ID: "chart-warm", Title: "Claims that found a warm pod", Unit: Share, Lines: []Line{g.warm()}},
		{ID: "chart-live", Title: "Live sandboxes", Unit: Count, Lines: []Line{g.latest("live", h.Live)}},
		{ID: "chart-releases", Title: "Releases", Unit: PerSecond, Lines: []Line{
			rate("by a call", h.ReleasesCalled), rate("idle", h.ReleasesIdle), rate("other reasons", h.ReleasesOther),
		}},
		{ID: "chart-acknowledged", Title: "Time until all routers acknowledged a release", Unit: Seconds, Peak: true,
			Lines: []Line{g.peaks("99 of 100", h.ReleaseAcknowledgedP99Seconds)}},
		{ID: "chart-errors", Title: "Errors", Unit: PerMinute, Lines: []Line{
			errors("failed claims", h.ClaimsFailed), errors("failed idle pods", h.PodFailures),
		}},
	}
	for i := range all {
		all[i].From, all[i].To = g.from, to
		for j, v := range measured.Values {
			all[i].Known[j] = !math.IsNaN(v)
		}
	}
	return all
}

// grid puts the steps of a history into the columns of a chart.
type grid struct {
	h    *openapi.History
	from time.Time
}

// fill calls f with the column of each step that a chart shows, and the index of the step.
func (g *grid) fill(name string, steps int, f func(at *float64, i int)) Line {
	l := unknown(name)
	step := time.Duration(g.h.StepSeconds) * time.Second
	for i := range steps {
		// The middle of the step decides.
		middle := g.h.Until.Add(-time.Duration(steps-i)*step + step/2)
		if column, ok := columnOf(middle, g.from); ok {
			f(&l.Values[column], i)
		}
	}
	return l
}

// unknown returns a line of which nothing is known.
func unknown(name string) Line {
	l := Line{Name: name}
	for i := range l.Values {
		l.Values[i] = math.NaN()
	}
	return l
}

// columnOf returns the column of a time in a chart that begins at from, if the chart has it.
func columnOf(at, from time.Time) (column int, ok bool) {
	column = int(math.Floor(float64(at.Sub(from)) / float64(span/Columns)))
	return column, column >= 0 && column < Columns
}

// means returns the mean of the counts of each column, in a unit of which a step has so many.
func (g *grid) means(name string, units float64, counts []*int) Line {
	steps := map[*float64]float64{}
	return g.fill(name, len(counts), func(at *float64, i int) {
		if counts[i] != nil {
			n := steps[at]
			*at = (cmpNaN(*at, 0)*n + float64(*counts[i])/units) / (n + 1)
			steps[at] = n + 1
		}
	})
}

// peaks returns the highest value in each column.
func (g *grid) peaks(name string, values []*float64) Line {
	return g.fill(name, len(values), func(at *float64, i int) {
		if v := values[i]; v != nil {
			*at = max(cmpNaN(*at, *v), *v)
		}
	})
}

// latest returns the latest value in each column.
func (g *grid) latest(name string, counts []*int) Line {
	return g.fill(name, len(counts), func(at *float64, i int) {
		if counts[i] != nil {
			*at = float64(*counts[i])
		}
	})
}

// warm returns the share of the claims that found warm pods, of those that asked a pool for one.
func (g *grid) warm() Line {
	found, waited, refused := g.means("", 1, g.h.PoolWarm), g.means("", 1, g.h.PoolWaited), g.means("", 1, g.h.PoolRefused)
	l := Line{Name: "warm"}
	for i, n := range found.Values {
		l.Values[i] = n / (n + waited.Values[i] + refused.Values[i]) // not a number without claims
	}
	return l
}
