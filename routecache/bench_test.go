package routecache_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/routecache"
)

const benchIDs = 10_000

func benchNames(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%020d", i)
	}
	return ids
}

// filled returns a fresh cache with a route for each ID.
func filled(tb testing.TB, now func() time.Duration, ids []string) *routecache.Cache {
	tb.Helper()
	c, err := routecache.New(routecache.Options{Now: now, Ask: func(string, bool) bool { return false }})
	require.NoError(tb, err)
	c.SetFreshUntil(1<<63 - 1)
	for _, id := range ids {
		c.Put(id, routeA)
	}
	return c
}

func standstill() time.Duration { return 0 }

// bareLRU returns an LRU of the library with the same routes.
func bareLRU[V any](tb testing.TB, ids []string, v func() V) *lru.Cache[string, V] {
	tb.Helper()
	c, err := lru.New[string, V](100_000)
	require.NoError(tb, err)
	for _, id := range ids {
		c.Add(id, v())
	}
	return c
}

// BenchmarkHit: what the guarantees cost on top of the library. All ways take turns in
// one run, in rounds of rotating order, and each figure is the median of its rounds.
// "ratio" is that of Lookup to Get of a golang-lru cache that holds routes,
// "ratio_pointers" to one that holds pointers to routes, which needs no copy. The
// clock of Lookup does not advance. Reading the boot clock, as in a router, is a figure of
// its own.
func BenchmarkHit(b *testing.B) {
	const rounds, perRound = 41, 100_000
	ids := benchNames(benchIDs)
	cache, withBootclock := filled(b, standstill, ids), filled(b, bootclock.Now, ids)
	released := filled(b, standstill, nil) // full of tombstones beside the routes
	for i := range 100_000 {
		released.Release(fmt.Sprintf("gone%016d", i), routecache.End{})
	}
	for _, id := range ids {
		released.Put(id, routeA)
	}
	keys := make([]sandboxid.Key, len(ids))
	for i, id := range ids {
		keys[i] = key(id)
	}
	values := bareLRU(b, ids, func() routecache.Route { return routeA })
	pointers := bareLRU(b, ids, func() *routecache.Route { r := routeA; return &r })
	ctx := b.Context()
	lookup := func(c *routecache.Cache) func() {
		return func() {
			for i := range perRound {
				if a, err := c.Lookup(ctx, keys[i%benchIDs]); err != nil || a.Status != routecache.Routable {
					b.Fatal(a, err)
				}
			}
		}
	}
	ways := []struct {
		name  string
		round func()
	}{
		{"lookup", lookup(cache)},
		{"lookup_with_bootclock", lookup(withBootclock)},
		{"lookup_beside_100k_tombstones", lookup(released)},
		{"find_and_holds", func() {
			for i := range perRound {
				id := keys[i%benchIDs]
				if r, ok := cache.Find(id); !ok || !cache.Holds(id, r) {
					b.Fatal("not found")
				}
			}
		}},
		{"lru_get", func() {
			for i := range perRound {
				if r, ok := values.Get(ids[i%benchIDs]); !ok || r.DefaultPort == 0 {
					b.Fatal("not there")
				}
			}
		}},
		{"lru_get_pointer", func() {
			for i := range perRound {
				if r, ok := pointers.Get(ids[i%benchIDs]); !ok || r.DefaultPort == 0 {
					b.Fatal("not there")
				}
			}
		}},
		{"bootclock", func() {
			for range perRound {
				if bootclock.Now() == 0 {
					b.Fatal("it does not run")
				}
			}
		}},
	}
	b.ReportAllocs()
	took := map[string][]float64{} // ns a call, by round
	for b.Loop() {
		for round := range rounds {
			for i := range ways {
				way := ways[(i+round)%len(ways)]
				began := time.Now()
				way.round()
				took[way.name] = append(took[way.name], float64(time.Since(began).Nanoseconds())/perRound)
			}
		}
	}
	ratio := func(of string) float64 {
		ratios := make([]float64, len(took[of]))
		for round, ns := range took[of] {
			ratios[round] = took["lookup"][round] / ns
		}
		return median(ratios)
	}
	b.ReportMetric(0, "ns/op") // the sum of all ways has no meaning
	for _, way := range ways {
		b.ReportMetric(median(took[way.name]), way.name+"_ns")
	}
	b.ReportMetric(ratio("lru_get"), "ratio")
	b.ReportMetric(ratio("lru_get_pointer"), "ratio_pointers")
}

func median(all []float64) float64 {
	sorted := slices.Clone(all)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}

// BenchmarkMemory reports the memory of 100,000 routes, including their IDs and the free room
// of the tables.
func BenchmarkMemory(b *testing.B) {
	const routes = 100_000
	ports := routecache.NewPorts([]uint16{80, 443, 8080})
	for name, fill := range map[string]func(c *routecache.Cache, i int){
		"route": func(c *routecache.Cache, i int) {
			c.Put(fmt.Sprintf("%020d", i), routecache.Route{Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), DefaultPort: 8080})
		},
		"route_with_3_ports": func(c *routecache.Cache, i int) {
			c.Put(fmt.Sprintf("%020d", i), routecache.Route{
				Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), DefaultPort: 8080,
				Ports: routecache.NewPorts(ports.List()), // as decoded from the stream: a copy for each
			})
		},
		"tombstone": func(c *routecache.Cache, i int) { c.Release(fmt.Sprintf("%020d", i), routecache.End{}) },
	} {
		b.Run(name, func(b *testing.B) {
			var bytes []float64
			for b.Loop() {
				before := heap()
				c := filled(b, standstill, nil)
				for i := range routes {
					fill(c, i)
				}
				bytes = append(bytes, float64(heap()-before)/routes)
				runtime.KeepAlive(c)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(median(bytes), "bytes/entry")
		})
	}
}

// heap returns the live bytes of the heap.
func heap() uint64 {
	runtime.GC()
	runtime.GC() // frees what the first one has finalized
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A hit while the allocator's stream writes: all calls share one lock.
func BenchmarkHitUnderPushes(b *testing.B) {
	c, err := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return false }})
	require.NoError(b, err)
	c.SetFreshUntil(time.Hour)
	c.Put("a", routeA)
	stop := make(chan struct{})
	var pushing sync.WaitGroup
	pushing.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				c.Put(fmt.Sprint("other", i%1000), routeB)
			}
		}
	})
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := c.Lookup(b.Context(), key("a")); err != nil {
				b.Error(err)
				return
			}
		}
	})
	close(stop)
	pushing.Wait()
}
