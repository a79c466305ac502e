package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// resizable is a pod that may request less, in some version.
func resizable(version string, lowered bool) func(*Pod) {
	return func(p *Pod) {
		p.AgentPort, p.CPURequest, p.Version, p.Lowered = 49983, "500m", version, lowered
	}
}

// Invariant: P29
func TestPodRequestsLessWhileItsSandboxSleeps(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	seen := func(version string, lowered bool) { s.step(PodSeen{with(warmPod("a-1"), resizable(version, lowered))}) }
	seen("1", false)
	none[ResizePod](s)
	s.asleep(sb.ID)
	low := ResizePod{Pod: sb.Pod, Version: "1", Lower: true, CPURequest: "500m"}
	if got := one[ResizePod](s); got != low {
		t.Errorf("%+v", got)
	}
	seen("2", false) // another client has written to it
	low.Version = "2"
	if got := one[ResizePod](s); got != low {
		t.Errorf("%+v", got)
	}
	seen("3", true)
	none[ResizePod](s)

	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour, Extend: true, Wake: true})
	thaw, high := one[Thaw](s), ResizePod{Pod: sb.Pod, Version: "3", CPURequest: "500m"}
	if got := one[ResizePod](s); got != high {
		t.Errorf("%+v", got)
	}
	s.step(Thawed{ID: sb.ID, Revision: thaw.Sandbox.Revision, OK: true})
	if got := s.core.View().Load().Deferred; got != 0 {
		t.Errorf("%d wait for room", got)
	}
	s.step(PodSeen{with(with(warmPod("a-1"), resizable("4", false)), func(p *Pod) { p.Deferred = true })})
	none[ResizePod](s)
	if got := s.core.View().Load().Deferred; got != 1 {
		t.Errorf("%d wait for room", got)
	}
	seen("5", true) // by another client
	one[ResizePod](s)
	s.step(Release{Token: 10, Scope: everyTeam, ID: sb.ID})
	seen("6", true)
	none[ResizePod](s)
}

// Invariant: P29
func TestNextLeaderResizesWhatTheLastOneHasNot(t *testing.T) {
	for name, c := range map[string]struct {
		phase   Phase
		lowered bool
		resized bool
	}{
		"asleep, and not lowered":  {Asleep, false, true},
		"asleep, and lowered":      {Asleep, true, false},
		"running, and lowered":     {Running, true, true},
		"running, and not lowered": {Running, false, false},
		"waking, and lowered":      {Waking, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port = 49983 })
			record := on("a-1", "x")
			sandboxOf(record).Phase, sandboxOf(record).Agent.Port = c.phase, 49983
			effects := s.recover([]Pool{pool}, []Pod{with(warmPod("a-1"), resizable("1", c.lowered))}, record)
			if got := of[ResizePod](effects); (len(got) > 0) != c.resized {
				t.Errorf("%+v", got)
			}
		})
	}
}
