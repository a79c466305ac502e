package core

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// ---- leaders that follow each other

// Invariant: I6
func TestRecoveryChangesNothingInASettledPool(t *testing.T) {
	s := newSim(t)
	effects := s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), with(warmPod("a-2"), func(p *Pod) { p.Ready = false })})
	if len(effects) > 0 {
		t.Errorf("unexpected %+v", effects)
	}
}

func TestPoolWithSandboxIsNotDrainedAtRecovery(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Deleting = true })}, []Pod{warmPod("a-1")}, on("a-1", "x"))
	none[PoolDrained](s)
	if r := one[SandboxReleased](s); r.Sandbox.ID != "x" || r.Sandbox.Reason != fact.ReasonPoolDeleted {
		t.Errorf("release %+v", r)
	}
}

// What a leader finds in the journal, in the Sandbox object and of the pod, and
// what it makes of it.
func TestRecoveryFindsEverySandboxInItsState(t *testing.T) {
	journaled := func(phase Phase, counter uint64) []Fact {
		f := on("a-1", "x")
		if phase == Released {
			f = released("a-1", "x")
		}
		f.Revision.Counter, sandboxOf(f).Revision.Counter, sandboxOf(f).Phase = counter, counter, phase
		return []Fact{f}
	}
	object := func(phase Phase, counter uint64) []Sandbox {
		return []Sandbox{*sandboxOf(journaled(phase, counter)[0])}
	}
	there := []Pod{warmPod("a-1")}
	seen := func(change func(*Pod)) []Pod { return []Pod{with(warmPod("a-1"), change)} }
	for _, tt := range []struct {
		name    string
		pods    []Pod
		facts   []Fact
		objects []Sandbox
		want    Phase
		reason  string // of the release that recovery finds out about
		record  bool   // a state is to be recorded
	}{
		{"in the journal only", there, journaled(Running, 5), nil, Running, "", true},
		{"in the object only", there, nil, object(Running, 5), Running, "", false},
		{"in both", there, journaled(Running, 5), object(Running, 5), Running, "", false},
		{"the journal is ahead", there, journaled(Released, 6), object(Running, 5), Released, "", true},
		{"the object is ahead", there, journaled(Running, 5), object(Released, 6), Released, "", false},
		{"ended, but its pod is still there", there, nil, object(Ended, 7), Released, "", true},
		{"its labels say that it was used", seen(func(p *Pod) { p.Used = true }), journaled(Running, 5), nil, Running, "", true},
		{"being deleted", seen(func(p *Pod) { p.Deleting = true }), journaled(Running, 5), nil, Released, fact.ReasonPodDeleted, true},
		{"finished", seen(func(p *Pod) { p.Finished = true }), nil, object(Running, 5), Released, fact.ReasonFailed, true},
		{"moved", seen(func(p *Pod) { p.IP = netip.MustParseAddr("10.9.9.9") }), nil, object(Running, 5), Released, fact.ReasonPodMoved, true},
		{"replaced by another of its name", seen(func(p *Pod) { p.Key.UID = "other" }), journaled(Running, 5), nil, Released, fact.ReasonPodDeleted, true},
		{"gone", nil, journaled(Running, 5), nil, Released, fact.ReasonPodDeleted, true},
		{"gone, while it was starting", nil, journaled(Starting, 5), nil, Released, fact.ReasonPodDeleted, true},
		{"gone, released before", nil, journaled(Released, 6), nil, Released, "", true},
		{"gone, ended before", nil, nil, object(Ended, 7), Ended, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			s.recoverState(State{Pools: []Pool{specA(0)}, Nodes: []string{"n1"}, Pods: tt.pods, Facts: append(tt.facts, Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}}), Objects: tt.objects})
			sb, ok := s.core.View().Sandbox("x")
			if !ok || sb.Phase != tt.want {
				t.Fatalf("found %+v %v, expected phase %d", sb, ok, tt.want)
			}
			if len(tt.pods) > 0 && tt.pods[0].Key == key("a-1") {
				none[DeletePod](s) // not before the fence
			}
			none[SandboxReady](s) // that was another leader's to say
			releases := of[SandboxReleased](s.effects)
			if got := len(releases) == 1; got != (tt.reason != "") || got && releases[0].Sandbox.Reason != tt.reason {
				t.Errorf("released %+v, expected %q", releases, tt.reason)
			}
			if got := len(of[WriteObject](s.effects)) > 0; got != tt.record {
				t.Errorf("recorded: %v, expected %v", got, tt.record)
			}
			s.step(Claim{Token: 1, Pool: poolA})
			one[ClaimRefused](s) // whatever it is, it is not warm
			if tt.want != Released || len(tt.pods) > 0 && tt.pods[0].Key == key("a-1") {
				return
			}
			s.pass(lease + maxStale) // the router of the earlier term may still know it
			none[WriteObject](s)
			s.pass(maxStale/100 + time.Second)
			if s.pass(window); one[WriteObject](s).Sandbox.Phase != Ended {
				t.Errorf("recorded %+v", s.effects)
			}
		})
	}
}

// Invariant: I7
func TestRecordsThatContradictEachOtherStopTheLeader(t *testing.T) {
	s := newSimAt(t, 2, start)
	_, err := s.core.Recover(State{Facts: []Fact{on("a-1", "x"), on("a-1", "y")}})
	if err == nil || !strings.Contains(err.Error(), "both on record with pod a-1") {
		t.Errorf("error %v", err)
	}
}

// One of the two records is not of our making, in any order. A router may have received
// the route to either pod.
// Invariant: I7
func TestConflictingPodsOfOneSandboxAreBothRefused(t *testing.T) {
	record := func(f Fact, counter uint64, phase Phase) (Fact, Sandbox) {
		f.Revision.Counter, sandboxOf(f).Revision.Counter, sandboxOf(f).Phase = counter, counter, phase
		return f, *sandboxOf(f)
	}
	for _, tt := range []struct {
		name           string
		fact, object   Fact
		inFact, inFile uint64 // their counters
		// gone is a pod that is not there.
		gone string
		// released: the sandbox was released before.
		released bool
	}{
		{name: "the journal is ahead", fact: on("a-1", "x"), object: on("a-2", "x"), inFact: 6, inFile: 5},
		{name: "the object is ahead", fact: on("a-1", "x"), object: on("a-2", "x"), inFact: 5, inFile: 6},
		{name: "neither is", fact: on("a-1", "x"), object: on("a-2", "x"), inFact: 5, inFile: 5},
		{name: "the journal's pod is gone", fact: on("a-1", "x"), object: on("a-2", "x"), inFact: 5, inFile: 6, gone: "a-1"},
		{name: "the object's pod is gone", fact: on("a-1", "x"), object: on("a-2", "x"), inFact: 6, inFile: 5, gone: "a-1"},
		{name: "one is released", fact: released("a-1", "x"), object: on("a-2", "x"), inFact: 6, inFile: 5, released: true},
		{name: "the other is released", fact: on("a-1", "x"), object: released("a-2", "x"), inFact: 5, inFile: 6, released: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			inJournal, _ := record(tt.fact, tt.inFact, sandboxOf(tt.fact).Phase)
			_, object := record(tt.object, tt.inFile, sandboxOf(tt.object).Phase)
			var pods []Pod
			for _, name := range []string{"a-1", "a-2"} {
				if name != tt.gone {
					pods = append(pods, warmPod(name))
				}
			}
			s.recoverState(State{
				Pools: []Pool{specA(2)}, Nodes: []string{"n1"}, Pods: pods,
				Facts: []Fact{inJournal, {Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}}}, Objects: []Sandbox{object},
			})
			one[Repaired](s)
			none[DeletePod](s)
			if !tt.released {
				if r := one[SandboxReleased](s); r.Sandbox.ID != "x" || r.Sandbox.Reason != fact.ReasonDuplicate {
					t.Errorf("released %+v", r)
				}
			}
			s.join("r", 1)
			if snapshot := one[SendSnapshot](s); len(snapshot.Routes) > 0 {
				t.Errorf("sent %+v", snapshot.Routes)
			}
			s.step(Resolve{Stream: 1, ID: "x"})
			if r := one[SendResolved](s); !r.Gone {
				t.Errorf("resolved %+v", r)
			}
			// Other pods may come to their addresses.
			s.step(PodSeen{with(warmPod("a-8"), func(p *Pod) { p.IP = warmPod("a-1").IP })})
			s.step(PodSeen{with(warmPod("a-9"), func(p *Pod) { p.IP = warmPod("a-2").IP })})
			s.step(Claim{Token: 1, Pool: poolA})
			one[ClaimRefused](s)
			if deleted := s.pass(maxStale / 2); len(of[DeletePod](deleted)) > 0 {
				t.Fatalf("deleted before the router has acknowledged: %+v", deleted)
			}
			s.ack("r", 1, 1)
			deleted := map[PodKey]bool{}
			for _, d := range of[DeletePod](s.pass(window)) {
				deleted[d.Pod] = true
			}
			for _, p := range pods {
				if !deleted[p.Key] {
					t.Errorf("%s is not deleted", p.Key.Name)
				}
			}
		})
	}
}

// The records of the sandbox name one pod from then on. The leaders that follow wait for
// the fence of the other one all the same.
// Invariant: I7
func TestNextLeadersKeepConflictingPodUntilItsFence(t *testing.T) {
	first, second := warmPod("a-1"), warmPod("a-2")
	for _, tt := range []struct {
		name string
		// object is where a user has written that x is, pods what is there.
		object Pod
		pods   []Pod
	}{
		{"another pod", second, []Pod{first, second}},
		{"a pod that is not there", second, []Pod{first}},
		{"another address", with(first, func(p *Pod) { p.IP = second.IP }), []Pod{first}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inJournal := on("a-1", "x")
			inJournal.Revision.Counter, sandboxOf(inJournal).Revision.Counter = 5, 5
			object := *sandboxOf(inJournal)
			object.Pod, object.IP = tt.object.Key, tt.object.IP
			router := Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}}

			facts, records, pods := []Fact{inJournal, router}, []Sandbox{object}, tt.pods
			var s *sim
			noneSettled := func(effects []Effect) {
				for _, e := range of[Settle](effects) {
					if _, ok := e.Thing.(SandboxID); !ok {
						t.Fatalf("settled while a router may know a route: %+v", e)
					}
				}
			}
			for term := uint64(2); term < 5; term++ {
				s = newSimAt(t, term, start)
				s.recoverState(State{Pools: []Pool{specA(0)}, Pods: pods, Nodes: []string{"n1"}, Facts: facts, Objects: records})
				none[DeletePod](s)
				// What it leaves behind.
				facts = []Fact{router}
				for _, w := range of[Write](s.effects) {
					facts = append(facts, w.Facts...)
				}
				noneSettled(s.effects)
				for _, r := range of[WriteObject](s.effects) {
					records = []Sandbox{r.Sandbox}
				}
			}
			s.step(PoolSeen{specA(3)})
			for _, p := range pods {
				s.step(PodGone{p.Key})
			}
			for name, at := range map[string]Pod{"a-8": first, "a-9": second} {
				s.step(PodSeen{with(warmPod(name), func(p *Pod) { p.IP = at.IP })})
			}
			s.step(Claim{Token: 1, Pool: poolA})
			one[ClaimRefused](s)
			noneSettled(s.pass(maxStale / 2))
			s.pass(lease + maxStale) // r has expired
			settled := false
			for _, e := range of[Settle](s.pass(window)) {
				settled = settled || e.Thing == first.Key
			}
			if !settled {
				t.Error("the intent to delete the pod stays in the journal")
			}
			s.step(PodSeen{warmPod("a-7")})
			s.step(Claim{Token: 2, Pool: poolA})
			one[Claimed](s)
		})
	}
}

// Invariant: I7
func TestOrphanIsDeletedAndNeverHandedOut(t *testing.T) {
	s := newSim(t)
	used := with(warmPod("a-1"), func(p *Pod) { p.Used = true })
	s.recover([]Pool{specA(0)}, []Pod{used})
	one[Repaired](s)
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
	// Routers of an earlier term may know a route to it.
	if after := s.deletedAfter(key("a-1"), never); after < lease+maxStale+window {
		t.Errorf("deleted after %v", after)
	}
}

// Invariant: I5, I9
func TestIdlePodIsDeletedOnlyWhenDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(PoolSeen{specA(0)})
	facts := one[Write](s).Facts
	if len(facts) != 1 || sandboxOf(facts[0]) != nil || retirementOf(facts[0]).Pod != key("a-1") {
		t.Errorf("written %+v", facts)
	}
	none[DeletePod](s)
	s.step(PoolSeen{specA(1)}) // too late: the intent is final
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
	s.written()
	one[DeletePod](s)
	s.step(PodGone{key("a-1")})
	if st := one[Settle](s); st.Thing != key("a-1") {
		t.Errorf("settled %+v", st)
	}
}

func TestIntentToDeleteHoldsUnderTheNextLeader(t *testing.T) {
	s := newSimAt(t, 2, start)
	intent := Fact{Revision: Revision{Term: 1, Counter: 3}, Subject: &RetirementFact{Pod: key("a-1")}}
	late := Fact{Revision: Revision{Term: 1, Counter: 4}, Subject: &RetirementFact{Pod: key("a-2")}}
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, intent, late)
	if d := one[DeletePod](s); d.Pod != key("a-1") {
		t.Errorf("deleted %+v", d)
	}
	if st := one[Settle](s); st.Thing != key("a-2") || st.Revision != late.Revision {
		t.Errorf("settled %+v", st) // it is gone
	}
	s.step(Claim{Token: 1, Pool: poolA})
	one[ClaimRefused](s)
}

func TestIntentOfVanishedPodIsSettledAfterItsWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.slow = true
	s.step(PoolSeen{specA(0)})
	s.step(PodGone{key("a-1")})
	none[Settle](s)
	s.written()
	one[Settle](s)
	none[DeletePod](s)
}

// Invariant: I3
func TestNextLeaderWaitsForRoutersOfTheLast(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(*sim)
		want    time.Duration // until the pod is deleted
	}{
		"silent":     {func(*sim) {}, lease + maxStale + maxStale/100 - 10*time.Second + window},
		"goodbye":    {func(s *sim) { s.step(SessionGoodbye{Session: "r"}) }, window},
		"found dead": {func(s *sim) { s.step(SessionDead{Session: "unheard of"}); s.step(SessionDead{Session: "r"}) }, window},
		"rejoins":    {func(s *sim) { s.join("r", 1); s.ack("r", 1, 1) }, window},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			left := Fact{Revision: Revision{Term: 1, Counter: 8}, Subject: &SessionFact{ID: "left", Left: true}}
			s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"), Fact{Revision: Revision{Term: 1, Counter: 7}, Subject: &SessionFact{ID: "r"}}, left)
			none[Settle](s)
			if list := s.core.routers.ends; len(list) != 1 || list[0].session != "left" || list[0].revision != left.Revision {
				t.Errorf("left: %+v", list)
			}
			s.pass(10 * time.Second)
			s.release("x")
			c.happens(s)
			if after := s.deletedAfter(key("a-1"), never); after < c.want || after > c.want+time.Second {
				t.Errorf("deleted after %v, expected %v", after, c.want)
			}
		})
	}
}

func TestNewSandboxIsNotFencedAgainstEarlierRouters(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.release(sb.ID)
	if after := s.deletedAfter(sb.Pod, never); after != window {
		t.Errorf("deleted after %v, expected %v", after, window)
	}
}

func TestOldObservationDoesNotFreeUsedPod(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	gone := s.step(PodGone{sb.Pod})
	s.record(gone)
	s.step(PodSeen{warmPod("a-1")}) // the watch lags behind what an audit found out
	s.step(Claim{Token: 2, Pool: poolA})
	one[ClaimRefused](s)
	// It is not left over either: the fence was complete, or goes on.
	s.record(s.step(PodSeen{warmPod("a-1")}))
	if after := s.deletedAfter(sb.Pod, never); after > window {
		t.Errorf("deleted after %v", after)
	}
}

func TestPodThatReturnsAfterItsFenceIsDeleted(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.record(s.step(PodGone{sb.Pod}))
	s.pass(window)
	s.step(PodSeen{warmPod("a-1")})
	if d := one[DeletePod](s); d.Pod != sb.Pod {
		t.Errorf("deleted %+v", d)
	}
}

func TestRecordsOfEndedSandboxesAreBounded(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded, s.cfg.KeepEndedFor = 1, time.Hour
	s.restart()
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	first, second, third := s.claim(), s.claim(), s.claim()
	s.step(PodGone{first.Pod})
	s.step(PodGone{second.Pod})
	var last []Effect
	for _, r := range of[WriteObject](s.pass(window)) {
		if r.Sandbox.ID == first.ID {
			last = append(last, r)
		} else {
			s.record([]Effect{r})
		}
	}
	s.pass(time.Second)
	// The last state of the first one is not written: that would bring it back. The
	// second need not wait for it.
	if f := one[DeleteObject](s); f.ID != second.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.record(last)
	s.pass(time.Second)
	none[DeleteObject](s)
	s.step(PodGone{third.Pod})
	s.pass(window)
	if f := one[DeleteObject](s); f.ID != first.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.record(s.effects)
	s.pass(time.Hour)
	if f := one[DeleteObject](s); f.ID != third.ID {
		t.Errorf("forgotten %+v", f)
	}
	s.step(ObjectWritten{ID: third.ID, Revision: third.Revision})
}

func TestRecordIsKeptUntilTheFenceIsComplete(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEndedFor = time.Second
	s.restart()
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.record(s.step(PodGone{sb.Pod}))
	s.pass(maxStale)
	none[DeleteObject](s)
	s.step(SessionGoodbye{Session: "r"})
	s.record(s.pass(window))
	s.pass(time.Second)
	one[DeleteObject](s)
}
