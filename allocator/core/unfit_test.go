package core

import (
	"net/netip"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

func TestSandboxIsReleasedAtItsEndTime(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Minute, Wait: wait})
	if c := one[Claimed](s); !c.Sandbox.EndAt.Equal(s.now.Wall.Add(time.Minute)) {
		t.Errorf("claimed %+v", c)
	}
	s.pass(59 * time.Second)
	none[SandboxReleased](s)
	s.pass(time.Second)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonEndTime {
		t.Errorf("release %+v", r)
	}
}

func TestLostSandboxIsReleasedAndNotRouted(t *testing.T) {
	for name, c := range map[string]struct {
		reason string
		ev     Event
	}{
		"its pod is being deleted":    {fact.ReasonPodDeleted, PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })}},
		"its pod has failed":          {fact.ReasonFailed, PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })}},
		"its pod is gone":             {fact.ReasonPodDeleted, PodGone{key("a-1")}},
		"its pod has another address": {fact.ReasonPodMoved, PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") })}},
	} {
		reason, ev := c.reason, c.ev
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.join("r", 1)
			s.join("r2", 3)
			sb := s.claim()
			s.slow = true
			s.step(ev)
			none[SandboxReleased](s) // it is not durable yet
			s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
			if one[SendResolved](s).Sandbox != nil {
				t.Error("its address is still sent")
			}
			s.step(SessionJoined{Session: "r2", Stream: 2})
			if routes := one[SendSnapshot](s).Routes; len(routes) > 0 {
				t.Errorf("snapshot with %+v", routes)
			}
			s.written()
			if r := one[SandboxReleased](s); r.Sandbox.Reason != reason {
				t.Errorf("released %+v", r)
			}
			if n := len(of[SendRelease](s.effects)); n != 2 {
				t.Errorf("%d routers were sent the release", n)
			}
			none[DeletePod](s)
			s.step(ev)
			none[SandboxReleased](s)
			none[Write](s)
		})
	}
}

// The status of a claimed pod loses its address for a while: podIP is empty while the kubelet makes
// the pod's network anew. The network may give the address to another pod.
func TestSandboxWhosePodLosesItsAddressIsReleased(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP, p.Ready = netip.Addr{}, false })})
	if r := one[SandboxReleased](s); r.Sandbox.ID != sb.ID || r.Sandbox.Reason != fact.ReasonPodMoved {
		t.Errorf("released %+v", r)
	}
	if running := s.core.View().Running(); len(running) != 0 {
		t.Errorf("routes of %v", running)
	}
}

func TestRestartEndsSandboxUnlessPoolKeepsIt(t *testing.T) {
	restarted := func(n int) Event {
		return PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Restarts = n })}
	}
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Restarts = 2 })}) // before the claim
	s.join("r", 1)
	sb := s.claim()
	if sb.Restarts != 2 {
		t.Errorf("claimed %+v", sb)
	}
	s.step(restarted(2))
	none[SandboxReleased](s)
	s.step(restarted(3))
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonUnexpectedRestart {
		t.Errorf("released %+v", r)
	}

	s = newSim(t)
	kept := specA(1)
	kept.KeepOnRestart = true
	s.recover([]Pool{kept}, []Pod{warmPod("a-1")})
	s.claim()
	s.step(restarted(1))
	none[SandboxReleased](s)

	// There was no leader meanwhile.
	f := on("a-1", "x")
	sandboxOf(f).Restarts = 1
	for n, want := range map[int]int{1: 0, 2: 1} {
		s = newSimAt(t, 2, start)
		s.recover([]Pool{specA(1)}, []Pod{restarted(n).(PodSeen).Pod}, f)
		if got := len(of[SandboxReleased](s.effects)); got != want {
			t.Errorf("%d restarts: released %d times", n, got)
		}
	}
}

// A pod restarts while its pool keeps sandboxes over restarts. Then the pool is edited to end
// sandboxes with a restart. The next observation of the pod, which has not restarted since, must not
// end the sandbox.
func TestAllowedRestartEndsNothingLater(t *testing.T) {
	s := newSim(t)
	keep := specA(1)
	keep.KeepOnRestart = true
	s.recover([]Pool{keep}, []Pod{warmPod("a-1")})
	s.claim()
	again := with(warmPod("a-1"), func(p *Pod) { p.Restarts = 1 })
	s.step(PodSeen{again})
	s.step(PoolSeen{specA(1)})
	none[SandboxReleased](s)
	s.step(PodSeen{again})
	none[SandboxReleased](s)
}

func TestClaimWhosePodRestartsGetsAnotherPod(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Restarts = 1 })})
	s.written()
	s.slow = false
	s.writeAll()
	if c := one[Claimed](s); c.Sandbox.Pod.Name != "a-2" {
		t.Errorf("claimed %+v", c)
	}
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonUnexpectedRestart {
		t.Errorf("released %+v", r)
	}
}
