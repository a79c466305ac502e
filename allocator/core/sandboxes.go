package core

import (
	"container/heap"
	"container/list"
)

type sandbox struct {
	Sandbox
	// inherited: routers of an earlier term may know its route.
	inherited bool
	// moved: its pod has another address than the routers were told.
	moved    bool
	index    int // in the deadline heap, -1 or 0 when not in it
	queued   bool
	recorded Revision // what the Sandbox object is known to show
	waiters  []waiter // callers of Release
	fence    *fence
	elem     *list.Element // in Core.ended
}

// routable reports whether routers may be told where it is.
func (s *sandbox) routable() bool {
	return (s.Phase == Running || s.Phase == Releasing) && s.IP.IsValid() && !s.moved
}

// takePorts gives s what its pool says of ports.
func (s *sandbox) takePorts(p *pool) { s.DefaultPort, s.Ports = p.DefaultPort, p.Ports }

func (c *Core) claim(ev Claim) {
	p := c.pools[ev.Pool]
	if p == nil || !p.known || p.Deleting {
		c.emit(ClaimRefused{Token: ev.Token, NoPool: true})
		return
	}
	b := ev.Binding
	b.ID, b.ClaimedAt = c.cfg.NewID(), c.now.Wall
	c.bind(p, &claim{token: ev.Token, binding: b})
	c.reconcile(p)
}

// bind writes the claim to the oldest warm pod.
func (c *Core) bind(p *pool, cl *claim) {
	e := p.queue.Front()
	if e == nil {
		delete(c.claims, cl.token)
		if !cl.abandoned {
			c.emit(ClaimRefused{Token: cl.token, NoPool: !p.known || p.Deleting, Counts: p.counts()})
		}
		return
	}
	q := e.Value.(*pod)
	c.enter(q, podBinding)
	q.claim = cl
	c.claims[cl.token] = q
	c.emit(BindPod{Pod: q.seen.Key, Binding: cl.binding})
}

// rebind moves the claim of a pod that turned out not to be free to another
// one, under an ID that was never written anywhere.
func (c *Core) rebind(q *pod) {
	cl := q.claim
	q.claim = nil
	if cl.abandoned {
		delete(c.claims, cl.token)
		return
	}
	cl.binding.ID = c.cfg.NewID()
	c.bind(q.pool, cl)
}

func (c *Core) claimAbandoned(token uint64) {
	if q := c.claims[token]; q != nil {
		q.claim.abandoned = true // what is being written is awaited, then released
	}
}

func (c *Core) bindDone(ev BindDone) {
	q := c.pods[ev.Pod]
	if q == nil || !q.ours(ev.ID) {
		return // it vanished or was adopted meanwhile; its caller was served
	}
	if !ev.Bound {
		c.rebind(q)
		c.enter(q, podPending) // until an observation says what it is
		c.podSeen(q.seen)
		return
	}
	cl := q.claim
	q.claim = nil
	delete(c.claims, cl.token)
	s := &sandbox{Sandbox: Sandbox{Binding: cl.binding, Pool: q.pool.Key, Pod: q.seen.Key, IP: q.seen.IP}}
	s.takePorts(q.pool)
	c.add(s)
	q.sandbox = s
	c.enter(q, podClaimed)
	c.running(s)
	if cl.abandoned {
		c.startRelease(s, ReasonAbandoned)
	} else {
		c.emit(Claimed{Token: cl.token, Sandbox: s.Sandbox})
	}
	c.podSeen(q.seen) // it may have been going already
}

// running makes a committed claim known.
func (c *Core) running(s *sandbox) {
	s.Phase = Running
	if !s.EndAt.IsZero() && !s.queued {
		heap.Push(&c.deadlines, s)
	}
	if s.recorded == (Revision{}) {
		c.revise(s)
	}
	c.pushRoute(s)
}

func (c *Core) release(ev Release) {
	s := c.sandboxes[ev.ID]
	answer := func(status ReleaseStatus) {
		if ev.Token != 0 {
			c.emit(ReleaseAnswered{Token: ev.Token, Status: status})
		}
	}
	switch {
	case s == nil:
		answer(ReleaseUnknown)
		return
	case s.Phase == Released || s.Phase == Ended:
		answer(ReleaseGone)
		return
	}
	if ev.Token != 0 {
		s.waiters = append(s.waiters, waiter{token: ev.Token})
	}
	c.startRelease(s, ev.Reason)
}

// startRelease writes the release of a running sandbox.
func (c *Core) startRelease(s *sandbox, reason string) {
	if s.Phase != Running {
		return
	}
	s.Phase, s.Reason = Releasing, reason
	c.emit(MarkReleased{Pod: s.Pod, ID: s.ID, Reason: reason})
}

// lost releases a sandbox whose pod cannot come back: that needs no write.
func (c *Core) lost(s *sandbox, reason string) {
	switch s.Phase {
	case Running:
		s.Reason = reason
		c.released(s)
	case Releasing:
		c.released(s)
	}
	if c.pods[s.Pod] == nil {
		c.end(s)
	}
}

// released acts on a committed release.
func (c *Core) released(s *sandbox) {
	if s.queued {
		heap.Remove(&c.deadlines, s.index)
	}
	s.Phase = Released
	s.EndedAt = c.now.Wall
	q := c.pods[s.Pod]
	if q != nil {
		if q.seen.Released && !q.seen.ReleasedAt.IsZero() {
			s.EndedAt = q.seen.ReleasedAt
		}
		c.enter(q, podReleased)
	}
	c.revise(s)
	c.emit(SandboxReleased{s.Sandbox})
	c.startFence(s)
}

// end notes that the sandbox's pod is gone.
func (c *Core) end(s *sandbox) {
	if s.Phase != Released {
		return
	}
	s.Phase = Ended
	s.elem = c.ended.PushBack(s)
	c.revise(s)
}

func (c *Core) recorded(ev Recorded) {
	s := c.sandboxes[ev.ID]
	if s == nil || !s.recorded.Less(ev.Revision) {
		return
	}
	s.recorded = ev.Revision
	if s.fence != nil {
		c.advanceFence(s)
	}
}

// deadlineHeap orders sandboxes by their end time.
type deadlineHeap []*sandbox

func (h deadlineHeap) Len() int           { return len(h) }
func (h deadlineHeap) Less(i, j int) bool { return h[i].EndAt.Before(h[j].EndAt) }
func (h deadlineHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *deadlineHeap) Push(x any) {
	s := x.(*sandbox)
	s.index, s.queued = len(*h), true
	*h = append(*h, s)
}

func (h *deadlineHeap) Pop() any {
	old := *h
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	s.queued = false
	return s
}
