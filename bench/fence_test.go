package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/instance"
	"github.com/berth-sandbox/berth/extproc/link"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// BenchmarkFence: how long it takes until the last router has acknowledged a release.
// 301 callers release sandboxes, one after the other, so that each release has 300
// others in flight.
//
// "ack" is what the allocator's histogram says: from the return of the journal's write
// to the moment in which the core has dealt with the last acknowledgement. Within a
// bucket of it values are taken to be spread evenly; the share at or below 10 ms is
// exact. "delete" is what a caller of the API sees, from the call to the answer, which
// comes with the last acknowledgement: the write and waiting for the one before it are
// in there.
//
// "echo" is the control, taken while sandboxes are released: how long one byte takes to ten
// goroutines over loopback and back from the last of them. What it takes more than a
// fraction of a millisecond is what others, and the callers, do to the machine.
//
// routers=10: ten routers without Envoy, each the real link with the real route cache.
// envoys=2: two Envoys with their routers, through which requests to other sandboxes go
// all the time, and eight routers without.
func BenchmarkFence(b *testing.B) {
	for _, c := range []struct {
		name           string
		envoys, links  int
		requests       int // a second, through each Envoy
		callers, times int
	}{
		{name: "routers=10", links: 10, callers: 301, times: 3},
		{name: "envoys=2", envoys: 2, links: 8, requests: 200, callers: 301, times: 3},
	} {
		b.Run(c.name, func(b *testing.B) {
			g := newGroundOf(b, stack.Options{Gateways: max(1, c.envoys), LeaseDuration: 15 * time.Second})
			if c.envoys == 0 { // the one there is says Goodbye
				for _, p := range []*stack.Process{g.berth.Gateways[0].Envoy, g.berth.Gateways[0].Router} {
					require.NoError(b, p.Stop(b.Context(), 10*time.Second))
				}
			}
			caches := make([]*routecache.Cache, c.links)
			for i := range caches {
				caches[i] = g.link()
			}
			released := 2 * c.callers
			g.pool("fence", int32(released), 0)
			stopTraffic := g.traffic(c.envoys, c.requests)
			b.ResetTimer()
			for range b.N {
				var deletes, echoes []time.Duration
				before := g.histogram("berth_allocator_release_acknowledged_seconds")
				for range c.times {
					g.warmUp(c.callers)
					ids := make([]string, released)
					g.parallel(released, 64, func(i int) (err error) { ids[i], err = g.claim("fence"); return err })
					g.projectionLag()
					stopEchoes := g.echoes(10)
					deletes = append(deletes, g.parallel(released, c.callers, func(i int) error { return g.release(ids[i]) })...)
					echoes = append(echoes, stopEchoes()...)
					for _, id := range ids {
						for _, cache := range caches {
							a, err := cache.Lookup(b.Context(), id)
							require.NoError(b, err)
							require.Equal(b, routecache.Gone, a.Status)
						}
					}
					g.full("fence", int32(released))
				}
				acks := g.histogram("berth_allocator_release_acknowledged_seconds").since(before)
				require.Equal(b, len(deletes), int(acks.count()), "releases that were measured")
				for _, q := range []float64{0.5, 0.9, 0.99} {
					b.ReportMetric(1000*acks.quantile(q), fmt.Sprintf("ack_p%g_ms", 100*q))
					b.ReportMetric(ms(quantile(deletes, q)), fmt.Sprintf("delete_p%g_ms", 100*q))
					b.ReportMetric(ms(quantile(echoes, q)), fmt.Sprintf("echo_p%g_ms", 100*q))
				}
				b.ReportMetric(100*acks.share(0.01), "ack_within_10ms_%")
				b.ReportMetric(acks.count(), "n")
			}
			b.StopTimer()
			if answered := stopTraffic(); c.envoys > 0 {
				b.ReportMetric(float64(answered), "requests")
			}
		})
	}
}

// link is a router without Envoy. It returns its cache once it has joined.
func (g *ground) link() *routecache.Cache {
	self, err := instance.New(g.TempDir())
	require.NoError(g, err)
	tracker, err := lastactive.New(lastactive.Options{Now: time.Now})
	require.NoError(g, err)
	var l *link.Link
	cache, err := routecache.New(routecache.Options{Now: bootclock.Now, Ask: func(id string) bool { return l.Ask(id) }})
	require.NoError(g, err)
	l, err = link.New(link.Options{
		Allocators: []string{g.berth.Allocators[0].Control.String()}, InstanceID: self.ID(), MaxStale: 15 * time.Minute,
		Cache: cache, Activity: tracker, Answers: extproc.NewAnswers(), Neighbours: self, Now: bootclock.Now, Log: zap.NewNop(),
		Dial: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	require.NoError(g, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	g.Cleanup(func() {
		cancel()
		require.NoError(g, <-ended)
		require.NoError(g, self.Close(true))
	})
	require.Eventually(g, l.Connected, 10*time.Second, 10*time.Millisecond)
	return cache
}

// echoes sends a byte to each of so many peers, all the time with a pause of 2 ms, until
// stop is called, which returns how long the last answer took each time.
func (g *ground) echoes(peers int) (stop func() []time.Duration) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(g, err)
	var all sync.WaitGroup
	conns := make([]net.Conn, peers)
	for i := range conns {
		conns[i], err = net.Dial("tcp", listener.Addr().String())
		require.NoError(g, err)
		peer, err := listener.Accept()
		require.NoError(g, err)
		all.Go(func() {
			_, _ = io.Copy(peer, peer) // until the other side closes
			peer.Close()
		})
	}
	ctx, cancel := context.WithCancel(g.Context())
	var took []time.Duration
	sent := make(chan struct{})
	all.Go(func() {
		defer close(sent)
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			began := time.Now()
			for _, c := range conns {
				if _, err := c.Write([]byte{1}); err != nil {
					g.Error(err)
					return
				}
			}
			for _, c := range conns {
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
					g.Error(err)
					return
				}
			}
			took = append(took, time.Since(began))
			<-tick.C
		}
	})
	return func() []time.Duration {
		cancel()
		<-sent
		for _, c := range conns {
			c.Close()
		}
		all.Wait()
		listener.Close()
		return took
	}
}

// traffic sends so many requests a second through each of the first Envoys, to
// sandboxes that stay. stop ends it and returns how many were answered; all must have
// been.
func (g *ground) traffic(envoys, perSecond int) (stop func() uint64) {
	if envoys == 0 {
		return func() uint64 { return 0 }
	}
	const sandboxes = 20
	hosts := make([]string, sandboxes)
	g.pool("stays", sandboxes, sandboxes)
	for i := range hosts {
		id, err := g.claim("stays")
		require.NoError(g, err)
		hosts[i] = fmt.Sprintf("%d-%s.%s", g.nodes.Port(), id, g.berth.Domain)
	}
	ctx, cancel := context.WithCancel(g.Context())
	var answered atomic.Uint64
	var all sync.WaitGroup
	for _, gateway := range g.berth.Gateways[:envoys] {
		to := client(g.B, gateway.Addr.String())
		slots := make(chan int, 64) // requests that are under way, at the most
		all.Go(func() {
			tick := time.NewTicker(time.Second / time.Duration(perSecond))
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				select {
				case slots <- i:
				case <-ctx.Done():
					return
				}
				all.Go(func() {
					defer func() { <-slots }()
					if err := g.get(to, hosts[i%len(hosts)]); err != nil {
						g.Error(err)
						return
					}
					answered.Add(1)
				})
			}
		})
	}
	return sync.OnceValue(func() uint64 {
		cancel()
		all.Wait()
		return answered.Load()
	})
}

// get sends one request to a sandbox. It goes on when the traffic is stopped.
func (g *ground) get(c *http.Client, host string) error {
	r, err := http.NewRequestWithContext(g.Context(), http.MethodGet, "http://pod/", http.NoBody)
	if err != nil {
		return err
	}
	r.Host = host
	response, err := c.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil || response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s %w", host, response.Status, err)
	}
	return nil
}

// histogram is one of Prometheus': how many values there are up to each bound, which
// ascend.
type histogram struct{ bounds, upTo []float64 }

// histogram reads one of the allocator's.
func (g *ground) histogram(name string) (h histogram) {
	response, err := http.Get(g.admin + "/metrics")
	require.NoError(g, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		bound, ok := strings.CutPrefix(lines.Text(), name+`_bucket{le="`)
		if !ok {
			continue
		}
		bound, value, ok := strings.Cut(bound, `"} `)
		require.True(g, ok, lines.Text())
		le, err := strconv.ParseFloat(bound, 64)
		require.NoError(g, err)
		count, err := strconv.ParseFloat(value, 64)
		require.NoError(g, err)
		h.bounds, h.upTo = append(h.bounds, le), append(h.upTo, count)
	}
	require.NoError(g, lines.Err())
	require.NotEmpty(g, h.bounds, name)
	return h
}

// since is what has come after before.
func (h histogram) since(before histogram) histogram {
	h.upTo = slices.Clone(h.upTo)
	for i := range h.upTo {
		h.upTo[i] -= before.upTo[i]
	}
	return h
}

func (h histogram) count() float64 { return h.upTo[len(h.upTo)-1] }

// quantile takes the values of a bucket to be spread evenly in it.
func (h histogram) quantile(q float64) float64 {
	rank := q * h.count()
	i := slices.IndexFunc(h.upTo, func(n float64) bool { return n >= rank })
	if math.IsInf(h.bounds[i], 1) {
		return math.Inf(1)
	}
	lower, below := 0.0, 0.0
	if i > 0 {
		lower, below = h.bounds[i-1], h.upTo[i-1]
	}
	return lower + (h.bounds[i]-lower)*(rank-below)/(h.upTo[i]-below)
}

// share is how many of all values are at or below a bound.
func (h histogram) share(bound float64) float64 {
	return h.upTo[slices.Index(h.bounds, bound)] / h.count()
}
