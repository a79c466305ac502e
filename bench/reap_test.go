package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// BenchmarkReap: how long after its idle timeout a sandbox is gone on every router. 300
// sandboxes with an idle timeout T of 10 s are claimed, a few milliseconds after one
// another, used once through one of three Envoys, and left alone. "late" is the time from
// the answer to that request, and T, until none of the routers has the route any more,
// which is looked at every 50 ms.
//
// Then sandboxes, 25 at a time, are left alone until shortly before they are idle, and
// are sent requests all the time while the allocator asks: "held" is how many of
// these the routers kept waiting, and for how long, by their histogram, where a bucket's
// values are taken to be spread evenly. "missed" counts the sandboxes that were released because
// the benchmark woke up too late to use them.
func BenchmarkReap(b *testing.B) {
	const sandboxes, asked, times = 300, 25, 20
	const idle = 10 * time.Second
	g := newGroundOf(b, stack.Options{Gateways: 3, LeaseDuration: 15 * time.Second})
	g.pool("reap", sandboxes, 0)
	clients := make([]*http.Client, len(g.berth.Gateways))
	for i, gateway := range g.berth.Gateways {
		clients[i] = client(b, gateway.Addr.String())
	}
	host := func(id string) string { return fmt.Sprintf("%d-%s.%s", g.berth.Nodes.Port(), id, g.berth.Stack.Domain) }
	b.ResetTimer()
	for range b.N {
		var mu sync.Mutex
		used, gone := map[string]time.Time{}, map[string]time.Time{}
		g.parallel(sandboxes, 4, func(i int) error {
			id, err := g.claimIdle("reap", idle)
			if err != nil {
				return err
			}
			if err := g.get(clients[i%len(clients)], host(id)); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			used[id] = time.Now()
			return nil
		})
		require.Eventually(b, func() bool {
			routed := map[string]bool{}
			now := time.Now() // not later than the answers
			for _, id := range g.routed() {
				routed[id] = true
			}
			for id := range used {
				if _, is := gone[id]; !is && !routed[id] {
					gone[id] = now
				}
			}
			return len(gone) == sandboxes
		}, time.Minute, 50*time.Millisecond)
		var late []time.Duration
		for id, at := range gone {
			late = append(late, at.Sub(used[id])-idle)
		}
		for _, q := range []float64{0.5, 0.9, 0.99, 1} {
			b.ReportMetric(ms(quantile(late, q)), fmt.Sprintf("late_p%g_ms", 100*q))
		}

		g.full("reap", sandboxes)
		before := g.held()
		var missed atomic.Int32
		g.parallel(asked*times, asked, func(i int) error {
			id, err := g.claimIdle("reap", idle)
			if err != nil {
				return err
			}
			c := clients[i%len(clients)]
			if err := g.get(c, host(id)); err != nil {
				return err
			}
			// A report may come until shortly before, and put it off.
			for left := time.Duration(1); left > 0; {
				if left, err = g.untilAsked(id); errors.Is(err, errGone) {
					missed.Add(1)
					return nil
				} else if err != nil {
					return err
				}
				left = min(left-100*time.Millisecond, 300*time.Millisecond)
				time.Sleep(left)
			}
			for until := time.Now().Add(300 * time.Millisecond); time.Now().Before(until); {
				switch err := g.get(c, host(id)); {
				case errors.Is(err, errGone): // this process slept too long, and the sandbox was idle
					missed.Add(1)
					return nil
				case err != nil:
					return err
				}
			}
			return nil
		})
		held := g.held().since(before)
		b.ReportMetric(held.count(), "held")
		b.ReportMetric(float64(missed.Load()), "missed")
		if held.count() == 0 {
			b.Log("no request was held: for how long they are is not measured")
		} else {
			for _, q := range []float64{0.5, 0.99} {
				b.ReportMetric(1000*held.quantile(q), fmt.Sprintf("held_p%g_ms", 100*q))
			}
		}
		require.Eventually(b, func() bool { return len(g.routed()) == 0 }, time.Minute, 50*time.Millisecond)
		g.full("reap", sandboxes)
	}
}

func (g *ground) claimIdle(pool string, idle time.Duration) (id string, err error) {
	var s struct{ SandboxID string }
	code, body, err := g.call(http.MethodPost, "/sandboxes",
		fmt.Sprintf(`{"templateID":%q,"idleTimeout":%d}`, pool, int(idle.Seconds())))
	if err != nil || code != http.StatusCreated {
		return "", fmt.Errorf("claim: %d %s %w", code, body, err)
	}
	return s.SandboxID, json.Unmarshal(body, &s)
}

// untilAsked is when the allocator asks whether a sandbox is idle, if it hears nothing of
// it until then.
func (g *ground) untilAsked(id string) (time.Duration, error) {
	var page rest.LastActive
	code, body, err := g.call(http.MethodGet, "/v1/admin/last-active?id="+id, "")
	if err != nil || code != http.StatusOK {
		return 0, fmt.Errorf("last-active: %d %s %w", code, body, err)
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return 0, fmt.Errorf("last-active: %s: %w", body, err)
	}
	if len(page.Sandboxes) == 0 {
		return 0, fmt.Errorf("last-active of %s: %w", id, errGone)
	}
	if len(page.Sandboxes) != 1 || page.Sandboxes[0].Next == nil {
		return 0, fmt.Errorf("last-active of %s: %s", id, body)
	}
	return time.Duration(page.Sandboxes[0].Next.InSeconds * float64(time.Second)), nil
}

// routed are the sandboxes that some router has a route of.
func (g *ground) routed() (ids []string) {
	for _, gateway := range g.berth.Gateways {
		ids = append(ids, g.routes(gateway.Admin)...)
	}
	return ids
}

// held is for how long the routers have kept requests waiting because they were asked
// whether their sandboxes are idle.
func (g *ground) held() (sum histogram) {
	for _, gateway := range g.berth.Gateways {
		h := g.histogramAt(gateway.Admin, "berth_router_quiesce_hold_seconds")
		if sum.bounds == nil {
			sum = h
			continue
		}
		require.True(g, slices.Equal(sum.bounds, h.bounds))
		for i := range h.upTo {
			sum.upTo[i] += h.upTo[i]
		}
	}
	return sum
}
