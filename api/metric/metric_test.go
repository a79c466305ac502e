package metric

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/tools/docs"
)

func TestMetricReferenceIsTheGoldenFile(t *testing.T) {
	for _, of := range []Program{Allocator, Router, Egress} {
		table := "| metric | type | labels | unit | meaning | when it moves |\n|---|---|---|---|---|---|\n"
		for _, r := range Table(of) {
			labels := ""
			if len(r.Labels) > 0 {
				labels = "`" + strings.Join(r.Labels, "`, `") + "`"
			}
			table += fmt.Sprintf("| `%s` | %s | %s | %s | %s | %s |\n", r.Name, r.Type, labels, r.Unit, docs.Cell(r.Help), docs.Cell(r.Moves))
		}
		docs.Section(t, "docs/reference/metrics.md", string(of), table)
	}
}

func TestEveryRowSaysWhatItMeansAndWhatToDo(t *testing.T) {
	for name, r := range rows {
		require.Contains(t, []Program{Allocator, Router, Egress}, r.Program, name)
		for field, text := range map[string]string{"Help": r.Help, "Moves": r.Moves} {
			require.True(t, strings.HasSuffix(text, "."), "%s of %s is no sentence: %q", field, name, text)
		}
		require.NotEmpty(t, r.Unit, name)
		require.NotContains(t, r.Labels, "sandbox", name)
		require.Equal(t, r.Type == TypeHistogram, len(r.Buckets) > 0, name)
		require.True(t, slices.IsSorted(r.Buckets), name)
	}
}

func TestServiceLevelsAreBoundsOfBuckets(t *testing.T) {
	for _, c := range []struct {
		of    Histogram
		bound float64
	}{
		{PoolClaimWaitSeconds, ClaimBound}, {AdmissionSeconds, AdmissionBound}, {ReleaseAcknowledgedSeconds, ReleaseBound}, {ReapLateSeconds, ReapBound},
	} {
		require.Contains(t, c.of.Buckets, c.bound, c.of.Name)
	}
}

// A metric without a value would not be in what a program serves, so the rows themselves are judged.
func TestPromlintFindsNothingWrongWithTheRows(t *testing.T) {
	types := map[Type]dto.MetricType{TypeCounter: dto.MetricType_COUNTER, TypeGauge: dto.MetricType_GAUGE, TypeHistogram: dto.MetricType_HISTOGRAM}
	var families []*dto.MetricFamily
	for _, r := range rows {
		m := &dto.Metric{}
		for _, label := range r.Labels {
			m.Label = append(m.Label, &dto.LabelPair{Name: &label})
		}
		families = append(families, &dto.MetricFamily{Name: &r.Name, Help: &r.Help, Type: types[r.Type].Enum(), Metric: []*dto.Metric{m}})
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	require.NoError(t, err)
	require.Empty(t, problems)
	require.Greater(t, len(families), 80)
}

func TestRegistryRefusesWhatIsNotInItsTable(t *testing.T) {
	reg := NewRegistry(Router)
	require.NoError(t, reg.Register(Requests.Vec()))
	require.NotContains(t, reg.Missing(), Requests.Name)
	require.Len(t, reg.Missing(), len(Table(Router))-1)
	for name, c := range map[string]prometheus.Collector{
		"another name":    prometheus.NewCounter(prometheus.CounterOpts{Name: "berth_router_others_total", Help: Requests.Help}),
		"another meaning": prometheus.NewCounter(prometheus.CounterOpts{Name: AnswersUnread.Name, Help: "Other."}),
		"other labels":    RequestsLimited.New(),
		"another program": Claims.Vec(),
	} {
		require.ErrorContains(t, reg.Register(c), "no such row of extproc", name)
		require.Panics(t, func() { reg.MustRegister(c) }, name)
	}
	require.Len(t, reg.Missing(), len(Table(Router))-1)
	require.Panics(t, func() { counter(Row{Name: Claims.Name}) })
}
