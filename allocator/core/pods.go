package core

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/taint"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

type podPhase int

const (
	podPending podPhase = iota
	podWarm
	podClaiming
	podClaimed
	podReleased
	podDeleting
	podPhases int = iota
)

type pod struct {
	pool     *pool
	seen     Pod // the latest observation
	node     *node
	phase    podPhase
	outdated bool // made from an older template
	// away: its node became unusable after the pod was scheduled. The pool creates another pod
	// for it. A pod that is scheduled to an unusable node is not away, because its replacement
	// might be scheduled to the same node.
	away bool
	// tainted: requests of an earlier sandbox may have reached it, because it was idle at an
	// address while that was tainted. It is never handed out, and the pool creates another one.
	tainted bool
	// quarantined: the same for sandboxes of an earlier journal. The pool creates no other pod until
	// the session of that journal ends.
	quarantined bool
	warmAt      time.Duration // boot clock: when it was warm for the first time; 0: never
	addr        *taint.Pod[PodKey]
	claim       *claim   // while claiming
	sandbox     *sandbox // from claimed on
}

// node is a node. One that pods name and that was not seen is not usable.
type node struct {
	name   string
	usable bool
	pods   map[*pod]struct{}
}

// stranded reports whether the pod is idle and the pool creates another pod for it.
func (p *pod) stranded() bool { return p.phase == podPending && (p.away || p.tainted) }

// usable reports whether the pod can be handed out.
func (p *pod) usable() bool {
	return p.seen.Ready && !p.seen.Deleting && !p.seen.Finished && p.node.usable && p.addr.HasAddress() && !p.tainted && !p.quarantined &&
		!p.addr.Contested()
}

// restarted reports whether a container of the pod has restarted since the claim, and the pool
// ends sandboxes for that.
func (p *pod) restarted(sb *sandbox) bool {
	return p.seen.Restarts > sb.Restarts && !p.pool.KeepOnRestart
}

// recount runs f, which changes a field that the pool counts its pods by.
func (p *pod) recount(f func()) {
	p.pool.count(p, -1)
	f()
	p.pool.count(p, +1)
}

func (c *Core) enter(p *pod, phase podPhase) {
	if p.phase == podWarm {
		p.pool.queue.Remove(p.seen.Key)
	}
	p.recount(func() { p.phase = phase })
	if phase == podWarm {
		c.becameWarm(p)
		p.pool.queue.Put(warm.Pod[PodKey]{Key: p.seen.Key, Node: p.seen.Node, CreatedAt: p.seen.CreatedAt, Name: p.seen.Key.Name})
	}
}

func (c *Core) nodeOf(name string) *node {
	n := c.nodes[name]
	if n == nil {
		n = &node{name: name, pods: map[*pod]struct{}{}}
		c.nodes[name] = n
	}
	return n
}

// leaveNode takes a pod off its node.
func (c *Core) leaveNode(p *pod) {
	delete(p.node.pods, p)
	if len(p.node.pods) == 0 && !p.node.usable {
		delete(c.nodes, p.node.name)
	}
}

func (c *Core) nodeSeen(name string, usable bool) {
	n := c.nodeOf(name)
	if n.usable != usable {
		there := sortedPods(n.pods)
		n.usable = usable
		for _, p := range there {
			p.recount(func() { p.away = !usable })
		}
		for _, p := range there {
			c.consider(p)
		}
	}
	if len(n.pods) == 0 && !n.usable {
		delete(c.nodes, name)
	}
}

// sortedPods lists pods by UID, so that the same events have the same effects.
func sortedPods(set map[*pod]struct{}) []*pod {
	all := make([]*pod, 0, len(set))
	for p := range set {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *pod) int { return comparePods(a.seen.Key, b.seen.Key) })
	return all
}

func comparePods(a, b PodKey) int { return strings.Compare(a.UID, b.UID) }

func (c *Core) podSeen(seen Pod) {
	p := c.pods[seen.Key]
	if p == nil {
		owner, ours := c.ownerOf(seen)
		if !ours {
			return
		}
		pool := c.poolOf(owner)
		pool.made(seen.Key.Name)
		p = &pod{pool: pool, seen: seen, node: c.nodeOf(seen.Node), outdated: pool.known && seen.Template != pool.Template, addr: &taint.Pod[PodKey]{Key: seen.Key}}
		p.away = c.recovering && seen.Node != "" && !p.node.usable
		p.node.pods[p] = struct{}{}
		c.pods[seen.Key] = p
		pool.pods[p] = struct{}{}
		pool.count(p, +1)
		d := c.retirements[seen.Key]
		switch sb := c.holds[seen.Key]; {
		case sb != nil:
			// The pod is used, even if this observation does not show it: it may be older.
			c.hold(p, sb)
		case d != nil:
			c.enter(p, podDeleting)
			c.advanceRetirement(seen.Key)
		}
	}
	if p.seen.Node != seen.Node { // it was scheduled
		c.leaveNode(p)
		p.node = c.nodeOf(seen.Node)
		p.node.pods[p] = struct{}{}
	}
	p.seen = seen
	c.locate(p)
	c.relabel(p)
	c.consider(p)
}

// ownerOf returns the pool of a pod that is seen for the first time. A pod that is on record, for a
// sandbox or as one to be deleted, is ours even if its owner reference was removed.
func (c *Core) ownerOf(seen Pod) (owner PoolKey, ours bool) {
	sb, d := c.holds[seen.Key], c.retirements[seen.Key]
	if seen.Pool == "" && sb != nil {
		return sb.Pool, true
	}
	return PoolKey{seen.Key.Namespace, seen.Pool}, seen.Pool != "" || d != nil
}

// relabel restores the pool's label of a pod. The effect names the sandbox too, because it replaces
// an earlier LabelPod that is not carried out yet.
func (c *Core) relabel(p *pod) {
	if !p.seen.Mislabelled || p.seen.Deleting {
		return
	}
	e := LabelPod{Pod: p.seen.Key, Pool: p.seen.Pool, Restored: true}
	if sb := p.sandbox; sb != nil {
		e.ID, e.Released = sb.ID, sb.Phase == Released || sb.Phase == Ended
	}
	c.emit(e)
}

// consider acts on the latest observation of a pod.
func (c *Core) consider(p *pod) {
	seen := p.seen
	switch p.phase {
	case podPending, podWarm:
		switch {
		case seen.Deleting || seen.Finished || p.addr.Contested():
			if seen.Finished && c.early(p) {
				c.endedEarly(p, cmp.Or(seen.Why, "its containers have ended"))
			} else if seen.Deleting && p.warmAt == 0 {
				c.endedEarly(p, "it was deleted before it was ready")
			}
			c.retire(p)
		case p.tainted && !p.addr.AddressTainted():
			// Not while the address is tainted: the next pod there would be tainted too.
			c.retire(p)
		case seen.Pool == "" && !p.tainted:
			// The next leader cannot find it without an owner.
			c.retire(p)
		case seen.Used:
			c.emit(Repaired{Pod: seen.Key, What: "a pod of this pool is marked as used, and no record says by whom: it will be deleted"})
			c.enter(p, podDeleting)
			c.orphans = append(c.orphans, p)
		case p.usable() && p.phase == podPending:
			c.enter(p, podWarm)
		case !p.usable() && p.phase == podWarm:
			c.enter(p, podPending)
		}
	case podClaiming:
		if !p.claim.fact.handed && !p.usable() {
			c.takeBack(p.claim)
			c.enter(p, podPending)
			c.consider(p)
		}
	case podClaimed:
		switch sb, reason := p.sandbox, p.unfit(p.sandbox); reason {
		case "":
			sb.Restarts = max(sb.Restarts, seen.Restarts) // they were kept
		case ReasonRestart:
			c.startRelease(sb, reason)
		default:
			c.lost(sb, reason)
		}
	case podReleased, podDeleting:
	}
}

// unfit returns the reason for which a pod can no longer serve its sandbox; empty: it can. q may be
// nil.
func (p *pod) unfit(sb *sandbox) string {
	switch {
	case p == nil:
		return ReasonPodGone
	case p.seen.Deleting:
		return ReasonPodDeleted
	case p.seen.Finished:
		return ReasonPodFailed
	case p.seen.IP != sb.IP:
		// The address of the route may belong to another pod already, even if this pod has none
		// at the moment.
		return ReasonPodMoved
	case p.addr.Contested():
		return ReasonAddressShared
	case p.restarted(sb):
		return ReasonRestart
	}
	return ""
}

// hold ties a pod that was found again to its sandbox.
func (c *Core) hold(p *pod, sb *sandbox) {
	p.sandbox = sb
	if p.pool.known {
		sb.takePorts(p.pool)
	}
	if sb.Phase != Released && sb.Phase != Ended {
		c.enter(p, podClaimed)
		c.pushRoute(sb)
		return
	}
	c.enter(p, podReleased)
	if sb.elem != nil { // it had ended, but its pod exists
		c.ended.Remove(sb.elem)
		sb.elem = nil
		sb.Phase = Released
		c.revise(sb)
		c.addRoutes(sb)
	}
	c.startFence(sb)
}

func (c *Core) podGone(key PodKey) {
	p := c.pods[key]
	if p == nil {
		return
	}
	if p.claim != nil {
		p.seen.Ready = false // so that it is not answered, when it is being written
		if !p.claim.fact.handed {
			c.takeBack(p.claim)
		}
	}
	sb := p.sandbox
	if p.phase == podPending && p.warmAt == 0 {
		c.endedEarly(p, "it was deleted before it was ready")
	}
	c.enter(p, podDeleting) // out of the queue
	p.pool.count(p, -1)
	delete(p.pool.pods, p)
	delete(c.pods, key)
	c.leaveNode(p)
	others, done := c.taints.Gone(p.addr)
	c.reconsider(others)
	if sb != nil {
		c.lost(sb, ReasonPodGone)
	}
	c.advanceRetirement(key)
	for _, id := range done {
		c.tryEnd(c.sandboxes[id])
	}
}
