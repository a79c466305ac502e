package extproc

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	requests *prometheus.CounterVec
	admitted prometheus.Counter // the one of requests for "admitted"
	quiesced prometheus.Histogram
}

// newMetrics registers the metrics. unread and held return present numbers.
func newMetrics(reg prometheus.Registerer, unread func() int, held func() int64) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_router_requests_total",
			Help: "Requests Envoy asked about, by outcome: admitted, link (the redirection of a link), preflight (of CORS, for the port of agents), or the reason of the refusal.",
		}, []string{"outcome"}),
		quiesced: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "berth_router_quiesce_hold_seconds",
			Help:    "How long requests waited while the allocator asked whether their sandbox is idle.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2},
		}),
	}
	m.admitted = m.requests.WithLabelValues("admitted")
	for _, c := range []prometheus.Collector{
		m.requests, m.quiesced,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "berth_router_requests_held",
			Help: "Requests waiting for a leader, or for a sandbox that is starting or quiesced. Above 2,000 further ones are refused.",
		}, func() float64 { return float64(held()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "berth_router_answers_unread",
			Help: "Answers that Envoy may not have read yet. A release is acknowledged only after all earlier answers were read.",
		}, func() float64 { return float64(unread()) }),
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
