package sandboxes

import (
	"cmp"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/api/activity"
)

// Bind enters the sandbox of a claim that is durable and not granted yet.
func (t *Table) Bind(f *fact.SandboxFact) *Sandbox {
	sb := &Sandbox{Sandbox: f.Sandbox, bound: true}
	if g := t.pods.Find(sb.Pool); g != nil {
		sb.takeOfPool(g) // they may have changed while the claim was written
	}
	t.byPod[sb.Pod] = sb
	t.addRoutes(sb)
	if p := t.pods.Get(sb.Pod); p != nil {
		t.pods.Bind(p, sb.ID)
	}
	return sb
}

// Grant gives a bound sandbox to its claim. Its ends count from boundAt, so that a step of the wall clock since then
// does not move them.
func (t *Table) Grant(sb *Sandbox, boundAt step.Instant) {
	t.decide(sb, boundAt)
	t.add(sb)
	t.schedule(sb)
}

// Reject ends a bound sandbox that its claim does not get. It does not count for the team: the claim does, or others
// of it.
func (t *Table) Reject(sb *Sandbox, boundAt step.Instant, cause fact.Cause) {
	t.decide(sb, boundAt)
	t.byID[sb.ID], sb.Batch = sb, ""
	t.End(sb, Rejected, cause)
}

// decide notes that the claim of a bound sandbox is decided. Until now no caller could know its ID.
func (t *Table) decide(sb *Sandbox, boundAt step.Instant) {
	sb.bound = false
	if p := t.pods.Get(sb.Pod); p != nil {
		t.pods.Grant(p)
	}
	sb.setTimes(boundAt)
	t.Emit(step.SandboxCreated{Sandbox: sb.Sandbox})
}

// Doom has a bound sandbox end for this cause when its claim is decided. Only the first cause counts.
func (t *Table) Doom(sb *Sandbox, cause fact.Cause) { sb.doomed = cmp.Or(sb.doomed, &cause) }

// Run notes that a granted sandbox runs: its pool has no hook, or that has succeeded.
func (t *Table) Run(sb *Sandbox) {
	t.markRunning(sb, t.Now.Boot, activity.Claim)
	t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
	t.Notify(Started{sb})
}

// markRunning notes that a sandbox runs. Routers may have its route from now on.
func (t *Table) markRunning(sb *Sandbox, usedAt time.Duration, kind activity.Kind) {
	t.idle.Add(idle.Sandbox{ID: sb.ID, Timeout: sb.IdleTimeout, MinBytes: sb.MinBytes}, usedAt, kind, t.Now.Boot)
	t.schedule(sb)
}

// HookDone acts on the outcome of the postStart hook for an incarnation of a sandbox.
func (t *Table) HookDone(id string, incarnation int, ok bool, why string) {
	sb := t.byID[id]
	if sb == nil || sb.Incarnation != incarnation || sb.Phase != fact.Starting || sb.readying || sb.sleep != nil && sb.sleep.pending != 0 {
		return
	}
	if !ok {
		t.End(sb, Serving, fact.Cause{Reason: fact.ReasonStartFailed, Message: why})
		return
	}
	sb.readying, sb.StartedAt = true, t.Now.Wall
	ready := &fact.SandboxFact{Sandbox: sb.next()}
	t.outbox.Commit(t.Now.Boot, ready, true, func(fact.Revision, time.Duration) {
		sb.readying = false
		sb.Revision, sb.EndAt = ready.Revision, ready.EndAt
		if sb.Phase != fact.Starting { // it is being released
			t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
			return
		}
		sb.Phase = fact.Running
		if sb.Sleeps() {
			t.revived(sb)
			return
		}
		t.Run(sb)
	})
}

// End ends a sandbox, in this way and for this cause. Only the first cause counts; a later call can only take the route
// away. One that is bound ends when its claim is decided: see Doom.
func (t *Table) End(sb *Sandbox, how How, cause fact.Cause) {
	switch {
	case sb.bound:
		t.Doom(sb, cause)
		return
	case sb.Over(), t.defers(sb, cause), t.fallsBack(sb, cause):
		return
	}
	sb.how = max(sb.how, how)
	if how == Rejected {
		sb.IdempotencyKey = ""
	}
	if !sb.Lives() {
		return
	}
	released := &fact.SandboxFact{Sandbox: sb.next()}
	released.Network.Headers = nil // their values have no use any more
	sb.ran = sb.Phase >= fact.Running
	sb.Phase = fact.Releasing
	released.Phase, released.Cause, released.ReleasedAt = fact.Released, cause, t.Now.Wall
	t.outbox.Commit(t.Now.Boot, released, true, func(_ fact.Revision, at time.Duration) { t.released(sb, released, at) })
}

// EndDue is End for a sandbox that was to end at this time.
func (t *Table) EndDue(sb *Sandbox, how How, at time.Duration, cause fact.Cause) {
	if sb.Lives() && !sb.bound {
		sb.dueAt = max(1, at)
	}
	t.End(sb, how, cause)
}

// released acts on a committed release. at is when that was known.
func (t *Table) released(sb *Sandbox, f *fact.SandboxFact, at time.Duration) {
	sb.Network.Headers = nil
	t.deadlines.Remove(sb.ID)
	t.idle.Remove(sb.ID)
	t.live.remove(sb)
	t.gone.add(sb)
	sb.asking = false
	if sb.Sleeps() {
		s := t.awake(sb)
		t.answer(s.sleepers, step.CallGone, sb, "")
		t.answer(s.stoppers, step.CallGone, sb, "")
		t.answerArchive(s.archive, step.CallGone, sb, "")
		for _, w := range s.wakers {
			t.answer([]uint64{w.token}, step.CallGone, sb, "")
		}
	}
	sb.Phase, sb.releasedAt, sb.durableAt, sb.Revision = fact.Released, t.Now.Boot, at, f.Revision
	sb.Cause, sb.ReleasedAt, sb.StartedAt = f.Cause, f.ReleasedAt, f.StartedAt
	if p := t.pods.Get(sb.Pod); p != nil && sb.HasPod() {
		t.pods.Release(p)
		t.readLog(sb)
	}
	if sb.Archive != "" {
		t.Emit(step.DropArchive{Sandbox: sb.Sandbox})
	}
	t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
	released := step.SandboxReleased{Sandbox: sb.Sandbox}
	if sb.dueAt > 0 {
		released.Late = max(1, at-sb.dueAt)
	}
	t.Emit(released)
	t.Notify(Released{sb})
}

// TryEnd ends a released sandbox if nothing of it is left: its pod is gone, its fence is complete,
// and the intent to delete every idle pod that its requests may have reached is durable.
func (t *Table) TryEnd(id string) {
	sb := t.byID[id]
	if sb.Phase != fact.Released || t.pods.Get(sb.Pod) != nil || !t.fences.Complete(id) || t.pods.Blocked(id) {
		return
	}
	sb.Phase = fact.Ended
	sb.elem = t.ended.PushBack(sb)
	t.revise(sb)
}

// PodChanged acts on a change of the pod of a sandbox.
func (t *Table) PodChanged(sb *Sandbox, p *pods.Pod) {
	if !sb.HasPod() {
		if sb.Phase == fact.Released {
			t.TryEnd(sb.ID)
		}
		return
	}
	if !sb.Over() && sb.takeOfPool(p.Group()) {
		t.Notify(Routed{sb})
	}
	switch cause, lost := sb.Unfit(p); {
	case lost && sb.Phase == fact.Released:
		t.TryEnd(sb.ID)
	case lost && t.outlives(sb, p):
		t.Stop(sb, 0, step.StopOfDeletion)
	case lost:
		t.End(sb, Lost, cause)
	case cause != (fact.Cause{}):
		t.End(sb, Serving, cause)
	default:
		sb.Restarts = max(sb.Restarts, p.Seen().Restarts) // they were kept
	}
}

// Unfit returns the cause for which a sandbox must end, as far as its pod is concerned; zero: there is none.
// lost: the pod cannot serve it any more. p may be nil.
func (sb *Sandbox) Unfit(p *pods.Pod) (cause fact.Cause, lost bool) {
	if p == nil {
		return fact.Because(fact.ReasonPodDeleted), true
	}
	if p.Seen().Deleting || p.Gone() {
		return p.Removed(), true
	}
	return sb.unfitIn(p)
}

// unfitIn is Unfit for a pod that is there, and as if it were not being deleted.
func (sb *Sandbox) unfitIn(p *pods.Pod) (cause fact.Cause, lost bool) {
	switch seen := p.Seen(); {
	case seen.Finished:
		cause = seen.Cause
		cause.Reason = cmp.Or(cause.Reason, fact.ReasonFailed)
		cause.Message = cmp.Or(cause.Message, seen.Why)
		return cause, true
	case seen.IP != sb.IP:
		// The address of the route may belong to another pod already, even if this pod has none
		// at the moment.
		return fact.Because(fact.ReasonPodMoved), true
	case p.Withheld()&pods.Contested != 0:
		return fact.Because(fact.ReasonAddressShared), true
	case seen.Restarts > sb.Restarts && (!p.Group().KeepOnRestart || sb.Agent.Port != 0):
		// An agent that starts again is not configured any more.
		if cause = seen.Cause; cause.Reason != fact.ReasonOOMKilled {
			cause.Reason = fact.ReasonUnexpectedRestart
		}
		return cause, false
	}
	return fact.Cause{}, false
}

// Found ties a pod that was found again to its sandbox.
func (t *Table) Found(sb *Sandbox, p *pods.Pod) {
	if sb.Phase == fact.Stopped {
		t.pods.Finish(p, false)
		return
	}
	sb.Workload = cmp.Or(sb.Workload, p.Seen().Workload)
	sb.takeOfPool(p.Group())
	if !sb.Over() {
		return
	}
	if sb.elem != nil { // it had ended, but its pod exists
		t.ended.Remove(sb.elem)
		sb.elem = nil
		sb.Phase = fact.Released
		t.revise(sb)
		t.addRoutes(sb)
	}
	t.readLog(sb) // the earlier leader may not have done it
}

// addRoutes notes that routers may receive routes of a sandbox from now on.
func (t *Table) addRoutes(sb *Sandbox) { t.pods.AddRoutes(sb.ID, sb.Pod, sb.addresses()) }

// takeOfPool gives a sandbox the ports and the egress rules that the pool of its pod has now. It reports whether they are
// others.
func (sb *Sandbox) takeOfPool(g *pods.Group) bool {
	if !g.Known {
		return false
	}
	egress := g.Egress
	if !sb.Agent.Egress {
		egress = nil
	}
	if sb.DefaultPort == g.DefaultPort && slices.Equal(sb.Ports, g.Ports) && sb.PoolEgress.Equal(egress) {
		return false
	}
	sb.DefaultPort, sb.Ports, sb.PoolEgress = g.DefaultPort, g.Ports, egress
	return true
}

// Fits reports whether the pod of a released sandbox could serve another one, as far as this one is concerned: it has
// not failed or ended because of the pod.
func (sb *Sandbox) Fits(p *pods.Pod) bool {
	cause, _ := sb.Unfit(p)
	return cause == (fact.Cause{}) && sb.Reason != fact.ReasonAddressShared && !slices.Contains(fact.LogReasons, sb.Reason) && len(sb.conflicts) == 0
}

// Configured notes that an earlier leader has configured the agent of a sandbox. It may have said that it is ready.
func (t *Table) Configured(sb *Sandbox) {
	sb.asking = false
	if sb.Phase == fact.Starting {
		t.Emit(step.StartSandbox{Sandbox: sb.Sandbox})
		return
	}
	t.markRunning(sb, t.Now.Boot, activity.Claim) // routers of the earlier leader are waited for: see idle.Expect
	t.Notify(Routed{sb})
}

// Adopt writes the objects of a grant of an earlier term when no agent of it is asked any more.
func (t *Table) Adopt(grant string) {
	members := t.Granted(grant)
	if slices.ContainsFunc(members, (*Sandbox).Asking) {
		return
	}
	for _, sb := range members {
		if sb.ungranted > 0 && sb.Phase < fact.Releasing && !sb.StopsNow() {
			sb.ungranted = 0
			t.Show(sb)
		}
	}
}
