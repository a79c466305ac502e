package rate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBurstAndRateOfEachLimit(t *testing.T) {
	for perSecond, want := range map[float64]struct {
		burst int
		wait  time.Duration
	}{
		0.001: {2000, 1000 * time.Second}, 1: {2000, time.Second}, 200: {2000, 5 * time.Millisecond},
		1000: {2000, time.Millisecond}, 5000: {10_000, 200 * time.Microsecond}, 1_000_000: {2_000_000, time.Microsecond},
	} {
		l, full := PerSecond(perSecond), time.Duration(0)
		taken := 0
		for {
			after, wait := l.Take(full, time.Hour)
			if wait > 0 {
				require.Equal(t, want.wait, wait, "%v per second", perSecond)
				require.Equal(t, full, after, "a refusal costs nothing")
				break
			}
			full = after
			taken++
		}
		require.Equal(t, want.burst, taken, "%v per second", perSecond)
		full, wait := l.Take(full, time.Hour+want.wait)
		require.Zero(t, wait, "%v per second", perSecond)
		_, wait = l.Take(full, time.Hour+want.wait)
		require.Equal(t, want.wait, wait, "one token came")
	}
}

func TestZeroLimitRefusesNothing(t *testing.T) {
	require.Equal(t, Limit{}, PerSecond(0))
	full := time.Duration(0)
	for range 10_000 {
		var wait time.Duration
		full, wait = Limit{}.Take(full, time.Hour)
		require.Zero(t, wait)
	}
}

// Within any time a bucket gives at most its burst and what comes in that time.
func TestBucketNeverGivesMoreThanItsRate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		perSecond := rapid.Float64Range(0.5, 3000).Draw(t, "perSecond")
		l, full, now := PerSecond(perSecond), time.Duration(0), time.Hour
		began, taken := now, 0
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			now += time.Duration(rapid.IntRange(0, int(5*time.Second)).Draw(t, "pause"))
			for range rapid.IntRange(1, 4000).Draw(t, "asks") {
				after, wait := l.Take(full, now)
				if full = after; wait == 0 {
					taken++
				}
			}
		}
		if most := max(2000, 2*perSecond) + (now-began).Seconds()*perSecond*1.000001 + 1; float64(taken) > most {
			t.Fatalf("%d were taken, more than %v", taken, most)
		}
	})
}
