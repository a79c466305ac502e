package core

import (
	"net/netip"
	"slices"
)

// place is one pod IP address. The network gives an address to another pod when its pod ends,
// and a pod can move to another address. A pod is handed out only if all of these hold:
//
//   - The address is not tainted: the fence of every sandbox that had a route to it is complete,
//     no matter which leader released the sandbox or who deleted its pod.
//   - The pod was never idle at the address while the address was tainted. Requests of the
//     earlier sandbox may have changed the pod. Such a pod keeps its address until all fences
//     are complete, and is then deleted.
//   - No other pod was seen at the address. One of the two must have lost it, and Core cannot
//     see which one. Idle pods there are deleted, and a sandbox there is released.
type place struct {
	pods   []*pod // that were last seen there
	routes int    // how many sandboxes with an incomplete fence had a route to it; above 0 it is tainted
	left   []*pod // pods that were idle there while it was tainted, and have moved away
}

// placeOf returns the place of an address, and creates it if there is none.
func (c *Core) placeOf(at netip.Addr) *place {
	p := c.places[at]
	if p == nil {
		p = &place{}
		c.places[at] = p
	}
	return p
}

func (c *Core) leavePlace(at netip.Addr, p *place) {
	if len(p.pods) == 0 && p.routes == 0 {
		delete(c.places, at)
	}
}

// contested reports whether another pod seems to be at the address of q.
func (q *pod) contested() bool {
	return q.place != nil && slices.ContainsFunc(q.place.pods, func(o *pod) bool {
		return o != q && !o.seen.Deleting && !o.seen.Finished
	})
}

// locate moves a pod to the address at which it was seen, or to none. It considers the other pods
// of the old address again.
func (c *Core) locate(q *pod, at netip.Addr) {
	if q.place != nil && q.at != at {
		p, was := q.place, q.at
		p.pods = slices.DeleteFunc(p.pods, func(o *pod) bool { return o == q })
		if q.reached && p.routes > 0 {
			p.left = append(p.left, q)
		}
		q.place, q.at = nil, netip.Addr{}
		c.leavePlace(was, p)
		c.reconsider(p, q)
	}
	if q.place == nil && at.IsValid() {
		q.place, q.at = c.placeOf(at), at
		q.place.pods = append(q.place.pods, q)
		q.early = q.early || q.sandbox == nil && c.members.HasEarlier()
		if q.sandbox == nil && q.place.routes > 0 {
			q.recount(func() { q.reached = true })
		}
	}
}

// reconsider considers all pods at an address again, except one.
func (c *Core) reconsider(p *place, but *pod) {
	set := map[*pod]struct{}{}
	for _, o := range p.pods {
		if o != but {
			set[o] = struct{}{}
		}
	}
	for _, o := range sortedPods(set) {
		c.consider(o)
	}
}

// expose taints the addresses of a sandbox: routers may receive a route to them from now on.
func (c *Core) expose(s *sandbox) {
	if !s.exposed {
		s.exposed = true
		for _, at := range s.addresses() {
			p := c.placeOf(at)
			p.routes++
			for _, q := range p.pods {
				if q.sandbox == nil && c.holds[q.seen.Key] != s {
					q.recount(func() { q.reached = true })
				}
			}
			c.reconsider(p, c.pods[s.Pod])
		}
	}
}

// cover ends the taint of the addresses of a sandbox: its fence is complete.
func (c *Core) cover(s *sandbox) {
	if s.exposed {
		s.exposed = false
		for _, at := range s.addresses() {
			p := c.placeOf(at)
			p.routes--
			c.leavePlace(at, p)
			for _, q := range append(slices.Clone(p.pods), p.left...) {
				if q.reached && !c.certain(q) && c.pods[q.seen.Key] == q {
					// The next leader does not know that this pod must not be handed out. So the
					// sandbox does not end before the intent to delete the pod is durable.
					q.before = append(q.before, s)
					s.reaches++
				}
			}
			if p.routes == 0 {
				p.left = nil
			}
			c.reconsider(p, c.pods[s.Pod])
		}
	}
}

// certain reports whether the intent to delete an idle pod is durable.
func (c *Core) certain(q *pod) bool {
	d := c.retirements[q.seen.Key]
	return d != nil && d.durable
}

// letEnd ends the sandboxes that waited until the intent to delete q is durable.
func (c *Core) letEnd(q *pod) {
	all := q.before
	q.before = nil
	for _, s := range all {
		s.reaches--
		c.tryEnd(s)
	}
}
