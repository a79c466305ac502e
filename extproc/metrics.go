package extproc

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/apierror"
)

// limitedPools bounds the pools that have series.
const limitedPools = 100

type metrics struct {
	requests *prometheus.CounterVec
	admitted prometheus.Counter // the one of requests for "admitted"
	quiesced prometheus.Histogram
	limited  *prometheus.CounterVec

	mu    sync.Mutex
	pools map[string]bool // that have series of limited
}

// countLimited counts a request that a limit has refused.
func (m *metrics) countLimited(pool string, reason apierror.Reason) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.pools[pool] && len(m.pools) == limitedPools {
		pool = "_other" // no name of an object begins so
	} else {
		m.pools[pool] = true
	}
	m.limited.WithLabelValues(pool, string(reason)).Inc()
}

// newMetrics registers the metrics. unread and held return present numbers.
func newMetrics(reg prometheus.Registerer, unread func() int, held func() int) (*metrics, error) {
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
		limited: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_router_requests_limited_total",
			Help: "Requests that a limit of their sandbox has refused, by pool and reason. Pools after the first 100 are summed as _other.",
		}, []string{"pool", "reason"}),
		pools: map[string]bool{},
	}
	m.admitted = m.requests.WithLabelValues("admitted")
	for _, c := range []prometheus.Collector{
		m.requests, m.quiesced, m.limited,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "berth_router_requests_held",
			Help: "Requests waiting for a leader, or for a sandbox that is starting or quiesced. Above 2,000 further ones are refused, and before that those for a sandbox that has as many as are left.",
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
