package core

import "github.com/berth-sandbox/berth/allocator/core/taint"

// A pod is handed out only if all of these hold:
//
//   - Its address is not tainted: the fence of every sandbox that had a route to it is complete,
//     no matter which leader released the sandbox or who deleted its pod.
//   - The pod is not tainted: it was never idle at an address while that was tainted. Requests of
//     the earlier sandbox may have changed the pod. Such a pod keeps its address until all fences
//     are complete, and is then deleted.
//   - No other pod was seen at the address. Idle pods there are deleted, and a sandbox there is
//     released.

// locate notes at which address a pod was seen.
func (c *Core) locate(p *pod) {
	tainted, others := c.taints.Seen(p.addr, taint.Observation{
		IP: p.seen.IP, Used: p.sandbox != nil, Ending: p.seen.Deleting || p.seen.Finished,
	})
	p.quarantined = p.quarantined || !p.granted() && p.seen.IP.IsValid() && c.routers.members.HasEarlier()
	if tainted {
		p.recount(func() { p.tainted = true })
	}
	c.reconsider(others)
}

// addRoutes notes that routers may receive routes of a sandbox from now on.
func (c *Core) addRoutes(sb *sandbox) {
	tainted, others := c.taints.AddRoutes(sb.ID, sb.Pod, sb.addresses())
	for _, t := range tainted {
		p := c.pods[t.Key]
		p.recount(func() { p.tainted = true })
	}
	c.reconsider(others)
}

// reconsider considers pods again, because something about their address has changed.
func (c *Core) reconsider(pods []*taint.Pod[PodKey]) {
	for _, t := range pods {
		if p := c.pods[t.Key]; p != nil {
			c.consider(p)
		}
	}
}
