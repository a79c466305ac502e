package sandboxes

import (
	"cmp"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/api/activity"
)

// Sleep: see docs/design/sleep.md.

const (
	// freezeTries is how often a sandbox may fail to fall asleep, one time after the other, before it is released
	// instead.
	freezeTries = 3
	// tryAgain is the pause before a sandbox that has come to its end tries to fall asleep again.
	tryAgain = 10 * time.Second
	// maxWakers bounds the callers that wait for one sandbox to wake, and those that wait for it to be stopped. Some may be
	// gone, and each can have a fact written.
	maxWakers = 1000
)

// Why a sandbox falls asleep.
type Why int

// Why a sandbox falls asleep.
const (
	Called     Why = iota // a call has asked for it
	AtEnd                 // its end has come
	WhenIdle              // a verdict has found it idle
	ForArchive            // its files are to be archived; it wakes then
)

// sleep is how far a sandbox is on its way from Close until it runs again.
type sleep struct {
	why   Why
	since time.Duration // boot clock: of Close; of the wake once it is to wake
	// pending is the phase whose fact is on its way into the journal; 0: none is.
	pending  fact.Phase
	sleepers []uint64 // tokens of the callers of Sleep
	wakers   []waker
	// wake: it wakes as soon as it can. end is its end then; zero: it has none.
	wake  bool
	place bool // a request has it wake, for which it has one of Table.places
	end   time.Time
	endAt time.Duration // the same on the boot clock; 0: none
	// stop is why it is to be stopped when it is asleep; empty: it is not. stoppers are the tokens of the callers that wait
	// for that. rising: it is stopped, and a claim for its next pod was made. rebinding: the claim has a pod, and its fact
	// is not withdrawn.
	stop              step.StopCause
	rising, rebinding bool
	stoppers          []uint64
	// tries is how often an archive for its stop, or a start after that, has failed.
	tries int
	// failed says why it did not fall asleep.
	failed string
	// archive is the one that is written of its files, or is to be; nil: none is.
	archive *archive
}

// archive is an archive of the files of a sandbox. token is that of its caller, 0 if it is one of a stop, and err is why
// there is none. order is the revision that the sandbox had, if it is one of a stop.
type archive struct {
	token   uint64
	order   fact.Revision
	values  step.Values
	written bool
	err     error
}

// waker is a caller that waits for a sandbox to run, and to live until a time on the boot clock at least.
type waker struct {
	token uint64
	until time.Duration
}

// Sleeps reports whether the sandbox is asleep, or on the way to that or back.
func (sb *Sandbox) Sleeps() bool { return sb.sleep != nil }

// Closing reports whether routers are asked to forget the route of the sandbox, and why.
func (sb *Sandbox) Closing() (why Why, ok bool) {
	if sb.sleep == nil || sb.Phase != fact.Running || sb.sleep.pending != 0 {
		return 0, false
	}
	return sb.sleep.why, true
}

// Wakes reports whether the sandbox is about to run.
func (sb *Sandbox) Wakes() bool { return sb.sleep != nil && sb.sleep.wake }

// MayWake reports whether a request may wake the sandbox, or end the sleep that it is about to begin.
func (sb *Sandbox) MayWake() bool {
	return sb.sleep != nil && (sb.sleep.why == WhenIdle || sb.sleep.why == ForArchive || sb.Sleep.WakeOnTraffic || sb.Wakeable)
}

// Archived reports whether the sandbox sleeps for nothing but an archive of its files.
func (sb *Sandbox) Archived() bool { return sb.sleep != nil && sb.sleep.why == ForArchive }

// CanArchive reports whether a sandbox is asleep and its files can be archived.
func (sb *Sandbox) CanArchive() bool {
	return sb.Phase == fact.Asleep && sb.sleep.pending == 0 && !sb.sleep.wake && sb.sleep.stop == "" && sb.sleep.archive == nil
}

// CanSleep reports whether a sandbox runs and can be closed.
func (t *Table) CanSleep(sb *Sandbox) bool {
	return sb.Phase == fact.Running && sb.sleep == nil && !sb.bound && !sb.asking && t.CannotSleep(sb) == ""
}

// CannotSleep says why a sandbox cannot sleep for as long as it has its pod; empty: it can. The pool says that of pods of
// its template. A pod of another template is taken for one that can, because a change of the pool must not end a sandbox
// that was claimed to sleep.
func (t *Table) CannotSleep(sb *Sandbox) string {
	if sb.Agent.Port == 0 {
		return "its pod has no agent; enable spec.agent of its pool"
	}
	if p := t.pods.Get(sb.Pod); p != nil && !p.Outdated() {
		return p.Group().CannotSleep
	}
	return ""
}

// Close begins the sleep of a sandbox that can sleep. Routers get its route no more. A token other than 0 is answered
// when it is asleep.
func (t *Table) Close(sb *Sandbox, why Why, token uint64) {
	sb.sleep = &sleep{why: why, since: t.Now.Boot}
	if token != 0 {
		sb.sleep.sleepers = []uint64{token}
	}
	t.idle.Suspend(sb.ID)
	t.schedule(sb)
	t.Notify(Closed{sb})
}

// JoinSleep has a call wait for the sleep that a sandbox has begun. A request does not end that any more.
func (t *Table) JoinSleep(sb *Sandbox, token uint64) {
	sb.sleep.why = Called
	sb.sleep.sleepers = append(sb.sleep.sleepers, token)
}

// Archive has the files of a sandbox archived. One that is asleep sleeps on. Another one can sleep: it does that for as
// long as the archive is written. The token is answered then.
func (t *Table) Archive(sb *Sandbox, token uint64, values step.Values) {
	a := &archive{token: token, values: values}
	if sb.Phase == fact.Asleep {
		sb.sleep.archive = a
		t.Emit(step.WriteArchive{Token: token, Sandbox: sb.Sandbox, Values: values})
		return
	}
	t.Close(sb, ForArchive, 0)
	sb.sleep.archive = a
}

// ArchiveWritten acts on the outcome of a WriteArchive.
func (t *Table) ArchiveWritten(id string, token uint64, order fact.Revision, err error, name string) {
	sb := t.byID[id]
	if sb == nil || !sb.Lives() || sb.sleep == nil || sb.sleep.archive == nil || sb.sleep.archive.token != token {
		return // else its release answers
	}
	a := sb.sleep.archive
	if token == 0 {
		if a.order == order {
			t.stopArchived(sb, err, name)
		}
		return
	}
	a.written, a.err = err == nil, err
	if sb.Archived() {
		sb.sleep.end, sb.sleep.endAt = sb.EndAt, sb.endAt // a request that waits does not move it
		t.wakeUp(sb)
		return
	}
	sb.sleep.archive = nil
	t.archiveEnded(a, sb, "")
	t.goesOn(sb)
}

// archiveEnded answers the caller of Archive, if there is one, with what came of the archive. failed says why the sandbox
// did not fall asleep for it.
func (t *Table) archiveEnded(a *archive, sb *Sandbox, failed string) {
	switch {
	case a == nil || a.token == 0:
	case a.written:
		t.answerArchive(a, step.CallOK, sb, "")
	case a.err != nil:
		t.answerNotArchived([]uint64{a.token}, sb, a.err)
	default:
		t.answerArchive(a, step.CallRefused, sb, cmp.Or(failed, "it woke meanwhile"))
	}
}

// answerNotArchived answers calls for which the files of a sandbox were to be archived.
func (t *Table) answerNotArchived(tokens []uint64, sb *Sandbox, err error) {
	for _, token := range tokens {
		t.Emit(step.SandboxCallAnswered{Token: token, Status: step.CallRefused, Sandbox: sb.Sandbox, Why: err.Error(), Err: err})
	}
}

// answerArchive answers the caller of Archive, if there is one.
func (t *Table) answerArchive(a *archive, status step.CallStatus, sb *Sandbox, why string) {
	if a != nil && a.token != 0 {
		t.answer([]uint64{a.token}, status, sb, why)
	}
}

// Open gives up the sleep of a sandbox that closes. Routers get its route again.
func (t *Table) Open(sb *Sandbox, why string) {
	s := t.awake(sb)
	sb.notBefore = t.Now.Boot + tryAgain
	t.markRunning(sb, t.Now.Boot, activity.Unknown)
	t.schedule(sb)
	t.answer(s.sleepers, step.CallNotReady, sb, why)
	t.answer(s.stoppers, step.CallNotReady, sb, why)
	t.answerArchive(s.archive, step.CallNotReady, sb, why)
	t.answerWakers(s.wakers, sb)
	t.Notify(Routed{sb})
}

// FallAsleep begins to freeze a sandbox that is closed: no router has its route, and nothing that was admitted can
// connect to its pod any more.
func (t *Table) FallAsleep(sb *Sandbox) {
	t.enter(sb, fact.FallingAsleep, func(f *fact.SandboxFact) { f.Wakeable = sb.MayWake() }, func() {
		t.Emit(step.Freeze{Sandbox: sb.Sandbox})
	})
}

// enter commits a phase of the sleep of a sandbox. then runs when that is durable, unless the sandbox ends.
func (t *Table) enter(sb *Sandbox, phase fact.Phase, set func(*fact.SandboxFact), then func()) {
	f := &fact.SandboxFact{Sandbox: sb.next()}
	f.Phase, sb.sleep.pending = phase, phase
	set(f)
	t.outbox.Commit(t.Now.Boot, f, true, func(fact.Revision, time.Duration) {
		sb.sleep.pending = 0
		sb.Revision = f.Revision
		if sb.Lives() {
			sb.Phase, sb.Wakeable, sb.AsleepAt, sb.EndAt, sb.nextEnd = phase, f.Wakeable, f.AsleepAt, f.EndAt, f.EndAt
		}
		t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
		if sb.Lives() {
			then()
		}
	})
}

// Frozen acts on the answer of an agent to the order of that revision.
func (t *Table) Frozen(id string, revision fact.Revision, ok bool, why string) {
	sb := t.byID[id]
	if sb == nil || sb.sleep == nil || sb.Revision != revision || sb.sleep.pending != 0 {
		return
	}
	switch {
	case sb.Phase == fact.FallingAsleep && ok && sb.Archived():
		t.Emit(step.WriteArchive{Token: sb.sleep.archive.token, Sandbox: sb.Sandbox, Values: sb.sleep.archive.values})
	case sb.Phase == fact.FallingAsleep && ok && sb.sleep.wake && len(sb.sleep.sleepers) == 0 && len(sb.sleep.stoppers) == 0:
		t.wakeUp(sb)
	case sb.Phase == fact.FallingAsleep && ok:
		t.sleeps(sb)
	case sb.Phase == fact.FallingAsleep:
		t.fail(sb, why)
	case sb.Phase == fact.Asleep && !ok: // its agent had continued the processes, and cannot stop them again
		if !t.endsWithPod(sb) {
			t.setEnd(sb, t.EndAfter(sb))
			t.wakeUp(sb)
		}
	}
}

// sleeps commits that a sandbox is asleep. Its end does not come while it sleeps.
func (t *Table) sleeps(sb *Sandbox) {
	t.enter(sb, fact.Asleep, func(f *fact.SandboxFact) { f.AsleepAt, f.EndAt = t.Now.Wall, time.Time{} }, func() {
		sb.failures, sb.endAt, sb.nextEndAt = 0, 0, 0
		t.setStop(sb)
		t.Emit(step.Freeze{Sandbox: sb.Sandbox, Keep: true})
		t.Emit(step.SandboxAsleep{Sandbox: sb.Sandbox})
		t.Notify(Turned{sb})
		t.answer(sb.sleep.sleepers, step.CallOK, sb, "")
		sb.sleep.sleepers = nil
		t.goesOn(sb)
	})
}

// goesOn does what a sandbox that is asleep or stopped is to do next.
func (t *Table) goesOn(sb *Sandbox) {
	switch s := sb.sleep; {
	case s.pending != 0 || !sb.Lives():
	case sb.Phase == fact.Asleep && s.wake && len(s.stoppers) == 0 && !t.leaves(sb):
		t.wakeUp(sb)
	case s.archive != nil:
	case sb.Phase == fact.Asleep && s.stop != "":
		t.archiveForStop(sb)
	case sb.Phase == fact.Asleep:
		t.schedule(sb)
	case sb.Phase == fact.Stopped && s.wake && !s.rising:
		s.rising = true
		t.Notify(Rising{sb})
	}
}

// fail wakes a sandbox that could not fall asleep. One that has failed too often, and whose time is over, is released.
func (t *Table) fail(sb *Sandbox, why string) {
	sb.failures++
	sb.sleep.failed = cmp.Or(why, "its processes could not be stopped")
	reason := map[Why]string{AtEnd: fact.ReasonEndTime, WhenIdle: fact.ReasonIdleTimeout}[sb.sleep.why]
	if reason != "" && sb.failures >= freezeTries {
		t.End(sb, Serving, fact.Cause{Reason: reason, Message: "it could not fall asleep: " + sb.sleep.failed})
		return
	}
	sb.notBefore = t.Now.Boot + tryAgain
	sb.sleep.end, sb.sleep.endAt = sb.EndAt, sb.endAt
	t.wakeUp(sb)
}

// setEnd sets the end that a sandbox gets when it wakes; zero: none.
func (t *Table) setEnd(sb *Sandbox, end time.Time) {
	if sb.sleep.end, sb.sleep.endAt = end, 0; !end.IsZero() {
		sb.sleep.endAt = max(1, t.Now.BootOf(end))
	}
}

// wakeFor is Wake for a call, which is answered when the sandbox runs and lives for so long at least.
func (t *Table) wakeFor(sb *Sandbox, token uint64, lifetime time.Duration) {
	sb.sleep.wakers = append(sb.sleep.wakers, waker{token, t.Now.Boot + lifetime})
	t.Wake(sb, t.Now.Wall.Add(lifetime))
}

// Wake has a sandbox that sleeps run again, with this end, zero for none. If it is to wake already the end stays. A
// sandbox that closes because it is idle opens again.
func (t *Table) Wake(sb *Sandbox, end time.Time) {
	s := sb.sleep
	if why, closing := sb.Closing(); closing && why == WhenIdle {
		t.Open(sb, "")
		return
	}
	if !s.wake {
		s.toWake(t.Now.Boot)
		t.setEnd(sb, end)
	}
	if sb.Phase == fact.Asleep || sb.Phase == fact.Stopped {
		t.goesOn(sb)
	}
}

// WakeForRequest is Wake for a request, unless there is no place for it. To open a sandbox that closes takes none.
func (t *Table) WakeForRequest(sb *Sandbox) bool {
	if sb.Phase == fact.Stopped && t.Now.Boot < sb.notBefore {
		return false
	}
	why, closing := sb.Closing()
	opens := closing && why == WhenIdle
	if !opens && !t.places.take(sb.Team) {
		return false
	}
	sb.sleep.place = !opens
	t.Wake(sb, t.EndAfter(sb))
	return true
}

// wakeUp commits that a sandbox wakes. No fact about its sleep is on its way.
func (t *Table) wakeUp(sb *Sandbox) {
	sb.sleep.toWake(t.Now.Boot)
	t.enter(sb, fact.Waking, func(f *fact.SandboxFact) { f.EndAt = sb.sleep.end }, func() {
		sb.endAt, sb.nextEndAt = sb.sleep.endAt, sb.sleep.endAt
		t.Emit(step.Thaw{Sandbox: sb.Sandbox})
		t.Notify(Turned{sb})
	})
}

// Thawed acts on the answer of an agent to the order of that revision.
func (t *Table) Thawed(id string, revision fact.Revision, ok bool, why string) {
	sb := t.byID[id]
	if sb == nil || sb.sleep == nil || sb.Phase != fact.Waking || sb.Revision != revision || sb.sleep.pending != 0 {
		return
	}
	if !ok {
		t.End(sb, Lost, fact.Cause{Reason: fact.ReasonWakeFailed, Message: why})
		return
	}
	s := t.awake(sb)
	awake := step.SandboxAwake{Took: t.Now.Boot - s.since}
	if !sb.AsleepAt.IsZero() {
		awake.Slept = max(0, t.Now.Wall.Sub(sb.AsleepAt))
	}
	sb.Phase, sb.AsleepAt, sb.Wakeable = fact.Running, time.Time{}, false
	running := &fact.SandboxFact{Sandbox: sb.next()}
	sb.arriving = true
	t.outbox.Commit(t.Now.Boot, running, false, func(revision fact.Revision, _ time.Duration) {
		sb.arriving, sb.Revision = false, revision
		t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
	})
	t.markRunning(sb, t.Now.Boot, activity.Claim)
	t.Notify(Routed{sb})
	awake.Sandbox = sb.Sandbox
	if s.failed == "" && s.why != ForArchive {
		t.Emit(awake)
	}
	t.archiveEnded(s.archive, sb, s.failed)
	t.answerWakers(s.wakers, sb)
	t.answer(s.sleepers, step.CallRefused, sb, s.failed)
	t.answer(s.stoppers, step.CallRefused, sb, cmp.Or(s.failed, "it woke meanwhile"))
}

// toWake notes that a sandbox is to wake.
func (s *sleep) toWake(now time.Duration) {
	if !s.wake {
		s.wake, s.since = true, now
	}
}

// awake notes that a sandbox does not sleep any more.
func (t *Table) awake(sb *Sandbox) *sleep {
	s := sb.sleep
	sb.sleep = nil
	if s.place {
		t.places.giveBack(sb.Team)
	}
	return s
}

// Places is how many sandboxes requests have wake. It is for tests.
func (t *Table) Places() int { return t.places.taken }

// answer answers calls about a sandbox.
func (t *Table) answer(tokens []uint64, status step.CallStatus, sb *Sandbox, why string) {
	for _, token := range tokens {
		t.Emit(step.SandboxCallAnswered{Token: token, Status: status, Sandbox: sb.Sandbox, Why: why})
	}
}

// answerWakers answers the callers that have waited for a sandbox, which runs. One to whom its end is too early is answered
// when it has another end.
func (t *Table) answerWakers(wakers []waker, sb *Sandbox) {
	for _, w := range wakers {
		if left := w.until - t.Now.Boot; sb.endAt != 0 && sb.endAt < w.until && left > 0 {
			t.SetTimeout(w.token, step.Scope{All: true}, sb.ID, left, true, false)
			continue
		}
		t.Emit(step.SandboxCallAnswered{Token: w.token, Status: step.CallOK, Sandbox: sb.Sandbox, Woken: true})
	}
}

// EndAfter is the end of a sandbox that a request wakes now.
func (t *Table) EndAfter(sb *Sandbox) (end time.Time) {
	if sb.Lifetime > 0 {
		end = t.Now.Wall.Add(sb.Lifetime)
	}
	return end
}

// recoverSleep goes on with a sandbox that an earlier leader has left in one of the phases of sleep. One that may be
// frozen for an unknown time wakes, in this term, so that an order of the earlier leader comes too late.
func (t *Table) recoverSleep(sb *Sandbox) {
	switch sb.Phase {
	case fact.Asleep:
		t.Emit(step.Freeze{Sandbox: sb.Sandbox, Keep: true})
		return
	case fact.Stopped:
		return
	}
	sb.sleep.end, sb.sleep.endAt = sb.EndAt, sb.endAt
	t.wakeUp(sb)
}

// Postpone has a sandbox that has come to its end try to sleep later.
func (t *Table) Postpone(sb *Sandbox) {
	sb.notBefore = t.Now.Boot + tryAgain
	t.schedule(sb)
}
