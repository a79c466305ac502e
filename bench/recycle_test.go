package bench

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// BenchmarkRecycle: so many callers take all pods of a pool, release them and wait until the pool is full again, in
// pools that recycle pods and that delete them, in turn with raw patches. A round is a life for each pod. The
// connect window of 5 s is in each round.
func BenchmarkRecycle(b *testing.B) {
	const n, atOnce, rounds = 1000, 64, 5
	g := newGround(b)
	raw := g.rawPods("raw", n)
	pools := []struct {
		name                   string
		reuse                  v1alpha1.Reuse
		claims, rounds, writes []float64
	}{{name: "recycle", reuse: v1alpha1.ReuseRecycle}, {name: "never", reuse: v1alpha1.ReuseNever}}
	for i := range pools {
		g.poolOf(pools[i].name, n, n, pools[i].reuse)
	}
	g.warmUp(atOnce)
	var patches []float64
	b.ResetTimer()
	for range b.N {
		for round := range rounds {
			for range pools {
				began := time.Now()
				g.parallel(n, atOnce, func(i int) error { return g.patch(raw[i], round*10_000+i) })
				patches = append(patches, n/time.Since(began).Seconds())

				p := &pools[(len(patches)+round)%len(pools)]
				ids, writes := make([]string, n), g.writes()
				began = time.Now()
				g.parallel(n, atOnce, func(i int) (err error) { ids[i], err = g.claim(p.name); return err })
				p.claims = append(p.claims, n/time.Since(began).Seconds())
				g.parallel(n, atOnce, func(i int) error { return g.release(ids[i]) })
				g.full(p.name, n)
				p.rounds, p.writes = append(p.rounds, n/time.Since(began).Seconds()), append(p.writes, (g.writes()-writes)/n)
			}
		}
	}
	floor := median(patches)
	b.ReportMetric(floor, "patches/s")
	for _, p := range pools {
		b.ReportMetric(median(p.claims), p.name+"_claims/s")
		b.ReportMetric(median(p.claims)/floor, p.name+"_ratio")
		b.ReportMetric(slices.Min(p.claims)/floor, p.name+"_ratio_least")
		b.ReportMetric(median(p.rounds), p.name+"_lives/s")
		b.ReportMetric(median(p.writes), p.name+"_writes/life")
	}
	pods, err := g.berth.Pods(b.Context(), "recycle", "")
	require.NoError(b, err)
	lives := 0
	for i := range pods {
		life, err := strconv.Atoi(pods[i].Annotations[v1alpha1.AnnotationLife])
		require.NoError(b, err)
		lives += life
	}
	b.ReportMetric(float64(lives)/(n*rounds)/float64(b.N), "recycled_share")
}
