package allocator

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/allocator/core"
)

const (
	// maxPoolSeries bounds the pools that have series of their own. The other pools are summed under
	// otherPools, which is no valid pool name.
	maxPoolSeries = 100
	otherPools    = "_other"
)

// Results of claims, as berth_allocator_pool_claims_total counts them.
const (
	resultWarm     = "warm"
	resultWaited   = "waited"
	resultRefused  = "refused"
	resultCanceled = "canceled"
)

// poolClaims counts the claims of each pool. The first maxPoolSeries pools with a claim have series of their own
// until they are deleted. A pool keeps its label, so that no counter decreases. The loop alone calls it.
type poolClaims struct {
	named map[string]bool
	total *prometheus.CounterVec
	wait  *prometheus.HistogramVec
}

func newPoolClaims() *poolClaims {
	return &poolClaims{
		named: map[string]bool{},
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_pool_claims_total", Help: "Claims by pool and result: warm (all pods that it got were warm when it came), waited (for a pod), refused (the pool had no pod in time, or too many claims waited) or canceled (by the caller before it was granted). Other refusals do not count. A claim of several sandboxes is one. Pools after the first 100 are summed as _other.",
		}, []string{"pool", "result"}),
		wait: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "berth_allocator_pool_claim_wait_seconds", Help: "Time from when the leader accepts a claim until the claim is granted: it has its pods, the journal has it, and the agents in the pods are configured. A postStart hook follows. Pools after the first 100 are summed as _other.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120},
		}, []string{"pool"}),
	}
}

func (p *poolClaims) label(pool string) string {
	if len(p.named) < maxPoolSeries {
		p.named[pool] = true
	}
	if p.named[pool] {
		return pool
	}
	return otherPools
}

// granted counts a claim that got its sandboxes.
func (p *poolClaims) granted(pool string, waited bool, wait time.Duration) {
	result := resultWarm
	if waited {
		result = resultWaited
	}
	label := p.label(pool)
	p.total.WithLabelValues(label, result).Inc()
	p.wait.WithLabelValues(label).Observe(wait.Seconds())
}

func (p *poolClaims) canceled(pool string) {
	p.total.WithLabelValues(p.label(pool), resultCanceled).Inc()
}

// refused counts a refusal, if the pool is the reason.
func (p *poolClaims) refused(pool string, why core.Refusal) {
	if why == core.PoolEmpty || why == core.LineFull {
		p.total.WithLabelValues(p.label(pool), resultRefused).Inc()
	}
}

// keep deletes the series of pools that do not exist.
func (p *poolClaims) keep(pools map[string]core.Counts) {
	for pool := range p.named {
		if _, exists := pools[pool]; !exists {
			delete(p.named, pool)
			p.total.DeletePartialMatch(prometheus.Labels{"pool": pool})
			p.wait.DeleteLabelValues(pool)
		}
	}
}

var (
	poolPods    = prometheus.NewDesc("berth_allocator_pool_pods", "Pods by pool and state: warm, pending, claimed or releasing. Pools after the first 100 by name are summed as _other.", []string{"pool", "state"}, nil)
	poolWaiting = prometheus.NewDesc("berth_allocator_pool_claims_waiting", "Claims that wait for a pod, by pool. Pools after the first 100 by name are summed as _other.", []string{"pool"}, nil)
	poolTarget  = prometheus.NewDesc("berth_allocator_pool_target_pods", "Pods that a pool asks for, without regard to maxPods: warm (for claims to come: spec.warm, or more with spec.maxWarm), lacking (that waiting claims still need) and spare (created for claims that have gone, and not deleted yet). Pools after the first 100 by name are summed as _other.", []string{"pool", "part"}, nil)
	poolStart   = prometheus.NewDesc("berth_allocator_pool_start_seconds", "Time from the creation of a pod until it was warm, that 9 of 10 of the last 32 pods of the pool did not exceed. No value: none was measured since this replica leads. Pools after the first 100 by name have none.", []string{"pool"}, nil)
)

// collectPools sends the counts of pools.
func collectPools(pools map[string]core.Counts, value func(d *prometheus.Desc, v float64, labels ...string)) {
	for name, n := range bounded(pools) {
		for state, pods := range map[string]int{"warm": n.Warm, "pending": n.Pending, "claimed": n.Claimed, "releasing": n.Releasing} {
			value(poolPods, float64(pods), name, state)
		}
		for part, pods := range map[string]int{"warm": n.Target, "lacking": n.Lacking, "spare": n.Spare} {
			value(poolTarget, float64(pods), name, part)
		}
		value(poolWaiting, float64(n.Waiting), name)
		if n.Start > 0 {
			value(poolStart, n.Start.Seconds(), name)
		}
	}
}

// bounded sums the pools beyond maxPoolSeries.
func bounded(pools map[string]core.Counts) map[string]core.Counts {
	if len(pools) <= maxPoolSeries {
		return pools
	}
	most := map[string]core.Counts{}
	var rest core.Counts
	for i, name := range slices.Sorted(maps.Keys(pools)) {
		n := pools[name]
		if i < maxPoolSeries {
			most[name] = n
			continue
		}
		rest.Warm += n.Warm
		rest.Pending += n.Pending
		rest.Claimed += n.Claimed
		rest.Releasing += n.Releasing
		rest.Waiting += n.Waiting
		rest.Target += n.Target
		rest.Lacking += n.Lacking
		rest.Spare += n.Spare
	}
	most[otherPools] = rest
	return most
}
