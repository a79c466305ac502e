package core

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/demand"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

func TestWaitingClaimGetsPodOfColdPool(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	created := one[CreatePod](s)
	s.step(PodSeen{warmPod(created.Name)})
	require.EqualValues(t, 1, one[Claimed](s).Token)
	none[CreatePod](s)
}

func TestPodOfClaimThatGaveUpIsKept(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Second})
	created := one[CreatePod](s)
	s.pass(time.Second)
	require.Equal(t, PoolEmpty, one[ClaimRefused](s).Why)
	s.step(PodSeen{warmPod(created.Name)})
	counts, _ := s.core.View().Counts(poolA)
	require.Equal(t, 1, counts.Warm)
	s.step(Claim{Token: 2, Pool: poolA}) // it comes again, and does not wait
	require.EqualValues(t, 2, one[Claimed](s).Token)
}

func TestSparePodIsDeletedWhenUnused(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Second})
	created := one[CreatePod](s)
	s.pass(time.Second)
	s.step(PodSeen{warmPod(created.Name)})
	s.pass(2 * demand.Spare)
	counts, _ := s.core.View().Counts(poolA)
	require.Zero(t, counts.Warm)
}

func TestWarmTargetFollowsTheBusiestStretch(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.MaxWarm = 3 })}, nil)
	target := func() int { return s.core.pools.Find(poolA).Target().Warm }
	require.Equal(t, 1, target())
	for token := range uint64(2) {
		s.step(Claim{Token: token + 1, Pool: poolA}) // refused at once, and wanted all the same
		require.Equal(t, PoolEmpty, one[ClaimRefused](s).Why)
	}
	require.Equal(t, 2, target())
	for token := range uint64(5) {
		s.step(Claim{Token: token + 10, Pool: poolA})
	}
	require.Equal(t, 3, target(), "maxWarm")
	s.step(Tick{})
	s.pass(demand.History - time.Minute)
	require.Equal(t, 3, target())
	s.pass(2 * time.Minute)
	require.Equal(t, 1, target())
}

func TestNewLeaderKeepsTheIdlePodsItFinds(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.MaxWarm = 10 })}, warmPods(4))
	counts, _ := s.core.View().Counts(poolA)
	require.Equal(t, 4, counts.Warm)
	s.pass(demand.History)
	counts, _ = s.core.View().Counts(poolA)
	require.Equal(t, 1, counts.Warm)
}

func TestNewLeaderKeepsPodsOfWaitingClaims(t *testing.T) {
	const starting, recent, old = "a-1", "a-2", "a-3"
	s := newSim(t)
	pods := []Pod{with(warmPod(starting), func(p *Pod) { p.Ready = false }), warmPod(recent), warmPod(old)}
	pods[1].CreatedAt = start.Wall.Add(-demand.Spare / 2)
	pods[2].CreatedAt = start.Wall.Add(-demand.Spare)
	s.recover([]Pool{specA(0)}, pods)
	counts, _ := s.core.View().Counts(poolA)
	require.Equal(t, 2, counts.Pending+counts.Warm)
	s.pass(2 * demand.Spare)
	counts, _ = s.core.View().Counts(poolA)
	require.Zero(t, counts.Pending+counts.Warm)
}

func TestClaimAboveTheTeamsLimitIsNoDemand(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(0), func(p *Pool) { p.MaxWarm = 5 })}, nil)
	s.step(TeamLimits{Settings: teams.Settings{Default: teams.Limits{MaxSandboxes: 2}}})
	s.step(Claim{Token: 1, Pool: poolA, Count: 3})
	require.Equal(t, OverLimit, one[ClaimRefused](s).Why)
	require.Zero(t, s.core.pools.Find(poolA).Target().Warm)
	s.step(Claim{Token: 2, Pool: poolA, Count: 2})
	require.Equal(t, PoolEmpty, one[ClaimRefused](s).Why)
	require.Equal(t, 2, s.core.pools.Find(poolA).Target().Warm)
}

func TestGrantSaysWhetherItsClaimWaited(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, warmPods(1))
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	require.Equal(t, ClaimGranted{Pool: poolA}, one[ClaimGranted](s))

	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	none[ClaimGranted](s)
	s.pass(time.Second)
	s.step(PodSeen{warmPod("a-2")})
	require.Equal(t, ClaimGranted{Pool: poolA, Waited: true, Wait: time.Second}, one[ClaimGranted](s))

	s.step(Claim{Token: 3, Pool: poolA, Wait: time.Second})
	s.step(ClaimAbandoned{Token: 3})
	require.Equal(t, poolA, one[ClaimCanceled](s).Pool)
	s.step(Claim{Token: 4, Pool: poolA, Wait: time.Second})
	s.pass(time.Second)
	require.Equal(t, poolA, one[ClaimRefused](s).Pool)
}

func TestClaimWhosePodIsLostHasWaited(t *testing.T) {
	s := newSim(t)
	s.slow = true
	s.recover([]Pool{specA(1)}, warmPods(1))
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(PodGone{key("a-1")})
	s.slow = false
	s.written()
	s.writeAll()
	s.step(PodSeen{warmPod("a-2")})
	require.True(t, one[ClaimGranted](s).Waited)
}

func TestCountsShowTheTargetOfTheDemand(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(0)}, nil)
	s.step(Claim{Token: 1, Pool: poolA, Wait: 2 * time.Second})
	created := one[CreatePod](s)
	counts, _ := s.core.View().Counts(poolA)
	require.Equal(t, [3]int{0, 1, 0}, [3]int{counts.Target, counts.Lacking, counts.Spare})
	require.Zero(t, counts.Start)
	s.pass(2 * time.Second)
	s.step(PodSeen{warmPod(created.Name)})
	counts, _ = s.core.View().Counts(poolA)
	require.Equal(t, [3]int{0, 0, 1}, [3]int{counts.Target, counts.Lacking, counts.Spare})
	require.Equal(t, 2*time.Second, counts.Start)
}
