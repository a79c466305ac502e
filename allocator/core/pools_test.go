package core

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
)

// ---- ports

// opens is the spec with other ports.
func opens(p Pool, defaultPort uint16, ports ...uint16) Pool {
	p.DefaultPort, p.Ports = defaultPort, ports
	return p
}

// ported requires that s has these ports.
func ported(t *testing.T, s Sandbox, defaultPort uint16, ports ...uint16) {
	t.Helper()
	if s.DefaultPort != defaultPort || !slices.Equal(s.Ports, ports) {
		t.Errorf("%s has default port %d and ports %v, expected %d and %v", s.ID, s.DefaultPort, s.Ports, defaultPort, ports)
	}
}

func TestChangedPortsReachSandboxesAndRouters(t *testing.T) {
	s := newSim(t)
	b := Pool{Key: PoolKey{Namespace: "ns", Name: "b"}, Template: "t1", DefaultPort: 1}
	inB := with(warmPod("b-9"), func(p *Pod) { p.Pool = "b" })
	s.recover([]Pool{opens(specA(5), 80, 80), b}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4"), inB}, on("b-9", "in-b"))
	s.join("r1", 1)
	s.join("r2", 8)
	s.join("left", 9)
	running, releasing, released := s.claim(), s.claim(), s.claim()
	ported(t, running, 80, 80)
	s.release(released.ID)
	s.slow = true
	s.step(Release{Scope: everyTeam, ID: releasing.ID, Reason: fact.ReasonKilled})
	s.step(Claim{Token: 7, Pool: poolA, Wait: wait})
	s.join("r2", 2)
	s.join("left", 3)
	s.step(SessionLeft{Session: "left", Stream: 3})

	spec := opens(specA(5), 8080, 22, 8080)
	s.step(PoolSeen{spec})
	type answered struct {
		stream, sequence uint64
		id               string
	}
	var got []answered
	for _, r := range of[SendRoute](s.effects) {
		ported(t, r.Sandbox, 8080, 22, 8080)
		got = append(got, answered{r.Stream, r.Sequence, r.Sandbox.ID})
	}
	slices.SortFunc(got, func(a, b answered) int {
		return cmp.Or(cmp.Compare(a.stream, b.stream), cmp.Compare(a.sequence, b.sequence))
	})
	if want := []answered{{1, 6, running.ID}, {1, 7, releasing.ID}, {2, 2, running.ID}, {2, 3, releasing.ID}}; !slices.Equal(got, want) {
		t.Errorf("sent %+v, expected %+v", got, want)
	}
	none[WriteObject](s) // ports are the pool's, and not on record
	none[SendSnapshot](s)

	// Later messages say the same.
	s.step(Resolve{Session: "r1", Stream: 1, ID: running.ID})
	ported(t, *one[SendResolved](s).Sandbox, 8080, 22, 8080)
	s.written()
	s.written()
	ported(t, one[Claimed](s).Sandbox, 8080, 22, 8080)
	for _, r := range of[SendRoute](s.effects) {
		ported(t, r.Sandbox, 8080, 22, 8080)
	}
	s.slow = false
	s.join("r3", 4)
	s.step(SessionJoined{Session: "r3", Stream: 5})
	for _, r := range one[SendSnapshot](s).Routes {
		if r.ID == "in-b" {
			ported(t, r, 1)
		} else {
			ported(t, r, 8080, 22, 8080)
		}
	}

	// Pools are seen whenever their status is written: that says nothing new.
	for range 2 {
		s.step(PoolSeen{changed(spec, func(p *Pool) { p.Warm, p.Ports = 4, slices.Clone(p.Ports) })})
		none[SendRoute](s)
	}
	// Each of the two alone is a change, to all ports too.
	for _, ports := range [][]uint16{{8080}, {443, 8080}, nil} {
		if s.step(PoolSeen{opens(spec, 8080, ports...)}); len(of[SendRoute](s.effects)) == 0 {
			t.Errorf("a change to ports %v was not sent", ports)
		}
	}
	if s.step(PoolSeen{opens(spec, 443)}); len(of[SendRoute](s.effects)) == 0 {
		t.Error("a change of the default port was not sent")
	}
}

func TestRecoveredSandboxHasCurrentPortsOfItsPool(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{opens(specA(0), 443, 443, 8080)}, []Pod{warmPod("a-1")}, on("a-1", "x"))
	s.step(SessionJoined{Session: "r", Stream: 1})
	ported(t, one[SendSnapshot](s).Routes[0], 443, 443, 8080)
}

func TestRecoveredSandboxWithoutPoolKeepsItsPorts(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.slow = true // its release is under way for long
	f := on("a-1", "x")
	sandboxOf(f).DefaultPort, sandboxOf(f).Ports = 443, []uint16{443}
	s.recover(nil, []Pod{warmPod("a-1")}, f, Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}})
	s.step(SessionJoined{Session: "r", Stream: 1})
	ported(t, one[SendSnapshot](s).Routes[0], 443, 443)
}

// ---- pools

func TestPoolIsFilledToWhatItAsksFor(t *testing.T) {
	claimed := warmPod("a-9")
	for _, tt := range []struct {
		name         string
		warm, most   int
		pods         []Pod
		made, undone int
	}{
		{"empty", 3, 0, nil, 3, 0},
		{"bounded", 3, 2, nil, 2, 0},
		{"bounded by claimed pods", 3, 3, []Pod{claimed, warmPod("a-2")}, 1, 0},
		{"bound lowered", 3, 2, []Pod{claimed, warmPod("a-2"), warmPod("a-3")}, 0, 1},
		{"too many", 1, 0, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")}, 0, 2},
		{"older template, room beside it", 1, 0, []Pod{with(warmPod("a-1"), old)}, 1, 0},
		{"older template, replaced", 1, 0, []Pod{with(warmPod("a-1"), old), warmPod("a-2")}, 0, 1},
		{"older template, not ready", 1, 0, []Pod{with(warmPod("a-1"), func(p *Pod) { old(p); p.Ready = false })}, 1, 1},
		{"older template, no room beside it", 2, 2, []Pod{with(warmPod("a-1"), old), with(warmPod("a-2"), old)}, 0, 1},
		{"older template, one makes room", 2, 2, []Pod{with(warmPod("a-1"), old), with(warmPod("a-2"), func(p *Pod) { p.Ready = false })}, 0, 0},
		{"finished", 1, 0, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })}, 1, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSim(t)
			p := specA(tt.warm)
			p.MaxPods = tt.most
			s.recover([]Pool{p}, tt.pods, facts(tt.pods)...)
			if made, undone := len(of[CreatePod](s.effects)), len(of[DeletePod](s.effects)); made != tt.made || undone != tt.undone {
				t.Errorf("%d made and %d deleted, expected %d and %d: %+v", made, undone, tt.made, tt.undone, s.effects)
			}
		})
	}
}

// facts are those of the pods that are used: a-9 is claimed, a-8 released.
func facts(pods []Pod) (all []Fact) {
	for _, p := range pods {
		switch p.Key.Name {
		case "a-9":
			all = append(all, on("a-9", "x"))
		case "a-8":
			all = append(all, released("a-8", "y"))
		}
	}
	return all
}

func old(p *Pod) { p.Template = "t0" }

func TestTemplateChangeReplacesPodsWithoutEmptyingThePool(t *testing.T) {
	for _, most := range []int{0, 2} {
		t.Run(fmt.Sprintf("at most %d", most), func(t *testing.T) {
			s := newSim(t)
			p := specA(2)
			p.MaxPods = most
			s.recover([]Pool{p}, []Pod{warmPod("a-1"), warmPod("a-2")})
			p.Template = "t2"
			queue := slices.Clone(s.step(PoolSeen{p}))
			least := 2
			for n := 0; len(queue) > 0; n++ {
				if n > 50 {
					t.Fatal("no end")
				}
				e := queue[0]
				queue = queue[1:]
				var ev Event
				switch e := e.(type) {
				case CreatePod:
					made := warmPod(e.Name)
					made.Template = "t2"
					ev = PodSeen{made}
				case DeletePod:
					ev = PodGone{e.Pod}
				default:
					continue
				}
				queue = append(queue, s.step(ev)...)
				counts, _ := s.core.View().Counts(poolA)
				least = min(least, counts.Warm)
			}
			if want := map[int]int{0: 2, 2: 1}[most]; least < want {
				t.Errorf("%d warm pods at the least, expected %d", least, want)
			}
			for q := range s.core.pools.Find(poolA).In(pods.All...) {
				if q.Seen().Template != "t2" || q.State() != pods.Warm {
					t.Errorf("left: %+v", q.Seen())
				}
			}
		})
	}
}

func notAllowed(p *Pool) { p.Refused = "it may not" }

func TestRefusedTemplateIsWithheld(t *testing.T) {
	unready := func(p *Pod) { p.Ready = false }
	for _, tt := range []struct {
		name       string
		warm, most int
		pods       []Pod
		deleted    []string
	}{
		{"none are made", 3, 0, nil, nil},
		{"warm ones made from it", 2, 0, []Pod{warmPod("a-1"), warmPod("a-2")}, []string{"a-1", "a-2"}},
		{"ones made from it that are not ready", 2, 0, []Pod{with(warmPod("a-1"), unready)}, []string{"a-1"}},
		{"warm ones of an earlier template stay", 2, 0, []Pod{with(warmPod("a-1"), old), warmPod("a-2"), with(warmPod("a-3"), old)}, []string{"a-2"}},
		{"none of an earlier template becomes ready", 2, 0, []Pod{with(warmPod("a-1"), func(p *Pod) { old(p); unready(p) })}, []string{"a-1"}},
		{"too many of an earlier template", 1, 0, []Pod{with(warmPod("a-1"), old), with(warmPod("a-2"), old), with(warmPod("a-3"), old)}, []string{"a-1", "a-2"}},
		{"bound lowered", 3, 2, []Pod{warmPod("a-9"), with(warmPod("a-2"), old), with(warmPod("a-3"), old)}, []string{"a-2"}},
		{"claimed and released ones are untouched", 1, 0, []Pod{with(warmPod("a-9"), old), with(warmPod("a-8"), old)}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSim(t)
			p := changed(specA(tt.warm), notAllowed)
			p.MaxPods = tt.most
			s.recover([]Pool{p}, tt.pods, facts(tt.pods)...)
			none[CreatePod](s)
			none[SandboxReleased](s)
			var deleted []string
			for _, d := range of[DeletePod](s.effects) {
				deleted = append(deleted, d.Pod.Name)
			}
			slices.Sort(deleted)
			if !slices.Equal(deleted, tt.deleted) {
				t.Errorf("deleted %v, expected %v", deleted, tt.deleted)
			}
		})
	}
}

func TestRefusedTemplateKeepsOldWarmPods(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	bad := changed(specA(2), func(p *Pool) { p.Template, p.Refused = "t2", "it may not" })
	s.step(PoolSeen{bad})
	if len(s.effects) > 0 {
		t.Errorf("unexpected %+v", s.effects)
	}
	s.claim()
	s.step(PodSeen{with(warmPod("a-3"), func(p *Pod) { p.Template = "t2" })}) // was being made meanwhile
	if d := one[DeletePod](s); d.Pod != key("a-3") {
		t.Errorf("deleted %+v", d)
	}
	s.pass(time.Minute)
	none[CreatePod](s)
	s.step(Claim{Token: 5, Pool: poolA})
	one[Claimed](s)
	s.step(Claim{Token: 6, Pool: poolA})
	one[ClaimRefused](s)
	none[CreatePod](s)

	s.step(PoolSeen{changed(bad, func(p *Pool) { p.Template, p.Refused = "t3", "" })})
	if made := of[CreatePod](s.effects); len(made) != 2 {
		t.Errorf("made %+v", made)
	}
}

// The shell refuses as well: it may have seen the template before the core has.
func TestRefusedTemplateIsNotRetriedUntilItChanges(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	name := one[CreatePod](s).Name
	s.step(CreateFailed{Pool: poolA, Name: name})
	bad := changed(specA(1), notAllowed)
	s.step(PoolSeen{bad})
	s.pass(pools.MaxRetry)
	none[CreatePod](s)
	s.step(PoolSeen{specA(1)})
	if again := one[CreatePod](s); again.Name != name {
		t.Errorf("made %+v, expected %s", again, name)
	}
}

func TestPoolWithRefusedTemplateIsDrained(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), notAllowed)}, []Pod{with(warmPod("a-1"), old)})
	none[DeletePod](s)
	s.step(PoolSeen{changed(specA(1), func(p *Pool) { p.Refused, p.Deleting = "it may not", true })})
	one[DeletePod](s)
	s.step(PodGone{key("a-1")})
	one[PoolDrained](s)
}

func TestScalingDownIgnoresPodsUnderCreation(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(PoolSeen{specA(1)})
	if d := of[DeletePod](s.effects); len(d) != 1 || d[0].Pod != key("a-1") {
		t.Errorf("deleted %+v, expected the oldest only", d)
	}
}

func TestFailedCreationIsRetriedUnderItsName(t *testing.T) {
	s := newSim(t)
	p := specA(3)
	p.MaxPods = 3
	s.recover([]Pool{p}, nil)
	var names []string
	for _, c := range of[CreatePod](s.effects) {
		names = append(names, c.Name)
	}
	if len(names) != 3 {
		t.Fatalf("made %v", names)
	}
	for _, name := range names { // side by side: that is one failure
		s.step(CreateFailed{Pool: poolA, Name: name})
		none[CreatePod](s)
	}
	for pause := pools.FirstRetry; pause <= 8*pools.FirstRetry; pause *= 2 {
		s.pass(pause - time.Millisecond)
		none[CreatePod](s)
		s.pass(time.Millisecond)
		again := one[CreatePod](s).Name // alone, until one has succeeded
		if again != names[0] {
			t.Fatalf("tried %v again, expected %v", again, names[0])
		}
		names = append(names[1:], again)
		s.step(CreateFailed{Pool: poolA, Name: again})
	}
	s.pass(pools.MaxRetry)
	s.step(PodSeen{warmPod(one[CreatePod](s).Name)})
	if again := of[CreatePod](s.effects); len(again) != 2 || again[0].Name != names[1] || again[1].Name != names[2] {
		t.Errorf("tried %v again, expected %v", again, names[1:])
	}
}

func TestSeenPodOverridesItsFailedCreation(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	name := one[CreatePod](s).Name
	s.step(PodSeen{with(warmPod(name), func(p *Pod) { p.Ready = false })})
	s.step(CreateFailed{Pool: poolA, Name: name})
	s.pass(time.Minute)
	none[CreatePod](s)
	s.step(PoolSeen{specA(2)})
	if again := one[CreatePod](s).Name; again == name {
		t.Errorf("%s is made twice", again)
	}
	s.step(CreateFailed{Pool: PoolKey{Namespace: "ns", Name: "other"}, Name: "x"})
}

func TestPoolBeingDeletedIsDrainedThroughItsFences(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	sb := s.claim() // one more is being made
	p := specA(2)
	p.Deleting = true
	s.step(PoolSeen{p})
	if d := one[DeletePod](s); d.Pod != key("a-2") {
		t.Errorf("deleted %+v", d)
	}
	one[SandboxReleased](s)
	s.step(PodGone{key("a-2")})
	s.ack("r", 1, 3)
	s.pass(window)
	one[DeletePod](s)
	s.step(PodGone{sb.Pod})
	none[PoolDrained](s) // a creation is still open
	s.step(CreateFailed{Pool: poolA, Name: "a-1"})
	one[PoolDrained](s)
	s.step(PoolSeen{p})
	none[PoolDrained](s)
	s.step(PoolGone{Key: poolA})
	if _, known := s.core.View().Counts(poolA); known {
		t.Error("the pool is still known")
	}
	s.step(PoolSeen{specA(1)}) // another one of that name
	one[CreatePod](s)
}

// Invariant: I6
func TestPodsOfUnknownPoolAreLeftAlone(t *testing.T) {
	s := newSim(t)
	s.recover(nil, nil)
	s.step(PodSeen{warmPod("a-1")})
	if len(s.effects) > 0 {
		t.Errorf("unexpected %+v", s.effects)
	}
	s.step(PodGone{key("a-1")})
	if s.core.pools.Len() > 0 {
		t.Error("a pool without an object and without pods is kept")
	}
}

func TestPodsOfDeletedPoolAreDeleted(t *testing.T) {
	s := newSim(t)
	s.recover(nil, []Pod{warmPod("a-1"), warmPod("a-9")}, facts([]Pod{warmPod("a-9")})...)
	one[DeletePod](s)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonPoolDeleted {
		t.Errorf("release %+v", r)
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

func TestNameOfAForeignPodIsNotUsedAgain(t *testing.T) {
	s := newSim(t)
	s.slowly()
	s.recover([]Pool{specA(1)}, nil)
	name := one[CreatePod](s).Name
	s.step(CreateFailed{Pool: poolA, Name: name, Taken: true})
	if again := one[CreatePod](s).Name; again == name {
		t.Errorf("%s is tried again", name)
	}
}
