package bench

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
)

// BenchmarkSleep: what a request that wakes its sandbox costs against one to the same sandbox that is awake. 50
// sandboxes with processes of their own sleep at one time. They are woken one after the other by a request through
// Envoy ("wake"), and each is sent another one right behind it ("awake"). Then all sleep again and are woken at once
// ("burst"): a request for each comes at the same moment. "burst_awake" sends as many at once to sandboxes that are
// awake. "behind" is a burst that comes when the sleeps have just ended. The leader then still writes what follows from
// them: objects, and the CPU requests of pods. Before the others that is over, and so is what follows from one wake
// before the next. The journal's writes are in these times. "sleep" is the time of a call that has a sandbox sleep,
// without the connect window, when all are called at once.
func BenchmarkSleep(b *testing.B) {
	const (
		sandboxes, rounds = 50, 10
		rest, pause       = 3 * time.Second, 100 * time.Millisecond // after sleeps, and between wakes
	)
	bin := b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "allocator", "extproc", "demo-sandbox", "agent"))
	berth := harness.NewRun(b, history.Settings{}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{bin}},
		Stack:   stack.Options{BinDir: bin, LeaseDuration: 15 * time.Second},
	})
	transport := &http.Transport{MaxIdleConnsPerHost: sandboxes}
	b.Cleanup(transport.CloseIdleConnections)
	first := berth.Stack.Allocators[0]
	calls := &http.Client{Transport: transport, Timeout: time.Minute}
	g := &ground{B: b, berth: berth, http: calls, api: first.API, admin: first.Admin}
	berth.CreatePool("sleep", sandboxes, func(p *v1alpha1.SandboxPool) {
		p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		most := int32(sandboxes)
		p.Spec.MaxPods = &most
	})
	g.full("sleep", sandboxes)
	ids := make([]string, sandboxes)
	for i := range ids {
		var err error
		ids[i], err = g.claimWith("sleep", `,"wakeOnTraffic":true`)
		require.NoError(b, err)
	}
	edge := client(b, berth.Gateways[0].Addr.String())
	get := func(i int) error { return g.get(edge, fmt.Sprintf("8080-%s.%s", ids[i], berth.Stack.Domain)) }
	asleep := func() []time.Duration {
		return g.parallel(sandboxes, sandboxes, func(i int) error {
			code, body, err := g.call(http.MethodPost, "/sandboxes/"+ids[i]+"/pause", "{}")
			if err == nil && code != http.StatusNoContent {
				err = fmt.Errorf("%d: %s", code, body)
			}
			return err
		})
	}
	g.parallel(sandboxes, sandboxes, get)
	took := map[string][]time.Duration{}
	add := func(what string, all ...time.Duration) { took[what] = append(took[what], all...) }
	b.ResetTimer()
	for range b.N {
		for round := range rounds {
			for _, d := range asleep() {
				add("sleep", d-envoy.ConnectWindow)
			}
			time.Sleep(rest)
			for i := range ids {
				time.Sleep(pause)
				began := time.Now()
				require.NoError(b, get(i))
				woken := time.Now()
				require.NoError(b, get(i))
				add("wake", woken.Sub(began))
				add("awake", time.Since(woken))
			}
			asleep()
			add("behind", g.parallel(sandboxes, sandboxes, get)...)
			asleep()
			time.Sleep(rest)
			add("burst", g.parallel(sandboxes, sandboxes, get)...)
			add("burst_awake", g.parallel(sandboxes, sandboxes, get)...)
			n := (round + 1) * sandboxes
			p50 := func(what string) float64 { return ms(quantile(took[what][n-sandboxes:], 0.5)) }
			b.Logf("round %d: p50 of wake %.1f, awake %.1f, behind %.1f, burst %.1f, burst awake %.1f ms", round,
				p50("wake"), p50("awake"), p50("behind"), p50("burst"), p50("burst_awake"))
		}
	}
	b.StopTimer()
	for what, all := range took {
		b.ReportMetric(ms(quantile(all, 0.5)), what+"_p50_ms")
		b.ReportMetric(ms(quantile(all, 0.99)), what+"_p99_ms")
		b.ReportMetric(ms(quantile(all, 1)), what+"_most_ms")
	}
}
