package core

import (
	"net/netip"
	"testing"
	"time"
)

// Whatever becomes of a pod while a claim is written to it, the sandbox that
// became durable is answered or released.
func TestClaimWhosePodLosesItsAddressIsNotHeldByNobody(t *testing.T) {
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
	if held, _ := s.core.Sandbox(first.ID); held.Phase == Running {
		t.Errorf("nobody was told of %s, and it runs: %+v", held.ID, s.core.pools[poolA].counts())
	}
}

// ---- clocks

func TestAStepOfTheWallClockReleasesNothingEarly(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Hour, Wait: wait})
	one[Claimed](s)
	s.now.Wall = s.now.Wall.Add(2 * time.Hour)
	s.pass(50 * time.Millisecond)
	none[SandboxReleased](s)
	s.now.Wall = s.now.Wall.Add(-4 * time.Hour)
	s.pass(time.Hour)
	one[SandboxReleased](s)
}

func TestAStepOfTheWallClockDoesNotStopTheForgetting(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded = 1
	s.restart()
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	end := func(token uint64) {
		s.step(Claim{Token: token, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: string(rune('a' + token))}, Wait: wait})
		c := one[Claimed](s)
		s.record(s.effects)
		s.release(c.Sandbox.ID)
		s.deletedAfter(c.Sandbox.Pod, never)
		s.record(s.step(PodGone{c.Sandbox.Pod}))
	}
	s.now.Wall = s.now.Wall.Add(365 * 24 * time.Hour)
	end(1)
	s.now.Wall = s.now.Wall.Add(-365 * 24 * time.Hour)
	for token := uint64(2); token <= 4; token++ {
		end(token)
	}
	s.pass(25 * time.Hour)
	s.pass(time.Second)
	if len(s.core.sandboxes) > 1 || len(s.core.keys) > 1 {
		t.Errorf("%d records and %d keys are left a day later", len(s.core.sandboxes), len(s.core.keys))
	}
}

// ---- keys

func TestKeyIsSaidToHaveEndedOnlyWhenTheReleaseIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	b := Binding{Team: "t", IdempotencyKey: "k"}
	s.step(Claim{Token: 1, Pool: poolA, Binding: b, Wait: wait})
	id := one[Claimed](s).Sandbox.ID
	s.slow = true
	s.step(Release{ID: id, Reason: ReasonKilled})
	s.step(Claim{Token: 2, Pool: poolA, Binding: b, Wait: wait})
	none[ClaimRefused](s)
	s.pass(2 * wait)
	none[Claimed](s)
	none[ClaimRefused](s)
	s.written()
	if r := one[ClaimRefused](s); r.Token != 2 || r.Why != KeyEnded || r.Sandbox.Reason != ReasonKilled {
		t.Errorf("refused %+v", r)
	}
}

// A claim that moves on to another pod takes its key with it: the object of the
// sandbox that it leaves behind, which is written once and then changed in its
// status only, must not have it.
func TestKeyOfAClaimThatMovedOnIsInNoObjectOfTheFirstPod(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k"}, Wait: wait})
	s.step(PodGone{key("a-1")})
	s.written()
	none[Record](s)
	s.written() // its release
	if r := one[Record](s); r.Sandbox.Phase != Released || r.Sandbox.IdempotencyKey != "" {
		t.Errorf("recorded %+v", r)
	}
}

// ---- what is forgotten

// The journal keeps what nothing has overwritten yet, for days where few claims
// come.
func TestWhatWasForgottenDoesNotComeBackWithANewLeader(t *testing.T) {
	s := newSimAt(t, 2, start)
	old := released("a-1", "old")
	old.Sandbox.EndedAt = start.Wall.Add(-3 * 24 * time.Hour) // KeepEndedFor is 24 h
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-2")}, old)
	none[Record](s)
	one[Settle](s)
}

func TestRecordThatCannotBeWrittenDoesNotKeepAllOthers(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded = 1
	s.restart()
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	for n := range uint64(4) {
		written := func(effects []Effect) {
			if n > 0 { // the API server refuses the first one's, for ever
				s.record(effects)
			}
		}
		written(s.step(Claim{Token: n, Pool: poolA, Wait: wait}))
		c := s.core.Live()[0]
		written(s.step(Release{ID: c.ID, Reason: ReasonKilled}))
		s.deletedAfter(c.Pod, never)
		written(s.step(PodGone{c.Pod}))
	}
	s.pass(25 * time.Hour)
	if n := len(s.core.sandboxes); n > 1 {
		t.Errorf("%d records a day later; one cannot be written", n)
	}
}

// ---- objects that people change

func TestObjectThatSomebodyHasReplacedIsWrittenAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	c := s.claim()
	s.step(RecordSeen{ID: c.ID, Pool: poolA}) // its status is gone
	if r := one[Record](s); r.Sandbox.ID != c.ID {
		t.Errorf("recorded %+v", r)
	}
}

func TestObjectThatGoesBeforeItIsRecordedIsWrittenAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	c := one[Claimed](s)
	s.step(RecordSeen{ID: c.Sandbox.ID, Pool: poolA, Revision: c.Sandbox.Revision})
	s.step(RecordGone{ID: c.Sandbox.ID})
	if len(of[Record](s.effects)) == 0 {
		t.Errorf("%s is not written again", c.Sandbox.ID)
	}
}

// ---- nodes

func TestStrandedPodsMakeRoomForOthers(t *testing.T) {
	s := newSim(t)
	spec := specA(2)
	spec.MaxPods = 2
	s.recoverState(State{Pools: []Pool{spec}, Pods: []Pod{warmPod("a-1"), warmPod("a-2")}, Nodes: []string{"n1", "n2"}})
	s.step(NodeSeen{Name: "n1"})
	if gone := of[DeletePod](s.effects); len(gone) != 2 {
		t.Errorf("deleted %+v", gone)
	}
	s.step(PodGone{key("a-1")})
	one[CreatePod](s)
}
