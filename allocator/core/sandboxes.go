package core

import (
	"cmp"
	"container/list"
	"net/netip"
	"slices"
	"time"
)

type sandbox struct {
	Sandbox
	// lost: its pod cannot serve it any more, or has another address than the route. Its release
	// is on its way into the journal.
	lost     bool
	readying bool // the fact that it runs is on its way into the journal
	ran      bool // it was running before its release began
	// The times of the same names in Binding and Sandbox, on the boot clock; 0: none. A step of
	// the wall clock must not end a sandbox, or keep it for ever.
	endAt, lifetimeEnd, startBy, releasedAt time.Duration
	// pendingTimeouts is how many changes of its end are on their way into the journal. nextEnd is the
	// end that the last one sets.
	pendingTimeouts int
	nextEnd         time.Time
	// reaped: a verdict has found it idle. From then on no router gets its route.
	reaped bool
	// claim is the one that waits until its agent is configured; nil: the claim is decided. doomed is
	// the cause for which it must be released then.
	claim  *claim
	doomed *Cause
	// ungranted is Fact.Ungranted of an earlier term: it is not known whether the claim was granted. The object
	// is not written then, because it says that the claim was. asking: the agent has not answered whether it
	// is configured. No router gets the route before.
	ungranted int
	asking    bool
	// durableAt is when the writer learned that its release is durable, on the boot clock; 0: in
	// an earlier term, or not yet.
	durableAt      time.Duration
	objectRevision Revision // what the Sandbox object is known to show
	// deleting: a user has deleted the object. A finalizer keeps it while Core.needsObject. dropped: it was deleted, and must not be written again.
	deleting, dropped bool
	waiters           []uint64 // tokens of callers of Release
	// conflicts are the pods and addresses that conflicting records name for it. None of these
	// pods serves it. Its fence covers all of them, because routes are keyed by sandbox ID.
	conflicts []conflict
	elem      *list.Element // in sandboxTable.ended
}

// conflict is a pod that one record names for a sandbox while another record names another pod.
type conflict struct {
	pod PodKey
	ip  netip.Addr
}

// addConflict notes that another record names this pod and address for s.
func (sb *sandbox) addConflict(pod PodKey, ip netip.Addr) {
	if d := (conflict{pod, ip}); !slices.Contains(sb.conflicts, d) {
		sb.conflicts = append(sb.conflicts, d)
	}
}

// addresses are those to which routers may send the requests of a sandbox.
func (sb *sandbox) addresses() []netip.Addr {
	all := []netip.Addr{sb.IP}
	for _, d := range sb.conflicts {
		all = append(all, d.ip)
	}
	return all
}

// live reports whether a sandbox is listed: it starts or runs, and its pod serves it.
func (sb *sandbox) live() bool { return sb.routable() || sb.Phase == Starting && !sb.lost }

func (c *Core) release(ev Release) {
	sb := c.sandboxes.seen(ev.ID, ev.Scope)
	answer := func(status CallStatus) {
		if ev.Token != 0 {
			c.emit(ReleaseAnswered{Token: ev.Token, Status: status})
		}
	}
	switch {
	case sb == nil:
		answer(CallUnknown)
		return
	case sb.Phase == Released || sb.Phase == Ended:
		answer(CallGone)
		return
	}
	if ev.Token != 0 {
		sb.waiters = append(sb.waiters, ev.Token)
	}
	c.startRelease(sb, because(ev.Reason))
}

// startRelease has the release of a live sandbox journaled. One whose agent is being configured is
// released when its claim is decided, because those of a batch must be released in one Write.
func (c *Core) startRelease(sb *sandbox, cause Cause) {
	switch {
	case sb.claim != nil:
		sb.doomed = cmp.Or(sb.doomed, &cause)
		return
	case sb.Phase != Starting && sb.Phase != Running:
		return
	}
	released := &SandboxFact{Sandbox: sb.next()}
	sb.ran = sb.Phase == Running
	sb.Phase = Releasing
	released.Phase, released.Cause, released.ReleasedAt = Released, cause, c.now.Wall
	c.outbox.Commit(c.now.Boot, released, true, func(_ Revision, at time.Duration) { c.released(sb, released, at) })
}

// lost releases a sandbox whose pod cannot serve it any more. From now on no router gets its
// route.
func (c *Core) lost(sb *sandbox, cause Cause) {
	if sb.Phase == Released {
		c.tryEnd(sb)
		return
	}
	sb.lost = true
	c.startRelease(sb, cause)
}

// released acts on a committed release. at is when that was known.
func (c *Core) released(sb *sandbox, f *SandboxFact, at time.Duration) {
	c.sandboxes.deadlines.Remove(sb.ID)
	c.idle.Remove(sb.ID)
	c.sandboxes.released(sb)
	sb.asking = false
	sb.Phase, sb.releasedAt, sb.Revision = Released, c.now.Boot, f.Revision
	sb.Cause, sb.ReleasedAt, sb.StartedAt = f.Cause, f.ReleasedAt, f.StartedAt
	p := c.pods[sb.Pod]
	if p != nil {
		p.enter(podReleased, c.now.Boot)
		c.emit(LabelPod{Pod: sb.Pod, Pool: sb.Pool.Name, ID: sb.ID, Released: true})
		c.readLog(sb)
	}
	c.emit(WriteObject{Sandbox: sb.Sandbox})
	c.emit(SandboxReleased{sb.Sandbox})
	c.claims.Keep(claimKey(&sb.Binding), sb.Grant(), sb.ID, sb.releasedAt)
	c.adopt(sb.Grant())
	sb.durableAt = at
	c.startFence(sb)
}

// tryEnd ends a released sandbox if nothing of it is left: its pod is gone, its fence is complete,
// and the intent to delete every idle pod that its requests may have reached is durable.
func (c *Core) tryEnd(sb *sandbox) {
	if sb.Phase != Released || c.pods[sb.Pod] != nil || !c.fences.Complete(sb.ID) || c.taints.Blocked(sb.ID) {
		return
	}
	sb.Phase = Ended
	c.sandboxes.end(sb)
	c.revise(sb)
}

// routable reports whether routers may receive its route.
func (s *sandbox) routable() bool {
	return (s.Phase == Running || s.Phase == Releasing && s.ran) && !s.lost && !s.reaped && s.claim == nil && !s.asking
}

// takePorts gives s the ports of its pool.
func (s *sandbox) takePorts(p *pool) { s.DefaultPort, s.Ports = p.DefaultPort, p.Ports }
