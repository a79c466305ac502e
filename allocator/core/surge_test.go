package core

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
)

// slowly begins with one creation at a time, as every pool does outside of the tests.
func (s *sim) slowly() { s.core.pools.SetStart(pools.MinWindow, unbounded) }

// unbounded is a surge that holds no test up.
const unbounded = 1 << 20

// names are those of the pods to be created.
func (s *sim) names() (all []string) {
	for _, c := range of[CreatePod](s.effects) {
		all = append(all, c.Name)
	}
	return all
}

func TestCreationsStartSlowlyAndDouble(t *testing.T) {
	s := newSim(t)
	s.slowly()
	s.recover([]Pool{specA(1000)}, nil)
	names := s.names()
	for _, want := range []int{1, 2, 4, 8, 16, 32, 64, 128, 128} {
		if len(names) != want {
			t.Fatalf("%d creations in a round, expected %d", len(names), want)
		}
		var next []string
		for _, name := range names {
			s.step(PodSeen{with(warmPod(name), func(p *Pod) { p.Ready, p.IP = false, netip.Addr{} })})
			next = append(next, s.names()...)
		}
		names = next
	}
}

func TestQuotaCostsOneCallForEachPause(t *testing.T) {
	s := newSim(t)
	s.slowly()
	s.recover([]Pool{specA(5000)}, nil)
	calls, names := 0, s.names()
	for range 600 { // a minute
		for _, name := range names {
			calls++
			s.step(CreateFailed{Pool: poolA, Name: name})
		}
		s.pass(100 * time.Millisecond)
		names = s.names()
	}
	if calls != 6 { // at 0, 1, 3, 7, 15 and 31 s
		t.Errorf("%d calls in a minute", calls)
	}
}

func TestMaxSurgeBoundsPodsThatStart(t *testing.T) {
	s := newSim(t)
	p := specA(10)
	p.MaxSurge = 3
	s.recover([]Pool{p}, nil)
	names := s.names()
	if len(names) != 3 {
		t.Fatalf("made %v", names)
	}
	for _, name := range names {
		s.step(PodSeen{with(warmPod(name), unready)})
		none[CreatePod](s) // created, and not ready
	}
	s.step(PodSeen{warmPod(names[0])})
	one[CreatePod](s)
}

// starting is a cluster whose pods take time to start. They share the cores, if there is a number of them.
type starting struct {
	*sim
	cores float64 // 0: enough for all
	work  time.Duration
	left  map[string]time.Duration // of the work, by pod
	made  int
	most  int // pods that were starting at one time
}

func newStarting(t *testing.T, cores float64, work time.Duration, p Pool) *starting {
	s := &starting{sim: newSim(t), cores: cores, work: work, left: map[string]time.Duration{}}
	s.unchecked = true
	s.core.pools.SetStart(pools.MinWindow, pools.FirstSurge)
	s.recover([]Pool{p}, nil)
	s.carryOut()
	return s
}

// carryOut does what the effects of the last step ask for, and what follows.
func (s *starting) carryOut() {
	for queue := s.effects; len(queue) > 0; queue = queue[1:] {
		switch e := queue[0].(type) {
		case CreatePod:
			s.made++
			s.left[e.Name] = s.work
			queue = append(queue, s.step(PodSeen{Pod{Key: key(e.Name), Pool: "a", Node: "n1", Template: "t1", CreatedAt: s.now.Wall}})...)
		case DeletePod:
			delete(s.left, e.Pod.Name)
			queue = append(queue, s.step(PodGone{e.Pod})...)
		}
	}
	s.most = max(s.most, len(s.left))
}

// run lets a tenth of a second pass.
func (s *starting) run() {
	const turn = 100 * time.Millisecond
	s.pass(turn)
	s.carryOut()
	done := turn
	if s.cores > 0 {
		done = min(turn, time.Duration(s.cores/float64(max(1, len(s.left)))*float64(turn)))
	}
	for _, name := range slices.Sorted(maps.Keys(s.left)) {
		if s.left[name] -= done; s.left[name] <= 0 {
			delete(s.left, name)
			n, _ := strconv.Atoi(strings.TrimPrefix(name, "a-"))
			s.step(PodSeen{Pod{Key: key(name), Pool: "a", Node: "n1", Template: "t1", Ready: true, IP: ipOf(n), CreatedAt: s.now.Wall}})
			s.carryOut()
		}
	}
}

func TestPodsThatStartAreBoundedByDefault(t *testing.T) {
	s := newStarting(t, 0, 4*time.Second, specA(4))
	for range 60 {
		s.run()
	}
	s.step(Claim{Token: 1, Pool: poolA, Count: 675, Wait: time.Second, Binding: Binding{Team: "t"}})
	s.carryOut()
	for range 50 {
		s.run()
	}
	if s.most > pools.FirstSurge {
		t.Errorf("%d pods were starting at one time", s.most)
	}
	if counts, _ := s.core.View().Counts(poolA); counts.Warm+counts.Pending > 4+pools.FirstSurge {
		t.Errorf("%d pods are kept for a claim that has gone", counts.Warm+counts.Pending-4)
	}
	for range 600 {
		s.run()
	}
	if counts, _ := s.core.View().Counts(poolA); counts.Warm+counts.Pending > 4 {
		t.Errorf("%d pods are kept a minute later", counts.Warm+counts.Pending-4)
	}
}

func TestPoolFillsFasterWhileNodesKeepUp(t *testing.T) {
	s := newStarting(t, 0, 4*time.Second, specA(300))
	began := s.now.Boot
	for s.core.View().AllCounts()[poolA].Warm < 300 && s.now.Boot-began < time.Hour {
		s.run()
	}
	took := s.now.Boot - began
	t.Logf("300 pods that take 4 s were warm after %v; %d were starting at one time", took, s.most)
	if took > 24*time.Second { // 10, 20, 40, 80 and 150 of them
		t.Errorf("300 pods that take 4 s were warm after %v", took)
	}
	for range 2 * int(pools.SurgeKept/time.Second) {
		s.pass(time.Second)
	}
	s.step(PoolSeen{specA(301)})
	if got := s.core.pools.Find(poolA).Surge(); got != pools.FirstSurge {
		t.Errorf("a later burst begins with %d", got)
	}
}

// Its pods take longer than two rounds of starts. The pods of a try have gone when the next one comes, but for some.
func TestRepeatedBatchGetsItsPodsAtLast(t *testing.T) {
	for _, count := range []int{25, 50} {
		s := newStarting(t, 0, 8*time.Second, specA(0))
		granted := false
		tries := 0
		for ; tries < 10 && !granted; tries++ {
			s.step(Claim{Token: uint64(tries + 1), Pool: poolA, Count: count, Wait: 10 * time.Second, Binding: Binding{Team: "t"}})
			s.carryOut()
			for range 110 { // of 100 ms
				s.run()
				granted = granted || len(of[BatchClaimed](s.effects)) > 0
			}
		}
		t.Logf("a batch of %d is granted at try %d, with %d pods made", count, tries, s.made)
		if !granted {
			t.Errorf("a batch of %d is never granted", count)
		}
	}
}

func TestBusyNodesGetNoMorePodsToStart(t *testing.T) {
	s := newStarting(t, 2, time.Second, specA(4))
	for range 50 {
		s.run()
	}
	granted, refused := 0, 0
	for turn := range 600 { // 2.5 claims a second for a minute, on nodes that can start 2
		if turn%4 == 0 {
			s.step(Claim{Token: uint64(turn + 1), Pool: poolA, Wait: 20 * time.Second, Binding: Binding{Team: "t"}})
			granted += len(of[Claimed](s.effects))
			s.carryOut()
		}
		s.run()
		refused += len(of[ClaimRefused](s.effects))
	}
	t.Logf("%d pods were starting at one time, %d made", s.most, s.made)
	if s.most > 2*pools.FirstSurge {
		t.Errorf("%d pods were starting at one time", s.most)
	}
}

func TestRefusedClaimSaysWhyPodsAreNotReady(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Ready, p.Reason, p.Why = false, PodImagePull, "not found" })})
	s.step(Claim{Token: 1, Pool: poolA})
	if got := one[ClaimRefused](s).Counts.Stuck; got != (Stuck{Reason: PodImagePull, Pod: "a-1", Why: "not found", Pods: 1}) {
		t.Errorf("it says %+v", got)
	}
	s.step(PodSeen{warmPod("a-1")})
	s.claim()
	s.step(Claim{Token: 2, Pool: poolA})
	if got := one[ClaimRefused](s).Counts.Stuck; got != (Stuck{}) {
		t.Errorf("it says %+v of a pod that is ready", got)
	}
}

func TestCountsSayWhichRouterHoldsAFullPool(t *testing.T) {
	s := newSim(t)
	p := specA(1)
	p.MaxPods = 1
	s.recover([]Pool{p}, []Pod{warmPod("a-1")})
	s.join("router", 1)
	given := s.claim()
	counts := func() Counts {
		n, _ := s.core.View().Counts(poolA)
		return n
	}
	if n := counts(); !n.Full || n.Fenced != 0 {
		t.Errorf("claimed: %+v", n)
	}
	s.release(given.ID)
	if n := counts(); n.Fenced != 0 || n.Releasing != 1 {
		t.Errorf("the router is connected: %+v", n)
	}
	s.step(SessionLeft{Session: "router", Stream: 1})
	if n := counts(); n.Fenced != 1 || n.FencedBy != "router" {
		t.Errorf("the router is not connected: %+v", n)
	}
}

func TestPodsAreShrinkingOnlyUntilTheyHaveGone(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, warmPods(3))
	s.step(PoolSeen{specA(1)})
	for _, want := range []int{2, 1, 0} {
		counts, _ := s.core.View().Counts(poolA)
		if counts.Retiring != want {
			t.Errorf("%d pods are being deleted, expected %d", counts.Retiring, want)
		}
		if want > 0 {
			s.step(PodGone{key(fmt.Sprintf("a-%d", 3-want))})
		}
	}
}

func TestPausedPoolKeepsItsPods(t *testing.T) {
	s := newSim(t)
	p := specA(2)
	p.Paused = true
	s.recover([]Pool{p}, []Pod{warmPod("a-1"), warmPod("a-2"), with(warmPod("a-3"), old), with(warmPod("a-4"), unready)})
	none[CreatePod](s)
	none[DeletePod](s)
	s.claim()
	none[CreatePod](s)
	p.Paused = false
	s.step(PoolSeen{p})
	s.step(PodSeen{warmPod("a-4")})
	if d := one[DeletePod](s); d.Pod != key("a-3") {
		t.Errorf("deleted %+v", d)
	}
}

func TestPoolScaledToZeroKeepsItsSandboxes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), with(warmPod("a-3"), unready)})
	given := s.claim()
	s.step(PoolSeen{specA(0)})
	if gone := of[DeletePod](s.effects); len(gone) != 2 {
		t.Errorf("deleted %+v", gone)
	}
	none[SandboxReleased](s)
	s.release(given.ID)
	s.step(PodGone{given.Pod})
	none[CreatePod](s)
}

func TestRolloutMayMissMaxUnavailablePods(t *testing.T) {
	s := newSim(t)
	p := specA(4)
	p.MaxUnavailable = 2
	s.recover([]Pool{p}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	p.Template = "t2"
	s.step(PoolSeen{p})
	if gone := of[DeletePod](s.effects); len(gone) != 2 || gone[0].Pod.Name != "a-1" || gone[1].Pod.Name != "a-2" {
		t.Errorf("deleted %+v, expected the two oldest", gone)
	}
}

func TestPodThatIsNotReadyInTimeIsReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		pod    func(*Pod)
		reason string // "": it stays
	}{
		"no reason": {unready, PodNeverReady},
		"no image":  {func(p *Pod) { p.Ready, p.Reason, p.Why = false, PodImagePull, "ErrImagePull" }, PodImagePull},
		"no node":   {func(p *Pod) { p.Ready, p.Node, p.Reason, p.Why = false, "", PodUnschedulable, "0/1 nodes" }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			p := specA(1)
			p.ReadyWithin = time.Minute
			s.recover([]Pool{p}, []Pod{with(warmPod("a-1"), c.pod)})
			s.pass(time.Minute - time.Millisecond)
			none[DeletePod](s)
			s.pass(pools.LateCheckEvery)
			if c.reason == "" {
				none[DeletePod](s)
				return
			}
			one[DeletePod](s)
			counts, _ := s.core.View().Counts(poolA)
			if got := counts.Failed; got.Reason != c.reason || got.Pod != "a-1" {
				t.Errorf("failed %+v", got)
			}
			if s.trouble().Reason != c.reason {
				t.Errorf("trouble %+v", s.trouble())
			}
			none[CreatePod](s) // after a pause, as for a pod that ends early
			s.step(PodGone{key("a-1")})
			s.pass(pools.FirstEndPause)
			one[CreatePod](s)
		})
	}
}

func TestReasonOfAnIdlePodsEndIsRecorded(t *testing.T) {
	for reason, change := range map[string]func(*Pod){
		PodOOMKilled: func(p *Pod) { p.Finished, p.Reason, p.Why = true, PodOOMKilled, "exit code 137" },
		PodFailed:    func(p *Pod) { p.Finished = true },
		PodEvicted:   func(p *Pod) { p.Deleting, p.Reason, p.Why = true, PodEvicted, "low on memory" },
		PodNodeLost:  func(p *Pod) { p.Deleting, p.Reason, p.Why = true, PodNodeLost, "deleting due to NoExecute taint" },
		PodDeleted:   func(p *Pod) { p.Deleting, p.Reason = true, PodCrashLoop },
	} {
		t.Run(reason, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.step(PodSeen{with(warmPod("a-1"), change)})
			if got := one[IdlePodFailed](s); got.Failure.Reason != reason || got.Pod != key("a-1") || got.Pool != poolA {
				t.Errorf("%+v", got)
			}
			s.step(PodGone{key("a-1")})
			none[IdlePodFailed](s)
		})
	}
}

func TestTaintOfANodeThatWorksIsNoLossOfTheNode(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting, p.NoExecute, p.Reason, p.Why = true, true, PodNodeLost, "NoExecute" })})
	if got := one[IdlePodFailed](s).Failure; got.Reason != PodEvicted || got.Why != "NoExecute" {
		t.Errorf("%+v", got)
	}
}

func TestDeletionOfAWarmPodIsNotSaidToBeEarly(t *testing.T) {
	for want, change := range map[string]func(*Pod){"it was deleted, and not by its pool": func(*Pod) {}, "it was deleted before it was ready": unready} {
		s := newSim(t)
		s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-1"), change)})
		s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Deleting = true })})
		if got := one[IdlePodFailed](s).Failure; got.Reason != PodDeleted || got.Why != want {
			t.Errorf("%+v, expected %q", got, want)
		}
	}
}

func TestOrphanedSandboxesOutliveTheDeletionOfTheirPool(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	given := s.claim()
	p := specA(2)
	p.Deleting, p.KeepSandboxes = true, true
	s.step(PoolSeen{p})
	if gone := of[DeletePod](s.effects); len(gone) != 1 || gone[0].Pod != key("a-2") {
		t.Errorf("deleted %+v", gone)
	}
	none[SandboxReleased](s)
	s.step(Claim{Token: 9, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Why != NoPool {
		t.Errorf("refused %+v", r)
	}
	s.step(CreateFailed{Pool: poolA, Name: "a-1"})
	s.step(PodGone{key("a-2")})
	none[PoolDrained](s)
	s.release(given.ID)
	s.pass(window)
	s.step(PodGone{given.Pod})
	one[PoolDrained](s)
}

func TestPolicyOfADeletedPoolCanChange(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.claim()
	p := specA(1)
	p.Deleting, p.KeepSandboxes = true, true
	s.step(PoolSeen{p})
	none[SandboxReleased](s)
	p.KeepSandboxes = false
	s.step(PoolSeen{p})
	one[SandboxReleased](s)
}

// lagging has an API server that creates pods at once, and a watch that shows each change 2 s later.
type lagging struct {
	*sim
	exist map[PodKey]bool
	later []struct {
		at time.Duration
		ev Event
	}
}

// ipOf is the address of the pod of that number.
func ipOf(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(1 + n>>16), byte(n >> 8), byte(n)})
}

func (l *lagging) show(ev Event) {
	l.later = append(l.later, struct {
		at time.Duration
		ev Event
	}{l.now.Boot + 2*time.Second, ev})
}

// do carries out effects and those that follow.
func (l *lagging) do(effects []Effect) {
	for queue := effects; len(queue) > 0; {
		e := queue[0]
		queue = queue[1:]
		switch e := e.(type) {
		case CreatePod:
			k := key(e.Name)
			l.exist[k] = true
			pod := Pod{Key: k, Pool: "a", Node: "n1", Template: "t1", IP: ipOf(len(l.exist)), CreatedAt: l.now.Wall}
			queue = append(queue, l.step(PodSeen{pod})...) // the answer
			l.show(PodSeen{pod})
			pod.Ready = true
			l.show(PodSeen{pod})
		case DeletePod:
			delete(l.exist, e.Pod)
			l.show(PodGone{e.Pod})
		}
	}
}

// to lets time pass until nothing is on its way.
func (l *lagging) drain(check func()) {
	for len(l.later) > 0 {
		l.now.Boot, l.now.Wall = l.now.Boot+100*time.Millisecond, l.now.Wall.Add(100*time.Millisecond)
		l.do(l.step(Tick{}))
		for len(l.later) > 0 && l.later[0].at <= l.now.Boot {
			ev := l.later[0].ev
			l.later = l.later[1:]
			l.do(l.step(ev))
			check()
		}
	}
}

// An informer that lags makes ReplicaSets create too many pods, unless they remember what they asked for.
func TestLaggingWatchCreatesNoPodTooMany(t *testing.T) {
	const warm = 5000
	l := &lagging{sim: newSim(t), exist: map[PodKey]bool{}}
	l.unchecked = true
	l.slowly()
	l.recover([]Pool{specA(warm)}, nil)
	most := warm
	check := func() {
		if len(l.exist) > most {
			t.Fatalf("%d pods, at most %d are asked for", len(l.exist), most)
		}
	}
	l.do(l.effects)
	l.drain(check)
	if counts, _ := l.core.View().Counts(poolA); len(l.exist) != warm || counts.Warm != warm {
		t.Fatalf("%d pods, counts %+v", len(l.exist), counts)
	}
	for range 100 { // claims are replaced one for one
		most++
		l.do(l.step(Claim{Token: uint64(most), Pool: poolA}))
		check()
	}
	l.drain(check)
	l.do(l.step(PoolSeen{specA(10)}))
	if len(l.exist) != 110 {
		t.Fatalf("%d pods after the pool was scaled down", len(l.exist))
	}
	l.drain(check)
	if counts, _ := l.core.View().Counts(poolA); len(l.exist) != 110 || counts.Warm != 10 || counts.Claimed != 100 {
		t.Fatalf("%d pods, counts %+v", len(l.exist), counts)
	}
}

var rounds = flag.Int("rounds", 300, "rounds of claims against scale-downs and rollouts")

// In each round a claim, a change of scale or template and a deletion's way into the journal cross each other.
func TestNoClaimedPodIsEverDeleted(t *testing.T) {
	s := newSim(t)
	s.unchecked = *rounds > 5000
	random := rand.New(rand.NewPCG(1, 2))
	p := specA(6)
	s.recover([]Pool{p}, nil)
	exist := map[PodKey]Pod{}
	held := map[PodKey]string{}
	token, template, made, deleted, claimed := uint64(0), 1, 1, 0, 0
	writing := false
	do := func(effects []Effect) {
		for queue := effects; len(queue) > 0; {
			e := queue[0]
			queue = queue[1:]
			switch e := e.(type) {
			case Write:
				writing = s.slow
			case CreatePod:
				pod := Pod{Key: key(e.Name), Pool: "a", Node: "n1", Template: p.Template, IP: ipOf(made), CreatedAt: s.now.Wall, Ready: random.IntN(4) > 0}
				made++
				exist[pod.Key] = pod
				queue = append(queue, s.step(PodSeen{pod})...)
			case DeletePod:
				if id := held[e.Pod]; id != "" {
					t.Fatalf("pod %s is deleted while it holds %s", e.Pod.Name, id)
				}
				deleted++
				delete(exist, e.Pod)
				queue = append(queue, s.step(PodGone{e.Pod})...)
			case Claimed:
				claimed++
				held[e.Sandbox.Pod] = e.Sandbox.ID
			case SandboxReleased:
				delete(held, e.Sandbox.Pod)
			}
		}
	}
	do(s.effects)
	for range *rounds {
		s.slow = random.IntN(2) == 0 // what is written in this round is durable at its end
		for _, n := range random.Perm(4) {
			switch n {
			case 0:
				token++
				do(s.step(Claim{Token: token, Pool: poolA, Wait: wait}))
			case 1:
				if p.Warm = random.IntN(7); random.IntN(3) == 0 {
					template++
					p.Template = fmt.Sprint("t", template)
				}
				p.MaxUnavailable, p.MaxSurge = random.IntN(3), random.IntN(4)
				do(s.step(PoolSeen{p}))
			case 2:
				for _, k := range slices.SortedFunc(maps.Keys(exist), fact.ComparePods) {
					if pod := exist[k]; !pod.Ready && random.IntN(2) == 0 {
						pod.Ready = true
						exist[k] = pod
						do(s.step(PodSeen{pod}))
					}
				}
			case 3:
				if len(held) > 3 {
					k := slices.SortedFunc(maps.Keys(held), fact.ComparePods)[0]
					do(s.step(Release{Scope: everyTeam, ID: held[k], Reason: fact.ReasonKilled}))
				}
			}
		}
		for writing {
			writing = false
			do(s.step(Written{}))
			do(s.step(WriterReady{}))
		}
		s.now.Boot, s.now.Wall = s.now.Boot+time.Second, s.now.Wall.Add(time.Second)
		do(s.step(Tick{}))
	}
	if claimed < *rounds/10 || deleted < *rounds/10 {
		t.Errorf("%d claims and %d deletions in %d rounds", claimed, deleted, *rounds)
	}
	t.Logf("%d rounds: %d claims, %d deletions", *rounds, claimed, deleted)
}

func TestPodBoundToALostNodeHoldsNoSurge(t *testing.T) {
	s := newSim(t)
	p := specA(2)
	p.MaxSurge = 1
	s.recover([]Pool{p}, nil)
	first := s.names()
	s.now.Boot += time.Second
	s.step(NodeSeen{Name: "n1"})
	s.step(PodSeen{with(warmPod(first[0]), func(p *Pod) { p.Ready, p.Node = false, "" })})
	none[CreatePod](s)
	s.step(PodSeen{with(warmPod(first[0]), unready)}) // it was bound before, and the watch shows it now
	second := s.names()
	if len(second) != 1 {
		t.Fatalf("made %v", second)
	}
	// Its replacement tolerates the node: another one would be bound there too.
	s.step(PodSeen{with(warmPod(second[0]), unready)})
	s.pass(10 * pods.BindingLag)
	none[CreatePod](s)
	if nodes, lost := s.core.pods.CountNodes(); nodes != 1 || lost != 0 {
		t.Errorf("%d nodes, %d lost ones", nodes, lost)
	}
	for _, name := range []string{first[0], second[0]} {
		s.step(PodGone{key(name)})
	}
	if nodes, _ := s.core.pods.CountNodes(); nodes != 0 {
		t.Errorf("%d nodes are kept", nodes)
	}
}

func TestLossOfANodeIsRecordedForItsIdlePods(t *testing.T) {
	for _, cordoned := range []bool{false, true} {
		s := newSim(t)
		s.pods = 1
		s.recoverState(State{Pools: []Pool{specA(1)}, Pods: []Pod{warmPod("a-1")}, Nodes: []string{"n1", "n2"}})
		s.step(NodeSeen{Name: "n1", Cordoned: cordoned})
		name := one[CreatePod](s).Name
		s.step(PodSeen{with(warmPod(name), func(p *Pod) { p.Node = "n2" })})
		if d := one[DeletePod](s); d.Pod != key("a-1") {
			t.Errorf("deleted %+v", d)
		}
		switch failed := of[IdlePodFailed](s.effects); {
		case cordoned && len(failed) > 0:
			t.Errorf("%+v of a node that is drained", failed)
		case !cordoned && (len(failed) != 1 || failed[0].Failure.Reason != PodNodeLost || failed[0].Pod != key("a-1")):
			t.Errorf("%+v", failed)
		}
	}
}

func TestPodChangedByAdmissionIsReplacedAfterAPause(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	name := s.names()[0]
	s.step(PodSeen{with(warmPod(name), func(p *Pod) { p.Used = true })})
	none[CreatePod](s)
	if d := one[DeletePod](s); d.Pod != key(name) {
		t.Errorf("deleted %+v", d)
	}
	if got := one[IdlePodFailed](s).Failure; got.Reason != PodFailed || !strings.Contains(got.Why, "admission") {
		t.Errorf("%+v", got)
	}
	s.pass(pools.FirstEndPause)
	one[CreatePod](s)
}
