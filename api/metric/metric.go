package metric

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// Program is a program that serves metrics.
type Program string

// The programs.
const (
	Allocator Program = "allocator"
	Router    Program = "extproc"
	Egress    Program = "egress"
)

// Type is a type of metrics.
type Type string

// The types.
const (
	TypeCounter   Type = "counter"
	TypeGauge     Type = "gauge"
	TypeHistogram Type = "histogram"
)

// Labels. Each has a bounded number of values.
const (
	Assertion = "assertion"
	Cause     = "cause"
	Class     = "class"
	Code      = "code"
	Direction = "direction"
	Kind      = "kind"
	Operation = "operation"
	Outcome   = "outcome"
	Part      = "part"
	Pool      = "pool"
	Reason    = "reason"
	Result    = "result"
	State     = "state"
	Team      = "team"
)

// Values of labels that queries name.
const (
	// Results of claims.
	ResultWarm     = "warm"
	ResultWaited   = "waited"
	ResultRefused  = "refused"
	ResultCanceled = "canceled"
	// States of pods.
	StateWarm      = "warm"
	StatePending   = "pending"
	StateClaimed   = "claimed"
	StateReleasing = "releasing"
	// Parts of the pods that a pool asks for.
	PartWarm    = "warm"
	PartLacking = "lacking"
	PartSpare   = "spare"
	// Outcomes.
	OutcomeAdmitted = "admitted"
	OutcomeClaimed  = "claimed"
	OutcomeClosed   = "closed"
	// CodeFailed is the class of codes of the API's own failures.
	CodeFailed = "5xx"
	// Directions: of messages as the allocator sees them, of bytes as sandboxes do.
	DirectionIn  = "in"
	DirectionOut = "out"
)

// Bounds of service levels, in seconds. The histograms that show them have buckets that end there.
const (
	ClaimBound     = 0.05  // of a claim that finds a warm pod
	AdmissionBound = 0.002 // of the admission of a request
	ReleaseBound   = 1     // until all routers have acknowledged a release
	ReapBound      = 5     // of the lateness of the end of a sandbox
)

// Row is one metric. It does not change.
type Row struct {
	Program Program
	Name    string
	Type    Type
	// Unit is what the value counts, in the plural.
	Unit   string
	Labels []string
	// Buckets are the upper bounds of those of a histogram.
	Buckets []float64
	// Help is what the value means, and Moves what to do when it moves.
	Help, Moves string
	// Desc describes the metric to Prometheus.
	Desc *prometheus.Desc
}

// Rows by type. Each call of New, Vec or Func returns another collector of the row: New of one without labels, Vec of
// one with labels, and Func of one whose value is read from f.
type (
	// Counter is the row of a counter.
	Counter struct{ *Row }
	// Gauge is the row of a gauge.
	Gauge struct{ *Row }
	// Histogram is the row of a histogram.
	Histogram struct{ *Row }
)

// rows has all rows by name, once the variables of this package are initialized.
var rows = map[string]*Row{}

func add(r Row, t Type) *Row {
	r.Type, r.Desc = t, prometheus.NewDesc(r.Name, r.Help, r.Labels, nil)
	if rows[r.Name] != nil {
		panic("metric: two rows of the table have the name " + r.Name)
	}
	rows[r.Name] = &r
	return &r
}

func counter(r Row) Counter     { return Counter{add(r, TypeCounter)} }
func gauge(r Row) Gauge         { return Gauge{add(r, TypeGauge)} }
func histogram(r Row) Histogram { return Histogram{add(r, TypeHistogram)} }

// Table returns the rows of a program, sorted by name.
func Table(of Program) []*Row {
	var all []*Row
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		if rows[name].Program == of {
			all = append(all, rows[name])
		}
	}
	return all
}

// New returns a counter.
func (c Counter) New() prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: c.Name, Help: c.Help})
}

// Vec returns counters by label.
func (c Counter) Vec() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: c.Name, Help: c.Help}, c.Labels)
}

// Func returns a counter that is read from f.
func (c Counter) Func(f func() float64) prometheus.CounterFunc {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: c.Name, Help: c.Help}, f)
}

// New returns a gauge.
func (g Gauge) New() prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: g.Name, Help: g.Help})
}

// Vec returns gauges by label.
func (g Gauge) Vec() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: g.Name, Help: g.Help}, g.Labels)
}

// Func returns a gauge that is read from f.
func (g Gauge) Func(f func() float64) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: g.Name, Help: g.Help}, f)
}

// Is returns a value for a collector of several metrics, with the values of all labels.
func (g Gauge) Is(value float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(g.Desc, prometheus.GaugeValue, value, labels...)
}

func (h Histogram) opts() prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Name: h.Name, Help: h.Help, Buckets: h.Buckets}
}

// New returns a histogram.
func (h Histogram) New() prometheus.Histogram { return prometheus.NewHistogram(h.opts()) }

// Vec returns histograms by label.
func (h Histogram) Vec() *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(h.opts(), h.Labels)
}

// BucketName is the name of the numbers of observations up to each bound.
func (h Histogram) BucketName() string { return h.Name + "_bucket" }

// CountName is the name of the number of observations.
func (h Histogram) CountName() string { return h.Name + "_count" }

// SumName is the name of the sum of all observations.
func (h Histogram) SumName() string { return h.Name + "_sum" }
