package core

import (
	"net/netip"
	"time"
)

// retire takes an idle pod out of use for good. The pod is deleted when the intent is durable.
// Otherwise the next leader could hand out a pod whose deletion is on its way.
func (c *Core) retire(p *pod) {
	p.enter(podDeleting, c.now.Boot)
	if !p.seen.Deleting {
		key := p.seen.Key
		pf := c.outbox.Commit(c.now.Boot, &RetirementFact{Pod: key}, false, func(Revision, time.Duration) { c.retired(key) })
		c.retirements[key] = &retirement{revision: pf.Revision()}
	}
}

// retireOrphans deletes the orphans: pods that are marked as used and on no record. It waits until
// no router of an earlier term can have a route to them.
func (c *Core) retireOrphans() {
	if len(c.orphans) == 0 || c.now.Boot < c.started.Boot+c.cfg.Lease+c.cfg.expiry(c.routers.longest)+c.cfg.ConnectWindow {
		return
	}
	for _, p := range c.orphans {
		if c.pods[p.seen.Key] == p {
			c.retire(p)
		}
	}
	c.orphans = nil
}

// retirement is the intent to delete an idle pod. It is final.
type retirement struct {
	revision Revision
	durable  bool
	// after: not before the fence of this sandbox is complete.
	after *sandbox
	asked bool // for its deletion
}

// retireConflicts takes the pods out of use for good that conflicting records name for a sandbox.
// They are deleted when the intent is durable and the sandbox's fence is complete. The intent is
// the only record of them: the sandbox's own record names one pod and one address from now on.
func (c *Core) retireConflicts(sb *sandbox) {
	at := map[PodKey][]netip.Addr{}
	var pods []PodKey
	for _, d := range sb.conflicts {
		if len(at[d.pod]) == 0 {
			pods = append(pods, d.pod)
		}
		at[d.pod] = append(at[d.pod], d.ip)
	}
	for _, key := range pods {
		pf := c.outbox.Commit(c.now.Boot, &RetirementFact{Pod: key, After: sb.ID, At: at[key]}, true, func(Revision, time.Duration) { c.retired(key) })
		c.retirements[key] = &retirement{revision: pf.Revision(), after: sb}
	}
}

// retired acts on a committed intent.
func (c *Core) retired(key PodKey) {
	c.retirements[key].durable = true
	c.advanceRetirement(key)
}

// advanceRetirement deletes a retired pod when its intent is durable and no fence protects it, or
// drops the intent when the pod is gone.
func (c *Core) advanceRetirement(key PodKey) {
	p, d := c.pods[key], c.retirements[key]
	switch {
	case d == nil || !d.durable || d.after != nil && c.taints.Routed(d.after.ID):
	case p == nil:
		delete(c.retirements, key)
		c.emit(Settle{key, d.revision})
	case !p.seen.Deleting && !d.asked && p.sandbox == nil: // the pod of a sandbox goes with its fence
		d.asked = true
		c.emit(DeletePod{Pod: key})
		for _, id := range c.taints.Retired(p.addr) {
			c.tryEnd(c.sandboxes.byID[id])
		}
	}
}
