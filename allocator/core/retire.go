package core

import (
	"net/netip"
	"time"
)

// discard takes an idle pod out of use for good. It is deleted once that is in
// the journal: a leader that comes after must not hand it out while our deletion
// is still on its way.
func (c *Core) discard(q *pod) {
	c.enter(q, podDeleting)
	if !q.seen.Deleting {
		key := q.seen.Key
		pf := c.commit(Fact{Discard: key}, false, func(Fact, time.Duration) { c.discarded(key) })
		c.discards[key] = &discard{revision: pf.fact.Revision}
	}
}

// discardStrays has the pods deleted that are marked as used and on no record,
// once no router of an earlier term can know a route to them.
func (c *Core) discardStrays() {
	if len(c.strays) == 0 || c.now.Boot < c.started.Boot+c.cfg.Lease+c.expiry()+c.cfg.Window {
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

// discardDoubles takes the pods out of use for good that records name for a sandbox,
// at other addresses or beside the pod that it counts as being on. They are deleted when
// that is in the journal, and the sandbox's fence is complete. The leaders that follow
// learn of them only from there: its record names one pod and one address from now on.
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

// advanceDiscard deletes a pod that is discarded, or drops the durable intent if the pod is gone,
// unless something stands in the way.
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
