package idle_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/api/activity"
)

func noProbe(string) bool { return false }

// askAt returns the question of one tick.
func askAt(l *idle.Ledger, now time.Duration) idle.Ask {
	l.Due(now, noProbe)
	l.Expire(now)
	ask, _ := l.Ask(now)
	return ask
}

func TestReleasedSandboxLeavesItsRound(t *testing.T) {
	l := idle.New(window, false)
	l.Joined("r", 0)
	l.Report("r", idle.Report{Gateway: "g"}, 0)
	for _, id := range []string{"x", "y"} {
		l.Add(idle.Sandbox{ID: id, Timeout: timeout}, 0, activity.Claim, 0)
	}
	ask := askAt(l, timeout)
	require.Equal(t, []string{"x", "y"}, ask.Sandboxes)
	l.Remove("x")
	v := l.Answer("r", ask.Round, []idle.Activity{{ID: "y"}}, "", timeout)
	require.Equal(t, idle.Verdict{Resume: []string{"y"}}, v)
	require.NoError(t, l.Check())
}

func TestBusyAnswerOfAnotherRouterIsLate(t *testing.T) {
	l := idle.New(window, false)
	for _, id := range []string{"q", "r"} {
		l.Joined(id, 0)
		l.Report(id, idle.Report{Gateway: id}, 0)
	}
	l.Add(idle.Sandbox{ID: "x", Timeout: timeout}, 0, activity.Claim, 0)
	probe := l.Due(timeout, func(string) bool { return true })[0]
	other := map[string]string{"q": "r", "r": "q"}[probe.Router]
	l.Probed(other, "x", true, timeout)
	use, _ := l.Use("x")
	require.Zero(t, use.At)
	l.Probed(probe.Router, "x", true, timeout)
	use, _ = l.Use("x")
	require.Equal(t, idle.Use{At: timeout, Kind: activity.Busy}, use)
	require.NoError(t, l.Check())
}

// All of one burst have their turns at once a minute later.
func TestTurnsToPersistAreSpreadOut(t *testing.T) {
	const all = 600
	l := idle.New(window, false)
	for i := range all {
		l.Add(idle.Sandbox{ID: fmt.Sprint(i), Timeout: time.Hour}, 0, activity.Claim, 0)
	}
	l.Add(idle.Sandbox{ID: "without a timeout"}, 0, activity.Claim, 0)
	last := map[string]time.Duration{}
	for now := time.Duration(0); now < 10*idle.PersistEvery; now += 50 * time.Millisecond {
		ids := l.ToPersist(now)
		require.LessOrEqual(t, len(ids), 2)
		for _, id := range ids {
			require.GreaterOrEqual(t, now-last[id], idle.PersistEvery)
			last[id] = now
		}
		if now > 2*idle.PersistEvery {
			require.Len(t, last, all)
		}
	}
	for id, at := range last {
		require.Greater(t, at, 8*idle.PersistEvery, id)
	}
}
