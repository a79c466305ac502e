package teams_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/teams"
)

func settings(l teams.Limits) teams.Settings { return teams.Settings{Default: l} }

func TestEachLimitIsNamedWithItsValue(t *testing.T) {
	for name, c := range map[string]struct {
		limits  teams.Limits
		request teams.Request
		want    teams.Excess
	}{
		"no limits":           {teams.Limits{}, teams.Request{Sandboxes: 1000, Waits: true, Used: 1e6, Waiting: 1e6}, teams.Excess{}},
		"the last sandbox":    {teams.Limits{MaxSandboxes: 10}, teams.Request{Sandboxes: 1, Used: 9}, teams.Excess{}},
		"one too many":        {teams.Limits{MaxSandboxes: 10}, teams.Request{Sandboxes: 1, Used: 10}, teams.Excess{Limit: teams.MaxSandboxes, Value: 10, Used: 10}},
		"a batch as a whole":  {teams.Limits{MaxSandboxes: 10}, teams.Request{Sandboxes: 4, Used: 7}, teams.Excess{Limit: teams.MaxSandboxes, Value: 10, Used: 7}},
		"one need not wait":   {teams.Limits{MaxWaiting: 2}, teams.Request{Sandboxes: 1, Waiting: 2}, teams.Excess{}},
		"too many would wait": {teams.Limits{MaxWaiting: 2}, teams.Request{Sandboxes: 1, Waits: true, Waiting: 2}, teams.Excess{Limit: teams.MaxWaiting, Value: 2, Used: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			l := teams.New()
			l.Set(settings(c.limits), 0)
			require.Equal(t, c.want, l.Admit(c.request, 0))
			require.NoError(t, l.Check(0))
		})
	}
}

func TestTeamsHaveTheirOwnLimits(t *testing.T) {
	l := teams.New()
	l.Set(teams.Settings{Default: teams.Limits{MaxSandboxes: 1}, Teams: map[string]teams.Limits{"big": {MaxSandboxes: 5}, "free": {}}}, 0)
	for team, want := range map[string]int{"big": 5, "other": 1, "": 1, "free": 0} {
		refused := l.Admit(teams.Request{Team: team, Sandboxes: 1, Used: 5}, 0)
		require.Equal(t, float64(want), refused.Value, team)
	}
}

func TestBatchAboveTheBucketLeavesADebt(t *testing.T) {
	l := teams.New()
	l.Set(settings(teams.Limits{ClaimsPerSecond: 10}), 0)
	batch, one := teams.Request{Sandboxes: 30}, teams.Request{Sandboxes: 1}
	require.Zero(t, l.Admit(batch, 0))
	refused := l.Admit(one, 0)
	require.Equal(t, teams.Excess{Limit: teams.ClaimsPerSecond, Value: 10, Wait: 2100 * time.Millisecond}, refused)
	require.NotZero(t, l.Admit(one, refused.Wait-time.Microsecond))
	require.Zero(t, l.Admit(one, refused.Wait))
	require.Equal(t, time.Second, l.Admit(batch, refused.Wait).Wait)
}

func TestSlowRateAdmitsOneClaim(t *testing.T) {
	l := teams.New()
	l.Set(settings(teams.Limits{ClaimsPerSecond: 0.5}), 0)
	require.Zero(t, l.Admit(teams.Request{Sandboxes: 1}, 0))
	require.Equal(t, 2*time.Second, l.Admit(teams.Request{Sandboxes: 1}, 0).Wait)
}

// The model of a rate: the claims that were admitted since any of them.
func TestRateAdmitsNoMoreThanItsBound(t *testing.T) {
	type admission struct {
		at   time.Duration
		pods int
	}
	rapid.Check(t, func(t *rapid.T) {
		rate := float64(rapid.IntRange(1, 40).Draw(t, "rate")) / 4
		l, now := teams.New(), time.Duration(0)
		l.Set(settings(teams.Limits{ClaimsPerSecond: rate}), now)
		var admitted []admission
		for range 60 {
			now += time.Duration(rapid.IntRange(0, 2000).Draw(t, "passes")) * time.Millisecond
			r := teams.Request{Team: "t", Sandboxes: rapid.SampledFrom([]int{1, 1, 2, 20}).Draw(t, "pods")}
			if rapid.IntRange(0, 9).Draw(t, "again") == 0 {
				l.Set(l.Settings(), now) // the same settings change nothing
			}
			refused := l.Admit(r, now)
			if refused.Wait > 0 {
				if early := l.Admit(r, now+refused.Wait-10*time.Microsecond); refused.Wait > 20*time.Microsecond && early == (teams.Excess{}) {
					t.Fatalf("%+v is admitted before %v", r, refused)
				}
				now += refused.Wait
				if late := l.Admit(r, now); late != (teams.Excess{}) {
					t.Fatalf("%+v is refused after its wait: %+v", r, late)
				}
			}
			admitted = append(admitted, admission{now, r.Sandboxes})
			if err := l.Check(now); err != nil {
				t.Fatal(err)
			}
			sum, largest := 0, 0
			for i := len(admitted) - 1; i >= 0; i-- {
				sum, largest = sum+admitted[i].pods, max(largest, admitted[i].pods)
				if bound := rate*(now-admitted[i].at).Seconds() + math.Max(1, rate) + float64(largest); float64(sum) > bound+1e-6 {
					t.Fatalf("%d sandboxes in %v at a rate of %v, expected at most %v", sum, now-admitted[i].at, rate, bound)
				}
			}
		}
	})
}
