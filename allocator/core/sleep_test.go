package core

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// sleepSim has a sandbox with an agent, which runs, and routers that have reported.
func sleepSim(t *testing.T, policy fact.SleepPolicy, routers ...string) (*sim, Sandbox) {
	t.Helper()
	s := newSim(t)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Sleep = 49983, policy })
	s.recover([]Pool{pool}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })})
	for i, r := range routers {
		s.joinAndReport(r, uint64(i+1))
	}
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Minute})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	return s, one[Claimed](s).Sandbox
}

// acked has a router acknowledge everything that it was sent.
func (s *sim) acked(session string, stream uint64) {
	s.t.Helper()
	s.step(SessionAck{Session: session, Stream: stream, Sequence: s.core.routers.members.Get(session).Sequence})
}

func (s *sim) view(id string) Sandbox {
	s.t.Helper()
	sb, ok := s.core.View().Sandbox(id)
	if !ok {
		s.t.Fatalf("%s is not known", id)
	}
	return sb
}

// asleep has a call put a sandbox to sleep.
func (s *sim) asleep(id string) {
	s.t.Helper()
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: id})
	s.pass(window)
	freeze := one[Freeze](s)
	s.step(Frozen{ID: id, Revision: freeze.Sandbox.Revision, OK: true})
	if a := one[SandboxCallAnswered](s); a.Token != 7 || a.Status != CallOK {
		s.t.Fatalf("answered %+v", a)
	}
}

// Invariant: P27
func TestSandboxIsFrozenWhenNoRouterHasItsRoute(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q", "r")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	if closes := of[SendClose](s.effects); len(closes) != 2 || closes[0].ID != sb.ID {
		t.Fatalf("sent %+v", closes)
	}
	s.joinAndReport("late", 3) // it gets no route
	if snapshot := s.core.View().Running(); len(snapshot) != 0 {
		t.Errorf("routable: %+v", snapshot)
	}
	s.acked("q", 1)
	s.pass(window)
	none[Freeze](s)
	s.acked("r", 2)
	none[Freeze](s)
	s.pass(window - 1)
	none[Freeze](s)
	s.pass(1)
	freeze := one[Freeze](s)
	none[SandboxCallAnswered](s)
	if freeze.Keep || freeze.Sandbox.Phase != FallingAsleep || s.view(sb.ID).Phase != FallingAsleep {
		t.Fatalf("%+v", freeze)
	}
	s.step(Frozen{ID: sb.ID, Revision: freeze.Sandbox.Revision, OK: true})
	keep, a := one[Freeze](s), one[SandboxCallAnswered](s)
	if !keep.Keep || !freeze.Sandbox.Revision.Less(keep.Sandbox.Revision) || a.Status != CallOK || a.Token != 7 {
		t.Errorf("%+v, answered %+v", keep, a)
	}
	if got := s.view(sb.ID); got.Phase != Asleep || !got.EndAt.IsZero() || !got.AsleepAt.Equal(s.now.Wall) {
		t.Errorf("it is %+v", got)
	}
	s.pass(time.Hour)
	if got := s.view(sb.ID); got.Phase != Asleep {
		t.Errorf("an hour later it is %+v", got)
	}
}

// The pool says that a template keeps its sandboxes awake. They end then where others would sleep.
//
// Invariant: P28
func TestSandboxOfAnUnfitTemplateNeverSleeps(t *testing.T) {
	unfit := func(s *sim, template string) {
		s.step(PoolSeen{Pool: changed(idlePool(1), func(p *Pool) {
			p.Agent.Port, p.Template, p.CannotSleep = 49983, template, "spec.template.spec.containers[1]: two"
		})})
	}
	s, sb := sleepSim(t, fact.SleepPolicy{})
	unfit(s, "t1")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	if a := one[SandboxCallAnswered](s); a.Status != CallUnfit || a.Why != "spec.template.spec.containers[1]: two" {
		t.Errorf("%+v", a)
	}
	none[SendClose](s)
	unfit(s, "t2") // its pod is of another template
	s.asleep(sb.ID)

	s, sb = sleepSim(t, fact.SleepPolicy{WhenIdle: true}, "q")
	unfit(s, "t1")
	s.pass(idleFor)
	q := s.asks(1)
	s.says(q, 1)
	if r := one[SandboxReleased](s); r.Sandbox.ID != sb.ID || r.Sandbox.Reason != fact.ReasonIdleTimeout {
		t.Errorf("%+v", r)
	}

	s, sb = sleepSim(t, fact.SleepPolicy{AtEnd: true})
	unfit(s, "t1")
	s.pass(time.Minute)
	if r := one[SandboxReleased](s); r.Sandbox.ID != sb.ID || r.Sandbox.Reason != fact.ReasonEndTime {
		t.Errorf("%+v", r)
	}
}

func TestSleepIsRefusedWhileARouterIsAway(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q")
	s.step(SessionLeft{Session: "q", Stream: 1})
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	if a := one[SandboxCallAnswered](s); a.Status != CallNotReady || a.Why == "" {
		t.Errorf("%+v", a)
	}
	none[SendClose](s)
}

// Invariant: P27
func TestClosingGoesOnWhenThePortsOfItsPoolChange(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.step(PoolSeen{changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Ports = 49983, []uint16{8081} })})
	none[SendRoute](s)
	s.acked("q", 1)
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	if a := one[SandboxCallAnswered](s); a.Token != 7 || a.Status != CallOK {
		t.Fatalf("answered %+v", a)
	}
	if got := s.view(sb.ID).Ports; len(got) != 1 || got[0] != 8081 {
		t.Errorf("its ports are %v", got)
	}
}

func TestClosingThatNeedsTooLongIsGivenUp(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q", "r")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.acked("q", 1)
	for range 30 {
		s.ping("q", 1)
		s.ping("r", 2)
		s.pass(time.Second)
	}
	if a := one[SandboxCallAnswered](s); a.Status != CallNotReady || a.Why == "" {
		t.Errorf("%+v", a)
	}
	if len(of[SendRoute](s.effects)) != 2 {
		t.Errorf("sent %+v", s.effects)
	}
	s.acked("q", 1)
	s.acked("r", 2)
	s.pass(window)
	none[Freeze](s)
}

func TestCallWakesASandboxWithANewEnd(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.step(SetTimeout{Token: 8, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour})
	if a := one[SandboxCallAnswered](s); a.Status != CallAsleep {
		t.Fatalf("%+v", a)
	}
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: sb.ID})
	if a := one[SandboxCallAnswered](s); a.Status != CallAsleep {
		t.Fatalf("%+v", a)
	}
	s.joinAndReport("q", 1)
	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Extend: true, Wake: true})
	thaw := one[Thaw](s)
	if thaw.Sandbox.Phase != Waking {
		t.Fatalf("%+v", thaw)
	}
	none[SendRoute](s)
	s.step(Thawed{ID: sb.ID, Revision: Revision{Term: 1, Counter: 1}, OK: true})
	none[SendRoute](s)
	s.step(Thawed{ID: sb.ID, Revision: thaw.Sandbox.Revision, OK: true})
	one[SendRoute](s)
	if a := one[SandboxCallAnswered](s); a.Token != 9 || a.Status != CallOK || !a.Sandbox.EndAt.Equal(s.now.Wall.Add(time.Hour)) {
		t.Errorf("%+v", a)
	}
	if got := s.view(sb.ID); got.Phase != Running || !got.AsleepAt.IsZero() {
		t.Errorf("it is %+v", got)
	}
	s.now.Boot += time.Hour
	s.now.Wall = s.now.Wall.Add(time.Hour)
	s.step(Tick{})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonEndTime {
		t.Errorf("%+v", r)
	}
}

func TestRequestWakesOnlyWhatItMay(t *testing.T) {
	for name, wakes := range map[string]bool{"not without the policy": false, "with it": true} {
		t.Run(name, func(t *testing.T) {
			s, sb := sleepSim(t, fact.SleepPolicy{WakeOnTraffic: wakes})
			s.asleep(sb.ID)
			s.joinAndReport("q", 1)
			s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID})
			if r := one[SendResolved](s); r.Sleeper == nil || r.Sleeper.Wakeable != wakes || r.Starting || r.Sandbox != nil {
				t.Fatalf("%+v", r)
			}
			none[Thaw](s)
			s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
			r := one[SendResolved](s)
			if !wakes {
				if r.Sleeper == nil || r.Busy {
					t.Fatalf("%+v", r)
				}
				none[Thaw](s)
				return
			}
			if r.Sleeper == nil || !r.Sleeper.Wakeable || r.Busy {
				t.Fatalf("%+v", r)
			}
			thaw := one[Thaw](s)
			s.step(Thawed{ID: sb.ID, Revision: thaw.Sandbox.Revision, OK: true})
			if route := one[SendRoute](s); route.Sandbox.ID != sb.ID {
				t.Errorf("%+v", route)
			}
			if got := s.view(sb.ID); !got.EndAt.Equal(s.now.Wall.Add(time.Minute)) {
				t.Errorf("its end is %v", got.EndAt)
			}
		})
	}
}

// Invariant: I4
func TestSilentSandboxSleepsAfterItsVerdict(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{WhenIdle: true}, "q")
	s.pass(idleFor)
	q := s.asks(1)
	s.says(q, 1)
	none[SandboxReleased](s)
	one[SendClose](s)
	one[SendResume](s)
	s.acked("q", 1)
	freeze := one[Freeze](s) // a verdict has looked already
	s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
	if r := one[SendResolved](s); r.Sleeper == nil || !r.Sleeper.Wakeable {
		t.Fatalf("%+v", r)
	}
	s.step(Frozen{ID: sb.ID, Revision: freeze.Sandbox.Revision, OK: true})
	thaw := one[Thaw](s) // at once
	s.step(Thawed{ID: sb.ID, Revision: thaw.Sandbox.Revision, OK: true})
	one[SendRoute](s)
}

func TestRequestEndsTheClosingOfAnIdleSandbox(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{WhenIdle: true}, "q", "r")
	s.pass(idleFor)
	q := s.asks(1, 2)
	s.says(q, 1)
	s.says(q, 2)
	s.acked("q", 1)
	s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
	if r := one[SendResolved](s); r.Sandbox == nil {
		t.Fatalf("%+v", r)
	}
	if len(of[SendRoute](s.effects)) != 2 {
		t.Errorf("sent %+v", s.effects)
	}
	s.acked("q", 1)
	s.acked("r", 2)
	s.pass(window)
	none[Freeze](s)
}

func TestSandboxThatCannotFreezeRunsOn(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.acked("q", 1)
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, Why: "process 5 of user 0"})
	s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	one[SendRoute](s)
	if a := one[SandboxCallAnswered](s); a.Status != CallRefused || a.Why != "process 5 of user 0" {
		t.Errorf("%+v", a)
	}
	if got := s.view(sb.ID); got.Phase != Running || !got.EndAt.Equal(sb.EndAt) {
		t.Errorf("it is %+v", got)
	}
}

// Invariant: P31
func TestRunningSandboxSleepsWhileItIsArchived(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{AtEnd: true}, "q")
	s.step(Archive{Token: 7, Scope: everyTeam, ID: sb.ID})
	one[SendClose](s)
	none[WriteArchive](s)
	s.acked("q", 1)
	none[WriteArchive](s)
	s.pass(window)
	freeze := one[Freeze](s)
	s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true}) // waits, and neither ends the archive nor moves the end
	if r := one[SendResolved](s); r.Sandbox != nil || r.Sleeper == nil || !r.Sleeper.Wakeable {
		t.Fatalf("%+v", r)
	}
	s.step(Frozen{ID: sb.ID, Revision: freeze.Sandbox.Revision, OK: true})
	none[Thaw](s)
	w := one[WriteArchive](s)
	for _, call := range []Event{Sleep{Token: 8, Scope: everyTeam, ID: sb.ID}, Archive{Token: 9, Scope: everyTeam, ID: sb.ID}} {
		s.step(call)
		if a := one[SandboxCallAnswered](s); a.Status != CallNotReady || a.Why == "" {
			t.Errorf("%T: %+v", call, a)
		}
	}
	s.step(KeepAlive{Token: 10, Scope: everyTeam, ID: sb.ID})
	if a := one[SandboxCallAnswered](s); a.Status != CallOK {
		t.Errorf("%+v", a)
	}
	s.step(ArchiveWritten{ID: sb.ID, Token: 6}) // of an earlier call
	none[Thaw](s)
	s.step(ArchiveWritten{ID: sb.ID, Token: w.Token})
	none[SandboxCallAnswered](s)
	s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	one[SendRoute](s)
	none[SandboxAwake](s) // it was never asleep for a person
	if a := one[SandboxCallAnswered](s); a.Token != 7 || a.Status != CallOK {
		t.Errorf("%+v", a)
	}
	if got := s.view(sb.ID); got.Phase != Running || !got.EndAt.Equal(sb.EndAt) {
		t.Errorf("it is %+v", got)
	}
}

func TestFailedArchiveLeavesTheSandboxAsItWas(t *testing.T) {
	for name, asleep := range map[string]bool{"running": false, "asleep": true} {
		t.Run(name, func(t *testing.T) {
			s, sb := sleepSim(t, fact.SleepPolicy{})
			if asleep {
				s.asleep(sb.ID)
				s.step(Archive{Token: 7, Scope: everyTeam, ID: sb.ID})
			} else {
				s.step(Archive{Token: 7, Scope: everyTeam, ID: sb.ID})
				s.pass(window)
				s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
			}
			w := one[WriteArchive](s)
			s.step(ArchiveWritten{ID: sb.ID, Token: w.Token, Err: errStoreFull})
			if !asleep {
				s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
			}
			if a := one[SandboxCallAnswered](s); a.Token != 7 || a.Status != CallRefused || a.Why != "the store is full" {
				t.Errorf("%+v", a)
			}
			if got := s.view(sb.ID); got.Phase != map[bool]Phase{false: Running, true: Asleep}[asleep] {
				t.Errorf("it is %+v", got)
			}
		})
	}
}

func TestReleaseAndWakeEndAnArchive(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.step(Archive{Token: 7, Scope: everyTeam, ID: sb.ID})
	w := one[WriteArchive](s)
	s.step(SetTimeout{Token: 8, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Extend: true, Wake: true})
	s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	answers := of[SandboxCallAnswered](s.effects)
	if len(answers) != 2 || answers[0].Token != 7 || answers[0].Status != CallRefused || answers[1].Status != CallOK {
		t.Fatalf("%+v", answers)
	}
	s.step(ArchiveWritten{ID: sb.ID, Token: w.Token, Err: errors.New("the stream was cut off")})
	none[SandboxCallAnswered](s)

	s.step(Archive{Token: 9, Scope: everyTeam, ID: sb.ID})
	s.step(Release{Scope: everyTeam, ID: sb.ID})
	if a := one[SandboxCallAnswered](s); a.Token != 9 || a.Status != CallGone {
		t.Errorf("%+v", a)
	}
}

// An archive can take long, and each of these callers has a fact written when the sandbox runs again.
func TestFewCallersWaitForOneSandboxToWake(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.unchecked = true
	s.step(Archive{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	w := one[WriteArchive](s)
	const most = 1000
	for i := range uint64(most) {
		s.step(SetTimeout{Token: 10 + i, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Extend: true, Wake: true})
		none[SandboxCallAnswered](s)
	}
	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Extend: true, Wake: true})
	if a := one[SandboxCallAnswered](s); a.Token != 9 || a.Status != CallNotReady {
		t.Errorf("%+v", a)
	}
	s.step(ArchiveWritten{ID: sb.ID, Token: w.Token})
	s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	if n := len(of[SandboxCallAnswered](s.effects)); n != most+1 {
		t.Errorf("%d calls were answered", n)
	}
}

// Invariant: P31
func TestArchiveThatEndsDuringAReleaseWakesNothing(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.step(Archive{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	w := one[WriteArchive](s)
	s.slow = true // the release is on its way into the journal
	s.step(Release{Scope: everyTeam, ID: sb.ID})
	s.step(ArchiveWritten{ID: sb.ID, Token: w.Token})
	s.written()
	none[Thaw](s)
	if a := one[SandboxCallAnswered](s); a.Token != 7 || a.Status != CallGone {
		t.Errorf("%+v", a)
	}
	if got := s.view(sb.ID); got.Phase != Released {
		t.Errorf("it is %+v", got)
	}
}

func TestEndOfASandboxBecomesItsSleep(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{AtEnd: true}, "q")
	for round := 1; ; round++ {
		for s.pass(time.Second); len(of[SendClose](s.effects)) == 0; s.pass(time.Second) {
			if all := of[SendQuiesce](s.effects); len(all) > 0 {
				s.says(all[0], 1, Activity{ID: sb.ID})
			}
			s.ping("q", 1)
			if s.now.Wall.After(sb.EndAt.Add(5 * time.Minute)) {
				t.Fatal("it does not sleep")
			}
		}
		if s.now.Wall.Before(sb.EndAt) {
			t.Fatal("it sleeps before its end")
		}
		none[SandboxReleased](s)
		s.acked("q", 1)
		s.pass(window)
		s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, Why: "no"})
		if round == 3 {
			if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonEndTime || r.Sandbox.Message == "" {
				t.Errorf("%+v", r)
			}
			return
		}
		s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	}
}

// Invariant: P27
func TestNextLeaderWakesWhatMayBeFrozen(t *testing.T) {
	for _, phase := range []Phase{FallingAsleep, Asleep, Waking} {
		s := newSimAt(t, 2, start)
		f := on("a-1", "x")
		sb := sandboxOf(f)
		sb.Agent.Port, sb.Phase = 49983, phase
		s.recover([]Pool{specA(0)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort, p.Used = 49983, true })}, f)
		s.joinAndReport("q", 1)
		if n := len(s.core.View().Running()); n != 0 {
			t.Errorf("phase %d: %d routes", phase, n)
		}
		if phase == Asleep {
			continue
		}
		got := s.view("x")
		if got.Phase != Waking || got.Revision.Term != 2 {
			t.Errorf("phase %d became %+v", phase, got)
		}
		s.step(Thawed{ID: "x", Revision: Revision{Term: 1, Counter: 5}, OK: true}) // to the earlier leader
		none[SendRoute](s)
		s.step(Thawed{ID: "x", Revision: got.Revision, OK: true})
		one[SendRoute](s)
	}
}

func TestSandboxThatDoesNotWakeIsReleased(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Wake: true})
	s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, Why: "it does not answer"})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonWakeFailed || r.Sandbox.Message != "it does not answer" {
		t.Errorf("%+v", r)
	}
	if a := one[SandboxCallAnswered](s); a.Status != CallGone {
		t.Errorf("%+v", a)
	}
}

func TestReleaseEndsEveryPhaseOfSleep(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.step(Release{Token: 8, Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled})
	if a := one[SandboxCallAnswered](s); a.Token != 7 || a.Status != CallGone {
		t.Errorf("%+v", a)
	}
	one[SandboxReleased](s)
	one[SendRelease](s)
	s.acked("q", 1)
	s.pass(window)
	none[Freeze](s)
}

// Invariant: P27
func TestNoTeamTakesAllPlacesToWake(t *testing.T) {
	s := newSim(t)
	s.unchecked = true
	var pods []Pod
	var facts []Fact
	teams := map[string]int{"a": 150, "b": 60, "": 3}
	ids := map[string][]string{}
	for _, team := range []string{"a", "b", ""} {
		for range teams[team] {
			i := len(facts)
			name, id := fmt.Sprintf("a-%d", i), fmt.Sprintf("id-%d", i)
			f := on(name, id)
			sb := sandboxOf(f)
			sb.Agent.Port, sb.Phase, sb.Wakeable, sb.Team, sb.IP = 49983, Asleep, true, team, address(i)
			facts, ids[team] = append(facts, f), append(ids[team], id)
			pods = append(pods, with(warmPod(name), func(p *Pod) { p.AgentPort, p.Used, p.IP = 49983, true, address(i) }))
		}
	}
	s.recover([]Pool{specA(0)}, pods, facts...)
	s.joinAndReport("q", 1)
	thaws := map[string]Thaw{}
	wake := func(team string, want int) {
		t.Helper()
		woken := 0
		for _, id := range ids[team] {
			s.step(Resolve{Session: "q", Stream: 1, ID: id, Wake: true})
			if all := of[Thaw](s.effects); len(all) > 0 {
				thaws[id] = all[0]
				woken++
			} else if s.view(id).Phase == Asleep && !one[SendResolved](s).Busy {
				t.Fatalf("team %q: %s is not woken, and not busy", team, id)
			}
		}
		if woken != want {
			t.Errorf("team %q: %d are woken, not %d", team, woken, want)
		}
	}
	wake("a", 100)
	wake("b", 50)
	wake("", 3)
	for _, id := range ids["a"][:80] {
		s.step(Thawed{ID: id, Revision: thaws[id].Sandbox.Revision, OK: true})
	}
	wake("a", 50)
	wake("b", 10)
	for _, id := range ids["a"][:80] { // their places do not stay with those that run or have ended
		s.release(id)
	}
	for id, thaw := range thaws {
		s.step(Thawed{ID: id, Revision: thaw.Sandbox.Revision, OK: true})
	}
	checkTables(t, s.core)
}

// A call takes no place, and neither does a request that keeps a sandbox from falling asleep.
func TestPlacesAreOfWakesByRequestsAlone(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{WakeOnTraffic: true})
	s.asleep(sb.ID)
	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Wake: true})
	if n := s.core.sandboxes.Places(); n != 0 {
		t.Errorf("a call has %d", n)
	}
	s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	s.asleep(sb.ID)
	s.joinAndReport("q", 1)
	for range 2 {
		s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
		if n := s.core.sandboxes.Places(); n != 1 {
			t.Errorf("requests for one sandbox have %d", n)
		}
	}
	s.release(sb.ID)
	if n := s.core.sandboxes.Places(); n != 0 {
		t.Errorf("a released sandbox has %d", n)
	}
}

// Requests that come again and again have a sandbox wake no more often than its own timeouts allow.
func TestWokenSandboxRunsForItsWholeTimeout(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{WhenIdle: true}, "q")
	sleeps := func() { // its verdict, and the freeze
		t.Helper()
		q := s.asks(1)
		s.says(q, 1)
		s.acked("q", 1)
		s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	}
	s.pass(idleFor)
	sleeps()
	for range 3 {
		s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
		s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
		s.pass(idleFor - 1)
		none[SendQuiesce](s)
		s.pass(1)
		sleeps()
	}

	s, sb = sleepSim(t, fact.SleepPolicy{AtEnd: true, WakeOnTraffic: true}, "q")
	for range 3 {
		woken := s.now.Wall
		for s.pass(time.Second); len(of[SendClose](s.effects)) == 0; s.pass(time.Second) { // it is in use meanwhile
			if all := of[SendQuiesce](s.effects); len(all) > 0 {
				s.says(all[0], 1, Activity{ID: sb.ID})
			}
			s.ping("q", 1)
			if s.now.Wall.After(woken.Add(2 * time.Minute)) {
				t.Fatal("it does not sleep")
			}
		}
		if ran := s.now.Wall.Sub(woken); ran < time.Minute {
			t.Errorf("it ran for %v", ran)
		}
		s.acked("q", 1)
		s.pass(window)
		s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
		s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
		s.step(Thawed{ID: sb.ID, Revision: one[Thaw](s).Sandbox.Revision, OK: true})
	}
}

// A close ends a question about the sandbox. Otherwise routers would hold its requests for ever.
// Invariant: P27
func TestSleepDuringARoundLeavesNothingQuiesced(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q", "r")
	s.pass(idleFor)
	s.asks(1, 2)
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	for i, e := range of[SendResume](s.effects) {
		if e.Stream != uint64(i+1) || len(e.IDs) != 1 || e.IDs[0] != sb.ID {
			t.Errorf("%+v", e)
		}
	}
	if n := len(of[SendResume](s.effects)); n != 2 {
		t.Errorf("%d routers were sent a resume", n)
	}
}

func TestCallThatJoinsAWakeGetsItsEnd(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{WakeOnTraffic: true})
	s.asleep(sb.ID)
	s.joinAndReport("q", 1)
	s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true}) // for a minute
	thaw := one[Thaw](s)
	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Extend: true, Wake: true})
	s.step(SetTimeout{Token: 10, Scope: everyTeam, ID: sb.ID, Lifetime: time.Second, Extend: true, Wake: true})
	s.step(Thawed{ID: sb.ID, Revision: thaw.Sandbox.Revision, OK: true})
	answers := map[uint64]time.Time{}
	for _, a := range of[SandboxCallAnswered](s.effects) {
		if a.Status != CallOK {
			t.Errorf("%+v", a)
		}
		answers[a.Token] = a.Sandbox.EndAt
	}
	if want := s.now.Wall.Add(time.Hour); len(answers) != 2 || !answers[9].Equal(want) || !s.view(sb.ID).EndAt.Equal(want) {
		t.Errorf("answered with %v, its end is %v", answers, s.view(sb.ID).EndAt)
	}
}
