package metric

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
)

func TestOnlyATraceIDLeavesAnExemplar(t *testing.T) {
	trace := strings.Repeat("0a", 16)
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "x", Buckets: []float64{1, 2, 3}})
	texts := []string{"", trace[1:], trace + "0", strings.ToUpper(trace), strings.Repeat("\xff", 32), trace}
	for value, text := range texts {
		Observe(h, float64(value)/2, text)
	}
	var m dto.Metric
	require.NoError(t, h.Write(&m))
	require.EqualValues(t, 6, m.GetHistogram().GetSampleCount())
	for i, b := range m.GetHistogram().GetBucket() {
		if i < 2 {
			require.Nil(t, b.GetExemplar(), i)
			continue
		}
		require.InDelta(t, 2.5, b.GetExemplar().GetValue(), 0)
		require.Len(t, b.GetExemplar().GetLabel(), 1)
		require.Equal(t, trace, b.GetExemplar().GetLabel()[0].GetValue())
	}
	Observe(prometheus.NewSummary(prometheus.SummaryOpts{Name: "y"}), 1, trace) // has none
}
