package processnode

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// crash runs a container for the given time and returns how long it then waits.
func crash(t *testing.T, b crashBackOff, ran time.Duration) time.Duration {
	t.Helper()
	time.Sleep(ran)
	ended, waited := time.Now(), time.Duration(0)
	for {
		wait, ok := b.restart("c", ended)
		if ok {
			return waited
		}
		require.Positive(t, wait)
		time.Sleep(wait)
		waited += wait
	}
}

func TestOnlyTheFirstRestartIsImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newCrashBackOff(RestartBackOff{Initial: 10 * time.Second, Max: 5 * time.Minute})
		for i, want := range []int{0, 10, 20, 40, 80, 160, 300, 300} {
			require.Equal(t, time.Duration(want)*time.Second, crash(t, b, time.Second), "restart %d", i+1)
		}
	})
}

func TestLongRunForgivesEarlierCrashes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newCrashBackOff(RestartBackOff{Initial: 10 * time.Second, Max: 5 * time.Minute})
		crash(t, b, time.Second)
		require.Equal(t, 10*time.Second, crash(t, b, time.Second))
		require.Equal(t, 20*time.Second, crash(t, b, 9*time.Minute), "not long enough")
		require.Zero(t, crash(t, b, 11*time.Minute))
		require.Equal(t, 10*time.Second, crash(t, b, time.Second), "from the beginning again")
	})
}

func TestWaitCountsFromTheEndOfTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newCrashBackOff(RestartBackOff{Initial: 10 * time.Second, Max: time.Minute})
		crash(t, b, 0)
		ended := time.Now()
		time.Sleep(4 * time.Second)
		wait, ok := b.restart("c", ended)
		require.False(t, ok)
		require.Equal(t, 6*time.Second, wait)
	})
}
