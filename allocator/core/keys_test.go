package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// Invariant: P3
func TestClaimsWithOneIdempotencyKeyAreOne(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.slow = true
	keyed := func(token uint64, team string, body byte) Claim {
		return Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{Team: team, IdempotencyKey: "k", RequestHash: [32]byte{body}}}
	}
	s.step(keyed(1, "t", 1))
	s.step(keyed(2, "t", 1)) // joins it
	s.step(keyed(3, "t", 2)) // another body
	if r := one[ClaimRefused](s); r.Token != 3 || r.Why != KeyReused {
		t.Errorf("refused %+v", r)
	}
	s.step(keyed(4, "other", 2)) // another team's key
	s.written()
	answers := of[Claimed](s.effects)
	if len(answers) != 2 || answers[0].Token != 1 || answers[1].Token != 2 || answers[0].Sandbox.ID != answers[1].Sandbox.ID {
		t.Fatalf("answers %+v", answers)
	}
	id := answers[0].Sandbox.ID
	s.slow = false
	s.written()
	if c := one[Claimed](s); c.Token != 4 || c.Sandbox.ID == id {
		t.Errorf("the other team got %+v", c)
	}

	s.step(keyed(5, "t", 1))
	if c := one[Claimed](s); c.Sandbox.ID != id {
		t.Errorf("a later retry got %+v", c)
	}
	s.step(keyed(6, "t", 2))
	one[ClaimRefused](s)
	s.release(id)
	s.pass(10*time.Minute - time.Second)
	s.step(keyed(7, "t", 1))
	if r := one[ClaimRefused](s); r.Why != KeyEnded || r.Sandbox.ID != id {
		t.Errorf("refused %+v", r)
	}
	s.pass(time.Second)
	s.step(keyed(8, "t", 2))
	if c := one[Claimed](s); c.Sandbox.ID == id {
		t.Errorf("answer %+v", c)
	}
}

func TestCallersOfOneKeyHaveTheirOwnDeadlines(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	keyed := Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{Team: "t", IdempotencyKey: "k"}}
	s.step(keyed)
	keyed.Token, keyed.Wait = 2, 3*wait
	s.step(keyed)
	keyed.Token, keyed.Wait = 3, wait/2
	s.step(keyed)
	s.pass(wait / 2)
	if r := one[ClaimRefused](s); r.Token != 3 || r.Why != PoolEmpty {
		t.Errorf("refused %+v", r)
	}
	s.pass(wait / 2)
	if r := one[ClaimRefused](s); r.Token != 1 || r.Why != PoolEmpty {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	if c := one[Claimed](s); c.Token != 2 {
		t.Errorf("answer %+v", c)
	}
}

// Invariant: P3
func TestIdempotencyKeyHoldsUnderTheNextLeader(t *testing.T) {
	for _, object := range []bool{false, true} {
		s := newSimAt(t, 2, start)
		running, ended := on("a-1", "x"), released("a-2", "y")
		sandboxOf(running).Team, sandboxOf(running).IdempotencyKey, sandboxOf(running).RequestHash = "t", "k1", [32]byte{1}
		sandboxOf(ended).Team, sandboxOf(ended).IdempotencyKey = "t", "k2"
		st := State{Pools: []Pool{specA(1)}, Nodes: []string{"n1"}, Pods: []Pod{warmPod("a-1"), warmPod("a-3")}}
		if object {
			st.Objects = []Sandbox{*sandboxOf(running), *sandboxOf(ended)}
		} else {
			st.Facts = []Fact{running, ended}
		}
		s.recoverState(st)
		s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k1", RequestHash: [32]byte{1}}})
		if c := one[Claimed](s); c.Sandbox.ID != "x" {
			t.Errorf("answer %+v", c)
		}
		s.step(Claim{Token: 2, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k1", RequestHash: [32]byte{2}}})
		if r := one[ClaimRefused](s); r.Why != KeyReused {
			t.Errorf("refused %+v", r)
		}
		s.step(Claim{Token: 3, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k2"}})
		if r := one[ClaimRefused](s); r.Why != KeyEnded || r.Sandbox.ID != "y" {
			t.Errorf("refused %+v", r)
		}
		s.pass(9 * time.Minute) // it was released a minute before this term
		s.step(Claim{Token: 4, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k2"}})
		one[Claimed](s)
	}
}

func TestKeyEndsOnlyWhenReleaseIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	b := Binding{Team: "t", IdempotencyKey: "k"}
	s.step(Claim{Token: 1, Pool: poolA, Binding: b, Wait: wait})
	id := one[Claimed](s).Sandbox.ID
	s.slow = true
	s.step(Release{Scope: everyTeam, ID: id, Reason: fact.ReasonKilled})
	s.step(Claim{Token: 2, Pool: poolA, Binding: b, Wait: wait})
	none[ClaimRefused](s)
	s.pass(2 * wait)
	none[Claimed](s)
	none[ClaimRefused](s)
	s.written()
	if r := one[ClaimRefused](s); r.Token != 2 || r.Why != KeyEnded || r.Sandbox.Reason != fact.ReasonKilled {
		t.Errorf("refused %+v", r)
	}
}

// A claim that moves on to another pod takes its key with it: the object of the
// sandbox that it leaves behind, which is written once and then changed in its
// status only, must not have it.
func TestObjectOfLostPodHasNoKey(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k"}, Wait: wait})
	s.step(PodGone{key("a-1")})
	s.written()
	none[WriteObject](s)
	s.written() // its release
	if r := one[WriteObject](s); r.Sandbox.Phase != Released || r.Sandbox.IdempotencyKey != "" {
		t.Errorf("recorded %+v", r)
	}
}

// A replica gives claims without a key an internal one.
// Invariant: P24
func TestInternalKeyHoldsUntilTheSandboxIsReleased(t *testing.T) {
	b := Binding{Team: "t", IdempotencyKey: fact.InternalKeys + "1"}
	s := newSimAt(t, 2, start)
	running, ended := on("a-1", "x"), released("a-2", "y")
	sandboxOf(running).Team, sandboxOf(running).IdempotencyKey = "t", b.IdempotencyKey
	sandboxOf(ended).Team, sandboxOf(ended).IdempotencyKey = "t", fact.InternalKeys+"2"
	s.recoverState(State{
		Pools: []Pool{specA(3)}, Nodes: []string{"n1"}, Facts: []Fact{running, ended},
		Pods: []Pod{warmPod("a-1"), warmPod("a-3"), warmPod("a-4")},
	})
	s.step(Claim{Token: 1, Pool: poolA, Binding: b})
	if c := one[Claimed](s); c.Sandbox.ID != "x" {
		t.Errorf("answer %+v", c)
	}
	s.step(Claim{Token: 2, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: fact.InternalKeys + "2"}})
	if c := one[Claimed](s); c.Sandbox.ID == "y" {
		t.Errorf("answer %+v", c)
	}
	s.release("x")
	s.step(Claim{Token: 3, Pool: poolA, Binding: b})
	if c := one[Claimed](s); c.Sandbox.ID == "x" {
		t.Errorf("answer %+v", c)
	}
}

// Invariant: P24
func TestAbandonedClaimWithInternalKeyIsReleased(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{Team: "t", IdempotencyKey: fact.InternalKeys + "1"}})
	s.step(ClaimAbandoned{Token: 1})
	s.slow = false
	s.written()
	s.written()
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonCanceled {
		t.Errorf("released %+v", r)
	}
}
