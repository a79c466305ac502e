package bench

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// BenchmarkNoisyTeam: what the claims of a team cost while another team keeps 10,000 claims waiting at
// another pool, in turn with what they cost alone. Teams that wait at one pool take turns, which tests of the
// core show. control is a second round alone against the first.
func BenchmarkNoisyTeam(b *testing.B) {
	const waiting, rounds, claims, warm = 10_000, 7, 300, 300
	g := newGroundOf(b, stack.Options{
		LeaseDuration: 15 * time.Second,
		AllocatorArgs: []string{"--api-keys-namespace=default", fmt.Sprintf("--claim-queue=%d", waiting)},
	})
	quiet, noisy := g.as("quiet", 16), g.as("noisy", waiting)
	quiet.pool("quiet", warm, 0)
	none := int32(1)
	g.berth.CreatePool("noisy", 0, func(p *v1alpha1.SandboxPool) { p.Spec.MaxPods = &none })
	round := func() (p50, p99 float64) {
		quiet.full("quiet", warm)
		took := make([]time.Duration, 0, claims)
		for range claims {
			began := time.Now()
			id, err := quiet.claim("quiet")
			took = append(took, time.Since(began))
			require.NoError(b, err)
			require.NoError(b, quiet.release(id))
		}
		return ms(quantile(took, 0.5)), ms(quantile(took, 0.99))
	}
	round()
	b.ResetTimer()
	for range b.N {
		all := map[string][]float64{}
		add := func(name string, v float64) { all[name] = append(all[name], v) }
		for range rounds {
			alone50, alone99 := round()
			again50, again99 := round()
			stop := noisy.crowd("noisy", waiting)
			noisy50, noisy99 := round()
			add("memory_MiB", g.metrics(g.admin + "/metrics")["process_resident_memory_bytes"]/(1<<20))
			stop()
			add("claim_p50_ms", noisy50)
			add("claim_p99_ms", noisy99)
			add("ratio_p50", noisy50/alone50)
			add("ratio_p99", noisy99/alone99)
			add("control_p50", again50/alone50)
			add("control_p99", again99/alone99)
			b.Logf("alone p50 %.1f p99 %.1f, again %.1f %.1f, beside %d waiting claims %.1f %.1f ms",
				alone50, alone99, again50, again99, waiting, noisy50, noisy99)
		}
		for name, values := range all {
			b.ReportMetric(median(values), name)
		}
	}
}

// as returns a ground whose calls are those of a team, with so many connections at most.
func (g *ground) as(team string, connections int) *ground {
	key := access.NewKey()
	secret, err := access.NewSecret(key, access.Caller{Key: team, Team: team, Role: access.Admin})
	require.NoError(g, err)
	secrets := g.berth.Clients.Kubernetes.CoreV1().Secrets(harness.Namespace)
	_, err = secrets.Create(g.Context(), secret, metav1.CreateOptions{})
	require.NoError(g, err)
	transport := &http.Transport{MaxIdleConnsPerHost: connections, DisableCompression: true}
	g.Cleanup(transport.CloseIdleConnections)
	own := &ground{
		B: g.B, berth: g.berth, api: g.api, admin: g.admin,
		http: &http.Client{Transport: withKey{transport, key}, Timeout: 6 * time.Minute},
	}
	require.Eventually(g, func() bool { // the key is known
		code, _, err := own.call(http.MethodGet, "/sandboxes", "")
		return err == nil && code == http.StatusOK
	}, time.Minute, 50*time.Millisecond)
	return own
}

// withKey adds an API key to each request.
type withKey struct {
	http.RoundTripper
	key string
}

func (w withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-API-Key", w.key)
	return w.RoundTripper.RoundTrip(r)
}

// crowd keeps so many claims waiting at a pool that has no pods. stop ends them, and waits until none is
// left.
func (g *ground) crowd(pool string, callers int) (stop func()) {
	ctx, cancel := context.WithCancel(g.Context())
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for ctx.Err() == nil {
				g.await(ctx, pool)
			}
		})
	}
	counted := func(is func(waiting int) bool) {
		require.Eventually(g, func() bool {
			return is(int(g.metrics(g.admin + "/metrics")["berth_allocator_pool_claims_waiting"]))
		}, 5*time.Minute, 100*time.Millisecond)
	}
	counted(func(waiting int) bool { return waiting >= callers*99/100 })
	return func() {
		cancel()
		all.Wait()
		counted(func(waiting int) bool { return waiting == 0 })
	}
}

// await claims, and does not look at the answer.
func (g *ground) await(ctx context.Context, pool string) {
	body := `{"templateID":"` + pool + `","waitTimeout":300}`
	_, _ = harness.Do(ctx, g.http, http.MethodPost, g.api+"/sandboxes", "", body)
}
