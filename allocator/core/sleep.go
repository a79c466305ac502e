package core

import (
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Sleep: see docs/design/sleep.md. Here the closing of a sandbox is tied to streams. Its ledger is one of fences, because
// a closing waits for what a release waits for.

// closeWait bounds the closing of a sandbox. It opens again then.
const closeWait = 30 * time.Second

// fallAsleep acts on a call that has a sandbox sleep.
func (c *Core) fallAsleep(ev Sleep) {
	sb := c.sandboxes.Seen(ev.ID, ev.Scope)
	e := SandboxCallAnswered{Token: ev.Token, Status: CallNotReady}
	if sb != nil {
		e.Sandbox = sb.Sandbox
	}
	switch why, closing := closingOf(sb); {
	case sb == nil:
		e.Status = CallUnknown
	case !sb.Lives():
		e.Status = CallGone
	case sb.Archived():
		e.Why = "its files are being archived"
	case ev.Stop && sb.CanStop():
		c.sandboxes.Stop(sb, ev.Token, step.StopCalled)
		return
	case closing && why != sandboxes.Called:
		c.sandboxes.JoinSleep(sb, ev.Token)
		return
	case sb.Sleeps() && sb.Wakes() && (sb.Phase == Stopped || sb.Phase == Starting):
		e.Why = "it is being woken" // which takes longer than a caller may take it for asleep
	case sb.Sleeps():
		e.Status = CallAsleep
	case c.sandboxes.CannotSleep(sb) != "":
		e.Status, e.Why = CallUnfit, c.sandboxes.CannotSleep(sb)
	case !c.sandboxes.CanSleep(sb):
		e.Why = "it does not run yet"
	default:
		switch e.Why = c.cannotClose(sb); {
		case e.Why != "":
		case ev.Stop:
			c.sandboxes.CloseToStop(sb, ev.Token)
			return
		default:
			c.sandboxes.Close(sb, sandboxes.Called, ev.Token)
			return
		}
	}
	c.Emit(e)
}

// archive acts on a call that has the files of a sandbox archived.
func (c *Core) archive(ev Archive) {
	sb := c.sandboxes.Seen(ev.ID, ev.Scope)
	e := SandboxCallAnswered{Token: ev.Token, Status: CallNotReady}
	if sb != nil {
		e.Sandbox = sb.Sandbox
	}
	switch {
	case sb == nil:
		e.Status = CallUnknown
	case !sb.Lives():
		e.Status = CallGone
	case !sb.HasPod():
		e.Status = CallAsleep
	case sb.CanArchive():
		c.sandboxes.Archive(sb, ev.Token, ev.Values)
		return
	case c.sandboxes.CannotSleep(sb) != "":
		e.Status, e.Why = CallUnfit, c.sandboxes.CannotSleep(sb)
	case !c.sandboxes.CanSleep(sb):
		e.Why = "it starts, falls asleep or wakes, or another archive of it is being written"
	default:
		if e.Why = c.cannotClose(sb); e.Why == "" {
			c.sandboxes.Archive(sb, ev.Token, ev.Values)
			return
		}
	}
	c.Emit(e)
}

func closingOf(sb *sandboxes.Sandbox) (why sandboxes.Why, closing bool) {
	if sb == nil {
		return 0, false
	}
	return sb.Closing()
}

// cannotClose says why a sandbox cannot be closed now; empty: it can. A router that is not connected may serve its route
// until the session expires.
func (c *Core) cannotClose(sb *sandboxes.Sandbox) string {
	for _, s := range c.routers.members.All() {
		if s.Stream == 0 && s.Has(sb.Agent) {
			return fmt.Sprintf("router %s may send requests to it and is not connected; its session expires in %v",
				s.ID, (c.routers.members.ExpiresAt(s) - c.Now.Boot).Truncate(time.Second))
		}
	}
	return ""
}

// startClosing has all routers forget the route of a sandbox, and begins to wait for them.
func (c *Core) startClosing(sb *sandboxes.Sandbox) {
	var routers []string
	for _, s := range c.routers.members.All() {
		if s.Durable && s.Has(sb.Agent) { // others have no route
			routers = append(routers, s.ID)
		}
	}
	c.closings.Begin(sb.ID, routers, c.Now.Boot)
	c.routers.closed = append(c.routers.closed, sb.ID)
}

// advanceClosings goes on with the closings that may wait for less than before.
func (c *Core) advanceClosings() {
	closed := c.routers.closed
	c.routers.closed = nil
	for _, id := range closed {
		cleared, complete := c.closings.Advance(id, c.Now.Boot)
		sb := c.sandboxes.Get(id)
		why, closing := closingOf(sb)
		// A verdict has shown that nothing is open, and that nothing was admitted within the connect window. It does
		// not speak of what egress routers have admitted.
		idle := cleared && why == sandboxes.WhenIdle && sb != nil && !sb.Agent.Egress
		if closing && (complete || idle) {
			c.closings.Drop(id)
			c.sandboxes.FallAsleep(sb)
		}
	}
}

// tickClosings opens the sandboxes again whose closing takes too long, and looks at the others.
func (c *Core) tickClosings() {
	for id := range c.closings.UnderWay() {
		began, _, _ := c.closings.Began(id)
		if c.Now.Boot-began < closeWait {
			c.routers.closed = append(c.routers.closed, id)
			continue
		}
		n := c.closings.CountWaiting(id)
		c.closings.Drop(id)
		c.sandboxes.Open(c.sandboxes.Get(id), fmt.Sprintf("%d routers have not acknowledged within %v that they send it no more requests", n, closeWait))
	}
}

// tired has a sandbox sleep whose end has come.
func (c *Core) tired(sb *sandboxes.Sandbox) {
	if !c.sandboxes.CanSleep(sb) {
		return
	}
	if c.cannotClose(sb) != "" {
		c.sandboxes.Postpone(sb)
		return
	}
	c.sandboxes.Close(sb, sandboxes.AtEnd, 0)
}

// resolveSleeper answers a router that asks about a sandbox that sleeps. wake: a request that may reach it waits.
func (c *Core) resolveSleeper(e *SendResolved, sb *sandboxes.Sandbox, wake bool) {
	asked := wake && sb.MayWake() && !sb.Wakes()
	busy := asked && !c.sandboxes.WakeForRequest(sb)
	found := sb.Sandbox
	if sb.Routable() {
		e.Sandbox = &found
		return
	}
	// Not Starting while it wakes: routers would let requests wait that may not reach it.
	found.Wakeable = sb.MayWake() || sb.Wakes()
	e.Sleeper, e.Busy = &found, busy
}

// sendCloses sends the routers the closings that have begun in this step. A close ends a question about the sandbox, as a
// release does, so it is resumed too: requests that were held for a verdict go on then, and ask for it.
func (r *routers) sendCloses() {
	if !r.closings.HasUnsent() {
		return
	}
	for _, s := range r.members.Reachable() {
		ids := r.closings.Unsent(s.ID)
		for _, id := range ids {
			sequence := r.members.NextSequence(s)
			r.closings.Sent(s.ID, sequence, []string{id})
			r.Emit(SendClose{Stream: s.Stream, Sequence: sequence, ID: id})
		}
		if len(ids) > 0 && !s.Egress {
			r.Emit(SendResume{Stream: s.Stream, IDs: ids})
		}
	}
	r.closings.AllSent()
}

// resize has a pod request the CPU that its sandbox needs. What the pod requests is read from the pod: each observation
// and each turn of its sandbox is compared, so that nothing has to be remembered across leaders.
func (c *Core) resize(p *pods.Pod, sb *sandboxes.Sandbox) {
	if p == nil || sb == nil || !sb.Lives() {
		return
	}
	seen, asleep := p.Seen(), sb.Phase == fact.Asleep
	if seen.CPURequest != "" && seen.Lowered != asleep && !seen.Deleting && !seen.Finished {
		c.Emit(ResizePod{Pod: seen.Key, Version: seen.Version, Lower: asleep, CPURequest: seen.CPURequest})
	}
}
