package core

import (
	"iter"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// class is what the pods of a pool are counted by.
type class struct {
	phase     podPhase
	outdated  bool // made from an older template
	stranded  bool // idle, and the pool creates another pod for it
	recycling bool // it becomes pending again
}

// class returns the class of a pod as it is now.
func (p *pod) class() class { return class{p.phase, p.outdated, p.stranded(), p.recycling} }

// census has the pods of a pool by class. All counts are taken from it, so nothing has to look at all pods.
type census map[class]map[*pod]struct{}

func (c census) add(p *pod) {
	if c[p.class()] == nil {
		c[p.class()] = map[*pod]struct{}{}
	}
	c[p.class()][p] = struct{}{}
}

func (c census) remove(p *pod) {
	of := c[p.class()]
	if delete(of, p); len(of) == 0 {
		delete(c, p.class())
	}
}

// total is how many pods there are, count how many are in some phases.
func (c census) total() (n int) {
	for _, pods := range c {
		n += len(pods)
	}
	return n
}

func (c census) count(phases ...podPhase) (n int) {
	for of, pods := range c {
		if slices.Contains(phases, of.phase) {
			n += len(pods)
		}
	}
	return n
}

// in returns the pods in some phases, in no order.
func (c census) in(phases ...podPhase) iter.Seq[*pod] {
	return func(yield func(*pod) bool) {
		for of, pods := range c {
			if !slices.Contains(phases, of.phase) {
				continue
			}
			for p := range pods {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// sorted lists the pods in some phases by UID, so that the same events choose the same pods.
func (c census) sorted(phases ...podPhase) []*pod {
	return slices.SortedFunc(c.in(phases...), func(a, b *pod) int { return fact.ComparePods(a.seen.Key, b.seen.Key) })
}

// counts are those that operators see.
func (pool *pool) counts() Counts {
	n := Counts{Pending: len(pool.creating), Waiting: pool.line.Callers()}
	for of, pods := range pool.pods {
		switch of.phase {
		case podPending:
			n.Pending += len(pods)
		case podWarm:
			n.Warm += len(pods)
		case podClaiming, podClaimed:
			n.Claimed += len(pods)
		case podReleased, podDeleting:
			n.Releasing += len(pods)
		}
		if of.outdated && of.phase <= podWarm {
			n.Outdated += len(pods)
		}
		if of.stranded {
			n.Stranded += len(pods)
		}
	}
	return n
}

// warmCounts are the counts that the plan of a pool depends on.
func (pool *pool) warmCounts() warm.Counts {
	n := warm.Counts{Creating: len(pool.creating), Total: pool.pods.total()}
	for of, pods := range pool.pods {
		switch of.phase {
		case podPending:
			n.Pending += len(pods)
			if of.outdated {
				n.OutdatedPending += len(pods)
			}
			if of.stranded {
				n.Stranded += len(pods)
			}
			if !of.outdated && !of.stranded {
				n.Coming += len(pods)
			}
		case podWarm:
			if of.outdated {
				n.OutdatedWarm += len(pods)
			} else {
				n.Warm += len(pods)
			}
		case podClaiming, podClaimed:
			n.InUse += len(pods)
		case podReleased:
		case podDeleting:
			if of.recycling {
				n.Recycling += len(pods)
			} else {
				n.Deleting += len(pods)
			}
		}
	}
	return n
}
