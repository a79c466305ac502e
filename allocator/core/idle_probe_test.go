package core

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/api/activity"
)

// The busy probe.

func probeSim(t *testing.T, warm int, routers ...string) *sim {
	t.Helper()
	s := newSim(t)
	var pods []Pod
	for i := range warm {
		name := fmt.Sprintf("a-%d", i+1)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP = key(name), address(i) }))
	}
	s.recover([]Pool{changed(idlePool(warm), func(p *Pool) {
		p.BusyProbe, p.MaxLifetime = BusyProbe{Port: 9000, Path: "/busy"}, 24*time.Hour
	})}, pods)
	for i, r := range routers {
		s.joinAndReport(r, uint64(i+1))
	}
	return s
}

// answers has a router say whether a pod is busy.
func (s *sim) answers(p SendProbe, busy bool) {
	s.t.Helper()
	s.step(Probed{Stream: p.Stream, Number: p.Number, ID: p.ID, Busy: busy})
	s.step(Tick{})
}

// Invariant: I4
func TestBusyPodCountsAsInUse(t *testing.T) {
	s := probeSim(t, 1, "q", "r")
	sb := s.claim()
	for range 3 {
		s.pass(idleFor)
		p := one[SendProbe](s)
		if p.ID != sb.ID || p.To != netip.AddrPortFrom(sb.IP, 9000) || p.Path != "/busy" {
			t.Errorf("asked: %+v", p)
		}
		none[SendQuiesce](s)
		s.answers(p, true)
		none[SendQuiesce](s)
		if list := s.activities(everySandbox, 1); list[0].Kind != activity.Busy || list[0].Age != 0 || list[0].In != idleFor {
			t.Errorf("shown as %+v", list)
		}
		s.ping("q", 1)
		s.ping("r", 2)
	}
}

// The journal does not answer for a minute, so no round begins.
func TestPodIsProbedAgainBeforeLateRound(t *testing.T) {
	s := probeSim(t, 2, "r")
	s.claim()
	s.pass(idleFor)
	p := one[SendProbe](s)
	s.slow = true
	s.step(Claim{Token: 7, Pool: poolA, Wait: wait})
	s.given()
	s.pass(2 * time.Second)
	s.answers(p, false)
	for range 12 {
		s.ping("r", 1)
		s.pass(5 * time.Second)
		none[SendQuiesce](s)
	}
	s.written()
	s.pass(time.Millisecond)
	none[SendQuiesce](s)
	p = one[SendProbe](s)
	s.answers(p, false)
	s.asks(1)
}

// A pod that always says that it is busy would never end.
func TestSandboxWithoutMaxLifetimeIsNotProbed(t *testing.T) {
	s := idleSim(t, 1, "r")
	s.claim()
	s.step(PoolSeen{Pool: changed(idlePool(1), func(p *Pool) {
		p.BusyProbe, p.MaxLifetime = BusyProbe{Port: 9000, Path: "/busy"}, 24*time.Hour
	})})
	s.pass(idleFor)
	none[SendProbe](s)
	s.says(s.asks(1), 1)
	one[SandboxReleased](s)
}

func TestPodThatIsNotBusyIsAskedAtOnce(t *testing.T) {
	s := probeSim(t, 1, "r")
	s.claim()
	s.pass(idleFor)
	s.answers(one[SendProbe](s), false)
	s.says(s.asks(1), 1)
	one[SandboxReleased](s)
}

// A router may end, lose its answer, or have too many probes under way. Then the pod may be busy.
func TestUnansweredProbeMovesToTheNextRouter(t *testing.T) {
	s := probeSim(t, 1, "q", "r")
	s.claim()
	s.pass(idleFor)
	first := one[SendProbe](s)
	for range 3 {
		s.pass(idle.ProbeWait - time.Millisecond)
		none[SendProbe](s)
		none[SendQuiesce](s)
		s.pass(time.Millisecond)
		second := one[SendProbe](s)
		if second.Stream == first.Stream {
			t.Errorf("stream %d was asked twice", first.Stream)
		}
		s.answers(first, false) // late
		none[SendQuiesce](s)
		s.ping("q", 1)
		s.ping("r", 2)
		first = second
	}
}

// The answer of a pod counts for the next round only, not hours later when a router is back.
func TestPodIsProbedAgainAfterABlockedQuestion(t *testing.T) {
	s := probeSim(t, 1, "q", "r")
	s.claim()
	s.step(Report{Stream: 2, Blind: "the look timed out"})
	for range 30 {
		s.ping("q", 1)
		s.ping("r", 2)
		s.pass(idleFor)
		none[SendProbe](s)
		none[SendQuiesce](s)
	}
	s.looks("r", 2, 0)
	s.pass(idle.AskAgain)
	p := one[SendProbe](s)
	s.step(Report{Stream: 2, Blind: "the look timed out"})
	s.answers(p, false)
	none[SendQuiesce](s)
	s.looks("r", 2, 0)
	s.pass(idle.AskAgain)
	one[SendProbe](s)
}

func TestProbesAreBoundedAndAllPodsGetOne(t *testing.T) {
	const all = idle.MaxProbes + 10
	s := probeSim(t, all, "r")
	for range all {
		s.claim()
	}
	s.pass(idleFor)
	first := of[SendProbe](s.effects)
	if len(first) != idle.MaxProbes {
		t.Fatalf("%d at once", len(first))
	}
	for _, p := range first {
		s.step(Probed{Stream: p.Stream, Number: p.Number, ID: p.ID, Busy: true})
	}
	s.pass(idle.AskAgain)
	if rest := of[SendProbe](s.effects); len(rest) != all-idle.MaxProbes {
		t.Errorf("then %d", len(rest))
	}
}

func TestProbedSandboxStaysWithoutARouter(t *testing.T) {
	s := probeSim(t, 1)
	s.claim()
	for range 20 {
		s.pass(idleFor)
		none[SandboxReleased](s)
	}
	s.joinAndReport("r", 1)
	s.pass(idle.AskAgain)
	one[SendProbe](s)
}
