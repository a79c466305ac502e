package docs

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics is a Registerer that keeps what is registered, to describe it.
type Metrics struct {
	mu         sync.Mutex
	collectors []prometheus.Collector
}

// Register implements prometheus.Registerer.
func (m *Metrics) Register(c prometheus.Collector) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collectors = append(m.collectors, c)
	return nil
}

// MustRegister implements prometheus.Registerer.
func (m *Metrics) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		_ = m.Register(c) // never fails
	}
}

// Unregister implements prometheus.Registerer. Nothing is unregistered.
func (*Metrics) Unregister(prometheus.Collector) bool { return false }

// Table describes the metrics in Markdown, sorted by name. It leaves out those whose names
// do not begin with "berth_": they belong to libraries.
func (m *Metrics) Table(t *testing.T) string {
	t.Helper()
	rows := map[string]string{}
	for _, c := range m.collectors {
		kinds := kindsOf(t, c)
		descs := make(chan *prometheus.Desc)
		go func() {
			defer close(descs)
			c.Describe(descs)
		}()
		for d := range descs {
			name, help, labels := parseDesc(t, d)
			if !strings.HasPrefix(name, "berth_") {
				continue
			}
			kind := kinds(name)
			rows[name] = fmt.Sprintf("| %s | %s | %s | %s |\n", code(name), kind, labels, cell(help))
		}
	}
	if len(rows) == 0 {
		t.Error("no metrics are registered")
	}
	var out strings.Builder
	out.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		out.WriteString(rows[name])
	}
	return out.String()
}

// kindsOf returns the types of a collector's metrics, by name. A collector that yields no
// sample now counts by its names: "_total" ends those of counters, the others are gauges.
func kindsOf(t *testing.T, c prometheus.Collector) func(name string) string {
	t.Helper()
	switch c.(type) {
	case *prometheus.CounterVec:
		return func(string) string { return "counter" }
	case *prometheus.GaugeVec:
		return func(string) string { return "gauge" }
	case *prometheus.HistogramVec:
		return func(string) string { return "histogram" }
	}
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]string{}
	for _, family := range families {
		known[family.GetName()] = strings.ToLower(family.GetType().String())
	}
	return func(name string) string {
		switch kind, ok := known[name]; {
		case ok:
			return kind
		case strings.HasSuffix(name, "_total"):
			return "counter"
		}
		return "gauge"
	}
}

var descForm = regexp.MustCompile(
	`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"), ` +
		`(?:unit: "[^"]*", )?constLabels: \{[^}]*\}, variableLabels: \{([^}]*)\}`)

// parseDesc reads a description from its text: the package prometheus exports no other way.
func parseDesc(t *testing.T, d *prometheus.Desc) (name, help, labels string) {
	t.Helper()
	m := descForm.FindStringSubmatch(d.String())
	if m == nil {
		t.Fatalf("unknown form of a description: %v", d)
	}
	name, errName := strconv.Unquote(m[1])
	help, errHelp := strconv.Unquote(m[2])
	if errName != nil || errHelp != nil {
		t.Fatalf("unknown form of a description: %v", d)
	}
	var all []string
	for label := range strings.SplitSeq(m[3], ",") {
		if label != "" {
			all = append(all, code(label))
		}
	}
	return name, help, strings.Join(all, ", ")
}
