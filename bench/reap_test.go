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

	"github.com/berth-sandbox/berth/api/openapi"
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
	const sandboxes = 300
	g := newGroundOf(b, stack.Options{Gateways: 3, LeaseDuration: 15 * time.Second})
	g.pool("reap", sandboxes, 0)
	r := reaper{ground: g}
	for _, gateway := range g.berth.Gateways {
		r.clients = append(r.clients, client(b, gateway.Addr.String()))
	}
	b.ResetTimer()
	for range b.N {
		r.late(sandboxes)
		g.full("reap", sandboxes)
		r.held()
		require.Eventually(b, func() bool { return len(g.routed()) == 0 }, time.Minute, 50*time.Millisecond)
		g.full("reap", sandboxes)
	}
}

// reapIdle is the idle timeout of the sandboxes.
const reapIdle = 10 * time.Second

// reaper has clients of each gateway.
type reaper struct {
	*ground
	clients []*http.Client
}

// claimed claims a sandbox and sends a request to it.
func (r reaper) claimed(i int) (id string, err error) {
	if id, err = r.claimIdle("reap", reapIdle); err != nil {
		return "", err
	}
	return id, r.request(i, id)
}

func (r reaper) request(i int, id string) error {
	return r.get(r.clients[i%len(r.clients)], fmt.Sprintf("%d-%s.%s", r.berth.Nodes.Port(), id, r.berth.Stack.Domain))
}

// late reports how long after their idle timeout so many sandboxes are gone on every router.
func (r reaper) late(sandboxes int) {
	var mu sync.Mutex
	used, gone := map[string]time.Time{}, map[string]time.Time{}
	r.parallel(sandboxes, 4, func(i int) error {
		id, err := r.claimed(i)
		mu.Lock()
		defer mu.Unlock()
		used[id] = time.Now()
		return err
	})
	require.Eventually(r, func() bool {
		routed := map[string]bool{}
		now := time.Now() // not later than the answers
		for _, id := range r.routed() {
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
		late = append(late, at.Sub(used[id])-reapIdle)
	}
	for _, q := range []float64{0.5, 0.9, 0.99, 1} {
		r.ReportMetric(ms(quantile(late, q)), fmt.Sprintf("late_p%g_ms", 100*q))
	}
}

// held reports how long requests are held that come while the leader asks about their sandbox.
func (r reaper) held() {
	const asked, times = 25, 20
	before := r.ground.held()
	var missed atomic.Int32
	r.parallel(asked*times, asked, func(i int) error {
		err := r.hold(i)
		if errors.Is(err, errGone) { // this process slept too long, and the sandbox was idle
			missed.Add(1)
			return nil
		}
		return err
	})
	held := r.ground.held().since(before)
	r.ReportMetric(held.count(), "held")
	r.ReportMetric(float64(missed.Load()), "missed")
	if held.count() == 0 {
		r.Log("no request was held: for how long they are is not measured")
		return
	}
	for _, q := range []float64{0.5, 0.99} {
		r.ReportMetric(1000*held.quantile(q), fmt.Sprintf("held_p%g_ms", 100*q))
	}
}

// hold claims a sandbox and sends requests to it when the leader is about to ask.
func (r reaper) hold(i int) error {
	id, err := r.claimed(i)
	if err != nil {
		return err
	}
	// A report may come until shortly before, and put it off.
	for left := time.Duration(1); left > 0; {
		if left, err = r.untilAsked(id); err != nil {
			return err
		}
		left = min(left-100*time.Millisecond, 300*time.Millisecond)
		time.Sleep(left)
	}
	for until := time.Now().Add(300 * time.Millisecond); time.Now().Before(until); {
		if err := r.request(i, id); err != nil {
			return err
		}
	}
	return nil
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
	var page openapi.LastActive
	code, body, err := g.call(http.MethodGet, "/v1/last-active?id="+id, "")
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
