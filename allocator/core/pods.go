package core

import "container/list"

type podPhase int

const (
	podPending podPhase = iota
	podWarm
	podBinding
	podClaimed
	podReleased
	podDeleting
	podPhases int = iota
)

type pod struct {
	pool     *pool
	seen     Pod // the latest observation
	phase    podPhase
	outdated bool          // made from an older template
	elem     *list.Element // in the pool's queue, while warm
	sandbox  *sandbox      // from claimed on
	claim    *claim        // while binding
	// condition is the version on which the last conditional DeletePod depends;
	// changed: it was not that any more.
	condition string
	changed   bool
}

// claim is a caller waiting for its binding to be written.
type claim struct {
	token     uint64
	binding   Binding
	abandoned bool
}

func (c *Core) enter(q *pod, phase podPhase) {
	if q.elem != nil {
		q.pool.queue.Remove(q.elem)
		q.elem = nil
	}
	q.pool.count(q, -1, true)
	q.phase = phase
	q.pool.count(q, +1, true)
	if phase == podWarm {
		q.elem = q.pool.queue.PushBack(q)
	}
}

// discard takes an idle pod out of use for good.
func (c *Core) discard(q *pod) {
	c.enter(q, podDeleting)
	if !q.seen.Deleting {
		// On condition that it has not changed: a claim that a deposed leader
		// wrote late must not be deleted with it.
		q.condition, q.changed = q.seen.Version, false
		c.emit(DeletePod{Pod: q.seen.Key, IfVersion: q.seen.Version})
	}
}

// usable reports whether the pod can be handed out.
func (p Pod) usable() bool {
	return p.Ready && p.Free && p.Binding == nil && p.IP.IsValid()
}

func (c *Core) podSeen(seen Pod) {
	q := c.pods[seen.Key]
	if q == nil {
		p := c.poolOf(PoolKey{seen.Key.Namespace, seen.Pool})
		p.made(seen.Key.Name)
		q = &pod{pool: p, seen: seen, outdated: p.known && seen.Template != p.Template}
		c.pods[seen.Key] = q
		p.pods[q] = struct{}{}
		p.count(q, +1, true)
		// Used before, whatever this observation shows: it may be older than
		// the use, or its mark was removed.
		if s := c.holds[seen.Key]; s != nil {
			c.hold(q, s)
		}
	}
	q.seen = seen
	switch q.phase {
	case podPending, podWarm, podBinding, podDeleting:
		if seen.Binding != nil && q.ours(seen.Binding.ID) {
			break // our own write, whose answer is on its way
		}
		if seen.Binding != nil && (q.phase != podDeleting || q.sandbox == nil) {
			c.adopt(q)
		}
	}
	switch q.phase {
	case podPending:
		switch {
		case seen.Deleting || seen.Finished:
			c.discard(q)
		case seen.usable():
			c.enter(q, podWarm)
		}
	case podWarm:
		switch {
		case seen.Deleting || seen.Finished:
			c.discard(q)
		case !seen.usable():
			c.enter(q, podPending)
		}
	case podClaimed:
		switch s := q.sandbox; {
		case seen.Released:
			// Ours, seen before its answer, or that of a leader that was deposed.
			if s.Phase == Running {
				s.Reason = seen.ReleaseReason
			}
			c.released(s)
		case seen.Deleting:
			c.lost(s, ReasonPodDeleted)
		case seen.Finished:
			c.lost(s, ReasonPodFailed)
		case seen.IP.IsValid() && !s.IP.IsValid():
			s.IP = seen.IP
			c.revise(s)
			c.pushRoute(s)
		case seen.IP.IsValid() && seen.IP != s.IP:
			// The address the routers know may belong to another pod already.
			s.moved = true
			c.startRelease(s, ReasonPodMoved)
		}
	case podDeleting:
		c.deleteAgain(q)
	}
	c.reconcile(q.pool)
}

// ours reports whether id is that of the claim being written to the pod.
func (q *pod) ours(id string) bool { return q.claim != nil && q.claim.binding.ID == id }

// adopt takes over a claim that was written by an earlier term and is not on
// record: found at recovery, or written late by a leader that was deposed.
func (c *Core) adopt(q *pod) {
	b := *q.seen.Binding
	if c.sandboxes[b.ID] != nil {
		return // two pods with one ID: the recorded one holds it, this one is never used
	}
	s := &sandbox{
		Sandbox:   Sandbox{Binding: b, Pool: q.pool.Key, Pod: q.seen.Key, IP: q.seen.IP},
		inherited: true,
	}
	c.add(s)
	c.hold(q, s)
}

// hold ties a pod to the sandbox that it was given earlier.
func (c *Core) hold(q *pod, s *sandbox) {
	if q.claim != nil {
		c.rebind(q) // our own write will fail; its caller gets another pod
	}
	q.sandbox = s
	// Those of a pool that was not seen are not known: no default port, and none
	// closed. It either follows or is gone, and then its sandboxes are released.
	s.takePorts(q.pool)
	switch {
	case s.Phase == Ended || s.Phase == Released:
		if s.elem != nil {
			c.ended.Remove(s.elem)
			s.elem = nil
		}
		c.enter(q, podReleased)
		s.Phase = Released
		c.revise(s) // so that no late write of an earlier term takes it back
		c.startFence(s)
	case q.seen.Released:
		c.enter(q, podClaimed)
		s.Reason = q.seen.ReleaseReason
		c.released(s)
	default:
		c.enter(q, podClaimed)
		s.moved = s.IP.IsValid() && q.seen.IP.IsValid() && s.IP != q.seen.IP
		c.running(s)
	}
}

func (c *Core) podGone(key PodKey) {
	q := c.pods[key]
	if q == nil {
		return
	}
	if q.claim != nil {
		c.rebind(q)
	}
	if s := q.sandbox; s != nil {
		c.lost(s, ReasonPodGone)
	}
	c.enter(q, podDeleting) // out of the queue
	q.pool.count(q, -1, true)
	delete(q.pool.pods, q)
	delete(c.pods, key)
	if s := q.sandbox; s != nil {
		c.end(s)
	}
	c.reconcile(q.pool)
}

func (c *Core) deleteFailed(key PodKey) {
	q := c.pods[key]
	if q == nil || q.phase != podDeleting || q.sandbox != nil {
		return
	}
	q.changed = true
	c.deleteAgain(q)
}

// deleteAgain deletes an idle pod that had changed when it was to be deleted,
// once it is known what it is now. Before that the same condition would only
// fail again.
func (c *Core) deleteAgain(q *pod) {
	if q.sandbox == nil && q.changed && q.seen.Version != q.condition {
		c.discard(q)
	}
}
