package allocator

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/api/apierror"
)

func TestHistoryHasWhatWasCountedInEachStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		a.metrics.claims.WithLabelValues("claimed").Add(100) // in an earlier term of this process
		stop := tm.loop.running(t)
		tm.history = history.New(time.Now())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); tm.keepHistory(ctx) }()
		synctest.Wait()

		for _, err := range []error{
			nil, nil, context.Canceled, errors.New("broken"), apierror.New(apierror.PoolEmpty, ""), apierror.New(apierror.Timeout, ""),
		} {
			a.metrics.claims.WithLabelValues(outcome(err)).Inc()
		}
		a.metrics.batches.WithLabelValues(outcome(nil)).Inc()
		a.metrics.claimed.Observe(.015)
		a.metrics.pools.granted("python", false, 0)
		a.metrics.pools.granted("python", true, time.Second)
		a.metrics.pools.refused("go", core.PoolEmpty)
		for _, reason := range []string{"Killed", "IdleTimeout", "IdleTimeout", "NodeLost"} {
			a.metrics.releases.WithLabelValues(reason).Inc()
		}
		tm.tell(core.Acknowledged{Took: 15 * time.Millisecond})
		a.metrics.podFailures.WithLabelValues("Failed").Inc()
		time.Sleep(history.Step)
		synctest.Wait()
		ring, err := a.History()
		require.NoError(t, err)
		points, _, _ := ring.Points()
		require.Len(t, points, 1)
		p := points[0]
		require.InDelta(t, .015, p.ClaimP50, .005)
		require.InDelta(t, .02, p.ClaimP99, .005)
		require.InDelta(t, .015, p.AcknowledgedP99, .005)
		p.ClaimP50, p.ClaimP99, p.AcknowledgedP99 = 0, 0, 0
		require.Equal(t, history.Point{
			Measured: true, Claimed: 3, Refused: 1, Failed: 2, Warm: 1, Waited: 1, Empty: 1, Called: 1, Idle: 2, Other: 1, PodsFailed: 1,
		}, p)

		stop() // the loop does not answer: what is not known is not zero
		time.Sleep(history.Step + lookWait)
		synctest.Wait()
		points, _, _ = ring.Points()
		require.Len(t, points, 2)
		require.Equal(t, -1, points[1].Live)
		require.Zero(t, points[1].Claimed, "counted in the step before")
		cancel()
		<-ended

		a.setTerm(nil)
		_, err = a.History()
		require.ErrorContains(t, err, "does not lead")
	})
}
