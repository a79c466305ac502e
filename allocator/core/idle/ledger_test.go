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
	l.Expire(now)
	_, ask, _ := l.Ask(now, noProbe)
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

func hasProbe(string) bool { return true }

// The answer to the first probe comes while the second one is under way, or after the pause.
// Invariant: I4
func TestLateProbeAnswerDoesNotCount(t *testing.T) {
	l := idle.New(window, false)
	l.Joined("r", 0)
	l.Report("r", idle.Report{Gateway: "g"}, 0)
	l.Add(idle.Sandbox{ID: "x", Timeout: timeout}, 0, activity.Claim, 0)
	now := timeout
	first, _, _ := l.Ask(now, hasProbe)
	now += idle.ProbeWait
	second, _, _ := l.Ask(now, hasProbe)
	require.Equal(t, first[0].Router, second[0].Router)
	l.Probed("x", first[0].Number, false, now)
	_, ask, _ := l.Ask(now, hasProbe)
	require.Empty(t, ask.Sandboxes)
	l.Probed("x", second[0].Number, false, now+idle.ProbeWait+1)
	third, ask, _ := l.Ask(now+idle.ProbeWait+1, hasProbe)
	require.Empty(t, ask.Sandboxes)
	l.Probed("x", third[0].Number, true, now+idle.ProbeWait+1)
	use, _ := l.Use("x")
	require.Equal(t, idle.Use{At: now + idle.ProbeWait + 1, Kind: activity.Busy}, use)
	require.NoError(t, l.Check())
}

// Looks that take longer leave no time for a verdict.
func TestSlowLooksBlockTheQuestionVisibly(t *testing.T) {
	l := idle.New(window, false)
	l.Joined("r", 0)
	l.Add(idle.Sandbox{ID: "x", Timeout: timeout}, 0, activity.Claim, 0)
	l.Report("r", idle.Report{Gateway: "g", Took: idle.MaxLook + 1}, timeout)
	require.Empty(t, askAt(l, timeout).Sandboxes)
	q, _ := l.Question("x", 1)
	require.Equal(t, []string{"r"}, q.Awaits)
	require.Equal(t, "its looks at Envoy take too long", q.Why)
	l.Report("r", idle.Report{Gateway: "g", Took: idle.MaxLook}, timeout)
	require.Equal(t, []string{"x"}, askAt(l, timeout+idle.AskAgain).Sandboxes)
	require.Less(t, 2*idle.MaxLook+101*time.Millisecond, 1600*time.Millisecond, "a router gives up then")
	require.Less(t, idle.AnswerWait, 2*time.Second, "requests are held for so long")
}

// It reports, so it is asked again, and it is named until it answers.
func TestRouterThatNeverAnswersIsNamed(t *testing.T) {
	l := idle.New(window, false)
	l.Joined("r", 0)
	l.Add(idle.Sandbox{ID: "x", Timeout: timeout}, 0, activity.Claim, 0)
	now, asked := timeout, 0
	var ask idle.Ask
	for range 60 {
		l.Report("r", idle.Report{Gateway: "g"}, now)
		if next := askAt(l, now); len(next.Sandboxes) > 0 {
			ask, asked = next, asked+1
		}
		if asked > 1 {
			q, _ := l.Question("x", 1)
			require.Equal(t, []string{"r"}, q.Awaits)
			require.Equal(t, "it did not answer in time", q.Why)
		}
		now += time.Second
	}
	require.InDelta(t, 5, asked, 1, "once in ten seconds, because requests are held meanwhile")
	l.Answer("r", ask.Round, nil, "", now)
	q, _ := l.Question("x", 1)
	require.Empty(t, q.Awaits)
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

// A router that ended before a sandbox slept may have left a request open, which goes on after the wake.
// Invariant: I4
func TestSuspendedSandboxKeepsItsPlaceAmongRoutes(t *testing.T) {
	l := idle.New(5*time.Second, false)
	l.Joined("r", 0)
	l.Add(idle.Sandbox{ID: "a", Timeout: 10 * time.Second}, 0, activity.Claim, 0)
	l.End("r", false, time.Hour, 0)
	l.Suspend("a")
	if _, known := l.Use("a"); known {
		t.Error("it is asked about while it sleeps")
	}
	l.Add(idle.Sandbox{ID: "a", Timeout: 10 * time.Second}, time.Minute, activity.Claim, time.Minute)
	if q, _ := l.Question("a", 5); len(q.Awaits) != 1 || q.Awaits[0] != "r" {
		t.Errorf("%+v", q)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
}
