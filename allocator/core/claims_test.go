package core

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Invariant: I9
func TestClaimIsAnsweredOnlyOnceItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.slow = true
	s.step(Claim{Token: 7, Pool: poolA, Binding: Binding{Metadata: map[string]string{"k": "v"}, Team: "t", User: "u"}})
	given := s.given()
	if given.Pod != key("a-1") || given.Phase != Running || given.Team != "t" || given.User != "u" {
		t.Errorf("written %+v", given)
	}
	none[Claimed](s)
	none[SendRoute](s)
	none[WriteObject](s)
	none[SandboxReady](s)
	s.step(Resolve{Session: "r", Stream: 1, ID: given.ID})
	if r := one[SendResolved](s); r.Sandbox != nil || r.Gone {
		t.Errorf("resolved %+v", r)
	}
	s.written()
	c := one[Claimed](s)
	if c.Token != 7 || c.Sandbox.ID != given.ID || c.Sandbox.Metadata["k"] != "v" || c.Sandbox.IP != warmPod("a-1").IP || c.Sandbox.DefaultPort != 80 {
		t.Errorf("answer %+v", c)
	}
	if r := one[SendRoute](s); r.Sandbox.ID != given.ID || r.Sequence != 2 {
		t.Errorf("route %+v", r)
	}
	one[WriteObject](s)
	one[SandboxReady](s)
	if l := one[LabelPod](s); l.Pod != key("a-1") || l.Pool != "a" || l.ID != given.ID || l.Released {
		t.Errorf("label %+v", l)
	}
}

// What comes while a write is under way goes together into the next one.
func TestClaimsThatAwaitTheWriterAreWrittenTogether(t *testing.T) {
	s := newSim(t)
	var pods []Pod
	for n := range 9 {
		pods = append(pods, warmPod("a-"+strconv.Itoa(n)))
	}
	s.recover([]Pool{specA(9)}, pods)
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA})
	one[Write](s)
	for token := uint64(2); token <= 9; token++ {
		s.step(Claim{Token: token, Pool: poolA})
		none[Write](s)
	}
	s.step(Written{})
	one[Claimed](s)
	none[Write](s) // the writer paces itself
	s.step(WriterReady{})
	if facts := one[Write](s).Facts; len(facts) != 8 {
		t.Errorf("%d facts", len(facts))
	}
	s.written()
	for i, c := range of[Claimed](s.effects) {
		if c.Token != uint64(i+2) {
			t.Errorf("answer %d to caller %d", i, c.Token)
		}
	}
}

func TestFactsWithoutCallersAreHeldBack(t *testing.T) {
	s := newSim(t)
	s.cfg.Linger = 25 * time.Millisecond
	s.restart()
	s.slow = true
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.step(PoolSeen{specA(2)})
	none[Write](s)
	s.pass(24 * time.Millisecond)
	none[Write](s)
	s.pass(time.Millisecond)
	one[Write](s)
	s.written()
	s.step(PoolSeen{specA(1)})
	none[Write](s)
	s.step(Claim{Token: 1, Pool: poolA})
	if facts := one[Write](s).Facts; len(facts) != 2 {
		t.Errorf("%d facts", len(facts))
	}
}

func TestPodsAreHandedOutByNodeAndAge(t *testing.T) {
	s := newSim(t)
	at := func(name, node string) Pod { return with(warmPod(name), func(p *Pod) { p.Node = node }) }
	s.recoverState(State{
		Pools: []Pool{specA(6)}, Nodes: []string{"n1", "n2", "n3"},
		Pods: []Pod{at("a-6", "n2"), at("a-1", "n1"), at("a-3", "n1"), at("a-2", "n1"), at("a-5", "n3"), at("a-4", "n2")},
	})
	var got []string
	for token := range uint64(7) {
		for _, c := range of[Claimed](s.step(Claim{Token: token, Pool: poolA})) {
			got = append(got, c.Sandbox.Pod.Name)
		}
	}
	slices.Sort(got[:3]) // which node is first is not said
	slices.Sort(got[3:5])
	if !slices.Equal(got, []string{"a-1", "a-4", "a-5", "a-2", "a-6", "a-3"}) {
		t.Errorf("handed out %v", got)
	}
	if r := one[ClaimRefused](s); r.Token != 6 || r.Why != PoolEmpty || r.Counts.Claimed != 6 {
		t.Errorf("refused %+v", r)
	}
}

func TestPodsThatCannotServeAreNotHandedOut(t *testing.T) {
	for name, change := range map[string]func(*Pod){
		"not ready":            func(p *Pod) { p.Ready = false },
		"terminating":          func(p *Pod) { p.Deleting = true },
		"finished":             func(p *Pod) { p.Finished = true },
		"without an address":   func(p *Pod) { p.IP = netip.Addr{} },
		"not scheduled":        func(p *Pod) { p.Node = "" },
		"on an unusable node":  func(p *Pod) { p.Node = "n2" },
		"on a node not seen":   func(p *Pod) { p.Node = "n3" },
		"marked as used":       func(p *Pod) { p.Used = true },
		"in a pool that is no": func(p *Pod) { p.Pool = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, nil)
			s.step(NodeSeen{Name: "n2", Usable: false})
			s.step(PodSeen{with(warmPod("a-1"), change)})
			s.step(Claim{Token: 1, Pool: poolA})
			none[Write](s)
			one[ClaimRefused](s)
			// One that was handed out could serve, whatever it is now.
			s.step(PodSeen{warmPod("a-2")})
			s.step(PodSeen{with(with(warmPod("a-2"), change), func(p *Pod) { p.Version = "2" })})
			s.step(Claim{Token: 2, Pool: poolA})
			if name == "in a pool that is no" { // a pod stays in the pool it was made for
				one[Claimed](s)
			} else {
				one[ClaimRefused](s)
			}
		})
	}
}

func TestIdlePodsLeaveACordonedNodeOnceReplaced(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-9")}, on("a-9", "x"))
	s.step(NodeSeen{Name: "n1"})
	if made := of[CreatePod](s.effects); len(made) != 2 {
		t.Errorf("made %+v", made)
	}
	none[DeletePod](s)
	none[SandboxReleased](s) // the eviction of its pod does that
	if counts, _ := s.core.View().Counts(poolA); counts.Warm != 0 || counts.Stranded != 2 {
		t.Errorf("counts %+v", counts)
	}
	other := func(name string) Pod { return with(warmPod(name), func(p *Pod) { p.Node = "n2" }) }
	s.step(NodeSeen{Name: "n2", Usable: true})
	s.step(PodSeen{other("a-3")})
	none[DeletePod](s) // they return if the node does
	s.step(PodSeen{other("a-4")})
	if gone := of[DeletePod](s.effects); len(gone) != 2 || gone[0].Pod.Name != "a-1" || gone[1].Pod.Name != "a-2" {
		t.Errorf("deleted %+v, expected those of the node", gone)
	}
	if given := s.claim(); given.Pod.Name != "a-3" {
		t.Errorf("given %v", given.Pod)
	}
	s.step(NodeSeen{Name: "n1", Usable: true})
	none[SandboxReleased](s)
}

func TestPodsOfANodeThatReturnsAreWarmAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(NodeSeen{Name: "n1"})
	s.step(NodeSeen{Name: "n1", Usable: true})
	none[DeletePod](s)
	if counts, _ := s.core.View().Counts(poolA); counts.Warm != 2 || counts.Stranded != 0 {
		t.Errorf("counts %+v", counts)
	}
}

func TestClaimOfUnknownPoolIsRefused(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Deleting = true })}, []Pod{warmPod("a-1")})
	for _, p := range []PoolKey{poolA, {Namespace: "ns", Name: "other"}} {
		s.step(Claim{Token: 1, Pool: p, Wait: wait})
		if r := one[ClaimRefused](s); r.Why != NoPool {
			t.Errorf("%v: %+v", p, r)
		}
	}
}

func changed(p Pool, change func(*Pool)) Pool {
	change(&p)
	return p
}

// Invariant: P3
func TestClaimsAreServedInOrderOfArrival(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, nil)
	for token := range uint64(3) {
		if s.step(Claim{Token: token + 1, Pool: poolA, Wait: wait}); len(s.effects) != len(of[CreatePod](s.effects)) {
			t.Errorf("unexpected %+v", s.effects)
		}
	}
	if counts, _ := s.core.View().Counts(poolA); counts.Waiting != 3 {
		t.Errorf("counts %+v", counts)
	}
	s.step(ClaimAbandoned{Token: 2})
	for i, want := range []uint64{1, 3} {
		s.step(PodSeen{warmPod("a-" + strconv.Itoa(i+1))})
		if c := one[Claimed](s); c.Token != want {
			t.Errorf("pod %d went to caller %d, expected %d", i+1, c.Token, want)
		}
	}
	s.step(PodSeen{warmPod("a-3")})
	none[Claimed](s)
}

func TestClaimWaitsNoLongerThanItSaid(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: 2 * time.Second})
	s.step(Claim{Token: 2, Pool: poolA, Wait: time.Second})
	s.pass(time.Second)
	if r := one[ClaimRefused](s); r.Token != 2 || r.Why != PoolEmpty || r.Counts.Waiting == 0 || r.Counts.Pending != 3 {
		t.Errorf("refused %+v", r)
	}
	s.pass(time.Second)
	if r := one[ClaimRefused](s); r.Token != 1 {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	none[Claimed](s)
}

func TestClaimsThatCannotWaitAreRefusedAtOnce(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 2
	s.restart()
	s.recover([]Pool{specA(1)}, nil)
	for token := range uint64(3) {
		s.step(Claim{Token: token, Pool: poolA, Wait: wait})
	}
	if r := one[ClaimRefused](s); r.Token != 2 || r.Counts.Waiting != 2 {
		t.Errorf("refused %+v", r)
	}
	s.step(PoolSeen{Pool{Key: PoolKey{Namespace: "ns", Name: "b"}, DefaultPort: 80, MaxPods: 3}})
	s.step(Claim{Token: 9, Pool: PoolKey{Namespace: "ns", Name: "b"}, Wait: wait, Count: 4})
	if r := one[ClaimRefused](s); r.Why != step.TooMany || r.MaxPods != 3 {
		t.Errorf("refused %+v", r)
	}
}

func TestClaimWaitsForAReleaseAtMaxPods(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.MaxPods = 1 })}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(Claim{Token: 2, Pool: poolA, Wait: 10 * wait})
	none[ClaimRefused](s)
	s.pass(wait)
	if r := one[ClaimRefused](s); r.Token != 1 || r.Why != PoolEmpty || r.MaxPods != 1 || r.Counts.Claimed != 1 {
		t.Errorf("refused %+v", r)
	}
	s.release(sb.ID)
	s.step(PodGone{key("a-1")})
	one[CreatePod](s)
	s.step(PodSeen{warmPod("a-2")})
	if c := one[Claimed](s); c.Token != 2 {
		t.Errorf("answer %+v", c)
	}
}

func TestPausedPoolKeepsClaimsWaiting(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	s.step(ClaimAbandoned{Token: 1})
	s.pass(wait)
	if r := one[ClaimRefused](s); r.Token != 2 || r.Warm != 0 {
		t.Errorf("refused %+v", r)
	}
}

func TestRefusedTemplateAnswersWithItsProblem(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(PodSeen{warmPod("a-1")})
	one[Claimed](s)
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	s.step(PoolSeen{changed(specA(1), notAllowed)})
	if r := one[ClaimRefused](s); r.Token != 2 || r.Why != NotAccepted || r.Problem != "it may not" {
		t.Errorf("refused %+v", r)
	}
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Token != 3 || r.Why != NotAccepted {
		t.Errorf("refused %+v", r)
	}
}

func TestCallersThatShareAnIdempotencyKeyAreBounded(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 2
	s.restart()
	s.recover([]Pool{specA(1)}, nil)
	keyed := func(token uint64) Claim {
		return Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}}
	}
	s.step(keyed(1))
	s.step(keyed(2))
	none[ClaimRefused](s)
	for token := range uint64(500) {
		s.step(keyed(3 + token))
		if r := one[ClaimRefused](s); r.Token != 3+token || r.Why != LineFull || r.Counts.Waiting != 2 {
			t.Fatalf("refused %+v", r)
		}
	}
	s.step(Claim{Token: 600, Pool: poolA, Wait: wait}) // they take the places of others, too
	if r := one[ClaimRefused](s); r.Token != 600 {
		t.Errorf("refused %+v", r)
	}
	s.step(ClaimAbandoned{Token: 1}) // a caller that leaves makes room
	s.step(keyed(601))
	none[ClaimRefused](s)
	s.step(PodSeen{warmPod("a-1")})
	if n := len(of[Claimed](s.effects)); n != 2 {
		t.Errorf("%d callers were answered", n)
	}
}

func TestCallersThatShareAStartingSandboxAreBounded(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 2
	s.restart()
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1")})
	keyed := func(token uint64) Claim {
		return Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}}
	}
	s.slow = true
	s.step(keyed(1))
	s.step(keyed(2))
	s.step(keyed(3)) // its claim is being written
	if r := one[ClaimRefused](s); r.Token != 3 {
		t.Errorf("refused %+v", r)
	}
	s.written()
	s.step(keyed(4)) // its sandbox is starting
	if r := one[ClaimRefused](s); r.Token != 4 || r.Why != Overloaded {
		t.Errorf("refused %+v", r)
	}
}

func TestWaitingClaimsAreRefusedWhenPoolGoes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(PoolSeen{changed(specA(1), func(p *Pool) { p.Deleting = true })})
	if r := one[ClaimRefused](s); r.Why != NoPool {
		t.Errorf("refused %+v", r)
	}
}

func TestAvailablePodServesAWaitingClaim(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	none[Claimed](s)
	s.step(PodSeen{warmPod("a-1")})
	one[Claimed](s)
}

func TestAClaimChoosesWhatCountsAsItsActivity(t *testing.T) {
	none, more := uint64(0), uint64(4096)
	for name, c := range map[string]struct {
		pool uint64
		said *uint64
		want uint64
	}{
		"as its pool, requests": {0, nil, 0}, "as its pool, bytes": {2048, nil, 2048},
		"requests": {2048, &none, 0}, "bytes": {0, &more, 4096}, "more bytes": {2048, &more, 4096},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{changed(specA(1), func(p *Pool) { p.MinBytes = c.pool })}, []Pod{warmPod("a-1")})
			s.step(Claim{Token: 1, Pool: poolA, Wait: wait, MinBytes: c.said})
			if got := one[Claimed](s).Sandbox.MinBytes; got != c.want {
				t.Errorf("%d bytes a minute, expected %d", got, c.want)
			}
		})
	}
}

func TestClosingLeaderAnswersEveryCaller(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(Closing{})
	if r := one[ClaimRefused](s); r.Token != 1 || r.Why != Ending {
		t.Errorf("refused %+v", r)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Why != Ending {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	one[Claimed](s) // what can be done at once is done
	s.step(PodSeen{warmPod("a-2")})
	s.slow = true
	s.step(Claim{Token: 4, Pool: poolA, Wait: wait})
	s.step(PodGone{key("a-2")})
	s.written()
	if r := one[ClaimRefused](s); r.Token != 4 || r.Why != Ending {
		t.Errorf("refused %+v", r)
	}

	s, sb := startingSim(t)
	s.step(Closing{})
	if c := one[Claimed](s); c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Starting {
		t.Errorf("answer %+v", c)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	one[Claimed](s)
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	one[Claimed](s)
}

func TestNewClaimsAreRefusedUnderPressure(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.step(Pressure{On: true})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Why != Overloaded {
		t.Errorf("refused %+v", r)
	}
	s.step(Pressure{})
	s.claim()
}

func TestClaimOnlyTightensTheAccessOfItsPool(t *testing.T) {
	for _, c := range []struct{ pool, said, want Access }{
		{AccessPublic, AccessPublic, AccessPublic}, {AccessPublic, AccessToken, AccessToken}, {AccessPublic, AccessTeam, AccessTeam},
		{AccessToken, AccessPublic, AccessToken}, {AccessToken, AccessTeam, AccessTeam}, {AccessTeam, AccessToken, AccessTeam},
	} {
		t.Run(c.pool.String()+" "+c.said.String(), func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{changed(specA(1), func(p *Pool) { p.Access = c.pool })}, []Pod{warmPod("a-1")})
			s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{Access: c.said}})
			if got := one[Claimed](s).Sandbox.Access; got != c.want {
				t.Fatalf("got %v, want %v", got, c.want)
			}
		})
	}
}
