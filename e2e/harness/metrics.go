package harness

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Metrics are values by name. Those of one name with different labels are added up.
type Metrics map[string]float64

// ParseMetrics reads a page in Prometheus' text format.
func ParseMetrics(page []byte) (Metrics, error) {
	all := Metrics{}
	lines := bufio.NewScanner(bytes.NewReader(page))
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		if i := strings.LastIndexByte(value, ' '); i >= 0 { // labels may have spaces in them
			value = value[i+1:]
		}
		name, _, _ = strings.Cut(name, "{")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			all[name] += v
		}
	}
	return all, lines.Err()
}

// ReadMetrics reads the page at a URL.
func ReadMetrics(ctx context.Context, client *http.Client, url string) (Metrics, error) {
	a, err := Do(ctx, client, http.MethodGet, url, "", "")
	if err != nil {
		return nil, err
	}
	if a.Code != http.StatusOK {
		return nil, fmt.Errorf("%s: %d %.200s", url, a.Code, a.Body)
	}
	return ParseMetrics(a.Body)
}

// Unwritten is how many writes an allocator has left for the background.
func (m Metrics) Unwritten() float64 {
	return m["berth_allocator_projection_waiting"] + m["berth_allocator_labels_waiting"] +
		m["berth_allocator_writes_waiting"]
}
