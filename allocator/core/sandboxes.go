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
	// exposed: some router may send requests to where it is, or was.
	exposed bool
	// reaches is how many idle pods its requests may have reached whose deletion is not
	// durable yet.
	reaches int
	// lost: its pod cannot serve it any more, or has another address than the
	// routers were told. Its release is on its way.
	lost     bool
	readying bool // that it runs is on its way into the journal
	ran      bool // routers were told of it before its release began
	// What these are in Binding and Sandbox, on the boot clock, 0 for none: a step of the
	// wall clock must not end anything, or keep it for ever.
	endAt, lifetimeEnd, startBy, endedAt time.Duration
	// changing is how many changes of its end are on their way into the journal, and
	// nextEnd what the last one says.
	changing int
	nextEnd  time.Time
	lastUse
	// dueAt is its place in the deadline heap. Nothing is due before; what was moved to
	// later moments is found out then.
	dueAt time.Duration
	// durableAt is when its release was known to be durable, on the boot clock; 0: in
	// an earlier term, or not yet.
	durableAt time.Duration
	index     int // in the deadline heap, -1 or 0 when not in it
	queued    bool
	recorded  Revision // what the Sandbox object is known to show
	// deleting: somebody has deleted the object. It stays for as long as its
	// idempotency key holds. dropped: it was deleted, and must not come back.
	deleting, dropped bool
	callers           []caller // of Claim, until it runs
	waiters           []waiter // callers of Release
	// doubles are where it is as well, on another record. No pod of them serves it;
	// its fence covers them all, because routers know a sandbox by its ID.
	doubles []double
	elem    *list.Element // in Core.ended
	keyElem *list.Element // in Core.keysEnded
}

// double is a pod that a record names for a sandbox for which another record names
// another one.
type double struct {
	pod PodKey
	ip  netip.Addr
}

// double notes that another record has s on a pod, at an address.
func (s *sandbox) double(pod PodKey, ip netip.Addr) {
	if d := (double{pod, ip}); !slices.Contains(s.doubles, d) {
		s.doubles = append(s.doubles, d)
	}
}

// addresses are where routers may send the requests of a sandbox to.
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

// lost releases a sandbox whose pod cannot serve it any more. Routers that ask are
// not told of it from now on.
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

// tryEnd notes, if that is so, that nothing is left of a released sandbox: its
// pod is gone, no router can send anything to where it was, and what its requests may
// have reached there is certain to go.
func (c *Core) tryEnd(s *sandbox) {
	if s.Phase != Released || c.pods[s.Pod] != nil || !c.fences.Complete(s.ID) || s.reaches > 0 {
		return
	}
	s.Phase = Ended
	s.elem = c.ended.PushBack(s)
	c.revise(s)
}
