package core

import (
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
)

func recyclable(name string) Pod {
	return with(warmPod(name), func(p *Pod) { p.Key.Life = 1; p.Recyclable = true })
}

// again is the first observation of the life that follows.
func again(p Pod) Pod {
	return with(p, func(p *Pod) { p.Key.Life = 2; p.Ready, p.Recycling = false, true })
}

func proven(p Pod) Pod { return with(p, func(p *Pod) { p.Ready, p.Recycling = true, false }) }

func specRecycle(warm, most int) Pool {
	spec := specA(warm)
	spec.Recycle, spec.MaxPods = true, most
	return spec
}

// recycled claims and releases the only pod of a pool until its next life is asked for.
func recycled(t *testing.T, change func(*Pod)) *sim {
	t.Helper()
	s := newSim(t)
	p := with(recyclable("a-1"), change)
	s.recover([]Pool{specRecycle(1, 1)}, []Pod{p})
	s.join("r1", 1)
	sb := s.claim()
	s.ack("r1", 1, 2)
	s.release(sb.ID)
	none[RecyclePod](s)
	s.ack("r1", 1, 3)
	none[RecyclePod](s)
	s.pass(window - 1)
	none[RecyclePod](s)
	s.pass(1)
	return s
}

// Invariant: I3, I5
func TestRecycledPodIsWarmOnlyWhenProven(t *testing.T) {
	s := recycled(t, func(*Pod) {})
	none[DeletePod](s)
	if e := one[RecyclePod](s); e.Pod != recyclable("a-1").Key {
		t.Fatalf("recycled: %+v", e)
	}
	s.step(Claim{Token: 9, Pool: poolA, Wait: time.Minute})
	s.step(PodSeen{again(recyclable("a-1"))})
	none[Claimed](s)
	none[CreatePod](s)
	s.step(PodSeen{proven(again(recyclable("a-1")))})
	if r := one[RecycleEnded](s); r.Outcome != Recycled {
		t.Fatalf("ended: %+v", r)
	}
	if c := one[Claimed](s); c.Sandbox.Pod != again(recyclable("a-1")).Key || c.Sandbox.ID == "term1-id1" {
		t.Fatalf("claimed: %+v", c)
	}
}

func TestLifeWithoutProofIsDeletedInTime(t *testing.T) {
	s := recycled(t, func(*Pod) {})
	s.step(PodSeen{with(again(recyclable("a-1")), func(p *Pod) { p.Why = "container berth-clean: exit code 1" })})
	s.pass(pods.ProofWithin - 1)
	none[DeletePod](s)
	s.pass(1)
	if f := one[IdlePodFailed](s).Failure; f.Reason != PodNeverReady || !strings.HasSuffix(f.Why, "within 2m0s: container berth-clean: exit code 1") {
		t.Fatalf("failed: %+v", f)
	}
	if r := one[RecycleEnded](s); r.Outcome != NotProven {
		t.Fatalf("ended: %+v", r)
	}
	if e := one[DeletePod](s); e.Pod != again(recyclable("a-1")).Key {
		t.Fatalf("deleted: %+v", e)
	}
}

func TestChangedPodIsDeletedAndNotRecycled(t *testing.T) {
	s := recycled(t, func(p *Pod) { p.Recyclable = false })
	none[RecyclePod](s)
	one[DeletePod](s)
	if r := one[RecycleEnded](s); r.Outcome != NotFit {
		t.Fatalf("ended: %+v", r)
	}
}

// The caller finds that it cannot be recycled.
func TestPodDeletedInsteadOfRecycledIsReplaced(t *testing.T) {
	s := recycled(t, func(*Pod) {})
	s.step(PodGone{recyclable("a-1").Key.Whole()})
	if r := one[RecycleEnded](s); r.Outcome != NotFit {
		t.Fatalf("ended: %+v", r)
	}
	one[CreatePod](s)
}

func TestPodOfAFailedSandboxIsDeletedAndNotRecycled(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := released("a-1", "id1")
	sandboxOf(f).Pod, sandboxOf(f).Cause = recyclable("a-1").Key, fact.Because(fact.ReasonStartFailed)
	s.recover([]Pool{specRecycle(1, 1)}, []Pod{with(recyclable("a-1"), func(p *Pod) { p.Used = true })}, f)
	s.pass(window)
	none[RecyclePod](s)
	one[DeletePod](s)
}

func TestSurplusPodIsDeletedAndNotRecycled(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specRecycle(1, 0)}, []Pod{recyclable("a-1"), recyclable("a-2")})
	sb := s.claim()
	s.release(sb.ID)
	s.pass(window)
	none[RecyclePod](s)
	one[DeletePod](s)
	if r := one[RecycleEnded](s); r.Outcome != NotNeeded {
		t.Fatalf("ended: %+v", r)
	}
}

// Invariant: I3
func TestNextLeaderDeletesLifeOfUnfencedSandbox(t *testing.T) {
	for name, found := range map[string]Pod{
		"not proven": again(recyclable("a-1")), "proven": proven(again(recyclable("a-1"))),
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			f := released("a-1", "id1")
			sandboxOf(f).Pod = recyclable("a-1").Key
			s.recover([]Pool{specRecycle(1, 1)}, []Pod{found}, f)
			s.step(Claim{Token: 9, Pool: poolA, Wait: time.Minute})
			s.step(PodSeen{proven(again(recyclable("a-1")))})
			none[Claimed](s)
			s.pass(window)
			none[Claimed](s)
			if e := one[DeletePod](s); e.Pod != again(recyclable("a-1")).Key {
				t.Fatalf("deleted: %+v", e)
			}
		})
	}
}

// The leader before has ended between the end of the fence and the write of the next life.
func TestNextLeaderFencesAndRecyclesLifeItFinds(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := released("a-1", "id1")
	sandboxOf(f).Pod = recyclable("a-1").Key
	s.recover([]Pool{specRecycle(1, 1)}, []Pod{with(recyclable("a-1"), func(p *Pod) { p.Used = true })}, f)
	none[RecyclePod](s)
	s.pass(window)
	if e := one[RecyclePod](s); e.Pod != recyclable("a-1").Key {
		t.Fatalf("recycled: %+v", e)
	}
	none[DeletePod](s)
}

// The leader before has ended after the sandbox did, and before the proof.
func TestNextLeaderAwaitsProofOfLifeWithoutRecord(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specRecycle(1, 1)}, []Pod{again(recyclable("a-1"))})
	s.step(Claim{Token: 9, Pool: poolA, Wait: time.Minute})
	none[Claimed](s)
	s.step(PodSeen{proven(again(recyclable("a-1")))})
	if c := one[Claimed](s); c.Sandbox.Pod != again(recyclable("a-1")).Key {
		t.Fatalf("claimed: %+v", c)
	}
}

func TestChangedLifeOfClaimedPodEndsItsSandbox(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specRecycle(1, 1)}, []Pod{recyclable("a-1")})
	s.join("r1", 1)
	sb := s.claim()
	s.step(PodSeen{proven(again(recyclable("a-1")))})
	if r := one[SandboxReleased](s); r.Sandbox.ID != sb.ID || r.Sandbox.Reason != fact.ReasonPodDeleted {
		t.Fatalf("released: %+v", r)
	}
	s.step(Claim{Token: 9, Pool: poolA, Wait: time.Minute})
	none[Claimed](s)
}

// deleted passes d in small steps, and returns what was deleted, and how recyclings ended.
func (s *sim) deleted(d time.Duration) (pods []PodKey, ended []string) {
	s.t.Helper()
	for passed := time.Duration(0); ; passed += 10 * time.Second {
		for _, e := range of[DeletePod](s.effects) {
			pods = append(pods, e.Pod)
		}
		for _, e := range of[RecycleEnded](s.effects) {
			ended = append(ended, e.Outcome)
		}
		if passed >= d {
			return pods, ended
		}
		s.pass(10 * time.Second)
	}
}

func unclean(p *Pod) { p.Reason, p.Why = PodCrashLoop, "container berth-clean: exit code 1" }

// A sandbox can leave what cannot be removed. Its pod must not hold a place of the pool for long.
func TestLifeThatCannotBeCleanedIsDeletedAtOnce(t *testing.T) {
	s := newSim(t)
	spec := specRecycle(1, 1)
	spec.ReadyWithin = 30 * time.Second
	s.recover([]Pool{spec}, []Pod{recyclable("a-1")})
	sb := s.claim()
	s.release(sb.ID)
	s.pass(window)
	one[RecyclePod](s)
	s.step(PodSeen{with(again(recyclable("a-1")), unclean)})
	if f := one[IdlePodFailed](s).Failure; !strings.HasSuffix(f.Why, "container berth-clean: exit code 1") {
		t.Errorf("failed: %+v", f)
	}
	pods, ended := s.deleted(0)
	if len(pods) != 1 || pods[0] != again(recyclable("a-1")).Key || len(ended) != 1 || ended[0] != NotProven {
		t.Errorf("deleted %v, ended %v", pods, ended)
	}
	if s.core.pools.Of(poolA).BackedOff() {
		t.Error("the pool pauses")
	}
}

func TestLateRestartDoesNotPauseThePool(t *testing.T) {
	s := newSim(t)
	spec := specRecycle(1, 1)
	spec.ReadyWithin = 30 * time.Second
	s.recover([]Pool{spec}, []Pod{recyclable("a-1")})
	sb := s.claim()
	s.release(sb.ID)
	s.pass(window)
	s.step(PodSeen{again(recyclable("a-1"))})
	pods, ended := s.deleted(pods.ProofWithin)
	if len(pods) != 1 || len(ended) != 1 || ended[0] != NotProven {
		t.Errorf("deleted %v, ended %v", pods, ended)
	}
	if s.core.pools.Of(poolA).BackedOff() {
		t.Error("the pool pauses")
	}
}

// Admission may refuse the write of the next life, again and again.
func TestLifeThatDoesNotEndIsDeletedInTime(t *testing.T) {
	s := recycled(t, func(*Pod) {})
	one[RecyclePod](s)
	s.step(Claim{Token: 9, Pool: poolA, Wait: wait})
	pods, ended := s.deleted(pods.ProofWithin)
	if len(pods) != 1 || pods[0] != recyclable("a-1").Key || len(ended) != 1 || ended[0] != NotProven {
		t.Errorf("deleted %v, ended %v", pods, ended)
	}
	s.step(PodGone{recyclable("a-1").Key.Whole()})
	one[CreatePod](s)
	none[RecycleEnded](s)
}

func TestPodWhoseDeletionHangsIsReplaced(t *testing.T) {
	s := recycled(t, func(*Pod) {})
	s.step(PodSeen{with(recyclable("a-1"), func(p *Pod) { p.Used, p.Deleting, p.Ready = true, true, false })})
	if r := one[RecycleEnded](s); r.Outcome != NotFit {
		t.Fatalf("ended: %+v", r)
	}
	more := specRecycle(1, 5)
	more.Version = "9"
	s.step(PoolSeen{more})
	one[CreatePod](s)
}

func TestUnreadyPodOfProvenLifeStays(t *testing.T) {
	s := recycled(t, func(*Pod) {})
	s.step(PodSeen{again(recyclable("a-1"))})
	s.step(PodSeen{proven(again(recyclable("a-1")))})
	one[RecycleEnded](s)
	s.pass(pods.ProofWithin - time.Second)
	s.step(PodSeen{with(proven(again(recyclable("a-1"))), unready)})
	if pods, ended := s.deleted(time.Minute); len(pods)+len(ended) > 0 {
		t.Errorf("deleted %v, ended %v", pods, ended)
	}
}
