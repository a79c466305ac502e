package allocator

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	claims   *prometheus.CounterVec
	releases *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, a *Allocator) (*metrics, error) {
	m := &metrics{
		claims: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_claims_total", Help: "Claims answered, by outcome: claimed or refused.",
		}, []string{"outcome"}),
		releases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_releases_total", Help: "Sandboxes released, by reason.",
		}, []string{"reason"}),
	}
	gauge := func(name, help string, value func(*term) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			t, err := a.leadingTerm()
			if err != nil {
				return 0
			}
			return value(t)
		})
	}
	for _, c := range []prometheus.Collector{
		m.claims, m.releases,
		gauge("berth_allocator_leading", "1 while this replica leads.", func(*term) float64 { return 1 }),
		gauge("berth_allocator_events_waiting", "Events waiting for the core.", func(t *term) float64 { return float64(len(t.loop.in)) }),
		gauge("berth_allocator_writes_waiting", "Writes to pods waiting for a worker.", func(t *term) float64 { return float64(t.claims.waiting() + t.other.waiting()) }),
		gauge("berth_allocator_records_waiting", "Sandbox objects waiting to be written.", func(t *term) float64 { return float64(t.projector.Lag()) }),
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
