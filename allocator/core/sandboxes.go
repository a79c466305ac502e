package core

import (
	"container/heap"
	"container/list"
	"net/netip"
	"slices"
	"time"
)

type sandbox struct {
	Sandbox
	// exposed: its addresses are tainted, because a router may have a route to them.
	exposed bool
	// reaches is how many idle pods its requests may have reached whose intent to be deleted is
	// not durable yet.
	reaches int
	// lost: its pod cannot serve it any more, or has another address than the route. Its release
	// is on its way into the journal.
	lost     bool
	readying bool // the fact that it runs is on its way into the journal
	ran      bool // it was running before its release began
	// The times of the same names in Binding and Sandbox, on the boot clock; 0: none. A step of
	// the wall clock must not end a sandbox, or keep it for ever.
	endAt, lifetimeEnd, startBy, endedAt time.Duration
	// changing is how many changes of its end are on their way into the journal. nextEnd is the
	// end that the last one sets.
	changing int
	nextEnd  time.Time
	lastUse
	// dueAt is its key in the deadline heap. Nothing is due before. A deadline that has moved to a
	// later time is found out then.
	dueAt time.Duration
	// durableAt is when the writer learned that its release is durable, on the boot clock; 0: in
	// an earlier term, or not yet.
	durableAt time.Duration
	index     int // in the deadline heap, -1 or 0 when not in it
	queued    bool
	recorded  Revision // what the Sandbox object is known to show
	// deleting: a user has deleted the object. A finalizer keeps it while its idempotency key
	// holds. dropped: it was deleted, and must not be written again.
	deleting, dropped bool
	callers           []caller // of Claim, until it runs
	waiters           []waiter // callers of Release
	// doubles are the pods and addresses that conflicting records name for it. None of these
	// pods serves it. Its fence covers all of them, because routes are keyed by sandbox ID.
	doubles []double
	elem    *list.Element // in Core.ended
	keyElem *list.Element // in Core.keysEnded
}

// double is a pod that one record names for a sandbox while another record names another pod.
type double struct {
	pod PodKey
	ip  netip.Addr
}

// double notes that another record names this pod and address for s.
func (s *sandbox) double(pod PodKey, ip netip.Addr) {
	if d := (double{pod, ip}); !slices.Contains(s.doubles, d) {
		s.doubles = append(s.doubles, d)
	}
}

// addresses are those to which routers may send the requests of a sandbox.
func (s *sandbox) addresses() []netip.Addr {
	all := []netip.Addr{s.IP}
	for _, d := range s.doubles {
		all = append(all, d.ip)
	}
	return all
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

// startRelease has the release of a live sandbox journaled.
func (c *Core) startRelease(s *sandbox, reason string) {
	if s.Phase != Starting && s.Phase != Running {
		return
	}
	released := s.next()
	s.ran = s.Phase == Running
	s.Phase = Releasing
	released.Phase, released.Reason, released.EndedAt = Released, reason, c.now.Wall
	c.commit(Fact{Sandbox: &released}, true, func(f Fact, at time.Duration) { c.released(s, f, at) })
}

// lost releases a sandbox whose pod cannot serve it any more. From now on no router gets its
// route.
func (c *Core) lost(s *sandbox, reason string) {
	if s.Phase == Released {
		c.tryEnd(s)
		return
	}
	s.lost = true
	c.startRelease(s, reason)
}

// released acts on a committed release. at is when that was known.
func (c *Core) released(s *sandbox, f Fact, at time.Duration) {
	if s.queued {
		heap.Remove(&c.deadlines, s.index)
	}
	c.delist(s)
	s.Phase, s.Reason, s.EndedAt, s.endedAt, s.Revision = Released, f.Sandbox.Reason, f.Sandbox.EndedAt, c.now.Boot, f.Revision
	q := c.pods[s.Pod]
	if q != nil {
		c.enter(q, podReleased)
		c.emit(LabelPod{Pod: s.Pod, Pool: s.Pool.Name, ID: s.ID, Released: true})
	}
	c.emit(Record{Sandbox: s.Sandbox})
	c.emit(SandboxReleased{s.Sandbox})
	c.keyEnds(s)
	why := StartFailed
	if s.ran {
		why = KeyEnded
	}
	c.answerCallers(s, ClaimRefused{Why: why, Sandbox: s.Sandbox})
	s.durableAt = at
	c.startFence(s)
}

// tryEnd ends a released sandbox if nothing of it is left: its pod is gone, its fence is complete,
// and the intent to delete every idle pod that its requests may have reached is durable.
func (c *Core) tryEnd(s *sandbox) {
	if s.Phase != Released || c.pods[s.Pod] != nil || !c.fences.Complete(s.ID) || s.reaches > 0 {
		return
	}
	s.Phase = Ended
	s.elem = c.ended.PushBack(s)
	c.revise(s)
}
