package history

import (
	"math"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

func TestRingKeepsOneHourOfPointsOnly(t *testing.T) {
	r := New(noon)
	all, since, until := r.Points()
	require.Empty(t, all)
	require.Equal(t, noon, since)
	require.Equal(t, noon, until)
	for i := range Size + 5 {
		r.Put(i, Point{Claimed: uint32(i)})
	}
	all, _, until = r.Points()
	require.Len(t, all, Size)
	require.Equal(t, uint32(5), all[0].Claimed)
	require.Equal(t, uint32(Size+4), all[Size-1].Claimed)
	require.Equal(t, noon.Add((Size+5)*Step), until)
}

func TestStepsWithoutMeasurementAreGaps(t *testing.T) {
	r := New(noon)
	r.Put(0, Point{Claimed: 1})
	r.Put(3, Point{Claimed: 2})
	r.Put(3, Point{Claimed: 3}) // two ticks in one step
	all, _, until := r.Points()
	require.Equal(t, []Point{
		{Measured: true, Claimed: 1}, {}, {}, {Measured: true, Claimed: 2}, {Measured: true, Claimed: 3},
	}, all)
	require.Equal(t, noon.Add(5*Step), until)

	r.Put(10*Size, Point{Claimed: 4}) // the process was stopped for hours
	all, _, _ = r.Points()
	require.Len(t, all, Size)
	require.Equal(t, Point{Measured: true, Claimed: 4}, all[Size-1])
	for _, p := range all[:Size-1] {
		require.Zero(t, p)
	}
}

func TestIncreasesCountEachSeriesOnce(t *testing.T) {
	claims := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "claims"}, []string{"pool", "result"})
	claims.WithLabelValues("a", "warm").Add(5)
	claims.WithLabelValues("b", "warm").Add(7)
	before := Read(claims)
	claims.WithLabelValues("a", "warm").Add(2)
	claims.WithLabelValues("b", "refused").Inc()
	claims.DeleteLabelValues("b", "warm") // its pool was deleted, and made anew
	claims.WithLabelValues("b", "warm").Add(3)
	found := map[string]uint32{}
	Read(claims).Increases(before, "result", func(result string, by uint32) { found[result] += by })
	require.Equal(t, map[string]uint32{"warm": 5, "refused": 1}, found)
}

func TestQuantileIsThatOfTheStepAlone(t *testing.T) {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "seconds", Buckets: []float64{.01, .1, 1}})
	for range 1000 {
		h.Observe(.005)
	}
	before := Read(h)
	require.True(t, math.IsNaN(Read(h).Quantile(before, .5)))
	for range 100 {
		h.Observe(.5)
	}
	require.InDelta(t, .55, Read(h).Quantile(before, .5), 1e-9)
	require.InDelta(t, .991, Read(h).Quantile(before, .99), 1e-9)
	h.Observe(50)
	require.InDelta(t, 1, Read(h).Quantile(before, 1), 1e-9, "above the highest bound")
	require.InDelta(t, .005, Read(h).Quantile(nil, .45), 1e-3)
}
