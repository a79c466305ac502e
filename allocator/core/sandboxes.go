package core

import (
	"container/heap"
	"container/list"
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
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
	fence             *fence
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

// routable reports whether routers may be told where it is.
func (s *sandbox) routable() bool {
	return (s.Phase == Running || s.Phase == Releasing && s.ran) && !s.lost && s.reaping != decided
}

// takePorts gives s what its pool says of ports.
func (s *sandbox) takePorts(p *pool) { s.DefaultPort, s.Ports = p.DefaultPort, p.Ports }

// bootOf is a moment of the wall clock on the boot clock.
func (c *Core) bootOf(t time.Time) time.Duration { return c.now.Boot + t.Sub(c.now.Wall) }

// times puts the moments at which a sandbox ends on the boot clock.
func (c *Core) times(s *sandbox) {
	s.nextEnd = s.EndAt
	for _, m := range []struct {
		at   time.Time
		boot *time.Duration
	}{{s.EndAt, &s.endAt}, {s.LifetimeEnd, &s.lifetimeEnd}, {s.StartBy, &s.startBy}} {
		if *m.boot = 0; !m.at.IsZero() {
			*m.boot = max(1, c.bootOf(m.at))
		}
	}
}

// ends is when a sandbox is released, in use or not, and why; "" if it is not.
func (s *sandbox) ends() (at time.Duration, reason string) {
	earlier := func(than time.Duration, why string) {
		if than != 0 && (reason == "" || than < at) {
			at, reason = than, why
		}
	}
	if s.changing == 0 { // else it is looked at again when that is durable
		earlier(s.endAt, ReasonTimeout)
	}
	earlier(s.lifetimeEnd, ReasonMaxLifetime)
	if s.Phase == Starting && !s.readying {
		earlier(s.startBy, ReasonStartup)
	}
	return at, reason
}

// schedule sees to it that the sandbox is looked at when it is due.
func (c *Core) schedule(s *sandbox) {
	if s.Phase != Starting && s.Phase != Running {
		return
	}
	at, reason := s.ends()
	if idle, ok := c.idleAt(s); ok && s.reaping == notDue {
		if idle = max(idle, s.notBefore); reason == "" || idle < at {
			at, reason = idle, ReasonIdle
		}
	}
	switch {
	case reason == "":
	case !s.queued:
		s.dueAt = at
		heap.Push(&c.deadlines, s)
	case at < s.dueAt:
		s.dueAt = at
		heap.Fix(&c.deadlines, s.index)
	}
}

// keepAlive counts a call as activity.
func (c *Core) keepAlive(ev KeepAlive) {
	if s := c.kept(ev.Token, ev.ID); s != nil {
		c.emit(Kept{Token: ev.Token, Status: ReleaseOK, Sandbox: s.Sandbox})
	}
}

// kept returns the live sandbox that a call is about, which is activity, or answers
// that there is none.
func (c *Core) kept(token uint64, id string) *sandbox {
	s := c.sandboxes[id]
	switch {
	case s == nil:
		c.emit(Kept{Token: token, Status: ReleaseUnknown})
		return nil
	case s.Phase != Starting && s.Phase != Running:
		c.emit(Kept{Token: token, Status: ReleaseGone, Sandbox: s.Sandbox})
		return nil
	}
	c.note(s, c.now.Boot, activity.Keepalive)
	return s
}

// setTimeout has the end of a sandbox moved. It counts when it is durable.
func (c *Core) setTimeout(ev SetTimeout) {
	s := c.kept(ev.Token, ev.ID)
	if s == nil {
		return
	}
	s.changing++
	s.nextEnd = c.now.Wall.Add(ev.Lifetime)
	next := s.next()
	c.append(&change{sandbox: s, kept: ev.Token, fact: Fact{Sandbox: &next}}, true)
}

// next is what the next fact of a sandbox begins with: what is so, and what is on its
// way into the journal.
func (s *sandbox) next() Sandbox {
	next := s.Sandbox
	next.EndAt = s.nextEnd
	if s.readying {
		next.Phase = Running
	}
	return next
}

// changed acts on a committed change of an end.
func (c *Core) changed(ch *change) {
	s := ch.sandbox
	s.changing--
	s.EndAt, s.Revision = ch.fact.Sandbox.EndAt, ch.fact.Revision
	s.endAt = max(1, c.bootOf(s.EndAt))
	c.note(s, c.now.Boot, activity.Keepalive)
	answer := Kept{Token: ch.kept, Status: ReleaseOK, Sandbox: s.Sandbox}
	if s.Phase != Starting && s.Phase != Running {
		answer.Status = ReleaseGone
	}
	c.schedule(s)
	shown := s.Sandbox
	shown.Phase = ch.fact.Sandbox.Phase // its release may be on its way, and it may never have run
	c.emit(Record{Sandbox: shown})
	c.emit(answer)
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
	c.append(&change{sandbox: s, fact: Fact{Sandbox: &released}}, true)
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
func (c *Core) released(ch *change, at time.Duration) {
	s := ch.sandbox
	if s.queued {
		heap.Remove(&c.deadlines, s.index)
	}
	c.delist(s)
	fact := ch.fact.Sandbox
	s.Phase, s.Reason, s.EndedAt, s.endedAt, s.Revision = Released, fact.Reason, fact.EndedAt, c.now.Boot, ch.fact.Revision
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
	if s.Phase != Released || c.pods[s.Pod] != nil || s.fence == nil || !s.fence.done || s.reaches > 0 {
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
	c.emit(Settle{ID: s.ID, Revision: ev.Revision})
	c.letGo(s)
}

// recordSeen acts on a Sandbox object: deleting one releases the sandbox. One that
// nobody knows, or that was gone, was written late by a leader that was deposed.
func (c *Core) recordSeen(ev RecordSeen) {
	switch s := c.sandboxes[ev.ID]; {
	case s != nil && s.dropped:
		c.emit(ForgetRecord{Pool: ev.Pool, ID: ev.ID})
	case s != nil && ev.Deleting:
		s.deleting = true
		c.startRelease(s, ReasonDeleted)
		c.letGo(s)
	case s != nil && ev.Revision == (Revision{}): // somebody has replaced it
		s.recorded = Revision{}
		c.emit(Record{Sandbox: s.Sandbox})
	case s == nil && ev.Revision != (Revision{}) && ev.Revision.Term < c.cfg.Term:
		c.emit(ForgetRecord{Pool: ev.Pool, ID: ev.ID})
	}
}

// letGo lets go of the object of an ended sandbox that somebody has deleted. The
// write that says that a sandbox has ended does so by itself, but for those with an
// idempotency key.
func (c *Core) letGo(s *sandbox) {
	if s.deleting && s.Phase == Ended && !s.recorded.Less(s.Revision) && s.IdempotencyKey != "" && s.keyElem == nil {
		s.dropped = true
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// recordGone acts on a Sandbox object that is not there any more, although nobody
// here has deleted it.
func (c *Core) recordGone(id string) {
	s := c.sandboxes[id]
	switch {
	case s == nil:
		return
	case s.Phase == Ended && s.keyElem == nil:
		s.dropped = true
		return
	}
	// What it said, of the key at least, is in nobody's keeping now.
	s.recorded, s.deleting = Revision{}, false
	c.startRelease(s, ReasonDeleted)
	c.emit(Record{Sandbox: s.Sandbox})
}

// deadlineHeap orders sandboxes by when something is due.
type deadlineHeap []*sandbox

func (h deadlineHeap) Len() int           { return len(h) }
func (h deadlineHeap) Less(i, j int) bool { return h[i].dueAt < h[j].dueAt }
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
