package core

import (
	"fmt"
	"slices"
	"time"
)

// The pod of a released sandbox can become warm again, if its pool asks for that. A pod then has several
// lives, one after the other. Each life has a PodKey of its own, so nothing else in this package knows of
// recycling: a life has at most one sandbox, its retirement is final, and a late message about it says
// nothing about the next one.
//
//   - A life ends by RecyclePod, which follows the complete fence of its sandbox. So no router has a route to
//     its address, and no request is on its way there. The observation of the next life ends it.
//   - The next life begins pending, at the same address. It is ready only when the kubelet's status proves
//     that every container was restarted after the life before: see package pods. Core trusts Pod.Recycling for
//     that. A life is retired if its pod cannot be cleaned, or if it is not proven within proofWithin. A life that
//     does not end within that time after RecyclePod is deleted.
//   - A restart needs no fact of its own. A leader that ends in between leaves either the life before, whose
//     fence the next leader begins again, or a next life that is not proven. The next leader has not seen
//     the fence complete: until it has, the address is tainted, and a next life there is tainted too and is
//     deleted. A late RecyclePod of a deposed leader does no harm: the fence that it followed stays complete.
//   - A client that changes what marks the life of a pod in use ends its sandbox: the release, its fence and the
//     taint follow as for a pod that is gone.

// proofWithin bounds how long the end of a life may take after RecyclePod, and how long the next one may be without
// proof. Restarts take seconds.
const proofWithin = 2 * time.Minute

// unproven is a life that is to end, or that began with a restart.
type unproven struct {
	pod   *pod
	since time.Duration // boot clock
}

// How the recycling of a pod can end.
const (
	Recycled  = "Recycled"  // the next life is proven
	NotNeeded = "NotNeeded" // the pool has as many idle pods as it keeps
	NotFit    = "NotFit"    // the pod, or the pool's template, has changed, or the sandbox failed or ended because of the pod
	NotProven = "NotProven" // the kubelet did not report the restart of all containers in time, or the pod could not be cleaned
)

// Recycles are all outcomes.
var Recycles = []string{Recycled, NotNeeded, NotFit, NotProven}

// recycles reports whether the pod of a released sandbox, whose fence is complete, begins another life. Only a pod
// that could go on to serve does, and only for a pool that keeps it.
func (c *Core) recycles(p *pod, sb *sandbox) bool {
	pool := p.pool
	if !pool.Recycle || !pool.known || pool.Deleting {
		return false
	}
	cause, _ := p.unfit(sb)
	switch {
	case pool.Refused != "", p.outdated, !p.seen.Recyclable, !p.usable(), cause != (Cause{}), sb.Reason == ReasonAddressShared,
		slices.Contains(logReasons, sb.Reason), len(sb.conflicts) > 0, c.retirements[p.seen.Key] != nil:
		c.emit(RecycleEnded{NotFit})
		return false
	case !pool.spec().Keeps(pool.warmCounts()):
		c.emit(RecycleEnded{NotNeeded})
		return false
	}
	return true
}

// recycle begins the end of a life.
func (c *Core) recycle(p *pod) {
	p.recount(func() { p.recycling = true })
	c.unproven = append(c.unproven, unproven{p, c.now.Boot})
	c.emit(RecyclePod{Pod: p.seen.Key, Pool: p.pool.Key})
}

// awaitProof begins the wait for the proof of a life, and ends it.
func (c *Core) awaitProof(p *pod) {
	switch {
	case p.recycling && p.seen.Deleting: // its deletion takes the place of the recycling
		p.recount(func() { p.recycling = false })
		c.emit(RecycleEnded{NotFit})
	case p.seen.Recycling && !p.awaited:
		p.awaited = true
		c.unproven = append(c.unproven, unproven{p, c.now.Boot})
	case p.awaited && !p.proven && !p.seen.Recycling:
		p.proven = true
		c.emit(RecycleEnded{Recycled})
	}
	if p.seen.Recycling && p.seen.Reason != "" && !p.seen.Deleting && !c.recovering {
		c.retireLife(p, "it could not be cleaned for the next sandbox")
	}
}

// retireUnproven ends the lives that have not ended, or whose proof has not come, in time.
func (c *Core) retireUnproven() {
	for len(c.unproven) > 0 && c.now.Boot-c.unproven[0].since >= proofWithin {
		p := c.unproven[0].pod
		c.unproven = c.unproven[1:]
		switch {
		case c.pods[p.seen.Key] != p:
		case p.recycling:
			p.recount(func() { p.recycling = false })
			c.emit(RecycleEnded{NotProven}) // the log has the errors of the writes
			c.emit(DeletePod{Pod: p.seen.Key})
		case p.seen.Recycling:
			c.retireLife(p, fmt.Sprintf("its node did not report the restart of all containers within %v", proofWithin))
		}
	}
}

// retireLife retires a life that is not proven. That of a tainted pod ends when its address is free.
func (c *Core) retireLife(p *pod, why string) {
	if p.phase != podPending || p.tainted {
		return
	}
	if p.seen.Why != "" {
		why += ": " + p.seen.Why
	}
	c.recordFailure(p, PodNeverReady, why)
	c.emit(RecycleEnded{NotProven})
	c.retire(p)
}
