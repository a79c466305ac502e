package metric

import "github.com/prometheus/client_golang/prometheus"

// TraceID is the label of exemplars.
const TraceID = "trace_id"

// Observe adds a value to a histogram. With the ID of a trace (W3C Trace Context) the value is also an exemplar, which
// scrapes in the OpenMetrics format show. Any other text, such as "" for a call that is not traced, leaves none.
func Observe(to prometheus.Observer, value float64, trace string) {
	if isTraceID(trace) {
		if to, ok := to.(prometheus.ExemplarObserver); ok {
			to.ObserveWithExemplar(value, prometheus.Labels{TraceID: trace})
			return
		}
	}
	to.Observe(value)
}

// isTraceID reports whether a text is 16 bytes in lower-case hexadecimal, which do not need to be from this process.
func isTraceID(text string) bool {
	if len(text) != 32 {
		return false
	}
	for _, c := range []byte(text) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
