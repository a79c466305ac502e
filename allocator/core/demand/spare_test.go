package demand_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/demand"
)

// The tracker counts in intervals of Spare. So the pods must outlast the end of an interval.
func TestPodsThatClaimsLackedAreKeptForSpare(t *testing.T) {
	for _, offset := range []time.Duration{0, time.Second, demand.Spare / 2, demand.Spare - time.Second} {
		var tracker demand.Tracker
		at := 10*demand.Spare + offset
		require.Equal(t, demand.Target{Lacking: 3}, tracker.Target(at, demand.Limits{Max: 9, Spare: 9}, 3))
		for passed := time.Second; passed < demand.Spare; passed += time.Second {
			require.Equal(t, demand.Target{Spare: 3}, tracker.Target(at+passed, demand.Limits{Max: 9, Spare: 9}, 0), "%v after an offset of %v", passed, offset)
		}
		require.Equal(t, demand.Target{}, tracker.Target(at+2*demand.Spare, demand.Limits{Max: 9, Spare: 9}, 0))
	}
}
