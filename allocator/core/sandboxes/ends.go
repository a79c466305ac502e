package sandboxes

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/api/activity"
)

// maxDeadlines bounds the deadlines that one tick looks at: after a change of leaders all may have
// come at once.
const maxDeadlines = 10_000

// setTimes converts the end times of a sandbox to the boot clock.
func (sb *Sandbox) setTimes(now step.Instant) {
	sb.nextEnd, sb.nextNetwork = sb.EndAt, sb.Network
	for _, m := range []struct {
		at   time.Time
		boot *time.Duration
	}{{sb.EndAt, &sb.endAt}, {sb.LifetimeEnd, &sb.lifetimeEnd}, {sb.StartBy, &sb.startBy}} {
		if *m.boot = 0; !m.at.IsZero() {
			*m.boot = max(1, now.BootOf(m.at))
		}
	}
	sb.nextEndAt = sb.endAt
}

// toStop is the reason of the end of a sleep whose sandbox is to be stopped.
const toStop = "Stop"

// Ends returns when a sandbox is released or stopped whether it is in use or not, and the reason. An empty
// reason means that no such end is set.
func (sb *Sandbox) Ends() (at time.Duration, reason string) {
	earlier := func(than time.Duration, why string) {
		if than != 0 && (reason == "" || than < at) {
			at, reason = than, why
		}
	}
	if sb.pendingTimeouts == 0 && !sb.Sleeps() { // else timeoutSet or the wake schedules it again
		end := sb.endAt
		if sb.Sleep.AtEnd && end != 0 {
			end = max(end, sb.notBefore)
		}
		earlier(end, fact.ReasonEndTime)
	}
	earlier(sb.lifetimeEnd, fact.ReasonMaxLifetime)
	if sb.Phase == fact.Starting && !sb.readying {
		earlier(sb.startBy, fact.ReasonStartupTimeout)
	}
	if sb.stopAt != 0 && sb.CanArchive() {
		earlier(max(sb.stopAt, sb.notBefore), toStop)
	}
	return at, reason
}

// ExpireEnds ends the sandboxes whose end has come.
func (t *Table) ExpireEnds() {
	for _, id := range t.deadlines.Due(t.Now.Boot, maxDeadlines) {
		sb := t.byID[id]
		switch at, reason := sb.Ends(); {
		case reason == "" || at > t.Now.Boot:
			t.schedule(sb)
		case reason == toStop:
			t.Stop(sb, 0, t.stopCause(sb))
			t.schedule(sb)
		case reason == fact.ReasonEndTime && sb.Sleep.AtEnd && t.CanSleep(sb):
			t.Notify(Tired{sb})
		default:
			t.EndDue(sb, Serving, at, fact.Because(reason))
		}
	}
}

// EndOf ends the sandboxes of a pool that is deleted, unless they are kept.
func (t *Table) EndOf(g *pods.Group) {
	if g.Deleting && (!g.KeepSandboxes || !g.Known) { // without the object the garbage collector deletes the pods
		for _, p := range g.Sorted(pods.Bound, pods.Claimed) {
			t.End(t.byPod[p.Key()], Serving, fact.Because(fact.ReasonPoolDeleted))
		}
	}
	if g.Deleting && !g.KeepSandboxes {
		for _, sb := range slices.Clone(t.live.Of(step.Selection{Scope: step.Scope{All: true}, Pool: g.Key})) {
			if sb.Phase == fact.Stopped {
				t.End(sb, Serving, fact.Because(fact.ReasonPoolDeleted))
			}
		}
	}
}

// Release acts on a call that ends a sandbox. A token other than 0 is answered when that is durable: see
// Sandbox.TakeWaiters.
func (t *Table) Release(token uint64, scope step.Scope, id, reason string) {
	sb, status := t.Seen(id, scope), step.CallUnknown
	switch {
	case sb == nil:
	case sb.Over():
		status = step.CallGone
	default:
		if token != 0 {
			sb.waiters = append(sb.waiters, token)
		}
		t.End(sb, Serving, fact.Because(reason))
		return
	}
	if token != 0 {
		t.Emit(step.ReleaseAnswered{Token: token, Status: status})
	}
}

// KeepAlive counts a call as activity.
func (t *Table) KeepAlive(token uint64, scope step.Scope, id string) {
	if sb := t.Seen(id, scope); sb != nil && sb.Lives() && sb.Archived() { // it wakes soon, which counts as use
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallOK, Sandbox: sb.Sandbox})
		return
	}
	if sb := t.use(token, scope, id, false); sb != nil {
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallOK, Sandbox: sb.Sandbox})
	}
}

// use returns the live sandbox of a call and notes the call as activity. If there is none, or it is asleep and the call
// does not wake it, use answers the call and returns nil. A call ends the sleep that an idle sandbox is about to begin.
func (t *Table) use(token uint64, scope step.Scope, id string, wakes bool) *Sandbox {
	sb := t.Seen(id, scope)
	switch {
	case sb == nil:
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallUnknown})
		return nil
	case !sb.Lives():
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallGone, Sandbox: sb.Sandbox})
		return nil
	}
	if why, closing := sb.Closing(); closing && why == WhenIdle {
		t.Open(sb, "")
	}
	if sb.Sleeps() && !wakes {
		status := step.CallAsleep
		if sb.Archived() {
			status = step.CallNotReady
		}
		t.Emit(step.SandboxCallAnswered{Token: token, Status: status, Sandbox: sb.Sandbox})
		return nil
	}
	t.idle.Note(sb.ID, activity.Keepalive, t.Now.Boot)
	return sb
}

// SetTimeout moves the end of a sandbox to lifetime from now. The new end counts when it is durable. extend: an end
// that is later stays. wake: a sandbox that sleeps is woken, and gets that end.
func (t *Table) SetTimeout(token uint64, scope step.Scope, id string, lifetime time.Duration, extend, wake bool) {
	sb := t.use(token, scope, id, wake)
	switch {
	case sb == nil:
		return
	case sb.Sleeps() && len(sb.sleep.wakers) >= maxWakers:
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallNotReady, Sandbox: sb.Sandbox})
		return
	case sb.Sleeps():
		t.wakeFor(sb, token, lifetime)
		return
	}
	end, at := t.Now.Wall.Add(lifetime), max(1, t.Now.Boot+lifetime)
	if extend && (sb.nextEndAt == 0 || sb.nextEndAt > at) {
		if end, at = sb.nextEnd, sb.nextEndAt; sb.pendingTimeouts == 0 { // it is durable
			t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallOK, Sandbox: sb.Sandbox})
			return
		}
	}
	sb.pendingTimeouts++
	sb.nextEnd, sb.nextEndAt = end, at
	next := &fact.SandboxFact{Sandbox: sb.next(), Ungranted: sb.ungranted}
	t.outbox.Commit(t.Now.Boot, next, true, func(fact.Revision, time.Duration) { t.timeoutSet(sb, token, next, at) })
}

// timeoutSet acts on a committed change of an end, which comes then on the boot clock.
func (t *Table) timeoutSet(sb *Sandbox, token uint64, f *fact.SandboxFact, at time.Duration) {
	sb.pendingTimeouts--
	sb.EndAt, sb.Revision, sb.endAt = f.EndAt, f.Revision, at
	t.idle.Note(sb.ID, activity.Keepalive, t.Now.Boot)
	answer := step.SandboxCallAnswered{Token: token, Status: step.CallOK, Sandbox: sb.Sandbox}
	if !sb.Lives() {
		answer.Status = step.CallGone
	}
	t.schedule(sb)
	t.show(sb, f)
	t.Emit(answer)
}

// show has the object show a committed change of a sandbox.
func (t *Table) show(sb *Sandbox, f *fact.SandboxFact) {
	shown := sb.Sandbox
	shown.Phase, shown.StartedAt = f.Phase, f.StartedAt // not Releasing: the sandbox may never have run
	if sb.ungranted == 0 {
		t.Emit(step.WriteObject{Sandbox: shown})
	}
}
