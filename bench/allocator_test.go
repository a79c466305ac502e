package bench

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// BenchmarkHandover: how long no caller gets a sandbox when the leader ends, with
// a lease of 3 s. A caller tries one replica after the other all the time; the
// time runs from the signal to the next claim that is answered.
func BenchmarkHandover(b *testing.B) {
	const times = 5
	g := newGroundOf(b, stack.Options{Allocators: 3, LeaseDuration: 3 * time.Second})
	g.pool("handover", 100, 0)
	for range b.N {
		for _, how := range []struct {
			name string
			end  func(*stack.Allocator) error
		}{
			{"sigterm", func(a *stack.Allocator) error { return a.Stop(b.Context(), 20*time.Second) }},
			{"kill", func(a *stack.Allocator) error { return a.Kill() }},
		} {
			var took []float64
			for range times {
				leader, err := g.berth.Stack.Leader(b.Context())
				require.NoError(b, err)
				began := time.Now()
				ended := make(chan error, 1)
				go func() { ended <- how.end(leader) }()
				for i := 0; ; i++ {
					if a := g.berth.Stack.Allocators[i%len(g.berth.Stack.Allocators)]; a != leader && g.claims(a, "handover") {
						break
					}
					time.Sleep(5 * time.Millisecond)
				}
				took = append(took, time.Since(began).Seconds())
				require.NoError(b, <-ended)
				require.NoError(b, leader.Start(b.Context()))
			}
			b.ReportMetric(median(took), how.name+"_median_s")
			b.ReportMetric(slices.Max(took), how.name+"_max_s")
		}
	}
}

// claims claims from one replica and reports whether it was answered.
func (g *ground) claims(a *stack.Allocator, pool string) bool {
	response, err := g.http.Post(a.API+"/sandboxes", "application/json",
		strings.NewReader(`{"templateID":"`+pool+`","waitTimeout":0}`))
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode == http.StatusCreated
}

// BenchmarkMemory: what the allocator keeps of 10,000 pods in 100 pools, and of
// 5,000 of them that are sandboxes: its live heap, and how much larger it is than
// that of an allocator that has nothing.
func BenchmarkMemory(b *testing.B) {
	const pools, each, claimed = 100, 100, 5000
	g := newGround(b)
	for range b.N {
		empty := g.heap()
		for i := range pools {
			name := fmt.Sprintf("memory-%d", i)
			most := int32(each)
			pool := stack.DemoPool(harness.Namespace, name, each)
			pool.Spec.MaxPods = &most
			require.NoError(b, g.pools(g.berth.Clients.Berth.Post()).Body(pool).Do(b.Context()).Error())
		}
		require.Eventually(b, func() bool {
			all, err := g.allPools()
			if err != nil {
				return false
			}
			warm := 0
			for _, p := range all.Items {
				warm += int(p.Status.Warm)
			}
			return warm == pools*each && g.idle()
		}, 15*time.Minute, time.Second)
		warm := g.heap()
		g.parallel(claimed, 64, func(i int) error { _, err := g.claim(fmt.Sprintf("memory-%d", i%pools)); return err })
		g.projectionLag()
		require.Eventually(b, g.idle, 10*time.Minute, time.Second)
		used := g.heap()
		b.ReportMetric(empty/(1<<20), "empty_MiB")
		b.ReportMetric(warm/(1<<20), "pods_MiB")
		b.ReportMetric(used/(1<<20), "sandboxes_MiB")
		b.ReportMetric((warm-empty)/pools/each, "bytes/pod")
		b.ReportMetric((used-warm)/claimed, "bytes/sandbox")
		const resident = "process_resident_memory_bytes"
		b.ReportMetric(g.metrics(g.admin + "/metrics")[resident]/(1<<20), "allocator_rss_MiB")
		b.ReportMetric(g.metrics(g.berth.Gateways[0].Admin + "/metrics")[resident]/(1<<20), "router_rss_MiB")
	}
}

// heap is the allocator's live heap: the least that is seen while it collects
// some times.
func (g *ground) heap() float64 {
	read := func() harness.Metrics { return g.metrics(g.admin + "/metrics") }
	least := 0.0
	for collected := read()["go_gc_duration_seconds_count"]; ; {
		m := read() // which makes garbage itself
		if least == 0 || m["go_memstats_heap_alloc_bytes"] < least {
			least = m["go_memstats_heap_alloc_bytes"]
		}
		if m["go_gc_duration_seconds_count"] >= collected+4 {
			return least
		}
	}
}
