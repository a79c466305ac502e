package pools

import (
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// Counts are those that operators see, without what Status adds and without the claims that wait.
func (pool *Pool) Counts() step.Counts {
	n := pool.warmCounts()
	ready := n.Warm + n.OutdatedWarm
	return step.Counts{
		Pending: n.Creating + n.Pending, Warm: ready, Claimed: n.InUse, Releasing: n.Total - n.Pending - ready - n.InUse,
		Outdated: n.OutdatedPending + n.OutdatedWarm, Stranded: n.Stranded,
	}
}

// warmCounts are the counts that the plan of a pool depends on.
func (pool *Pool) warmCounts() warm.Counts {
	n := warm.Counts{Creating: len(pool.creating), Total: pool.Total()}
	for of, count := range pool.Classes() {
		switch of.State {
		case pods.Pending:
			n.Pending += count
			if of.Outdated {
				n.OutdatedPending += count
			}
			if of.Stranded {
				n.Stranded += count
			}
			if !of.Outdated && !of.Stranded {
				n.Coming += count
			}
		case pods.Warm:
			if of.Outdated {
				n.OutdatedWarm += count
			} else {
				n.Warm += count
			}
		case pods.Claiming, pods.Bound, pods.Claimed:
			n.InUse += count
		case pods.Released:
		case pods.Recycling:
			n.Recycling += count
		case pods.Going:
			n.Deleting += count
		}
	}
	return n
}

// Status adds to the counts why pods are not ready, what the pool asks for, and whether it is full.
func (pool *Pool) Status() step.Counts {
	n, spec := pool.Counts(), pool.spec()
	n.Stuck, n.Trouble = pool.stuck(), pool.backOff.trouble
	if len(pool.failures) > 0 {
		n.Failed = pool.failures[0]
	}
	n.Target, n.Wanted = spec.Warm, spec.Wanted(pool.warmCounts().InUse)
	n.Lacking, n.Spare, n.Start = spec.Lacking, spec.Spare, pool.demand.Start()
	for p := range pool.In(pods.Going) {
		if p.Sandbox() == "" && !p.Outdated() {
			n.Retiring++
		}
	}
	n.Full = pool.MaxPods > 0 && pool.Total()+len(pool.creating) >= pool.MaxPods
	return n
}

// Refusal adds to the counts what the caller of a refused claim is told. It looks at no pod.
func (pool *Pool) Refusal() step.Counts {
	n := pool.Counts()
	n.Trouble = pool.backOff.trouble
	if p := pool.LastUnready(); p != nil { // Status looks at all pods
		n.Stuck = step.Stuck{Reason: p.Seen().Reason, Pod: p.Key().Name, Why: p.Seen().Why, Pods: 1}
	}
	return n
}

// Exhausted reports whether a pool that is paused, or at its MaxPods, makes no pod before a sandbox is released.
func (pool *Pool) Exhausted() bool {
	n := pool.Counts()
	return (pool.Paused || pool.MaxPods > 0 && pool.Total() >= pool.MaxPods) && n.Pending+n.Releasing == 0
}
