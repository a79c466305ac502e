package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
)

// BenchmarkClaimAlone: one caller, one claim after the other, in turn with the
// floor.
func BenchmarkClaimAlone(b *testing.B) {
	const n = 400
	g := newGround(b)
	g.pool("alone", n, n)
	raw := g.rawPods("raw", n)
	for range 5 {
		require.NoError(b, g.patch(raw[0], -1))
	}
	g.warmUp(1)
	b.ResetTimer()
	for range b.N {
		var claims, patches []time.Duration
		for i := range n {
			// Whichever is first finds the other's work done.
			one := func() {
				claims = append(claims, g.parallel(1, 1, func(int) error { _, err := g.claim("alone"); return err })...)
			}
			other := func() { patches = append(patches, g.parallel(1, 1, func(int) error { return g.patch(raw[i], i) })...) }
			if i%2 == 0 {
				one, other = other, one
			}
			one()
			time.Sleep(15 * time.Millisecond) // alone: what is written in the background is done
			other()
			time.Sleep(15 * time.Millisecond)
		}
		b.ReportMetric(ms(quantile(claims, 0.5)), "claim_p50_ms")
		b.ReportMetric(ms(quantile(claims, 0.99)), "claim_p99_ms")
		b.ReportMetric(ms(quantile(patches, 0.5)), "patch_p50_ms")
		b.ReportMetric(ms(quantile(patches, 0.99)), "patch_p99_ms")
		b.ReportMetric(float64(quantile(claims, 0.5))/float64(quantile(patches, 0.5)), "ratio_p50")
	}
}

// BenchmarkClaimsAtOnce: a burst through the HTTP API, in turn with as many raw
// patches at once.
func BenchmarkClaimsAtOnce(b *testing.B) {
	g := newGround(b)
	for _, c := range []struct{ burst, warm int }{{300, 600}, {1000, 1500}} {
		b.Run(fmt.Sprintf("burst=%d/warm=%d", c.burst, c.warm), func(b *testing.B) {
			g := &ground{B: b, berth: g.berth, http: g.http, api: g.api, admin: g.admin}
			pool := fmt.Sprintf("burst%d", c.burst)
			g.pool(pool, int32(c.warm), 0)
			raw := g.rawPods(pool+"-raw", c.burst)
			const rounds = 6
			b.ResetTimer()
			for range b.N {
				var p50, p99, claim50, claim99, patch50, patch99, batches, lag []float64
				for round := range rounds {
					var claims, patches []time.Duration
					ids := make([]string, c.burst)
					burst := func() {
						g.warmUp(c.burst)
						before := g.metrics(g.admin + "/metrics")["berth_allocator_journal_batches_total"]
						claims = g.parallel(c.burst, c.burst, func(i int) (err error) { ids[i], err = g.claim(pool); return err })
						batches = append(batches, g.metrics(g.admin + "/metrics")["berth_allocator_journal_batches_total"]-before)
						lag = append(lag, g.projectionLag())
						g.parallel(c.burst, 64, func(i int) error { return g.release(ids[i]) })
						g.full(pool, int32(c.warm))
					}
					floor := func() {
						patches = g.parallel(c.burst, c.burst, func(i int) error { return g.patch(raw[i], round*10_000+i) })
						time.Sleep(time.Second)
					}
					if round%2 == 0 {
						burst()
						floor()
					} else {
						floor()
						burst()
					}
					b.Logf("round %d: claims p50 %.1f p99 %.1f ms, patches p50 %.1f p99 %.1f ms, %v batches, lag up to %.1f s",
						round, ms(quantile(claims, 0.5)), ms(quantile(claims, 0.99)), ms(quantile(patches, 0.5)),
						ms(quantile(patches, 0.99)), batches[len(batches)-1], lag[len(lag)-1])
					claim50, claim99 = append(claim50, ms(quantile(claims, 0.5))), append(claim99, ms(quantile(claims, 0.99)))
					patch50, patch99 = append(patch50, ms(quantile(patches, 0.5))), append(patch99, ms(quantile(patches, 0.99)))
					p50 = append(p50, claim50[round]/patch50[round])
					p99 = append(p99, claim99[round]/patch99[round])
				}
				b.ReportMetric(median(claim50), "claim_p50_ms")
				b.ReportMetric(median(claim99), "claim_p99_ms")
				b.ReportMetric(median(patch50), "patch_p50_ms")
				b.ReportMetric(median(patch99), "patch_p99_ms")
				b.ReportMetric(median(p50), "ratio_p50")
				b.ReportMetric(median(p99), "ratio_p99")
				b.ReportMetric(median(batches), "batches")
				b.ReportMetric(slices.Max(lag), "projection_lag_max_s")
			}
			b.StopTimer()
			g.drop(pool)
		})
	}
}

// BenchmarkBatch: 100 sandboxes in one call, in turn with one claim and with another single claim as
// the control.
func BenchmarkBatch(b *testing.B) {
	const count, rounds = 100, 12
	g := newGround(b)
	g.pool("batch", 2*count, 0)
	g.warmUp(1)
	batch := func() (ids []string) {
		request := fmt.Sprintf(`{"pool":"batch","count":%d,"timeout":7200}`, count)
		code, body, err := g.call(http.MethodPost, "/v1/claims", request)
		var all struct {
			Sandboxes []struct{ SandboxID string }
		}
		require.NoError(b, err)
		require.Equal(b, http.StatusCreated, code, string(body))
		require.NoError(b, json.Unmarshal(body, &all))
		require.Len(b, all.Sandboxes, count)
		for _, s := range all.Sandboxes {
			ids = append(ids, s.SandboxID)
		}
		return ids
	}
	b.ResetTimer()
	for range b.N {
		var batches, ones, controls []time.Duration
		for round := range rounds {
			var ids []string
			timed := func(into *[]time.Duration, f func()) func() {
				return func() {
					began := time.Now()
					f()
					*into = append(*into, time.Since(began))
				}
			}
			one := func() {
				id, err := g.claim("batch")
				require.NoError(b, err)
				ids = append(ids, id)
			}
			many := func() { ids = append(ids, batch()...) }
			turns := []func(){timed(&batches, many), timed(&ones, one), timed(&controls, one)}
			for i := range turns { // whichever is first finds the others' work done
				turns[(i+round)%len(turns)]()
				time.Sleep(15 * time.Millisecond)
			}
			g.parallel(len(ids), 16, func(i int) error { return g.release(ids[i]) })
			g.full("batch", 2*count)
		}
		p50 := func(all []time.Duration) float64 { return ms(quantile(all, 0.5)) }
		b.ReportMetric(p50(batches), "batch_p50_ms")
		b.ReportMetric(p50(ones), "claim_p50_ms")
		b.ReportMetric(p50(batches)/p50(ones), "ratio_p50")
		b.ReportMetric(p50(controls)/p50(ones), "control_p50")
	}
}

// projectionLag waits until all Sandbox objects are written and returns how long
// one had to wait at the most.
func (g *ground) projectionLag() float64 {
	most := 0.0
	for {
		m := g.metrics(g.admin + "/metrics")
		most = max(most, m["berth_allocator_projection_lag_seconds"])
		if m["berth_allocator_projection_waiting"] == 0 {
			return most
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// BenchmarkDrain: so many callers take all warm pods of a pool that is not
// refilled, as fast as they can, against as many patches.
func BenchmarkDrain(b *testing.B) {
	const n, atOnce = 5000, 64
	g := newGround(b)
	raw := g.rawPods("raw", n)
	for range b.N {
		g.pool("drain", n, n)
		g.warmUp(atOnce)
		before := g.written()
		began := time.Now()
		took := g.parallel(n, atOnce, func(int) error { _, err := g.claim("drain"); return err })
		claims := float64(n) / time.Since(began).Seconds()
		lag := g.projectionLag()
		bytes := g.written() - before
		began = time.Now()
		patches := g.parallel(n, atOnce, func(i int) error { return g.patch(raw[i], i) })
		floor := float64(n) / time.Since(began).Seconds()
		b.ReportMetric(claims, "claims/s")
		b.ReportMetric(floor, "patches/s")
		b.ReportMetric(claims/floor, "ratio")
		b.ReportMetric(ms(quantile(took, 0.5)), "claim_p50_ms")
		b.ReportMetric(ms(quantile(took, 0.99)), "claim_p99_ms")
		b.ReportMetric(ms(quantile(patches, 0.5)), "patch_p50_ms")
		b.ReportMetric(lag, "projection_lag_max_s")
		b.ReportMetric(bytes/n, "etcd_bytes/claim")
		g.drop("drain")
	}
}

// BenchmarkLives: whole lives, claimed and released, for a minute at 50 a second
// and for a minute as fast as it goes. What the API server is asked to write for
// them, by all who write, is compared with how fast it takes raw patches.
func BenchmarkLives(b *testing.B) {
	const warm, minute = 400, time.Minute
	g := newGround(b)
	raw := g.rawPods("raw", 1000)
	g.pool("lives", warm, 0)
	g.warmUp(256)
	for range b.N {
		floor := g.rawRate(raw)
		paced := g.live("lives", 50, minute)
		g.full("lives", warm)
		full := g.live("lives", 0, minute)
		g.full("lives", warm)
		floor = (floor + g.rawRate(raw)) / 2

		for name, l := range map[string]lives{"paced": paced, "full": full} {
			b.ReportMetric(float64(l.n)/minute.Seconds(), name+"_lives/s")
			b.ReportMetric(ms(quantile(l.claims, 0.5)), name+"_claim_p50_ms")
			b.ReportMetric(ms(quantile(l.claims, 0.99)), name+"_claim_p99_ms")
			b.ReportMetric(l.lag, name+"_projection_lag_max_s")
			b.ReportMetric(l.bytes/float64(l.n), name+"_etcd_bytes/life")
			b.ReportMetric(l.bytes/minute.Minutes()*5/(1<<20), name+"_etcd_MiB/5min")
			b.ReportMetric(l.journal/float64(l.n), name+"_journal_bytes/life")
			b.ReportMetric(l.journalLast/l.journalFirst, name+"_journal_growth")
			b.ReportMetric(float64(l.last)/float64(l.first), name+"_latency_growth")
			b.ReportMetric(l.heapLast/l.heapFirst, name+"_heap_growth")
			b.ReportMetric(l.writes/float64(l.n), name+"_writes/life")
		}
		b.ReportMetric(floor, "raw_patches/s")
		b.ReportMetric(full.writes/minute.Seconds()/floor, "full_writes_ratio")
	}
}

// rawRate is how many patches a second the API server takes from 64 callers.
func (g *ground) rawRate(raw []*corev1.Pod) float64 {
	const n = 5000
	began := time.Now()
	g.parallel(n, 64, func(i int) error { return g.patch(raw[i%len(raw)], int(began.Unix())+i) })
	return n / time.Since(began).Seconds()
}

// lives are measurements of claims that are released again. first and last are of the second and
// the last third of the time.
type lives struct {
	n                         int
	claims                    []time.Duration
	first, last               time.Duration // median claim
	lag, bytes, writes        float64
	journal                   float64
	journalFirst, journalLast float64 // bytes per life
	heapFirst, heapLast       float64 // bytes after a collection, the least seen
}

// live claims and releases for d: perSecond times a second, or with 0 as often as 64 callers manage.
func (g *ground) live(pool string, perSecond int, d time.Duration) lives {
	ctx, cancel := context.WithTimeout(g.Context(), d)
	defer cancel()
	type life struct {
		at, took time.Duration
	}
	var mu sync.Mutex
	var all []life
	began := time.Now()
	one := func(hold time.Duration) error {
		at := time.Now()
		id, err := g.claim(pool)
		if err != nil {
			return err
		}
		took := time.Since(at)
		mu.Lock()
		all = append(all, life{at.Sub(began), took})
		mu.Unlock()
		time.Sleep(hold)
		return g.release(id)
	}
	bytes, writes := g.written(), g.writes()
	journal := g.metrics(g.admin + "/metrics")["berth_allocator_journal_bytes_total"]
	working := atRate(ctx, perSecond, one)
	var l lives
	third := func() (n int, journal float64) { // until the next third is over
		least := 0.0
		for until := time.Now().Add(d / 3); time.Now().Before(until); time.Sleep(200 * time.Millisecond) {
			m := g.metrics(g.admin + "/metrics")
			l.lag = max(l.lag, m["berth_allocator_projection_lag_seconds"])
			if heap := m["go_memstats_heap_alloc_bytes"]; least == 0 || heap < least {
				least = heap
			}
		}
		l.heapFirst, l.heapLast = l.heapLast, least
		mu.Lock()
		defer mu.Unlock()
		return len(all), g.metrics(g.admin + "/metrics")["berth_allocator_journal_bytes_total"]
	}
	n1, journal1 := third()
	n2, journal2 := third()
	n3, journal3 := third()
	l.journalFirst, l.journalLast = (journal2-journal1)/float64(n2-n1), (journal3-journal2)/float64(n3-n2)
	require.NoError(g, working.Wait())
	l.lag = max(l.lag, g.projectionLag())
	l.n, l.bytes, l.writes = len(all), g.written()-bytes, g.writes()-writes
	l.journal = g.metrics(g.admin + "/metrics")["berth_allocator_journal_bytes_total"] - journal
	var second, last []time.Duration
	for _, x := range all {
		l.claims = append(l.claims, x.took)
		switch int(3 * x.at / d) {
		case 1:
			second = append(second, x.took)
		case 2:
			last = append(last, x.took)
		}
	}
	l.first, l.last = quantile(second, 0.5), quantile(last, 0.5)
	return l
}

// atRate begins lives until ctx ends: perSecond of one second each, or with 0 as many as 64 callers
// manage. The result waits for them.
func atRate(ctx context.Context, perSecond int, live func(hold time.Duration) error) *errgroup.Group {
	working := new(errgroup.Group)
	if perSecond == 0 {
		for range 64 {
			working.Go(func() error {
				for ctx.Err() == nil {
					if err := live(0); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return working
	}
	working.Go(func() error {
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				working.Go(func() error { return live(time.Second) })
			}
		}
	})
	return working
}

// writes is how many writes the API server has served.
func (g *ground) writes() float64 {
	raw, err := g.berth.Clients.Kubernetes.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(g.Context())
	require.NoError(g, err)
	total := 0.0
	for line := range strings.Lines(string(raw)) {
		if !strings.HasPrefix(line, "apiserver_request_total{") || !strings.Contains(line, `code="20`) {
			continue
		}
		for _, verb := range []string{"POST", "PUT", "PATCH", "DELETE"} {
			if strings.Contains(line, `verb="`+verb+`"`) {
				v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
				require.NoError(g, err)
				total += v
			}
		}
	}
	return total
}
