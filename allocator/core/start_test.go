package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

func startingSim(t *testing.T) (*sim, Sandbox) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(2), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	none[Claimed](s)
	none[SandboxReady](s)
	none[SendRoute](s)
	return s, one[StartSandbox](s).Sandbox
}

func TestSandboxIsStartingUntilItsHookAnswers(t *testing.T) {
	s, sb := startingSim(t)
	if r := one[WriteObject](s); r.Sandbox.Phase != Starting {
		t.Errorf("recorded %+v", r)
	}
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if r := one[SendResolved](s); !r.Starting || r.Gone || r.Sandbox != nil {
		t.Errorf("resolved %+v", r)
	}
	s.slow = true
	s.step(Started{ID: sb.ID, OK: true})
	none[Claimed](s)
	s.step(Started{ID: sb.ID, OK: true})
	s.slow = false
	s.written()
	if c := one[Claimed](s); c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Running {
		t.Errorf("answer %+v", c)
	}
	one[SandboxReady](s)
	one[SendRoute](s)
	if r := one[WriteObject](s); r.Sandbox.Phase != Running || !sb.Revision.Less(r.Sandbox.Revision) {
		t.Errorf("recorded %+v", r)
	}
}

func TestLateCallerIsAnsweredWithStartingSandbox(t *testing.T) {
	s, sb := startingSim(t)
	s.step(Claim{Token: 2, Pool: poolA, Wait: 20 * time.Second, Binding: Binding{IdempotencyKey: "k"}})
	s.pass(wait)
	if c := one[Claimed](s); c.Token != 1 || c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Starting {
		t.Errorf("answer %+v", c)
	}
	s.step(Started{ID: sb.ID, OK: true})
	if c := one[Claimed](s); c.Token != 2 || c.Sandbox.Phase != Running {
		t.Errorf("answer %+v", c)
	}
	one[SandboxReady](s)
}

func TestSandboxWhoseHookFailsIsReleased(t *testing.T) {
	s, sb := startingSim(t)
	s.step(Started{ID: sb.ID, Why: "it answered 500"})
	want := Cause{Reason: fact.ReasonStartFailed, Message: "it answered 500"}
	if r := one[ClaimRefused](s); r.Token != 1 || r.Why != StartFailed || r.Sandbox.ID != sb.ID || r.Sandbox.Cause != want {
		t.Errorf("refused %+v", r)
	}
	if r := one[SandboxReleased](s); r.Sandbox.Cause != want {
		t.Errorf("released %+v", r)
	}
	none[SandboxReady](s)
}

func TestReleaseDuringWriteOfStartStands(t *testing.T) {
	s, sb := startingSim(t)
	s.slow = true
	s.step(Started{ID: sb.ID, OK: true})
	s.step(Release{Scope: everyTeam, Token: 9, ID: sb.ID, Reason: fact.ReasonKilled})
	s.written()
	none[SandboxReady](s)
	none[SendRoute](s)
	s.written()
	if r := one[SandboxReleased](s); r.Sandbox.Phase != Released {
		t.Errorf("released %+v", r)
	}
	if got, _ := s.core.View().Sandbox(sb.ID); got.Phase != Released {
		t.Errorf("it is %+v", got)
	}
}

func TestCallersOfStartingSandboxMayLeave(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(2), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	s.step(ClaimAbandoned{Token: 1})
	none[SandboxReleased](s) // the retry must find it
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	s.step(ClaimAbandoned{Token: 2})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonCanceled {
		t.Errorf("released %+v", r)
	}
}

func TestNextLeaderRepeatsTheHookOfStartingSandbox(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := on("a-1", "x")
	sandboxOf(f).Phase = Starting
	s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, f)
	if e := one[StartSandbox](s); e.Sandbox.ID != "x" {
		t.Errorf("starts %+v", e)
	}
	s.step(Started{ID: "x", OK: true})
	one[SandboxReady](s)
}
