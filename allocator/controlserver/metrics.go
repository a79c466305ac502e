package controlserver

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/api/metric"
)

type metrics struct{ messages, ended *prometheus.CounterVec }

// newMetrics makes the metrics, and registers them if there is a registry.
func newMetrics(reg prometheus.Registerer) (metrics, error) {
	m := metrics{messages: metric.ControlMessages.Vec(), ended: metric.ControlStreamsEnded.Vec()}
	if reg == nil {
		return m, nil
	}
	return m, cmp.Or(reg.Register(m.messages), reg.Register(m.ended))
}

// count counts a message by its kind: the name of its field in the protocol.
func (m metrics) count(direction string, message proto.Message) {
	kind := "unknown" // of a later version
	r := message.ProtoReflect()
	if f := r.WhichOneof(r.Descriptor().Oneofs().ByName("message")); f != nil {
		kind = string(f.Name())
	}
	m.messages.WithLabelValues(direction, kind).Inc()
}
