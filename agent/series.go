package agent

import (
	"context"
	"net/http"
	"sync"
	"time"
)

const (
	// seriesStep is the time between two points of the series, and seriesSize how many are kept: an hour in 10 KB.
	seriesStep = 15 * time.Second
	seriesSize = 240
)

// series keeps the latest measurements of the sandbox.
type series struct {
	mu   sync.Mutex
	next int // number of the next point
	ring [seriesSize]point
}

// point is a measurement: Unix time, percent of CPU, and bytes of memory, cache and disk.
type point [5]float64

func (s *series) add(m *Metrics) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ring[s.next%seriesSize] = point{
		float64(m.Timestamp), float64(int(100*m.CPUUsedPct)) / 100,
		float64(m.MemUsed), float64(m.MemCache), float64(m.DiskUsed),
	}
	s.next++
}

// points returns the points, the oldest first.
func (s *series) points() []point {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]point, 0, min(s.next, seriesSize))
	for n := max(0, s.next-seriesSize); n < s.next; n++ {
		all = append(all, s.ring[n%seriesSize])
	}
	return all
}

// KeepSeries measures the sandbox every 15 s from its configuration on, until ctx ends.
func (a *Agent) KeepSeries(ctx context.Context) {
	select {
	case <-a.configured:
	case <-ctx.Done():
		return
	}
	step := time.NewTicker(seriesStep)
	defer step.Stop()
	for {
		select {
		case now := <-step.C:
			if m, err := a.meter.read(now); err == nil { // GET /metrics says what fails
				a.series.add(m)
			}
		case <-ctx.Done():
			return
		}
	}
}

// History is the JSON body of GET /metrics/history: what is measured now, and the measurements before, the oldest
// first.
type History struct {
	*Metrics
	Points []point `json:"points"`
}

func (a *Agent) history(w http.ResponseWriter, _ *http.Request) {
	a.answerMetrics(w, func(m *Metrics) any { return History{m, a.series.points()} })
}
