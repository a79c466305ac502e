package rest

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/metric"
)

// metrics are those of the calls that clients make to this replica.
type metrics struct {
	calls       *prometheus.CounterVec
	seconds     *prometheus.HistogramVec
	rateLimited prometheus.Counter
}

func newMetrics() *metrics {
	return &metrics{calls: metric.APICalls.Vec(), seconds: metric.APICallSeconds.Vec(), rateLimited: metric.RateLimited.New()}
}

// register registers the metrics, and the slots in use.
func (a *api) register(reg prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{a.counts.calls, a.counts.seconds, a.counts.rateLimited, slots{
		"claims": a.claims, "others": a.others, "sleeps": a.sleeps, "wakes": a.wakes, "snapshots": a.snapshots, "slow": a.slow, "streams": a.streams,
	}} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// slots collects the slots of classes.
type slots map[string]*class

// Describe implements prometheus.Collector.
func (slots) Describe(all chan<- *prometheus.Desc) { all <- metric.APISlotsUsed.Desc }

// Collect implements prometheus.Collector.
func (s slots) Collect(all chan<- prometheus.Metric) {
	for name, c := range s {
		all <- metric.APISlotsUsed.Is(float64(c.slots.inUse()), name)
	}
}

const (
	// noOperation is the label of a call that is none of the document's.
	noOperation = "other"
	// streamOperation has no duration that says anything.
	streamOperation = "streamEvents"
)

// codeClasses are the labels of status codes, by their first digit. 0: the client has gone.
var codeClasses = [...]string{"none", "1xx", "2xx", "3xx", "4xx", metric.CodeFailed}

// counted counts the calls that clients make to this replica. The call that another replica forwards is counted there.
func (a *api) counted(mux *http.ServeMux, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(forwardedHeader) != "" {
			next.ServeHTTP(w, r)
			return
		}
		began, c := time.Now(), &counting{ResponseWriter: w}
		defer func() { // also of a handler that aborts
			_, pattern := mux.Handler(r)
			operation, known := a.operations[pattern]
			if !known {
				operation = noOperation
			}
			a.counts.calls.WithLabelValues(operation, codeClasses[min(c.code/100, len(codeClasses)-1)]).Inc()
			if operation != streamOperation {
				took, trace := time.Since(began).Seconds(), c.Header().Get(traceIDHeader)
				metric.Observe(a.counts.seconds.WithLabelValues(operation), took, trace)
			}
		}()
		next.ServeHTTP(c, r)
	})
}

// counting is a writer that keeps the status of the answer.
type counting struct {
	http.ResponseWriter
	code int // 0: there was none
}

func (c *counting) WriteHeader(code int) {
	if c.code == 0 && code >= http.StatusOK {
		c.code = code
	}
	c.ResponseWriter.WriteHeader(code)
}

func (c *counting) Write(b []byte) (int, error) {
	if c.code == 0 {
		c.code = http.StatusOK
	}
	return c.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (c *counting) Unwrap() http.ResponseWriter { return c.ResponseWriter }
