package allocator

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/metric"
)

const (
	// maxPoolSeries bounds the pools that have series of their own. The other pools are summed under
	// otherPools, which is no valid pool name.
	maxPoolSeries = 100
	otherPools    = "_other"
)

// poolClaims counts the claims of each pool. The first maxPoolSeries pools with a claim have series of their own
// until they are deleted. A pool keeps its label, so that no counter decreases. The loop alone calls it.
type poolClaims struct {
	named map[string]bool
	total *prometheus.CounterVec
	wait  *prometheus.HistogramVec
}

func newPoolClaims() *poolClaims {
	return &poolClaims{named: map[string]bool{}, total: metric.PoolClaims.Vec(), wait: metric.PoolClaimWaitSeconds.Vec()}
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
	result := metric.ResultWarm
	if waited {
		result = metric.ResultWaited
	}
	label := p.label(pool)
	p.total.WithLabelValues(label, result).Inc()
	p.wait.WithLabelValues(label, result).Observe(wait.Seconds())
}

func (p *poolClaims) canceled(pool string) {
	p.total.WithLabelValues(p.label(pool), metric.ResultCanceled).Inc()
}

// refused counts a refusal, if the pool is the reason.
func (p *poolClaims) refused(pool string, why core.Refusal) {
	if why == core.PoolEmpty || why == core.LineFull {
		p.total.WithLabelValues(p.label(pool), metric.ResultRefused).Inc()
	}
}

// keep deletes the series of pools that do not exist.
func (p *poolClaims) keep(pools map[string]core.Counts) {
	for pool := range p.named {
		if _, exists := pools[pool]; !exists {
			delete(p.named, pool)
			p.total.DeletePartialMatch(prometheus.Labels{metric.Pool: pool})
			p.wait.DeletePartialMatch(prometheus.Labels{metric.Pool: pool})
		}
	}
}

// collectPools sends the counts of pools.
func collectPools(pools map[string]core.Counts, all chan<- prometheus.Metric) {
	for name, n := range bounded(pools) {
		for state, pods := range map[string]int{metric.StateWarm: n.Warm, metric.StatePending: n.Pending, metric.StateClaimed: n.Claimed, metric.StateReleasing: n.Releasing} {
			all <- metric.PoolPods.Is(float64(pods), name, state)
		}
		for part, pods := range map[string]int{metric.PartWarm: n.Target, metric.PartLacking: n.Lacking, metric.PartSpare: n.Spare} {
			all <- metric.PoolTargetPods.Is(float64(pods), name, part)
		}
		all <- metric.PoolClaimsWaiting.Is(float64(n.Waiting), name)
		if n.Start > 0 {
			all <- metric.PoolStartSeconds.Is(n.Start.Seconds(), name)
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
