package core

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

func TestEndOfPodNamesWhatItsStatusSays(t *testing.T) {
	seen := func(f func(*Pod)) []Event { return []Event{PodSeen{with(warmPod("a-1"), f)}} }
	code := int32(137)
	oom := Cause{Reason: fact.ReasonOOMKilled, Message: "container main: exit code 137 OOMKilled", ExitCode: &code}
	failed := Cause{Reason: fact.ReasonFailed, Message: "container main: exit code 137 Error", ExitCode: &code}
	restart := failed
	restart.Reason = fact.ReasonUnexpectedRestart
	evicted := Cause{Reason: fact.ReasonEvicted, Message: "EvictionByEvictionAPI: Eviction API: evicting"}
	lost := Cause{Reason: fact.ReasonNodeLost, Message: "DeletionByPodGC: PodGC: node no longer exists"}
	tainted := Cause{Reason: fact.ReasonEvicted, Message: "DeletionByTaintManager: Taint manager: deleting due to NoExecute taint"}
	unreachable := tainted
	unreachable.Reason = fact.ReasonNodeLost
	for name, c := range map[string]struct {
		events []Event
		want   Cause
	}{
		"a container ended for good":    {seen(func(p *Pod) { p.Finished, p.Cause = true, failed }), failed},
		"out of memory for good":        {seen(func(p *Pod) { p.Finished, p.Cause = true, oom }), oom},
		"all containers completed":      {seen(func(p *Pod) { p.Finished, p.Cause.Reason = true, fact.ReasonCompleted }), fact.Because(fact.ReasonCompleted)},
		"failed without a container":    {seen(func(p *Pod) { p.Finished, p.Why = true, "DeadlineExceeded" }), Cause{Reason: fact.ReasonFailed, Message: "DeadlineExceeded"}},
		"evicted by its kubelet":        {seen(func(p *Pod) { p.Finished, p.Cause = true, evicted }), evicted},
		"a container restarted":         {seen(func(p *Pod) { p.Restarts, p.Cause = 1, failed }), restart},
		"restarted as out of memory":    {seen(func(p *Pod) { p.Restarts, p.Cause = 1, oom }), oom},
		"the eviction API":              {seen(func(p *Pod) { p.Deleting, p.Cause = true, evicted }), evicted},
		"its node is gone":              {append(seen(func(p *Pod) { p.Cause = lost }), PodGone{key("a-1")}), lost},
		"a taint of a ready node":       {seen(func(p *Pod) { p.Deleting, p.NoExecute, p.Cause = true, true, tainted }), tainted},
		"a taint of a node in a drain":  {append([]Event{NodeSeen{Name: "n1"}}, seen(func(p *Pod) { p.Deleting, p.NoExecute, p.Cause = true, true, tainted })...), tainted},
		"a taint of an unreachable one": {append([]Event{NodeSeen{Name: "n1"}}, seen(func(p *Pod) { p.Ready, p.Deleting, p.NoExecute, p.Cause = false, true, true, tainted })...), unreachable},
		"a taint in a drain, not ready": {append([]Event{NodeSeen{Name: "n1", Cordoned: true}}, seen(func(p *Pod) { p.Ready, p.Deleting, p.NoExecute, p.Cause = false, true, true, tainted })...), tainted},
		"deleted after an old failure":  {seen(func(p *Pod) { p.Deleting, p.Cause = true, oom }), fact.Because(fact.ReasonPodDeleted)},
		"deleted by a client":           {seen(func(p *Pod) { p.Deleting = true }), fact.Because(fact.ReasonPodDeleted)},
		"deleted by force":              {[]Event{PodGone{key("a-1")}}, fact.Because(fact.ReasonPodDeleted)},
		"evicted, and a later failure":  {append(seen(func(p *Pod) { p.Deleting, p.Cause = true, evicted }), seen(func(p *Pod) { p.Finished, p.Cause = true, failed })...), evicted},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			id := s.claim().ID
			for _, ev := range c.events {
				s.step(ev)
			}
			got, _ := s.core.View().Sandbox(id)
			if got.Phase < Released || !reflect.DeepEqual(got.Cause, c.want) {
				t.Errorf("phase %v, %+v", got.Phase, got.Cause)
			}
		})
	}
}

func TestNextLeaderKnowsWhyASandboxEnded(t *testing.T) {
	code := int32(3)
	want := Cause{Reason: fact.ReasonFailed, Message: "container main: exit code 3 Error", ExitCode: &code}
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished, p.Cause = true, want })})
	released := one[SandboxReleased](s).Sandbox

	s = newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, nil, Fact{Revision: released.Revision, Subject: &SandboxFact{Sandbox: released}})
	got, ok := s.core.View().Sandbox(sb.ID)
	if !ok || !reflect.DeepEqual(got.Cause, want) || !got.StartedAt.Equal(sb.ClaimedAt) {
		t.Errorf("%+v", got)
	}

	// Its pod went while no allocator led.
	s = newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, nil, on("a-1", "x"))
	if got, _ := s.core.View().Sandbox("x"); got.Cause != (Cause{Reason: fact.ReasonPodDeleted, Message: "the pod did not exist any more when this allocator began to lead"}) {
		t.Errorf("%+v", got.Cause)
	}
}

func TestNextLeaderTakesTheWorkloadFromThePod(t *testing.T) {
	w := &Workload{Images: []string{"python:3"}}
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Workload = w })})
	if sb := s.claim(); sb.Workload != w {
		t.Errorf("claimed %+v", sb)
	}
	s = newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used, p.Workload = true, w })}, on("a-1", "x"))
	if sb, _ := s.core.View().Sandbox("x"); sb.Workload != w {
		t.Errorf("recovered %+v", sb)
	}
	if o := of[WriteObject](s.effects); len(o) == 0 || o[0].Sandbox.Workload != w {
		t.Errorf("objects %+v", o)
	}
}

func TestNextLeaderKeepsTheWorkloadOfTheObject(t *testing.T) {
	w := &Workload{Images: []string{"python:3"}}
	shown := *sandboxOf(on("a-1", "x"))
	shown.Workload, shown.Revision = w, Revision{Term: 1, Counter: 1}
	released := shown
	released.Workload, released.Phase, released.ReleasedAt, released.Revision = nil, Released, start.Wall, Revision{Term: 1, Counter: 2}
	s := newSimAt(t, 2, start)
	s.recoverState(State{
		Pools: []Pool{specA(1)}, Facts: []Fact{{Revision: released.Revision, Subject: &SandboxFact{Sandbox: released}}}, Objects: []Sandbox{shown},
	})
	if sb, _ := s.core.View().Sandbox("x"); sb.Phase < Released || sb.Workload != w {
		t.Errorf("recovered %+v", sb)
	}
}

func TestNextLeaderTellsCordonedNodesFromLostOnes(t *testing.T) {
	tainted := with(warmPod("a-1"), func(p *Pod) {
		p.Used, p.Ready, p.Deleting, p.NoExecute, p.Cause = true, false, true, true, fact.Because(fact.ReasonEvicted)
	})
	for want, st := range map[string]State{fact.ReasonEvicted: {Cordoned: []string{"n1"}}, fact.ReasonNodeLost: {}} {
		st.Pools, st.Pods, st.Facts = []Pool{specA(1)}, []Pod{tainted}, []Fact{on("a-1", "x")}
		s := newSimAt(t, 2, start)
		s.recoverState(st)
		if sb, _ := s.core.View().Sandbox("x"); sb.Phase < Released || sb.Reason != want {
			t.Errorf("%s: recovered %+v", want, sb)
		}
	}
}

// Invariant: I5
func TestLogIsReadWhenASandboxFails(t *testing.T) {
	fails := map[string]Event{
		fact.ReasonFailed:            PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })},
		fact.ReasonUnexpectedRestart: PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Restarts = 1 })},
	}
	others := map[string]Event{
		fact.ReasonPodDeleted: PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })},
		fact.ReasonPodMoved:   PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP = netip.MustParseAddr("127.9.9.9") })},
	}
	ends := func(ev Event) (*sim, Sandbox) {
		s := newSim(t)
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
		s.claim()
		s.step(ev)
		return s, one[SandboxReleased](s).Sandbox
	}
	for reason, ev := range fails {
		s, sb := ends(ev)
		if r := one[ReadLog](s).Sandbox; r.ID != sb.ID || r.Reason != reason {
			t.Errorf("%s: reads %+v", reason, r)
		}
		s.step(LogRead{ID: sb.ID, Lines: []string{"last"}})
		if o := one[WriteObject](s); !slices.Equal(o.LogLines, []string{"last"}) || !sb.Revision.Less(o.Sandbox.Revision) || o.Sandbox.Phase != Released {
			t.Errorf("%s: writes %+v", reason, o)
		}
		for range 10 { // nothing waits for the next read
			s.pass(window)
			if len(of[DeletePod](s.effects)) > 0 {
				break
			}
		}
		s.step(PodGone{key("a-1")})
		if o := one[WriteObject](s); o.Sandbox.Phase != Ended || o.LogLines != nil {
			t.Errorf("%s: writes %+v", reason, o)
		}
		s.step(LogRead{ID: sb.ID, Lines: nil})
		none[WriteObject](s)
	}
	for reason, ev := range others {
		s, sb := ends(ev)
		if none[ReadLog](s); sb.Reason != reason {
			t.Errorf("ended for %s, want %s", sb.Reason, reason)
		}
	}

	// The leader ended before it had read the log.
	released := *sandboxOf(on("a-1", "x"))
	released.Phase, released.ReleasedAt, released.Cause = Released, start.Wall, fact.Because(fact.ReasonFailed)
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used, p.Finished = true, true })}, Fact{Revision: released.Revision, Subject: &SandboxFact{Sandbox: released}})
	if r := one[ReadLog](s).Sandbox; r.ID != "x" {
		t.Errorf("the next leader reads %+v", r)
	}
	s.step(LogRead{ID: "unknown", Lines: []string{"last"}})
	none[WriteObject](s)
}
