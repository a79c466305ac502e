package allocator

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
)

func TestLeaderMetricsCountItsState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		registry := prometheus.NewRegistry()
		registry.MustRegister(&census{a})
		names := []string{"berth_allocator_routers_connected", "berth_allocator_sandboxes_live", "berth_allocator_pool_pods", "berth_allocator_pool_target_pods", "berth_allocator_pool_claims_waiting"}
		all := func(want string) {
			t.Helper()
			require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(want), names...))
		}
		const routers = `
# HELP berth_allocator_routers_connected Routers whose control stream is open.
# TYPE berth_allocator_routers_connected gauge
berth_allocator_routers_connected 0
`
		all(routers) // the loop does not answer: what is not known is not zero

		stop := tm.loop.running(t)
		tm.loop.Submit(core.PoolSeen{Pool: core.Pool{Key: poolKey, Warm: 2, DefaultPort: 80, Version: "1"}})
		tm.loop.Submit(core.PodSeen{Pod: pod("1")})
		all(routers + `
# HELP berth_allocator_pool_claims_waiting Claims that wait for a pod, by pool. Pools after the first 100 by name are summed as _other.
# TYPE berth_allocator_pool_claims_waiting gauge
berth_allocator_pool_claims_waiting{pool="python"} 0
# HELP berth_allocator_pool_pods Pods by pool and state: warm, pending, claimed or releasing. Pools after the first 100 by name are summed as _other.
# TYPE berth_allocator_pool_pods gauge
berth_allocator_pool_pods{pool="python",state="claimed"} 0
berth_allocator_pool_pods{pool="python",state="pending"} 1
berth_allocator_pool_pods{pool="python",state="releasing"} 0
berth_allocator_pool_pods{pool="python",state="warm"} 1
# HELP berth_allocator_pool_target_pods Pods that a pool asks for, without regard to maxPods: warm (for claims to come: spec.warm, or more with spec.maxWarm), lacking (that waiting claims still need) and spare (created for claims that have gone, and not deleted yet). Pools after the first 100 by name are summed as _other.
# TYPE berth_allocator_pool_target_pods gauge
berth_allocator_pool_target_pods{part="lacking",pool="python"} 0
berth_allocator_pool_target_pods{part="spare",pool="python"} 0
berth_allocator_pool_target_pods{part="warm",pool="python"} 2
# HELP berth_allocator_sandboxes_live Sandboxes that are starting or running, or are asleep or stopped.
# TYPE berth_allocator_sandboxes_live gauge
berth_allocator_sandboxes_live 0
`)
		stop()
		a.setTerm(nil)
		all("")
	})
}

func TestPoolSeriesAreBounded(t *testing.T) {
	pools := map[string]core.Counts{}
	for n := range maxPoolSeries {
		pools[fmt.Sprintf("p%03d", n)] = core.Counts{Warm: n}
	}
	require.Equal(t, pools, bounded(pools))
	pools["z1"], pools["z2"] = core.Counts{Warm: 1, Pending: 2, Claimed: 3, Releasing: 4, Waiting: 5, Target: 6, Lacking: 7, Spare: 8, Start: time.Second},
		core.Counts{Warm: 10, Pending: 20, Claimed: 30, Releasing: 40, Waiting: 50, Target: 60, Lacking: 70, Spare: 80, Start: time.Second}
	got := bounded(pools)
	require.Len(t, got, maxPoolSeries+1)
	require.Equal(t, core.Counts{Warm: 11, Pending: 22, Claimed: 33, Releasing: 44, Waiting: 55, Target: 66, Lacking: 77, Spare: 88}, got[otherPools])
}

func TestClaimsAreCountedByPoolAndResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		p := a.metrics.pools
		for _, e := range []core.Effect{
			core.ClaimGranted{Pool: poolKey}, core.ClaimGranted{Pool: poolKey, Waited: true, Wait: 7 * time.Second}, core.ClaimCanceled{Pool: poolKey},
			core.ClaimRefused{Pool: poolKey, Why: core.PoolEmpty}, core.ClaimRefused{Pool: poolKey, Why: core.LineFull},
			core.ClaimRefused{Why: core.NoPool}, core.ClaimRefused{Pool: poolKey, Why: core.OverLimit},
		} {
			tm.do(e)
		}
		for result, want := range map[string]float64{metric.ResultWarm: 1, metric.ResultWaited: 1, metric.ResultCanceled: 1, metric.ResultRefused: 2} {
			require.InDelta(t, want, testutil.ToFloat64(p.total.WithLabelValues("python", result)), 0, result)
		}
		require.Equal(t, 4, testutil.CollectAndCount(p.total))
		require.Equal(t, 2, testutil.CollectAndCount(p.wait), "claims that waited are apart")

		stop := tm.loop.running(t)
		tm.loop.Submit(core.PoolSeen{Pool: core.Pool{Key: poolKey, Version: "1"}})
		testutil.CollectAndCount(&census{a})
		require.Equal(t, 4, testutil.CollectAndCount(p.total))
		tm.loop.Submit(core.PoolGone{Key: poolKey, Version: "2"})
		testutil.CollectAndCount(&census{a})
		require.Zero(t, testutil.CollectAndCount(p.total)+testutil.CollectAndCount(p.wait), "the pool is deleted")
		stop()
	})
}

func TestClaimsOfManyPoolsAreSummed(t *testing.T) {
	p := newPoolClaims()
	for n := range maxPoolSeries + 2 {
		p.granted(fmt.Sprint("pool", n), false, 0)
	}
	require.Equal(t, maxPoolSeries+1, testutil.CollectAndCount(p.total))
	require.InDelta(t, 2, testutil.ToFloat64(p.total.WithLabelValues(otherPools, metric.ResultWarm)), 0)
	p.keep(nil)
	require.Equal(t, 1, testutil.CollectAndCount(p.total), "the sum of the others stays")
	p.granted("pool100", false, 0)
	require.InDelta(t, 1, testutil.ToFloat64(p.total.WithLabelValues("pool100", metric.ResultWarm)), 0)
}

func TestClaimsAreCountedByOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		for _, answer := range []core.Effect{core.Claimed{}, core.ClaimRefused{Why: core.PoolEmpty}, core.ClaimRefused{Why: core.NoPool}} {
			claim, done := claiming(t.Context(), a, tm)
			time.Sleep(time.Second)
			tm.answers.deliver(claim.Token, answer)
			<-done
		}
		ctx, cancel := context.WithCancel(t.Context())
		_, done := claiming(ctx, a, tm)
		cancel()
		<-done
		a.setTerm(nil)
		_, err := a.Claim(t.Context(), "python", core.Claim{})
		require.Error(t, err)
		for _, outcome := range []string{"claimed", string(apierror.PoolEmpty), string(apierror.PoolNotFound), "canceled", string(apierror.NotLeader)} {
			require.InDelta(t, 1, testutil.ToFloat64(a.metrics.claims.WithLabelValues(outcome)), 0, outcome)
		}
		require.Equal(t, 5, testutil.CollectAndCount(a.metrics.claims))
		require.NoError(t, testutil.CollectAndCompare(a.metrics.claimed, strings.NewReader(`
# HELP berth_allocator_claim_seconds Time from the call to the answer of successful claims, including the wait for a warm pod.
# TYPE berth_allocator_claim_seconds histogram
`+buckets()+`berth_allocator_claim_seconds_sum 1
berth_allocator_claim_seconds_count 1
`)))
	})
}

// buckets of one claim that took a second.
func buckets() (text string) {
	for _, le := range []string{"0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"} {
		text += fmt.Sprintf("berth_allocator_claim_seconds_bucket{le=%q} 0\n", le)
	}
	for _, le := range []string{"1", "2", "5", "10", "30", "60", "120", "300", "+Inf"} {
		text += fmt.Sprintf("berth_allocator_claim_seconds_bucket{le=%q} 1\n", le)
	}
	return text
}
