package egress

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/metric"
)

type metrics struct {
	requests *prometheus.CounterVec
	admitted prometheus.Counter // the one of requests for "admitted"
	lookups  prometheus.Counter
	// bytes of requests. sent and received are its values.
	bytes          *prometheus.CounterVec
	sent, received prometheus.Counter
	// connected and closed are new connections.
	connected, closed prometheus.Counter
	unlogged          prometheus.Counter
}

// register makes the metrics, and registers them unless reg is nil.
func (m *metrics) register(reg prometheus.Registerer, t *table) error {
	m.requests, m.lookups = metric.EgressRequests.Vec(), metric.EgressLookups.New()
	m.bytes = metric.EgressBytes.Vec()
	m.sent, m.received = m.bytes.WithLabelValues(metric.DirectionOut), m.bytes.WithLabelValues(metric.DirectionIn)
	m.unlogged = metric.EgressUnlogged.New()
	connections := metric.EgressConnections.Vec()
	m.connected = connections.WithLabelValues(metric.OutcomeAdmitted)
	m.closed = connections.WithLabelValues(metric.OutcomeClosed)
	m.admitted = m.requests.WithLabelValues(metric.OutcomeAdmitted)
	if reg == nil {
		return nil
	}
	read := func(value func() float64) func() float64 {
		return func() float64 {
			t.mu.Lock()
			defer t.mu.Unlock()
			return value()
		}
	}
	for _, c := range []prometheus.Collector{
		m.requests, m.lookups, m.bytes, m.unlogged, connections,
		metric.EgressOpen.Func(read(func() float64 { return float64(t.unended) })),
		metric.EgressCut.Func(read(func() float64 { return float64(t.cuts) })),
		metric.EgressSandboxes.Func(read(func() float64 { return float64(len(t.all)) })),
	} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}
