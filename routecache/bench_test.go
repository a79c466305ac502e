package routecache_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/routecache"
)

const benchIDs = 10_000

// What the guarantees cost on top of the library: compare the two.
func BenchmarkHit(b *testing.B) {
	ids := make([]string, benchIDs)
	for i := range ids {
		ids[i] = fmt.Sprintf("%020d", i)
	}
	b.Run("Lookup", func(b *testing.B) {
		c, err := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string) bool { return false }})
		require.NoError(b, err)
		c.SetFreshUntil(time.Hour)
		for _, id := range ids {
			c.Put(id, routeA)
		}
		ctx := b.Context()
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if a, err := c.Lookup(ctx, ids[i%benchIDs]); err != nil || a.Status != routecache.Routable {
				b.Fatal(a, err)
			}
		}
	})
	b.Run("LookupAndHolds", func(b *testing.B) {
		c, err := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string) bool { return false }})
		require.NoError(b, err)
		c.SetFreshUntil(time.Hour)
		for _, id := range ids {
			c.Put(id, routeA)
		}
		ctx := b.Context()
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			id := ids[i%benchIDs]
			if a, err := c.Lookup(ctx, id); err != nil || !c.Holds(id, a.Route) {
				b.Fatal(a, err)
			}
		}
	})
	b.Run("BareLRU", func(b *testing.B) {
		c, err := lru.New[string, routecache.Route](100_000)
		require.NoError(b, err)
		for _, id := range ids {
			c.Add(id, routeA)
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if _, ok := c.Get(ids[i%benchIDs]); !ok {
				b.Fatal("not there")
			}
		}
	})
}

// A hit while the allocator's stream writes: everybody shares one lock.
func BenchmarkHitUnderPushes(b *testing.B) {
	c, err := routecache.New(routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string) bool { return false }})
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
			if _, err := c.Lookup(b.Context(), "a"); err != nil {
				b.Error(err)
				return
			}
		}
	})
	close(stop)
	pushing.Wait()
}
