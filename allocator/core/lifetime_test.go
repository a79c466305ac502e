package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// The ends of a life.

func TestEarliestEndReleasesTheSandbox(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(*Pool)
		lifetime time.Duration
		want     string
		after    time.Duration
	}{
		"end time":         {func(p *Pool) { p.MaxLifetime, p.IdleTimeout = time.Hour, time.Hour }, time.Minute, fact.ReasonEndTime, time.Minute},
		"maximal lifetime": {func(p *Pool) { p.MaxLifetime, p.IdleTimeout = 30*time.Second, time.Hour }, time.Minute, fact.ReasonMaxLifetime, 30 * time.Second},
		"idle":             {func(p *Pool) { p.MaxLifetime = time.Hour }, time.Hour, fact.ReasonIdleTimeout, idleFor},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{changed(idlePool(1), c.change)}, []Pod{warmPod("a-1")})
			s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: c.lifetime})
			sb := one[Claimed](s).Sandbox
			list := s.activities(only(sb.ID), 1)
			if len(list) != 1 || list[0].Next != c.want || list[0].In != c.after {
				t.Errorf("shown as %+v", list)
			}
			s.pass(c.after - time.Millisecond)
			none[SandboxReleased](s)
			s.slow = true
			s.pass(time.Millisecond)
			none[SandboxReleased](s)
			s.pass(3 * time.Second)
			s.written()
			if r := one[SandboxReleased](s); r.Sandbox.Reason != c.want || r.Late != 3*time.Second {
				t.Errorf("released for %s, %v late", r.Sandbox.Reason, r.Late)
			}
		})
	}
}

func TestSandboxThatDoesNotStartIsReleased(t *testing.T) {
	s := newSim(t)
	pool := changed(specA(1), func(p *Pool) { p.PostStart, p.StartupTimeout = true, 20*time.Second })
	s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Minute})
	s.pass(20*time.Second - time.Millisecond)
	none[SandboxReleased](s)
	s.pass(time.Millisecond)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonStartupTimeout {
		t.Errorf("released for %s", r.Sandbox.Reason)
	}
	if refused := one[ClaimRefused](s); refused.Why != StartFailed {
		t.Errorf("%+v", refused)
	}
}

func TestStartupTimeoutEndsWhenTheSandboxRuns(t *testing.T) {
	s := newSim(t)
	pool := changed(specA(1), func(p *Pool) { p.PostStart, p.StartupTimeout = true, 20*time.Second })
	s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Minute})
	s.slow = true
	s.step(Started{ID: one[StartSandbox](s).Sandbox.ID, OK: true})
	s.pass(30 * time.Second) // it takes long until that is durable
	none[SandboxReleased](s)
	s.written()
	one[Claimed](s)
	s.pass(time.Minute)
	none[SandboxReleased](s)
}

func TestStepOfTheWallClockMovesNoExtendedEnd(t *testing.T) {
	for _, clock := range []time.Duration{-time.Hour, 50 * time.Second} {
		s := newSim(t)
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
		s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
		sb := one[Claimed](s).Sandbox
		s.now.Wall = s.now.Wall.Add(clock)
		s.step(SetTimeout{Scope: everyTeam, Token: 8, ID: sb.ID, Lifetime: 30 * time.Second, Extend: true}) // its end is later
		s.pass(time.Minute - time.Second)
		none[SandboxReleased](s)
		s.step(SetTimeout{Scope: everyTeam, Token: 9, ID: sb.ID, Lifetime: 2 * time.Minute, Extend: true})
		s.pass(2*time.Minute - time.Second)
		none[SandboxReleased](s)
		s.pass(time.Second)
		one[SandboxReleased](s)
	}
}

func TestStepOfTheWallClockMovesNoEndOfAClaim(t *testing.T) {
	for _, clock := range []time.Duration{-time.Hour, 50 * time.Second} {
		s := newSim(t)
		s.slow = true
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
		s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
		s.now.Wall = s.now.Wall.Add(clock) // while the claim is being written
		s.written()
		s.slow = false
		s.pass(time.Minute - time.Second)
		none[SandboxReleased](s)
		s.pass(time.Second)
		one[SandboxReleased](s)
	}
}

func TestSetTimeoutMovesTheEndOnceDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
	sb := one[Claimed](s).Sandbox
	s.pass(50 * time.Second)
	s.slow = true
	s.step(SetTimeout{Scope: everyTeam, Token: 9, ID: sb.ID, Lifetime: 2 * time.Minute})
	none[SandboxCallAnswered](s)
	if f := s.given(); !f.EndAt.Equal(s.now.Wall.Add(2*time.Minute)) || f.Phase != Running {
		t.Errorf("written: %+v", f)
	}
	s.pass(20 * time.Second) // the old end passes while the new one is on its way
	none[Write](s)
	s.written()
	if k := one[SandboxCallAnswered](s); k.Token != 9 || k.Status != CallOK || !k.Sandbox.EndAt.Equal(s.now.Wall.Add(100*time.Second)) {
		t.Errorf("answered: %+v", k)
	}
	if r := one[WriteObject](s); !r.Sandbox.EndAt.Equal(s.now.Wall.Add(100 * time.Second)) {
		t.Errorf("on record: %+v", r)
	}
	s.slow = false
	s.step(SetTimeout{Scope: everyTeam, Token: 10, ID: sb.ID, Lifetime: 10 * time.Second}) // it may be earlier as well
	s.pass(10*time.Second - time.Millisecond)
	none[SandboxReleased](s)
	s.pass(time.Millisecond)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonEndTime {
		t.Errorf("released for %s", r.Sandbox.Reason)
	}
	s.step(SetTimeout{Scope: everyTeam, Token: 11, ID: sb.ID, Lifetime: time.Minute})
	if k := one[SandboxCallAnswered](s); k.Status != CallGone {
		t.Errorf("answered: %+v", k)
	}
	s.step(SetTimeout{Scope: everyTeam, Token: 12, ID: "none", Lifetime: time.Minute})
	if k := one[SandboxCallAnswered](s); k.Status != CallUnknown {
		t.Errorf("answered: %+v", k)
	}
}

func TestExtendNeverBringsTheEndForward(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
	sb := one[Claimed](s).Sandbox
	s.step(SetTimeout{Scope: everyTeam, Token: 2, ID: sb.ID, Lifetime: 30 * time.Second, Extend: true})
	if k := one[SandboxCallAnswered](s); k.Status != CallOK || !k.Sandbox.EndAt.Equal(sb.EndAt) {
		t.Errorf("answered: %+v", k)
	}
	none[Write](s)
	s.slow = true
	s.step(SetTimeout{Scope: everyTeam, Token: 3, ID: sb.ID, Lifetime: 3 * time.Minute, Extend: true})
	s.step(SetTimeout{Scope: everyTeam, Token: 4, ID: sb.ID, Lifetime: 2 * time.Minute, Extend: true}) // answered once the later end is durable
	none[SandboxCallAnswered](s)
	s.written()
	if k := one[SandboxCallAnswered](s); k.Token != 3 || !k.Sandbox.EndAt.Equal(s.now.Wall.Add(3*time.Minute)) {
		t.Errorf("answered: %+v", k)
	}
	s.written()
	if k := one[SandboxCallAnswered](s); k.Token != 4 || !k.Sandbox.EndAt.Equal(s.now.Wall.Add(3*time.Minute)) {
		t.Errorf("answered: %+v", k)
	}
}

func TestExtendGivesNoEndToASandboxWithoutOne(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	sb := one[Claimed](s).Sandbox
	s.step(SetTimeout{Scope: everyTeam, Token: 2, ID: sb.ID, Lifetime: time.Minute, Extend: true})
	if k := one[SandboxCallAnswered](s); k.Status != CallOK || !k.Sandbox.EndAt.IsZero() {
		t.Errorf("answered: %+v", k)
	}
}

// A fact is a whole state. It must have the changes of the facts that are pending before it.
func TestLaterFactsKeepThePendingEnd(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
	id := one[StartSandbox](s).Sandbox.ID
	s.slow = true
	s.step(SetTimeout{Scope: everyTeam, Token: 9, ID: id, Lifetime: time.Hour})
	s.step(Started{ID: id, OK: true})
	end := s.now.Wall.Add(time.Hour)
	s.written()
	if f := s.given(); f.Phase != Running || !f.EndAt.Equal(end) {
		t.Errorf("written: %+v", f)
	}
	s.step(SetTimeout{Scope: everyTeam, Token: 10, ID: id, Lifetime: 2 * time.Hour})
	s.written()
	if f := s.given(); f.Phase != Running || !f.EndAt.Equal(end.Add(time.Hour)) {
		t.Errorf("written: %+v", f)
	}
	s.written()
	if got, _ := s.core.View().Sandbox(id); got.Phase != Running || !got.EndAt.Equal(end.Add(time.Hour)) {
		t.Errorf("%+v", got)
	}
}

func TestKeepAliveCountsAsActivity(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor - time.Second)
	s.step(KeepAlive{Scope: everyTeam, Token: 3, ID: sb.ID})
	if k := one[SandboxCallAnswered](s); k.Token != 3 || k.Status != CallOK || k.Sandbox.ID != sb.ID {
		t.Errorf("answered: %+v", k)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
	// Also in the moment in which routers are asked.
	s.step(KeepAlive{Scope: everyTeam, Token: 4, ID: sb.ID})
	s.says(SendQuiesce{Number: 1}, 1)
	s.resumed(1)
}
