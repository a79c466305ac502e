package core

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// warmPods makes the pods a-1 to a-n.
func warmPods(n int) (all []Pod) {
	for i := range n {
		all = append(all, warmPod("a-"+strconv.Itoa(i+1)))
	}
	return all
}

func batchOf(token uint64, count, atLeast int, wait time.Duration) Claim {
	return Claim{Token: token, Pool: poolA, Count: count, AtLeast: atLeast, Wait: wait}
}

// Invariant: I9, P3
func TestBatchIsJournaledInOneWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, warmPods(4))
	s.slow = true
	s.step(batchOf(1, 3, 0, wait))
	facts := one[Write](s).Facts
	if len(facts) != 3 || facts[0].Joined || !facts[1].Joined || !facts[2].Joined || sandboxOf(facts[0]).Batch == "" || sandboxOf(facts[2]).Batch != sandboxOf(facts[0]).Batch {
		t.Errorf("written %+v", facts)
	}
	none[BatchClaimed](s)
	s.written()
	if b := one[BatchClaimed](s); b.Token != 1 || len(b.Sandboxes) != 3 || len(b.Ended) != 0 {
		t.Errorf("answer %+v", b)
	}
	if n := len(of[SandboxReady](s.effects)); n != 3 {
		t.Errorf("%d are ready", n)
	}
}

func TestFullWriteDoesNotDivideABatch(t *testing.T) {
	const singles, count = fact.MaxPerWrite - 2, 5
	ids := 0
	c, err := New(Config{
		Term: 1, MaxStale: maxStale, ConnectWindow: window, Lease: lease, Linger: -1, MaxWaiting: 1,
		NewID:     func() string { ids++; return strconv.Itoa(ids) },
		NewSuffix: func() string { ids++; return strconv.Itoa(ids) },
	}, start)
	if err != nil {
		t.Fatal(err)
	}
	pods := warmPods(singles + count + 1)
	for i := range pods {
		pods[i].IP = netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
	}
	if _, err := c.Recover(State{Pools: []Pool{specA(len(pods))}, Pods: pods, Nodes: []string{"n1"}}); err != nil {
		t.Fatal(err)
	}
	c.Step(start, Claim{Token: 1, Pool: poolA}) // keeps the writer busy
	for i := range singles {
		c.Step(start, Claim{Token: uint64(i + 2), Pool: poolA, Wait: wait})
	}
	c.Step(start, batchOf(1_000_000, count, 0, wait))
	c.Step(start, Written{})
	facts := of[Write](c.Step(start, WriterReady{}))[0].Facts
	if n := len(facts); n != singles+count {
		t.Errorf("%d facts, expected %d with the whole batch", n, singles+count)
	}
}

func TestBatchCollectsPodsUntilItHasAll(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, warmPods(2))
	s.step(batchOf(1, 4, 0, wait))
	none[Write](s)
	if made := of[CreatePod](s.effects); len(made) != 4 { // two that it lacks, and the warm ones that it has
		t.Errorf("created %+v", made)
	}
	s.step(batchOf(2, 2, 0, 2*wait)) // another one does not collect at the same time
	s.step(PodSeen{warmPod("a-3")})
	none[BatchClaimed](s)
	s.step(PodSeen{warmPod("a-4")})
	if b := one[BatchClaimed](s); b.Token != 1 || len(b.Sandboxes) != 4 {
		t.Errorf("answer %+v", b)
	}
	s.step(PodSeen{warmPod("a-5")})
	s.step(PodGone{key("a-5")}) // it has to find another one
	s.step(PodSeen{warmPod("a-6")})
	none[BatchClaimed](s)
	s.step(PodSeen{warmPod("a-7")})
	if b := one[BatchClaimed](s); b.Token != 2 || len(b.Sandboxes) != 2 {
		t.Errorf("answer %+v", b)
	}
}

func TestBatchTakesEnoughWhenItsWaitIsOver(t *testing.T) {
	for name, c := range map[string]struct {
		atLeast, want int
		wait          time.Duration
	}{
		"enough":                {2, 2, wait},
		"too few":               {3, 0, wait},
		"enough at once":        {2, 2, 0},
		"too few at once":       {3, 0, 0},
		"more than enough":      {1, 2, wait},
		"all, if not said else": {0, 0, wait},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(2)}, warmPods(2))
			s.step(batchOf(1, 4, c.atLeast, c.wait))
			if c.wait > 0 {
				none[BatchClaimed](s)
				none[ClaimRefused](s)
				s.pass(c.wait)
			}
			if c.want == 0 {
				if r := one[ClaimRefused](s); r.Why != PoolEmpty {
					t.Errorf("refused %+v", r)
				}
				if counts, _ := s.core.View().Counts(poolA); counts.Warm != 2 || counts.Claimed != 0 {
					t.Errorf("counts %+v", counts)
				}
				return
			}
			if b := one[BatchClaimed](s); len(b.Sandboxes) != c.want {
				t.Errorf("answer %+v", b)
			}
		})
	}
}

func TestBatchTakesEnoughWhenOneCallersWaitIsOver(t *testing.T) {
	for name, atLeast := range map[string]int{"enough": 2, "too few": 3} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(2)}, warmPods(2))
			keyed := batchOf(1, 4, atLeast, wait)
			keyed.Binding.IdempotencyKey = "k"
			s.step(keyed)
			keyed.Token, keyed.Wait = 2, 3*wait
			s.step(keyed)
			s.pass(wait)
			if atLeast == 2 {
				if all := of[BatchClaimed](s.effects); len(all) != 2 || len(all[0].Sandboxes) != 2 {
					t.Errorf("answers %+v", all)
				}
				none[ClaimRefused](s)
				return
			}
			if r := one[ClaimRefused](s); r.Token != 1 || r.Why != PoolEmpty {
				t.Errorf("refused %+v", r)
			}
			s.step(PodSeen{warmPod("a-3")}) // the other caller waits for all
			none[BatchClaimed](s)
			s.step(PodSeen{warmPod("a-4")})
			if b := one[BatchClaimed](s); b.Token != 2 || len(b.Sandboxes) != 4 {
				t.Errorf("answer %+v", b)
			}
		})
	}
}

func TestBatchTakesWhatMaxPodsLeaves(t *testing.T) {
	for name, c := range map[string]struct{ inUse, count, atLeast, want int }{
		"more than MaxPods":        {0, 9, 2, 4},
		"others are in use":        {1, 4, 2, 3},
		"both":                     {2, 9, 2, 2},
		"too few until a release":  {3, 4, 2, 0},
		"all, and others are used": {1, 4, 4, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.pods = 3 // pods that are created are a-4, a-5 and so on
			s.recover([]Pool{changed(specA(4), func(p *Pool) { p.MaxPods = 4 })}, warmPods(3))
			var used []Sandbox
			for range c.inUse {
				used = append(used, s.claim())
			}
			s.step(batchOf(2, c.count, c.atLeast, wait))
			none[BatchClaimed](s) // a pod is being created
			s.step(PodSeen{warmPod("a-4")})
			if c.want == 0 {
				none[BatchClaimed](s)
				none[ClaimRefused](s)
				for _, sb := range used {
					s.release(sb.ID)
					s.step(PodGone{sb.Pod})
					none[BatchClaimed](s) // its replacement is being created
				}
				for i := range used {
					s.step(PodSeen{warmPod("a-" + strconv.Itoa(5+i))})
				}
				c.want = 4
			}
			if b := one[BatchClaimed](s); len(b.Sandboxes) != c.want {
				t.Errorf("%d sandboxes, expected %d", len(b.Sandboxes), c.want)
			}
		})
	}
}

func TestQuotaCountsABatchOfAtMostMaxPods(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(3), func(p *Pool) { p.MaxPods = 3 })}, warmPods(3))
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxSandboxes: 3}}})
	s.step(batchOf(1, 9, 2, wait))
	if b := one[BatchClaimed](s); len(b.Sandboxes) != 3 {
		t.Errorf("answer %+v", b)
	}
}

func TestBatchThatLosesPodsIsAllOrNone(t *testing.T) {
	for atLeast, want := range map[int]int{3: 0, 2: 2} {
		s := newSim(t)
		s.recover([]Pool{specA(3)}, warmPods(3))
		s.slow = true
		s.step(Claim{Token: 1, Pool: poolA, Count: 3, AtLeast: atLeast, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
		s.step(PodGone{key("a-2")})
		s.written()
		if want > 0 {
			if b := one[BatchClaimed](s); len(b.Sandboxes) != want {
				t.Errorf("answer %+v", b)
			}
			continue
		}
		none[BatchClaimed](s)
		none[SendRoute](s)
		s.slow = false
		s.written()
		if gone := of[SandboxReleased](s.effects); len(gone) != 3 || gone[0].Sandbox.Reason == "" || gone[0].Sandbox.IdempotencyKey != "" {
			t.Errorf("released %+v", gone)
		}
		for _, name := range []string{"a-4", "a-5", "a-6"} { // the claim has kept its place
			none[BatchClaimed](s)
			s.step(PodSeen{warmPod(name)})
		}
		if b := one[BatchClaimed](s); len(b.Sandboxes) != 3 {
			t.Errorf("answer %+v", b)
		}
	}
}

// Invariant: P3
func TestIncompleteBatchIsReleasedInOneWrite(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, warmPods(4))
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Count: 3, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	s.step(PodGone{key("a-2")})
	s.step(PodGone{key("a-3")})
	s.step(PodSeen{with(warmPod("a-4"), func(p *Pod) { p.Finished = true })}) // another fact of the same Write
	s.written()
	var joined []bool
	for _, f := range one[Write](s).Facts {
		if sandboxOf(f) != nil {
			joined = append(joined, f.Joined)
		} else if f.Joined {
			t.Errorf("joined: %+v", f)
		}
	}
	if !slices.Equal(joined, []bool{false, true, true}) {
		t.Errorf("releases are joined: %v", joined)
	}
}

func TestAbandonedBatchLeavesNothingBehind(t *testing.T) {
	for _, handed := range []bool{false, true} {
		s := newSim(t)
		s.recover([]Pool{specA(3)}, warmPods(3))
		s.slow = handed
		s.step(batchOf(1, map[bool]int{false: 4, true: 3}[handed], 0, wait))
		s.step(ClaimAbandoned{Token: 1})
		s.slow = false
		s.written()
		s.written()
		if n := len(s.core.View().Running()); n != 0 {
			t.Errorf("handed to the writer: %v: %d sandboxes are left", handed, n)
		}
		if counts, _ := s.core.View().Counts(poolA); !handed && counts.Warm != 3 || counts.Claimed != 0 {
			t.Errorf("counts %+v", counts)
		}
	}
}

func TestBatchFailsIfTooFewStart(t *testing.T) {
	for atLeast, failed := range map[int]bool{1: false, 2: true} {
		s := newSim(t)
		s.recover([]Pool{changed(specA(2), func(p *Pool) { p.PostStart = true })}, warmPods(2))
		s.step(batchOf(1, 2, atLeast, wait))
		starts := of[StartSandbox](s.effects)
		s.step(Started{ID: starts[0].Sandbox.ID, OK: true})
		none[BatchClaimed](s)
		s.step(Started{ID: starts[1].Sandbox.ID})
		if failed {
			if r := one[ClaimRefused](s); r.Why != StartFailed || r.Sandbox.ID != starts[1].Sandbox.ID {
				t.Errorf("refused %+v", r)
			}
			if n := len(of[SandboxReleased](s.effects)); n != 2 {
				t.Errorf("%d were released", n)
			}
			continue
		}
		if b := one[BatchClaimed](s); len(b.Sandboxes) != 1 || len(b.Ended) != 1 || b.Ended[0] != starts[1].Sandbox.ID {
			t.Errorf("answer %+v", b)
		}
	}
}

// Invariant: P3
func TestKeyStandsForTheWholeBatch(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, warmPods(3))
	keyed := func(token uint64) Claim {
		return Claim{Token: token, Pool: poolA, Count: 3, Wait: wait, Binding: Binding{Team: "t", IdempotencyKey: "k"}}
	}
	s.slow = true
	s.step(keyed(1))
	facts := one[Write](s).Facts
	s.written()
	first := one[BatchClaimed](s)

	// The next leader finds the batch in the journal, whether it was answered or not.
	next := newSimAt(t, 2, s.now)
	next.recover([]Pool{specA(3)}, warmPods(3), facts...)
	next.step(keyed(2))
	again := one[BatchClaimed](next)
	if len(first.Sandboxes) != 3 || len(again.Sandboxes) != 3 {
		t.Fatalf("answers %+v, %+v", first, again)
	}
	ids := map[string]bool{}
	for i := range again.Sandboxes {
		ids[first.Sandboxes[i].ID], ids[again.Sandboxes[i].ID] = true, true
	}
	if len(ids) != 3 {
		t.Errorf("sandboxes %v", ids)
	}
	next.release(again.Sandboxes[0].ID)
	next.pass(time.Hour)
	next.step(keyed(3))
	if b := one[BatchClaimed](next); len(b.Sandboxes) != 2 || len(b.Ended) != 1 || b.Ended[0] != again.Sandboxes[0].ID {
		t.Errorf("answer %+v", b)
	}
	next.release(again.Sandboxes[1].ID)
	next.release(again.Sandboxes[2].ID)
	next.step(keyed(4))
	if r := one[ClaimRefused](next); r.Why != KeyEnded {
		t.Errorf("refused %+v", r)
	}
	next.pass(10 * time.Minute)
	next.step(keyed(5))
	none[ClaimRefused](next) // the key is free
}
