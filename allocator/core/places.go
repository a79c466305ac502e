package core

import (
	"net/netip"
	"slices"
)

// place is an address, and what may be reached there. Addresses come back: to
// another pod of ours when the network gives them out again, and to a pod that moves.
// So a pod is handed out only at an address that
//
//   - no router may still send the requests of an earlier sandbox to, whoever deleted
//     that sandbox's pod and under whichever leader: its routes are fenced;
//   - no such requests can have reached before, while it was idle there. Its next sandbox
//     would be another one's. Such a pod keeps the address until all is fenced, and is
//     deleted;
//   - no other pod of ours seems to have. One of the two is not there any more, and
//     which one it is cannot be seen from here: those that are idle are deleted, a
//     sandbox there is released.
type place struct {
	pods   []*pod // that were last seen there
	routes int    // of sandboxes whose fence is not complete
	left   []*pod // that were reached there and have moved away
}

// placeOf returns what is at an address.
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

// locate puts a pod to the address that it was seen at, or to none. Others that are
// or were there with it are looked at again.
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
		q.early = q.early || q.sandbox == nil && c.earlier > 0
		if q.sandbox == nil && q.place.routes > 0 {
			q.change(func() { q.reached = true })
		}
	}
}

// reconsider looks again at the pods at an address, but for one.
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

// expose notes that routers may be told where a sandbox is.
func (c *Core) expose(s *sandbox) {
	if !s.exposed {
		s.exposed = true
		for _, at := range s.addresses() {
			p := c.placeOf(at)
			p.routes++
			for _, q := range p.pods {
				if q.sandbox == nil && c.holds[q.seen.Key] != s {
					q.change(func() { q.reached = true })
				}
			}
			c.reconsider(p, c.pods[s.Pod])
		}
	}
}

// cover notes that no router can send anything to where a sandbox was.
func (c *Core) cover(s *sandbox) {
	if s.exposed {
		s.exposed = false
		for _, at := range s.addresses() {
			p := c.placeOf(at)
			p.routes--
			c.leavePlace(at, p)
			for _, q := range append(slices.Clone(p.pods), p.left...) {
				if q.reached && !c.certain(q) && c.pods[q.seen.Key] == q {
					// The next leader would not know why this pod may not be handed out.
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

// certain reports whether it is durable that an idle pod is to be deleted.
func (c *Core) certain(q *pod) bool {
	d := c.discards[q.seen.Key]
	return d != nil && d.durable
}

// letEnd has those end that waited for the end of a pod that they had reached.
func (c *Core) letEnd(q *pod) {
	all := q.before
	q.before = nil
	for _, s := range all {
		s.reaches--
		c.tryEnd(s)
	}
}
