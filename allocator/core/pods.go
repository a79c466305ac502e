package core

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

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
	// reached: requests of an earlier sandbox may have reached it, because it was idle at an
	// address while that was tainted. It is never handed out, and the pool creates another one.
	reached bool
	// early: the same for sandboxes of an earlier journal. The pool creates no other pod until
	// the session of that journal ends.
	early   bool
	warmAt  time.Duration // boot clock: when it was warm for the first time; 0: never
	before  []*sandbox    // that do not end before the intent to delete this pod is durable
	place   *place        // at the address that it was last seen at
	at      netip.Addr
	claim   *claim   // while claiming
	sandbox *sandbox // from claimed on
}

// node is a node. One that pods name and that was not seen is not usable.
type node struct {
	name   string
	usable bool
	pods   map[*pod]struct{}
}

// stranded reports whether the pod is idle and the pool creates another pod for it.
func (q *pod) stranded() bool { return q.phase == podPending && (q.away || q.reached) }

// usable reports whether the pod can be handed out.
func (q *pod) usable() bool {
	return q.seen.Ready && !q.seen.Deleting && !q.seen.Finished && q.node.usable && q.place != nil && !q.reached && !q.early && !q.contested()
}

// restarted reports whether a container of the pod has restarted since the claim, and the pool
// ends sandboxes for that.
func (q *pod) restarted(s *sandbox) bool {
	return q.seen.Restarts > s.Restarts && !q.pool.KeepOnRestart
}

// change runs f, which changes a field that the pool counts its pods by.
func (q *pod) change(f func()) {
	q.pool.count(q, -1)
	f()
	q.pool.count(q, +1)
}

func (c *Core) enter(q *pod, phase podPhase) {
	if q.phase == podWarm {
		q.pool.queue.Remove(q.seen.Key)
	}
	q.change(func() { q.phase = phase })
	if phase == podWarm {
		c.becameWarm(q)
		q.pool.queue.Put(warm.Pod[PodKey]{Key: q.seen.Key, Node: q.seen.Node, CreatedAt: q.seen.CreatedAt, Name: q.seen.Key.Name})
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
func (c *Core) leaveNode(q *pod) {
	delete(q.node.pods, q)
	if len(q.node.pods) == 0 && !q.node.usable {
		delete(c.nodes, q.node.name)
	}
}

func (c *Core) nodeSeen(name string, usable bool) {
	n := c.nodeOf(name)
	if n.usable != usable {
		there := sortedPods(n.pods)
		n.usable = usable
		for _, q := range there {
			q.change(func() { q.away = !usable })
		}
		for _, q := range there {
			c.consider(q)
		}
	}
	if len(n.pods) == 0 && !n.usable {
		delete(c.nodes, name)
	}
}

// sortedPods lists pods by UID, so that the same events have the same effects.
func sortedPods(set map[*pod]struct{}) []*pod {
	all := make([]*pod, 0, len(set))
	for q := range set {
		all = append(all, q)
	}
	slices.SortFunc(all, func(a, b *pod) int { return comparePods(a.seen.Key, b.seen.Key) })
	return all
}

func comparePods(a, b PodKey) int { return strings.Compare(a.UID, b.UID) }

func (c *Core) podSeen(seen Pod) {
	q := c.pods[seen.Key]
	if q == nil {
		owner, ours := c.ownerOf(seen)
		if !ours {
			return
		}
		p := c.poolOf(owner)
		p.made(seen.Key.Name)
		q = &pod{pool: p, seen: seen, node: c.nodeOf(seen.Node), outdated: p.known && seen.Template != p.Template}
		q.away = c.recovering && seen.Node != "" && !q.node.usable
		q.node.pods[q] = struct{}{}
		c.pods[seen.Key] = q
		p.pods[q] = struct{}{}
		p.count(q, +1)
		d := c.discards[seen.Key]
		switch s := c.holds[seen.Key]; {
		case s != nil:
			// The pod is used, even if this observation does not show it: it may be older.
			c.hold(q, s)
		case d != nil:
			c.enter(q, podDeleting)
			c.advanceDiscard(seen.Key)
		}
	}
	if q.seen.Node != seen.Node { // it was scheduled
		c.leaveNode(q)
		q.node = c.nodeOf(seen.Node)
		q.node.pods[q] = struct{}{}
	}
	q.seen = seen
	c.locate(q, seen.IP)
	if q.place != nil {
		c.reconsider(q.place, q)
	}
	c.relabel(q)
	c.consider(q)
}

// ownerOf returns the pool of a pod that is seen for the first time. A pod that is on record, for a
// sandbox or as one to be deleted, is ours even if its owner reference was removed.
func (c *Core) ownerOf(seen Pod) (owner PoolKey, ours bool) {
	s, d := c.holds[seen.Key], c.discards[seen.Key]
	if seen.Pool == "" && s != nil {
		return s.Pool, true
	}
	return PoolKey{seen.Key.Namespace, seen.Pool}, seen.Pool != "" || d != nil
}

// relabel restores the pool's label of a pod. The effect names the sandbox too, because it replaces
// an earlier LabelPod that is not carried out yet.
func (c *Core) relabel(q *pod) {
	if !q.seen.Mislabelled || q.seen.Deleting {
		return
	}
	e := LabelPod{Pod: q.seen.Key, Pool: q.seen.Pool, Restored: true}
	if s := q.sandbox; s != nil {
		e.ID, e.Released = s.ID, s.Phase == Released || s.Phase == Ended
	}
	c.emit(e)
}

// consider acts on the latest observation of a pod.
func (c *Core) consider(q *pod) {
	seen := q.seen
	switch q.phase {
	case podPending, podWarm:
		switch {
		case seen.Deleting || seen.Finished || q.contested():
			if seen.Finished && c.early(q) {
				c.endedEarly(q, cmp.Or(seen.Why, "its containers have ended"))
			} else if seen.Deleting && q.warmAt == 0 {
				c.endedEarly(q, "it was deleted before it was ready")
			}
			c.discard(q)
		case q.reached && (q.place == nil || q.place.routes == 0):
			// Not while the address is tainted: the next pod there would be reached too.
			c.discard(q)
		case seen.Pool == "" && !q.reached:
			// The next leader cannot find it without an owner.
			c.discard(q)
		case seen.Used:
			c.emit(Repaired{Pod: seen.Key, What: "a pod of this pool is marked as used, and no record says by whom: it will be deleted"})
			c.enter(q, podDeleting)
			c.strays = append(c.strays, q)
		case q.usable() && q.phase == podPending:
			c.enter(q, podWarm)
		case !q.usable() && q.phase == podWarm:
			c.enter(q, podPending)
		}
	case podClaiming:
		if !q.claim.fact.handed && !q.usable() {
			c.takeBack(q.claim)
			c.enter(q, podPending)
			c.consider(q)
		}
	case podClaimed:
		switch s, reason := q.sandbox, q.unfit(q.sandbox); reason {
		case "":
			s.Restarts = max(s.Restarts, seen.Restarts) // they were kept
		case ReasonRestart:
			c.startRelease(s, reason)
		default:
			c.lost(s, reason)
		}
	case podReleased, podDeleting:
	}
}

// unfit returns the reason for which a pod can no longer serve its sandbox; empty: it can. q may be
// nil.
func (q *pod) unfit(s *sandbox) string {
	switch {
	case q == nil:
		return ReasonPodGone
	case q.seen.Deleting:
		return ReasonPodDeleted
	case q.seen.Finished:
		return ReasonPodFailed
	case q.seen.IP != s.IP:
		// The address of the route may belong to another pod already, even if this pod has none
		// at the moment.
		return ReasonPodMoved
	case q.contested():
		return ReasonAddressShared
	case q.restarted(s):
		return ReasonRestart
	}
	return ""
}

// hold ties a pod that was found again to its sandbox.
func (c *Core) hold(q *pod, s *sandbox) {
	q.sandbox = s
	if q.pool.known {
		s.takePorts(q.pool)
	}
	if s.Phase != Released && s.Phase != Ended {
		c.enter(q, podClaimed)
		c.pushRoute(s)
		return
	}
	c.enter(q, podReleased)
	if s.elem != nil { // it had ended, but its pod exists
		c.ended.Remove(s.elem)
		s.elem = nil
		s.Phase = Released
		c.revise(s)
		c.expose(s)
	}
	c.startFence(s)
}

func (c *Core) podGone(key PodKey) {
	q := c.pods[key]
	if q == nil {
		return
	}
	if q.claim != nil {
		q.seen.Ready = false // so that it is not answered, when it is being written
		if !q.claim.fact.handed {
			c.takeBack(q.claim)
		}
	}
	s := q.sandbox
	if q.phase == podPending && q.warmAt == 0 {
		c.endedEarly(q, "it was deleted before it was ready")
	}
	c.enter(q, podDeleting) // out of the queue
	q.pool.count(q, -1)
	delete(q.pool.pods, q)
	delete(c.pods, key)
	c.leaveNode(q)
	c.locate(q, netip.Addr{})
	if s != nil {
		c.lost(s, ReasonPodGone)
	}
	c.advanceDiscard(key)
	c.letEnd(q)
}
