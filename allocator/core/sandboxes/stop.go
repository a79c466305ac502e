package sandboxes

import (
	"cmp"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/api/activity"
)

// A stop: the files of a sandbox that is asleep are archived, that is durable, and its pod is deleted. It begins only from
// Asleep, when no router has a route of the sandbox and nothing that was admitted can connect to its pod any more. So
// there is no fence of the pod, routers need not know of the stop, and a wake waits for nothing that the former pod does.

// setStop sets when a sandbox that has fallen asleep is to be stopped. On a node that is cordoned that is at once: its pod
// is about to be evicted, and would take the files with it.
func (t *Table) setStop(sb *Sandbox) {
	sb.stopAt = 0
	if sb.AsleepAt.IsZero() {
		return
	}
	if sb.Sleep.StopAfter > 0 {
		sb.stopAt = max(1, t.Now.BootOf(sb.AsleepAt.Add(sb.Sleep.StopAfter)))
	}
	if p := t.pods.Get(sb.Pod); p != nil && p.Cordoned() && sb.isStopped(p) && (sb.stopAt == 0 || sb.stopAt > t.Now.Boot) {
		sb.stopAt = max(1, t.Now.Boot)
	}
}

// isStopped reports whether a sandbox that sleeps in this pod is stopped without a call for that: after some time, or
// when too many sleep in its pool.
func (sb *Sandbox) isStopped(p *pods.Pod) bool {
	return sb.Sleep.StopAfter > 0 || p.Group().MaxAsleep > 0
}

// Cordoned has the sandboxes stopped that are asleep on a node, if they may be.
func (t *Table) Cordoned(node string) {
	for _, sb := range t.live.Of(Everything()) {
		if p := t.pods.Get(sb.Pod); sb.HasPod() && p != nil && p.Node() == node {
			t.setStop(sb)
			t.schedule(sb)
		}
	}
}

// outlives reports whether a sandbox may outlive its pod, which is being deleted: it is asleep there, its processes are
// stopped, and it may be stopped, or is about to be. What has the archive fail ends it.
func (t *Table) outlives(sb *Sandbox, p *pods.Pod) bool {
	if sb.Phase != fact.Asleep || sb.sleep.pending != 0 || !sb.isStopped(p) && sb.sleep.stop == "" || p.Gone() {
		return false
	}
	cause, _ := sb.unfitIn(p)
	return cause == (fact.Cause{}) && p.Removed().Reason != fact.ReasonNodeLost
}

// leaves reports whether the pod of a sandbox is being deleted. No sandbox wakes there.
func (t *Table) leaves(sb *Sandbox) bool {
	p := t.pods.Get(sb.Pod)
	return p != nil && p.Seen().Deleting
}

// endsWithPod ends a sandbox if its pod is being deleted or is gone, and reports whether that is so.
func (t *Table) endsWithPod(sb *Sandbox) bool {
	cause, lost := sb.Unfit(t.pods.Get(sb.Pod))
	if lost {
		t.End(sb, Lost, cause)
	}
	return lost
}

// CanStop reports whether a sandbox sleeps and can be stopped, or is about to be, and another caller may wait for that.
func (sb *Sandbox) CanStop() bool {
	return sb.sleep != nil && sb.Phase >= fact.Running && sb.Phase < fact.Waking && sb.sleep.pending != fact.Waking && !sb.Archived() &&
		len(sb.sleep.stoppers) < maxWakers
}

// Stop has a sandbox that sleeps stopped as soon as it is asleep and no archive of it is being written. A token other
// than 0 is answered then. The cause of a stop that has begun stays.
func (t *Table) Stop(sb *Sandbox, token uint64, cause step.StopCause) {
	s := sb.sleep
	s.stop = cmp.Or(s.stop, cause)
	if token != 0 {
		s.stoppers = append(s.stoppers, token)
	}
	if _, closing := sb.Closing(); closing {
		s.why = Called
	}
	t.goesOn(sb)
}

// CloseToStop is Close for a call that has a sandbox stopped.
func (t *Table) CloseToStop(sb *Sandbox, token uint64) {
	t.Close(sb, Called, 0)
	t.Stop(sb, token, step.StopCalled)
}

// stopCause is why a sandbox is stopped whose time for that has come.
func (t *Table) stopCause(sb *Sandbox) step.StopCause {
	if after := sb.Sleep.StopAfter; after > 0 && t.Now.BootOf(sb.AsleepAt.Add(after)) <= t.Now.Boot {
		return step.StopAfter
	}
	return step.StopOfCordon
}

// archiveForStop has the files of a sandbox archived that is asleep.
func (t *Table) archiveForStop(sb *Sandbox) {
	sb.sleep.archive = &archive{order: sb.Revision}
	t.Emit(step.WriteArchive{Sandbox: sb.Sandbox, Cause: sb.sleep.stop})
}

// stopArchived acts on the outcome of archiveForStop. name is that of the archive.
func (t *Table) stopArchived(sb *Sandbox, err error, name string) {
	s := sb.sleep
	s.archive = nil
	switch {
	case sb.Phase != fact.Asleep || s.pending != 0: // it wakes
		return
	case err != nil && t.endsWithPod(sb):
		return
	case err != nil:
		s.stop = ""
		t.backOff(sb)
		t.answerNotArchived(s.stoppers, sb, err)
		s.stoppers = nil
		t.goesOn(sb)
		return
	}
	before, f := sb.Sandbox, &fact.SandboxFact{Sandbox: sb.next()}
	f.Archive = name
	t.commitStop(sb, f, func() {
		if before.Archive != "" {
			t.Emit(step.DropArchive{Sandbox: before})
		}
		t.answer(s.stoppers, step.CallOK, sb, "")
		s.stop, s.stoppers = "", nil
	})
}

// backOff has a sandbox not try again for a while, and each time for longer, at most for an hour. Calls need not wait.
func (t *Table) backOff(sb *Sandbox) {
	sb.notBefore = t.Now.Boot + min(tryAgain<<min(sb.sleep.tries, 10), time.Hour)
	sb.sleep.tries++
}

// commitStop commits that a sandbox is stopped, which has or had the pod of the fact. No router has a route to it. then
// runs when that is durable.
func (t *Table) commitStop(sb *Sandbox, f *fact.SandboxFact, then func()) {
	f.Phase, sb.sleep.pending = fact.Stopped, fact.Stopped
	t.outbox.Commit(t.Now.Boot, f, true, func(fact.Revision, time.Duration) {
		sb.sleep.pending, sb.sleep.rebinding = 0, false
		delete(t.byPod, sb.Pod)
		t.take(sb, &f.Sandbox)
		sb.stopped, sb.asking, sb.ungranted, sb.stopAt = true, false, 0, 0
		sb.endAt, sb.nextEnd, sb.nextEndAt, sb.startBy = 0, time.Time{}, 0, 0
		t.Emit(step.SandboxStopped{Sandbox: sb.Sandbox})
		t.pods.Fenced(sb.ID)
		if p := t.pods.Get(sb.Pod); p != nil {
			t.pods.Release(p)
			t.pods.Finish(p, false)
		}
		t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
		then()
		t.endDoomed(sb)
		t.goesOn(sb)
	})
}

// StopsNow reports whether the fact that a sandbox is stopped is on its way into the journal.
func (sb *Sandbox) StopsNow() bool { return sb.sleep != nil && sb.sleep.pending == fact.Stopped }

// endDoomed ends a sandbox that could not end before: see defers.
func (t *Table) endDoomed(sb *Sandbox) {
	if doomed := sb.doomed; doomed != nil {
		sb.doomed = nil
		t.End(sb, Serving, *doomed)
	}
}

// take gives a sandbox a state, and the pod of that.
func (t *Table) take(sb *Sandbox, state *fact.Sandbox) {
	shown := sb.LastActive
	sb.Sandbox = *state
	sb.LastActive = shown
	t.byPod[sb.Pod] = sb
}

// Rebind returns the fact that gives a stopped sandbox a pod, which a claim has taken for it. It starts there, also if its
// pool has no hook: no router ever has the route of a sandbox that starts, so that it can be stopped again.
func (t *Table) Rebind(sb *Sandbox, p *pods.Pod, start Start) *fact.SandboxFact {
	sb.sleep.rebinding = true
	seen, f := p.Seen(), &fact.SandboxFact{Sandbox: sb.next(), Ungranted: 1}
	f.Incarnation++
	f.Pod, f.IP, f.Agent, f.Workload = p.Key(), seen.IP, start.Agent, seen.Workload
	f.DefaultPort, f.Ports, f.Restarts = start.DefaultPort, start.Ports, seen.Restarts
	f.Phase, f.StartedAt, f.StartBy = fact.Starting, time.Time{}, start.By
	f.EndAt = sb.sleep.end
	return f
}

// Start is what a pool has of a sandbox that starts, and by when it must run; zero: there is no bound.
type Start struct {
	Agent       fact.Agent
	DefaultPort uint16
	Ports       []uint16
	By          time.Time
}

// Unbound notes that the fact of Rebind was withdrawn.
func (t *Table) Unbound(sb *Sandbox) {
	if sb.sleep != nil {
		sb.sleep.rebinding = false
		t.endDoomed(sb)
	}
}

// Revive gives a stopped sandbox the pod to which it was bound, and has it start.
func (t *Table) Revive(sb, bound *Sandbox, boundAt step.Instant) {
	s := sb.sleep
	s.rebinding, s.rising = false, false
	delete(t.byPod, sb.Pod)
	t.take(sb, &bound.Sandbox)
	sb.stopped, sb.stopAt = false, 0
	if p := t.pods.Get(sb.Pod); p != nil {
		t.pods.Grant(p)
	}
	lifetimeEnd := sb.lifetimeEnd // the wall clock may have had a step since it was set
	sb.setTimes(boundAt)
	sb.endAt, sb.nextEndAt, sb.lifetimeEnd = s.endAt, s.endAt, lifetimeEnd
	t.schedule(sb)
	t.Emit(step.LabelPod{Pod: sb.Pod, Pool: sb.Pool.Name, ID: sb.ID})
	t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
	t.Emit(step.StartSandbox{Sandbox: sb.Sandbox})
}

// revived notes that a sandbox runs that was stopped.
func (t *Table) revived(sb *Sandbox) {
	s := t.awake(sb)
	awake := step.SandboxAwake{Took: t.Now.Boot - s.since}
	if !sb.AsleepAt.IsZero() {
		awake.Slept = max(0, t.Now.Wall.Sub(sb.AsleepAt))
	}
	sb.AsleepAt, sb.Wakeable = time.Time{}, false
	awake.Sandbox = sb.Sandbox
	t.markRunning(sb, t.Now.Boot, activity.Claim)
	t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
	t.Notify(Routed{sb})
	t.Emit(awake)
	t.answerWakers(s.wakers, sb)
}

// Unrevive takes a pod away from a stopped sandbox that was bound to it, for this cause. then runs when that is durable,
// unless the sandbox ends.
func (t *Table) Unrevive(sb, bound *Sandbox, then func()) {
	f := &fact.SandboxFact{Sandbox: sb.next()}
	f.Pod, f.IP, f.Incarnation, f.Agent, f.Restarts = bound.Pod, bound.IP, bound.Incarnation, bound.Agent, bound.Restarts
	t.commitStop(sb, f, func() {
		if sb.doomed == nil {
			then()
		}
	})
}

// NotRevived gives up to wake a stopped sandbox, and says why. CallNotReady: it may have a pod later.
func (t *Table) NotRevived(sb *Sandbox, status step.CallStatus, why string) {
	s := sb.sleep
	if status == step.CallRefused {
		t.backOff(sb)
	}
	if s.wake, s.rising = false, false; s.place {
		s.place = false
		t.places.giveBack(sb.Team)
	}
	wakers := s.wakers
	s.wakers = nil
	for _, w := range wakers {
		t.answer([]uint64{w.token}, status, sb, why)
	}
}

// startReasons are those of a start that does not succeed because of the pod, or in it.
var startReasons = []string{
	fact.ReasonStartFailed, fact.ReasonStartupTimeout, fact.ReasonConfigurationFailed, fact.ReasonUnexpectedRestart, fact.ReasonOOMKilled,
	fact.ReasonFailed, fact.ReasonCompleted, fact.ReasonEvicted, fact.ReasonNodeLost, fact.ReasonPodDeleted, fact.ReasonPodMoved, fact.ReasonAddressShared,
}

// defers reports whether a sandbox cannot end now: that it is stopped, or has a pod again, is on its way into the journal.
// It ends after that, unless the cause is its pod.
func (t *Table) defers(sb *Sandbox, cause fact.Cause) bool {
	if s := sb.sleep; s == nil || !sb.StopsNow() && !s.rebinding {
		return false
	}
	if sb.doomed == nil && !slices.Contains(startReasons, cause.Reason) {
		sb.doomed = &cause
		t.Notify(Doomed{sb})
	}
	return true
}

// fallsBack reports whether a sandbox is stopped again, instead of being released: its start after a stop has not
// succeeded, and no router ever had its route to the pod.
func (t *Table) fallsBack(sb *Sandbox, cause fact.Cause) bool {
	if sb.Archive == "" || sb.Phase != fact.Starting || sb.readying || !slices.Contains(startReasons, cause.Reason) {
		return false
	}
	f := &fact.SandboxFact{Sandbox: sb.next()}
	f.EndAt, f.StartBy = time.Time{}, time.Time{}
	t.commitStop(sb, f, func() { t.NotRevived(sb, step.CallRefused, cmp.Or(cause.Message, cause.Reason)) })
	return true
}
