package docs

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics is a Registerer that keeps what is registered, to describe it.
type Metrics []prometheus.Collector

// Register implements prometheus.Registerer.
func (m *Metrics) Register(c prometheus.Collector) error {
	*m = append(*m, c)
	return nil
}

// MustRegister implements prometheus.Registerer.
func (m *Metrics) MustRegister(all ...prometheus.Collector) { *m = append(*m, all...) }

// Unregister implements prometheus.Registerer. Nothing is unregistered.
func (*Metrics) Unregister(prometheus.Collector) bool { return false }

// Table describes the metrics in Markdown, sorted by name. It leaves out those whose names
// do not begin with "berth_": they belong to libraries.
func (m Metrics) Table(t *testing.T) string {
	t.Helper()
	rows := map[string]string{}
	for _, c := range m {
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
			rows[name] = fmt.Sprintf("| %s | %s | %s | %s |\n", code(name), kind(c, name), labels, cell(help))
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

// kind returns the type of a metric of a collector. The names of counters end in "_total".
func kind(c prometheus.Collector, name string) string {
	switch c.(type) {
	case *prometheus.HistogramVec, prometheus.Histogram:
		return "histogram"
	}
	if strings.HasSuffix(name, "_total") {
		return "counter"
	}
	return "gauge"
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
	name, _ = strconv.Unquote(m[1]) // a Go string, as descForm says
	help, _ = strconv.Unquote(m[2])
	var all []string
	for label := range strings.SplitSeq(m[3], ",") {
		if label != "" {
			all = append(all, code(label))
		}
	}
	return name, help, strings.Join(all, ", ")
}
