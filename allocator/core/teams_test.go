package core

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/demand"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

func of1(team string, token uint64) Claim {
	return Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{Team: team}}
}

func TestTeamsAreServedInTurns(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	for token := range uint64(500) {
		s.step(of1("noisy", token+1))
	}
	s.step(of1("quiet", 1001))
	s.step(of1("quiet", 1002))
	var order []uint64
	for i := range 5 {
		s.step(PodSeen{warmPod("a-" + strconv.Itoa(i+1))})
		order = append(order, one[Claimed](s).Token)
	}
	if want := [5]uint64{1, 1001, 2, 1002, 3}; [5]uint64(order) != want {
		t.Errorf("served %v, expected %v", order, want)
	}
}

// A team keeps many claims waiting at the pool where another one claims. Each step of the other team costs as
// many allocations as beside few, and it gets every second pod.
// Invariant: P3
func TestClaimCostsTheSameBesideManyWaiting(t *testing.T) {
	allocations := func(waiting int) float64 {
		s := newSim(t)
		s.cfg.MaxWaiting = 2 * waiting
		s.restart()
		s.recover([]Pool{specA(1)}, nil)
		token, pods := uint64(0), 0
		var granted []string
		do := func(ev Event) {
			for effects := s.stepCore(ev); len(effects) > 0; { // without the checks of step, which see every claim
				writes := false
				for _, e := range effects {
					switch e := e.(type) {
					case Write:
						writes = true
					case Claimed:
						granted = append(granted, e.Sandbox.Team)
					}
				}
				if effects = nil; writes {
					effects = append(s.stepCore(Written{}), s.stepCore(WriterReady{})...)
				}
			}
		}
		claim := func(team string) {
			token++
			do(of1(team, token))
		}
		for range waiting {
			claim("noisy")
		}
		const runs = 200
		n := testing.AllocsPerRun(runs, func() {
			claim("quiet")
			for range 2 {
				pods++
				do(PodSeen{with(warmPod("a-1"), func(p *Pod) {
					p.Key, p.IP = key("a-"+strconv.Itoa(pods)), netip.AddrFrom4([4]byte{10, 1, byte(pods >> 8), byte(pods)})
				})})
			}
			claim("noisy")
			s.now.Boot += time.Millisecond
			do(Tick{})
		})
		for i, team := range granted {
			if want := []string{"noisy", "quiet"}[i%2]; team != want {
				t.Fatalf("grant %d of %d beside %d waiting claims goes to %q, expected %q", i, len(granted), waiting, team, want)
			}
		}
		if len(granted) != 2*(runs+1) { // AllocsPerRun makes one run more
			t.Fatalf("%d grants beside %d waiting claims", len(granted), waiting)
		}
		checkTables(t, s.core)
		return n
	}
	few, many := allocations(100), allocations(10_000)
	if many > 1.1*few+5 {
		t.Errorf("%v allocations beside 10,000 waiting claims, %v beside 100", many, few)
	}
	t.Logf("%v allocations beside 10,000 waiting claims, %v beside 100", many, few)
}

func TestTeamCannotFillALineAlone(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 4
	s.restart()
	s.recover([]Pool{specA(1)}, nil)
	for token := range uint64(4) {
		s.step(of1("noisy", token+1))
	}
	none[ClaimRefused](s)
	for i, displaced := range []uint64{4, 3} {
		s.step(of1("quiet", uint64(10+i)))
		if r := one[ClaimRefused](s); r.Token != displaced || r.Why != LineFull {
			t.Errorf("refused %+v", r)
		}
	}
	for _, team := range []string{"quiet", "noisy"} { // each has its half
		s.step(of1(team, 20))
		if r := one[ClaimRefused](s); r.Token != 20 || r.Why != LineFull {
			t.Errorf("refused %+v", r)
		}
	}
}

func TestQuotaCountsWhatTheNextLeaderFinds(t *testing.T) {
	limits := TeamLimits{teams.Settings{Teams: map[string]teams.Limits{"t": {MaxSandboxes: 3}}}}
	s := newSim(t)
	s.recover([]Pool{specA(5)}, warmPods(5))
	s.step(limits)
	s.slow = true
	s.step(of1("t", 1))
	facts := one[Write](s).Facts
	s.step(of1("t", 2)) // on its way
	s.step(Claim{Token: 3, Pool: poolA, Count: 2, Wait: wait, Binding: Binding{Team: "t"}})
	if r := one[ClaimRefused](s); r.Why != OverLimit || r.Excess != (teams.Excess{Team: "t", Limit: teams.MaxSandboxes, Value: 3, Used: 2}) {
		t.Errorf("refused %+v", r)
	}
	s.step(of1("other", 4))
	none[ClaimRefused](s)

	next := newSimAt(t, 2, s.now)
	next.recover([]Pool{specA(5)}, warmPods(5), facts...)
	next.step(limits)
	for token := range uint64(2) {
		next.step(of1("t", token+1))
		one[Claimed](next)
	}
	next.step(of1("t", 9))
	if r := one[ClaimRefused](next); r.Excess.Used != 3 {
		t.Errorf("refused %+v", r)
	}
	next.release(sandboxOf(facts[0]).ID)
	next.step(of1("t", 10))
	one[Claimed](next)
}

func TestWaitingClaimsOfATeamAreBounded(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1), changed(specA(1), func(p *Pool) { p.Key.Name = "b" })}, nil)
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxWaiting: 2, ClaimsPerSecond: 3}}})
	s.step(of1("t", 1))
	s.step(Claim{Token: 2, Pool: PoolKey{Namespace: "ns", Name: "b"}, Wait: wait, Binding: Binding{Team: "t"}})
	s.step(of1("t", 3))
	if r := one[ClaimRefused](s); r.Excess.Limit != teams.MaxWaiting || r.Excess.Used != 2 {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	s.step(of1("t", 4)) // the refused one has cost no token
	none[ClaimRefused](s)
	s.step(PodSeen{warmPod("a-2")})
	s.step(of1("t", 5))
	if r := one[ClaimRefused](s); r.Excess.Limit != teams.ClaimsPerSecond || r.Excess.Wait <= 0 || r.Excess.Wait > time.Second {
		t.Errorf("refused %+v", r)
	}
}

// Otherwise a team without places would wait with any number of calls of one claim.
func TestCallersOfOneKeyCountAsWaiting(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, nil)
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxWaiting: 2, MaxSandboxes: 1, ClaimsPerSecond: 1}}})
	again := func(token uint64) {
		s.step(Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{Team: "t", IdempotencyKey: "k"}})
	}
	again(1)
	again(2) // costs neither a sandbox nor a token
	none[ClaimRefused](s)
	again(3)
	if r := one[ClaimRefused](s); r.Token != 3 || r.Excess != (teams.Excess{Team: "t", Limit: teams.MaxWaiting, Value: 2, Used: 2}) {
		t.Errorf("refused %+v", r)
	}
	s.step(ClaimAbandoned{Token: 1})
	again(4)
	none[ClaimRefused](s)
	s.step(PodSeen{warmPod("a-1")})
	if got := of[Claimed](s.effects); len(got) != 2 {
		t.Errorf("answered %+v", got)
	}
}

func TestCallersOfOneKeyCrowdNoOtherTeam(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 4
	s.restart()
	s.recover([]Pool{specA(1)}, nil)
	again := func(team string, token uint64) {
		s.step(Claim{Token: token, Pool: poolA, Wait: wait, Binding: Binding{Team: team, IdempotencyKey: "k"}})
	}
	again("quiet", 1)
	for token := range uint64(3) {
		s.step(of1("noisy", 10+token))
	}
	again("quiet", 2)
	if r := one[ClaimRefused](s); r.Token != 12 || r.Why != LineFull {
		t.Errorf("refused %+v", r)
	}
	again("quiet", 3)
	if r := one[ClaimRefused](s); r.Token != 3 || r.Why != LineFull {
		t.Errorf("refused %+v", r)
	}
}

func TestOneCallerOfAKeyMakesRoomForAnotherTeam(t *testing.T) {
	s := newSim(t)
	s.cfg.MaxWaiting = 6
	s.restart()
	s.recover([]Pool{specA(1)}, nil)
	for token := range uint64(4) { // callers of one claim
		s.step(Claim{Token: token + 1, Pool: poolA, Wait: wait, Binding: Binding{Team: "noisy", IdempotencyKey: "k"}})
	}
	s.step(of1("noisy", 5))
	s.step(of1("quiet", 6))
	s.step(of1("quiet", 10))
	if r := one[ClaimRefused](s); r.Token != 4 || r.Why != LineFull {
		t.Errorf("refused %+v", r)
	}
	s.step(of1("quiet", 11)) // both have three
	if r := one[ClaimRefused](s); r.Token != 3 || r.Why != LineFull {
		t.Errorf("refused %+v", r)
	}
	s.step(PodSeen{warmPod("a-1")})
	var served []uint64
	for _, c := range of[Claimed](s.effects) {
		served = append(served, c.Token)
	}
	if !slices.Equal(served, []uint64{1, 2}) {
		t.Errorf("the claim of several callers got a sandbox for %v", served)
	}
}

func TestPodsOfClaimsThatEndedCountForTheTeam(t *testing.T) {
	s := newSim(t)
	b := changed(specA(0), func(p *Pool) { p.Key.Name = "b" })
	s.recover([]Pool{specA(0), b}, nil)
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxSandboxes: 3}}})
	ask := func(pool PoolKey, token uint64, pods int) {
		s.step(Claim{Token: token, Pool: pool, Count: pods, Wait: time.Second, Binding: Binding{Team: "t"}})
	}
	ask(poolA, 1, 3)
	s.pass(time.Second)
	if r := one[ClaimRefused](s); r.Why != PoolEmpty {
		t.Errorf("refused %+v", r)
	}
	ask(b.Key, 2, 1) // it would have another pod created
	if r := one[ClaimRefused](s); r.Excess != (teams.Excess{Team: "t", Limit: teams.MaxSandboxes, Value: 3, Used: 3}) {
		t.Errorf("refused %+v", r)
	}
	none[CreatePod](s)
	ask(poolA, 3, 3) // it takes those pods
	none[ClaimRefused](s)
	s.step(ClaimAbandoned{Token: 3})
	s.pass(2 * demand.Spare)
	ask(b.Key, 4, 3) // they have gone
	none[ClaimRefused](s)
	if got := of[CreatePod](s.effects); len(got) != 3 {
		t.Errorf("created %+v", got)
	}
}
