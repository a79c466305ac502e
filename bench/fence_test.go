package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	routeradmin "github.com/berth-sandbox/berth/extproc/admin"
)

// BenchmarkFence: how long it takes until the last of ten routers has acknowledged a
// release. 301 callers release sandboxes, one after the other, so that each release has
// 300 others in flight.
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
// The routers are processes of their own. envoys=0: their Envoys have been ended.
// envoys=2: two of the Envoys are there, and requests to other sandboxes go through them
// all the time.
func BenchmarkFence(b *testing.B) {
	const routers, callers, times = 10, 301, 5
	const requests = 200 // a second, through each Envoy
	for _, envoys := range []int{0, 2} {
		b.Run(fmt.Sprintf("envoys=%d", envoys), func(b *testing.B) {
			g := newGroundOf(b, stack.Options{Gateways: routers, LeaseDuration: 15 * time.Second})
			for _, gateway := range g.berth.Gateways[envoys:] {
				require.NoError(b, gateway.Envoy.Stop(b.Context(), 10*time.Second))
			}
			const released = 2 * callers
			g.pool("fence", released, 0)
			stopTraffic := g.traffic(envoys, requests)
			b.ResetTimer()
			for range b.N {
				var deletes, echoes []time.Duration
				before := g.histogram("berth_allocator_release_acknowledged_seconds")
				for range times {
					ids := make([]string, released)
					g.parallel(released, 64, func(i int) (err error) { ids[i], err = g.claim("fence"); return err })
					g.settled("fence", released, released) // no pod is made while we measure
					g.warmUp(callers)
					require.Equal(b, slices.Repeat([]int{released}, routers), g.known(ids),
						"a router that does not know them has nothing to forget")
					stopEchoes := g.echoes(routers)
					deletes = append(deletes, g.parallel(released, callers, func(i int) error { return g.release(ids[i]) })...)
					echoes = append(echoes, stopEchoes()...)
					require.Equal(b, make([]int, routers), g.known(ids))
					g.full("fence", released)
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
			if answered := stopTraffic(); envoys > 0 {
				b.ReportMetric(float64(answered), "requests")
			}
		})
	}
}

// known is how many of these sandboxes each router has a route of.
func (g *ground) known(ids []string) (known []int) {
	for _, gateway := range g.berth.Gateways {
		n := 0
		for _, id := range g.routes(gateway.Admin) {
			if slices.Contains(ids, id) {
				n++
			}
		}
		known = append(known, n)
	}
	return known
}

// routes are the sandboxes that a router has a route of.
func (g *ground) routes(admin string) (ids []string) {
	a, err := harness.Do(g.Context(), http.DefaultClient, http.MethodGet, admin+"/admin/routes", "", "")
	require.NoError(g, err)
	var page routeradmin.Routes
	require.NoError(g, json.Unmarshal(a.Body, &page))
	for _, route := range page.Routes {
		ids = append(ids, route.SandboxID)
	}
	return ids
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
		hosts[i] = fmt.Sprintf("%d-%s.%s", g.berth.Nodes.Port(), id, g.berth.Stack.Domain)
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
// errGone is in the error of a request whose sandbox had been released.
var errGone = errors.New("the sandbox is gone")

func (g *ground) get(c *http.Client, host string) error {
	a, err := harness.Do(g.Context(), c, http.MethodGet, "http://pod/", host, "")
	switch {
	case err == nil && a.Code == http.StatusGone:
		err = fmt.Errorf("%s: %w", host, errGone)
	case err == nil && a.Code != http.StatusOK:
		err = fmt.Errorf("%s: %d %.200s", host, a.Code, a.Body)
	}
	return err
}

// histogram is one of Prometheus': how many values there are up to each bound, which
// ascend.
type histogram struct{ bounds, upTo []float64 }

// histogram reads one of the allocator's.
func (g *ground) histogram(name string) histogram { return g.histogramAt(g.admin, name) }

func (g *ground) histogramAt(admin, name string) (h histogram) {
	page, err := harness.Do(g.Context(), http.DefaultClient, http.MethodGet, admin+"/metrics", "", "")
	require.NoError(g, err)
	lines := bufio.NewScanner(bytes.NewReader(page.Body))
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
