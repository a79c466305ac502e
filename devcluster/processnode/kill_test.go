package processnode

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestGracePeriodOnlyGetsShorter(t *testing.T) {
	for _, c := range []struct {
		name  string
		asked []time.Duration // one per second, from the first second on
		want  time.Duration
	}{
		{name: "never changed", want: 30 * time.Second},
		{name: "shorter", asked: []time.Duration{5 * time.Second}, want: 6 * time.Second},
		{name: "longer is ignored", asked: []time.Duration{time.Hour}, want: 30 * time.Second},
		{name: "the shortest wish counts", asked: []time.Duration{3 * time.Second, time.Hour, 10 * time.Second}, want: 4 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				k := newKiller(30 * time.Second)
				go func() {
					for _, d := range c.asked {
						time.Sleep(time.Second)
						k.within(d)
					}
				}()
				require.False(t, k.wait(t.Context(), nil))
				require.Equal(t, c.want, time.Since(begun))
				synctest.Wait()
				time.Sleep(time.Hour) // the asking goroutine ends
			})
		})
	}
}

func TestWishesMadeBeforeTheWaitCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		k := newKiller(30 * time.Second)
		k.within(2 * time.Second)
		k.within(20 * time.Second)
		require.False(t, k.wait(t.Context(), nil))
		require.Equal(t, 2*time.Second, time.Since(begun))
	})
}

func TestNoWishTakesTheMinimumAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		k := newKiller(30 * time.Second)
		k.least = begun.Add(minimumGrace)
		k.within(time.Second)
		require.False(t, k.wait(t.Context(), nil))
		require.Equal(t, minimumGrace, time.Since(begun))
	})
}
