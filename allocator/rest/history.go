package rest

import (
	"math"
	"net/http"

	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/api/openapi"
)

// history answers with what happened in the last hour of this leader, a list for each number.
func (a *api) history(w *reply, _ *http.Request) error {
	ring, err := a.Allocator.History()
	if err != nil {
		return err
	}
	points, since, until := ring.Points()
	count := func(of func(*history.Point) uint32) []*int {
		return column(points, func(p *history.Point) (int, bool) { return int(of(p)), true })
	}
	quantile := func(of func(*history.Point) float64) []*float64 {
		return column(points, func(p *history.Point) (float64, bool) {
			v := of(p)
			return math.Round(v*1e5) / 1e5, !math.IsNaN(v)
		})
	}
	return writeJSON(w, http.StatusOK, openapi.History{
		Since: since.UTC(), Until: until.UTC(), StepSeconds: int(history.Step.Seconds()),
		ClaimsClaimed:                 count(func(p *history.Point) uint32 { return p.Claimed }),
		ClaimsRefused:                 count(func(p *history.Point) uint32 { return p.Refused }),
		ClaimsFailed:                  count(func(p *history.Point) uint32 { return p.Failed }),
		PoolWarm:                      count(func(p *history.Point) uint32 { return p.Warm }),
		PoolWaited:                    count(func(p *history.Point) uint32 { return p.Waited }),
		PoolRefused:                   count(func(p *history.Point) uint32 { return p.Empty }),
		ReleasesCalled:                count(func(p *history.Point) uint32 { return p.Called }),
		ReleasesIdle:                  count(func(p *history.Point) uint32 { return p.Idle }),
		ReleasesOther:                 count(func(p *history.Point) uint32 { return p.Other }),
		PodFailures:                   count(func(p *history.Point) uint32 { return p.PodsFailed }),
		ClaimP50Seconds:               quantile(func(p *history.Point) float64 { return p.ClaimP50 }),
		ClaimP99Seconds:               quantile(func(p *history.Point) float64 { return p.ClaimP99 }),
		ReleaseAcknowledgedP99Seconds: quantile(func(p *history.Point) float64 { return p.AcknowledgedP99 }),
		Live:                          column(points, func(p *history.Point) (int, bool) { return p.Live, p.Live >= 0 }),
	})
}

// column returns a value of each point, nil for what is not known.
func column[T any](points []history.Point, of func(*history.Point) (T, bool)) []*T {
	all := make([]*T, len(points))
	for i := range points {
		if v, known := of(&points[i]); known && points[i].Measured {
			all[i] = &v
		}
	}
	return all
}
