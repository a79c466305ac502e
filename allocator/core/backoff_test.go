package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
)

// ---- pods that end

func finished(p *Pod) {
	p.Ready, p.Finished, p.Why = false, true, "container sandbox: exit code 1 Error"
}
func unready(p *Pod) { p.Ready = false }

// end has all pods that are to be made seen as they are given, and then end. It returns
// their number.
func (s *sim) end(lives func(*Pod), after time.Duration) (made int) {
	s.t.Helper()
	var names []string
	for _, c := range of[CreatePod](s.effects) {
		names = append(names, c.Name)
	}
	for _, name := range names {
		s.step(PodSeen{with(warmPod(name), lives)})
	}
	if after > 0 {
		s.pass(after)
	}
	for _, name := range names {
		s.step(PodSeen{with(warmPod(name), finished)})
		s.step(PodGone{key(name)})
	}
	return len(names)
}

func (s *sim) trouble() Trouble {
	s.t.Helper()
	counts, ok := s.core.View().Counts(poolA)
	if !ok {
		s.t.Fatal("no such pool")
	}
	return counts.Trouble
}

func TestPauseGrowsWhilePodsEndEarly(t *testing.T) {
	for name, c := range map[string]struct {
		lives func(*Pod)
		after time.Duration
	}{
		"never ready":             {unready, 0},
		"ready, and for a second": {func(*Pod) {}, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(3)}, nil)
			for _, seconds := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
				pause := time.Duration(seconds) * time.Second
				ends := s.now.Wall.Add(c.after)
				if made := s.end(c.lives, c.after); made != 3 {
					t.Fatalf("%d made, expected 3", made)
				}
				if got := s.trouble(); got.Why != "container sandbox: exit code 1 Error" || !got.Retry.Equal(ends.Add(pause).Truncate(time.Second)) {
					t.Errorf("trouble %+v, expected the next attempt at %v", got, ends.Add(pause))
				}
				s.step(PoolSeen{specA(3)}) // its status was written
				none[CreatePod](s)
				s.pass(pause - time.Millisecond)
				none[CreatePod](s)
				s.pass(time.Millisecond)
			}
			if got := s.trouble(); got.Pod == "" || !got.Retry.IsZero() {
				t.Errorf("trouble %+v while others are being tried", got)
			}
		})
	}
}

func TestBackOffIsForgottenOncePodsStayWarm(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	for range 3 {
		s.end(unready, 0)
		s.pass(4 * time.Second)
	}
	name := one[CreatePod](s).Name
	s.step(PodSeen{warmPod(name)})
	s.pass(pods.StableAfter - time.Millisecond)
	if s.trouble() == (Trouble{}) {
		t.Error("forgotten too early")
	}
	s.pass(time.Millisecond)
	if got := s.trouble(); got != (Trouble{}) {
		t.Errorf("trouble %+v", got)
	}
	// One that ends late is replaced at once, and the next early end is the first.
	s.step(PodSeen{with(warmPod(name), finished)})
	if made := s.end(unready, 0); made != 1 {
		t.Fatalf("%d made in place of one that was warm for long", made)
	}
	s.pass(pools.FirstEndPause)
	one[CreatePod](s)
}

func TestAnotherTemplateIsTriedAtOnce(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, nil)
	s.end(unready, 0)
	s.step(PoolSeen{changed(specA(2), func(p *Pool) { p.Template = "t2" })})
	if made := of[CreatePod](s.effects); len(made) != 2 {
		t.Errorf("made %+v", made)
	}
	if got := s.trouble(); got != (Trouble{}) {
		t.Errorf("trouble %+v", got)
	}
}

func TestSinglePodsThatEndCauseNoPause(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-91"), warmPod("a-92"), with(warmPod("a-93"), unready)})
	s.step(PodSeen{with(warmPod("a-93"), finished)})
	none[CreatePod](s)
	s.step(Claim{Token: 1, Pool: poolA})
	one[CreatePod](s) // in place of the claimed one
	s.pass(pools.FirstEndPause)
	one[CreatePod](s)
}

func TestPodsAlreadyReplacedAreNotHeldUpAgain(t *testing.T) {
	for name, ends := range map[string][]Event{
		"ended":   {PodSeen{with(warmPod("a-91"), finished)}, PodGone{key("a-91")}},
		"deleted": {PodSeen{with(warmPod("a-91"), func(p *Pod) { unready(p); p.Deleting = true })}, PodGone{key("a-91")}},
		"gone":    {PodGone{key("a-91")}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-91"), unready)})
			s.step(NodeSeen{Name: "n2", Usable: true})
			s.step(NodeSeen{Name: "n1"}) // the pod is not counted on any more
			instead := one[CreatePod](s).Name
			for _, ev := range ends {
				s.step(ev)
			}
			if got := s.trouble(); got != (Trouble{}) {
				t.Errorf("trouble %+v", got)
			}
			// What stands in for it is claimed, and replaced at once.
			s.step(PodSeen{with(warmPod(instead), func(p *Pod) { p.Node = "n2" })})
			s.step(Claim{Token: 1, Pool: poolA})
			one[CreatePod](s)
		})
	}
}

func TestSandboxesThatEndSoonCauseNoPause(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(PodSeen{warmPod(one[CreatePod](s).Name)})
	for range 5 {
		s.step(Claim{Token: 1, Pool: poolA})
		given := one[Claimed](s).Sandbox
		next := one[CreatePod](s).Name
		s.step(PodSeen{with(warmPod(given.Pod.Name), finished)})
		s.step(PodGone{given.Pod})
		none[CreatePod](s)
		s.step(PodSeen{warmPod(next)})
	}
	if got := s.trouble(); got != (Trouble{}) {
		t.Errorf("trouble %+v", got)
	}
}

func TestDeletedPodsCountAsEarlyBeforeReady(t *testing.T) {
	deleted := func(p *Pod) { p.Deleting = true }
	for name, tt := range map[string]struct {
		was  func(*Pod)
		ev   Event
		made int
	}{
		"warm, deleted":      {func(*Pod) {}, PodSeen{with(warmPod("a-9"), deleted)}, 1},
		"warm, gone":         {func(*Pod) {}, PodGone{key("a-9")}, 1},
		"not ready, deleted": {unready, PodSeen{with(warmPod("a-9"), func(p *Pod) { unready(p); deleted(p) })}, 0},
		"not ready, gone":    {unready, PodGone{key("a-9")}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-9"), tt.was)})
			s.step(tt.ev)
			if made := len(of[CreatePod](s.effects)); made != tt.made {
				t.Errorf("%d made, expected %d", made, tt.made)
			}
			s.pass(pools.FirstEndPause)
			if made := len(of[CreatePod](s.effects)); made != 1-tt.made {
				t.Errorf("%d made a second later", made)
			}
		})
	}
}

func TestCountsNameOnePodThatIsStuck(t *testing.T) {
	s := newSim(t)
	stuck := func(p *Pod) { p.Ready, p.Reason, p.Why = false, PodImagePull, "container sandbox: ImagePullBackOff" }
	s.recover([]Pool{specA(3)}, []Pod{with(warmPod("a-1"), unready), with(warmPod("a-2"), stuck), with(warmPod("a-3"), stuck)})
	if counts, _ := s.core.View().Counts(poolA); counts.Stuck != (Stuck{Reason: PodImagePull, Pod: "a-2", Why: "container sandbox: ImagePullBackOff", Pods: 2}) {
		t.Errorf("stuck %+v", counts.Stuck)
	}
	for range 2 {
		s.step(PodSeen{warmPod("a-2")})
		s.step(PodSeen{warmPod("a-3")})
	}
	if counts, _ := s.core.View().Counts(poolA); counts.Stuck != (Stuck{}) {
		t.Errorf("stuck %+v", counts.Stuck)
	}
}
