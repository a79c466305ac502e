package core

import (
	"net/netip"
	"time"
)

// discard takes an idle pod out of use for good. The pod is deleted when the intent is durable.
// Otherwise the next leader could hand out a pod whose deletion is on its way.
func (c *Core) discard(q *pod) {
	c.enter(q, podDeleting)
	if !q.seen.Deleting {
		key := q.seen.Key
		pf := c.commit(Fact{Discard: key}, false, func(Fact, time.Duration) { c.discarded(key) })
		c.discards[key] = &discard{revision: pf.fact.Revision}
	}
}

// discardStrays deletes the orphans: pods that are marked as used and on no record. It waits until
// no router of an earlier term can have a route to them.
func (c *Core) discardStrays() {
	if len(c.strays) == 0 || c.now.Boot < c.started.Boot+c.cfg.Lease+c.cfg.expiry()+c.cfg.Window {
		return
	}
	for _, q := range c.strays {
		if c.pods[q.seen.Key] == q {
			c.discard(q)
		}
	}
	c.strays = nil
}

// discard is the intent to delete an idle pod. It is final.
type discard struct {
	revision Revision
	durable  bool
	// after: not before the fence of this sandbox is complete.
	after *sandbox
	asked bool // for its deletion
}

// discardDoubles takes the pods out of use for good that conflicting records name for a sandbox.
// They are deleted when the intent is durable and the sandbox's fence is complete. The intent is
// the only record of them: the sandbox's own record names one pod and one address from now on.
func (c *Core) discardDoubles(s *sandbox) {
	at := map[PodKey][]netip.Addr{}
	var pods []PodKey
	for _, d := range s.doubles {
		if len(at[d.pod]) == 0 {
			pods = append(pods, d.pod)
		}
		at[d.pod] = append(at[d.pod], d.ip)
	}
	for _, key := range pods {
		pf := c.commit(Fact{Discard: key, After: s.ID, At: at[key]}, true, func(Fact, time.Duration) { c.discarded(key) })
		c.discards[key] = &discard{revision: pf.fact.Revision, after: s}
	}
}

// discarded acts on a committed intent.
func (c *Core) discarded(key PodKey) {
	c.discards[key].durable = true
	c.advanceDiscard(key)
}

// advanceDiscard deletes a discarded pod when its intent is durable and no fence protects it, or
// drops the intent when the pod is gone.
func (c *Core) advanceDiscard(key PodKey) {
	q, d := c.pods[key], c.discards[key]
	switch {
	case d == nil || !d.durable || d.after != nil && d.after.exposed:
	case q == nil:
		delete(c.discards, key)
		c.emit(Settle{Pod: key, Revision: d.revision})
	case !q.seen.Deleting && !d.asked && q.sandbox == nil: // the pod of a sandbox goes with its fence
		d.asked = true
		c.emit(DeletePod{Pod: key})
		c.letEnd(q)
	}
}
