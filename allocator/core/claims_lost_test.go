package core

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// Invariant: P3
func TestClaimWhosePodGoesKeepsItsPlace(t *testing.T) {
	for _, handed := range []bool{false, true} {
		for name, cause := range map[string]Event{
			"gone":     PodGone{key("a-1")},
			"deleted":  PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })},
			"finished": PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })},
			"moved":    PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") })},
		} {
			if !handed && name == "moved" {
				continue // it is given to the claim at its new address
			}
			t.Run(fmt.Sprintf("%s, handed to the writer: %v", name, handed), func(t *testing.T) {
				s := newSim(t)
				s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1")})
				s.slow = true
				if !handed { // the writer is busy with something else
					s.step(PodSeen{with(warmPod("a-7"), func(p *Pod) { p.Finished = true })})
					one[Write](s)
				}
				s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
				first := ""
				for _, f := range s.core.claims.Bound() {
					first = f.Subject().(*SandboxFact).ID
				}
				s.step(Claim{Token: 2, Pool: poolA, Wait: wait}) // waits behind
				s.step(cause)
				none[Claimed](s)
				s.written()
				none[Claimed](s)
				s.step(PodSeen{warmPod("a-2")})
				for range 3 {
					if len(of[Claimed](s.effects)) == 0 {
						s.written()
					}
				}
				c := one[Claimed](s)
				if c.Token != 1 || c.Sandbox.Pod != key("a-2") || c.Sandbox.ID == first {
					t.Errorf("answer %+v after %s", c, first)
				}
				sb, known := s.core.View().Sandbox(first)
				if known != handed || known && sb.Phase == Running {
					t.Errorf("the first one is %+v", sb)
				}
				s.slow = false
				s.written()
				s.step(Claim{Token: 3, Pool: poolA, Binding: Binding{IdempotencyKey: "k"}})
				if again := one[Claimed](s); again.Sandbox.ID != c.Sandbox.ID {
					t.Errorf("the key stands for %s", again.Sandbox.ID)
				}
			})
		}
	}
}

// Invariant: I7
func TestPodMarkedUsedLeavesItsClaim(t *testing.T) {
	for name, count := range map[string]int{"a batch collects pods": 3, "a claim awaits the writer": 2} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(2)}, warmPods(2))
			s.slow = true
			s.step(PodSeen{with(warmPod("a-7"), func(p *Pod) { p.Finished = true })}) // keeps the writer busy
			one[Write](s)
			s.step(batchOf(1, count, 1, wait))
			s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Used = true })})
			if r := one[Repaired](s); r.Pod != key("a-1") {
				t.Errorf("repaired %+v", r)
			}
			s.slow = false
			s.written()
			s.pass(wait)
			if b := one[BatchClaimed](s); len(b.Sandboxes) != 1 || b.Sandboxes[0].Pod != key("a-2") {
				t.Errorf("answer %+v", b)
			}
		})
	}
}

// Invariant: I7
func TestUIDDistinguishesPodsOfOneName(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA})
	namesake := PodKey{Namespace: "ns", Name: "a-1", UID: "uid-of-an-earlier-one"}
	s.step(PodGone{namesake})
	if len(s.effects) > 0 {
		t.Fatalf("unexpected %+v", s.effects)
	}
	s.written()
	one[Claimed](s)
	s.step(PodGone{namesake})
	none[Write](s)
}

// Whatever becomes of a pod while a claim is written to it, the sandbox that
// became durable is answered or released.
func TestClaimWhosePodLosesItsAddressIsReleased(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	first := s.given()
	s.step(PodSeen{with(warmPod(first.Pod.Name), func(p *Pod) { p.IP, p.Ready, p.Version = netip.Addr{}, false, "2" })})
	s.written()
	s.slow = false
	s.writeAll()
	if c := one[Claimed](s); c.Sandbox.ID == first.ID {
		t.Fatalf("answered with %s, whose pod has no address", first.ID)
	}
	s.step(PodSeen{with(warmPod(first.Pod.Name), func(p *Pod) { p.Version = "3" })}) // it has it again
	if held, _ := s.core.View().Sandbox(first.ID); held.Phase == Running {
		t.Errorf("no caller was given %s, and it runs: %+v", held.ID, s.core.pools.Find(poolA).Counts())
	}
}

// Invariant: P3
func TestAbandonedClaimReturnsItsPodBeforeTheWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA}) // a-1, keeps the writer busy
	s.step(Claim{Token: 2, Pool: poolA, Binding: Binding{IdempotencyKey: "k"}})
	s.step(ClaimAbandoned{Token: 2})
	s.step(Claim{Token: 3, Pool: poolA})
	s.written()
	if given := s.given(); given.Pod != key("a-2") {
		t.Errorf("written %+v, expected the oldest that is left", given)
	}
	s.written()
	one[Claimed](s)
	s.slow = false
	s.step(Claim{Token: 4, Pool: poolA, Binding: Binding{IdempotencyKey: "k", RequestHash: [32]byte{1}}})
	one[Claimed](s) // the key stands for nothing
}

func TestAbandonedClaimIsReleasedAfterItsWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA})
	given := s.given()
	s.step(ClaimAbandoned{Token: 1})
	s.written()
	none[Claimed](s)
	if f := s.given(); f.ID != given.ID || f.Reason != fact.ReasonCanceled {
		t.Errorf("written %+v", f)
	}
}

func TestAbandonedClaimWithKeyIsKeptForRetry(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.slow = true
	keyed := Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k"}}
	s.step(keyed)
	given := s.given()
	s.step(ClaimAbandoned{Token: 1})
	s.written()
	none[Claimed](s)
	none[Write](s)
	keyed.Token = 2
	s.step(keyed)
	if c := one[Claimed](s); c.Token != 2 || c.Sandbox.ID != given.ID {
		t.Errorf("answer %+v", c)
	}
}
