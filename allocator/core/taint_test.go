package core

import (
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// another is a pod that the pool has asked for, and that has the address of a-1.
func another() Pod {
	return with(warmPod("a-4"), func(p *Pod) { p.IP = warmPod("a-1").IP })
}

// Requests of the earlier sandbox may reach a pod that gets the address meanwhile. Such a pod is
// never handed out.
// Invariant: I3
func TestAddressIsReusedOnlyAfterItsFence(t *testing.T) {
	for name, c := range map[string]struct {
		goes   func(s *sim, sb Sandbox)
		fenced time.Duration // after which its fence is complete, with the router's acknowledgement at once
	}{
		"deleted by others": {func(s *sim, sb Sandbox) { s.step(PodGone{sb.Pod}) }, window},
		"moved away": {func(s *sim, _ Sandbox) {
			s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP = warmPod("a-7").IP })})
		}, window},
		"has failed": {func(s *sim, _ Sandbox) {
			s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })})
		}, window},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			sb := s.claim()
			c.goes(s, sb)
			s.step(PodSeen{another()})
			at := func(when string, token uint64) {
				t.Helper()
				s.step(Claim{Token: token, Pool: poolA})
				if len(of[Claimed](s.effects)) > 0 {
					t.Fatalf("handed out %s", when)
				}
				if s.core.pods.CountRetirements() > 0 {
					t.Fatalf("deleted %s: the next pod would get the address", when)
				}
			}
			s.pass(maxStale / 2)
			at("while a router may route to its address for another sandbox", 10)
			s.ack("r", 1, 3)
			s.pass(c.fenced - 100*time.Millisecond)
			at("within the window", 11)

			s.slow = true
			s.pass(100 * time.Millisecond)
			one[Write](s) // the intent
			if phase := s.core.sandboxes.Get(sb.ID).Phase; phase == Ended {
				t.Fatal("the next leader would not know that the pod is tainted")
			}
			s.slow = false
			s.written()
			s.writeAll()
			if all := of[DeletePod](s.effects); !slices.Contains(all, DeletePod{Pod: another().Key}) {
				t.Errorf("deleted %+v", all)
			}
			s.step(PodGone{another().Key})
			s.step(PodSeen{with(another(), func(p *Pod) { p.Key = key("a-5") })})
			s.step(Claim{Token: 12, Pool: poolA})
			one[Claimed](s)
		})
	}
}

// The pool does not wait for the fence, which may take as long as max-stale. The tainted pod keeps
// its address, even if that leaves no room for another pod.
func TestPodAtTaintedAddressIsReplacedAtOnce(t *testing.T) {
	for name, most := range map[string]int{"": 0, "no room": 1} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			pool := specA(1)
			pool.MaxPods = most
			s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			sb := s.claim()
			s.step(PodGone{sb.Pod})
			for name := range s.core.pools.Find(poolA).Creating() {
				s.step(PodSeen{with(another(), func(p *Pod) { p.Key.Name = name })})
			}
			if made := of[CreatePod](s.effects); (most == 0) != (len(made) == 1) {
				t.Fatalf("made %+v", made)
			}
			if s.core.pods.CountRetirements() > 0 {
				t.Fatalf("%d are discarded", s.core.pods.CountRetirements())
			}
		})
	}
}

// Invariant: I3
func TestNextLeaderKnowsTaintedAddresses(t *testing.T) {
	s := newSimAt(t, 2, start)
	gone := released("a-1", "x")
	s.recover([]Pool{specA(5)}, []Pod{another()}, gone, Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}})
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
	s.pass(lease + maxStale)
	s.step(Claim{Token: 2, Pool: poolA})
	one[ClaimRefused](s)
	s.pass(maxStale/100 + time.Second) // the router has expired
	s.pass(window)
	if d := one[DeletePod](s); d.Pod != another().Key {
		t.Errorf("deleted %+v", d)
	}
	s.step(PodGone{another().Key})
	s.step(PodSeen{with(another(), func(p *Pod) { p.Key = key("a-5") })})
	s.step(Claim{Token: 3, Pool: poolA})
	one[Claimed](s)
}

// One of them does not exist any more, and Core cannot see which one.
func TestTwoIdlePodsAtOneAddressAreReplaced(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1")})
	s.step(PodSeen{another()})
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
	if c := s.core.pools.Find(poolA).Counts(); c.Releasing != 2 || c.Pending != 2 {
		t.Errorf("counts %+v", c)
	}
}

func TestSandboxAtContestedAddressIsReleased(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(PodSeen{another()})
	if r := one[SandboxReleased](s); r.Sandbox.ID != sb.ID || r.Sandbox.Reason != fact.ReasonAddressShared || r.Late != 0 {
		t.Errorf("released %+v", r)
	}
	one[SendRelease](s)
}

func TestClaimAtContestedAddressGetsAnotherPod(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	if f := s.given(); f.Pod.Name != "a-1" {
		t.Fatalf("given %+v", f)
	}
	s.step(PodSeen{another()})
	s.written()
	s.slow = false
	s.writeAll()
	if c := one[Claimed](s); c.Sandbox.Pod.Name != "a-2" {
		t.Errorf("claimed %+v", c)
	}
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonAddressShared {
		t.Errorf("released %+v", r)
	}
}

// A tainted pod may get another address before its retirement is durable. The sandbox that tainted
// it must not end before that, because the next leader could not know that the pod is tainted.
func TestSandboxEndsOnlyAfterTaintedPodsRetire(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(PodGone{sb.Pod})
	s.step(PodSeen{another()}) // tainted
	s.ack("r", 1, 3)
	s.slow = true // the journal stands still
	s.step(PodSeen{with(another(), func(p *Pod) { p.IP = warmPod("a-7").IP })})
	s.pass(window)
	if s.core.sandboxes.Get(sb.ID).Phase == Ended {
		t.Fatal("ended before the retirement of the tainted pod is durable")
	}
	s.slow = false
	s.written()
	s.writeAll()
	if s.core.sandboxes.Get(sb.ID).Phase != Ended {
		t.Fatal("it does not end")
	}
}

// A pod may move to a tainted address, and back, while a claim on it is written.
func TestClaimIsNotAnsweredWithTaintedPod(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	x := s.claim() // on a-1
	s.step(PodGone{x.Pod})
	s.slow = true
	s.step(Claim{Token: 9, Pool: poolA, Wait: wait}) // a-2, handed to the writer
	s.step(PodSeen{with(warmPod("a-2"), func(p *Pod) { p.IP = x.IP })})
	s.step(PodSeen{warmPod("a-2")})
	s.written()
	none[Claimed](s)
}
