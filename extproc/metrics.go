package extproc

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
)

// limitedPools bounds the pools that have series.
const limitedPools = 100

type metrics struct {
	requests  *prometheus.CounterVec
	admitted  prometheus.Counter // the one of requests for "admitted"
	admission prometheus.Histogram
	quiesced  prometheus.Histogram
	wakes     prometheus.Histogram
	limited   *prometheus.CounterVec

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
		requests: metric.Requests.Vec(), admission: metric.AdmissionSeconds.New(), quiesced: metric.QuiesceHoldSeconds.New(),
		wakes: metric.WakeWaitSeconds.New(), limited: metric.RequestsLimited.Vec(), pools: map[string]bool{},
	}
	m.admitted = m.requests.WithLabelValues(metric.OutcomeAdmitted)
	for _, c := range []prometheus.Collector{
		m.requests, m.admission, m.quiesced, m.wakes, m.limited,
		metric.RequestsHeld.Func(func() float64 { return float64(held()) }),
		metric.AnswersUnread.Func(func() float64 { return float64(unread()) }),
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
