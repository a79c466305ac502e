package allocator

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
)

func TestPressureHasHysteresis(t *testing.T) {
	for name, c := range map[string]struct {
		on        bool
		lag       time.Duration
		unsettled int
		want      bool
	}{
		"nothing waits":           {false, 0, 0, false},
		"as late as may be":       {false, maxLag, 0, false},
		"too late":                {false, maxLag + 1, 0, true},
		"as much as may be":       {false, 0, maxUnsettled, false},
		"too much":                {false, 0, maxUnsettled + 1, true},
		"still late":              {true, lowLag, 0, true},
		"still much":              {true, 0, lowUnsettled, true},
		"neither late nor much":   {true, lowLag - 1, lowUnsettled - 1, false},
		"late, and has not begun": {false, lowLag, lowUnsettled, false},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, pressure(c.on, c.lag, c.unsettled)) })
	}
}

func TestPressureChangesReachTheCore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tm := &term{loop: newTestLoop(t, nil), log: zap.NewNop()}
		ctx, cancel := context.WithCancel(t.Context())
		var unsettled atomic.Int64
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			tm.watchPressure(ctx, func() (time.Duration, int) { return 0, int(unsettled.Load()) })
		}()
		for range 2 {
			time.Sleep(time.Minute)
			require.Empty(t, tm.loop.in, "nothing has changed")
			unsettled.Store(maxUnsettled + 1)
			time.Sleep(time.Minute)
			require.Len(t, tm.loop.in, 1)
			require.Equal(t, core.Pressure{On: true}, <-tm.loop.in)
			time.Sleep(time.Minute)
			require.Empty(t, tm.loop.in, "no event was submitted")
			unsettled.Store(0)
			time.Sleep(time.Minute)
			require.Len(t, tm.loop.in, 1)
			require.Equal(t, core.Pressure{On: false}, <-tm.loop.in)
		}
		cancel()
		<-ended
	})
}

func TestRefusedClaimsSayThatTheCRDIsMissing(t *testing.T) {
	s, stop := serveLeader(t, 2, callers{"key": {Key: "k", Team: "t", Role: access.Member}}, func(m *memoryAPI) { m.unserved = "sandboxes" })
	defer stop()
	s.claim("key") // its object cannot be written
	require.Eventually(t, func() bool {
		w := s.call("key", http.MethodPost, "/sandboxes", `{"templateID":"python"}`)
		return w.Code == http.StatusServiceUnavailable && strings.Contains(w.Body.String(), "the CRD sandboxes.berth.sh is missing or is being deleted")
	}, time.Minute, 50*time.Millisecond)
}

func TestBatchesArePacedByTheirSize(t *testing.T) {
	const second = 100 << 10 // bytes
	synctest.Test(t, func(t *testing.T) {
		m, err := newMetrics(prometheus.NewRegistry(), &Allocator{})
		require.NoError(t, err)
		w := newJournalWriter(nil, second, nil, m, zap.NewNop())
		paused := func(records, bytes int) time.Duration {
			began := time.Now()
			require.True(t, w.pause(t.Context(), began, records, bytes))
			return time.Since(began)
		}
		require.Zero(t, paused(1, 0), "a claim alone")
		require.Equal(t, 9*pacePerRecord, paused(10, 0))
		require.Equal(t, maxPace, paused(1000, 0))
		began := time.Now()
		time.Sleep(time.Second)
		require.True(t, w.pause(t.Context(), began, 1000, 0))
		require.Equal(t, time.Second, time.Since(began), "the write itself took longer")

		require.Zero(t, testutil.ToFloat64(m.heldBack))

		// Bytes: a burst of some seconds, then no more than the bound.
		require.LessOrEqual(t, paused(1, burstSeconds*second), maxPace)
		require.InDelta(t, time.Second, paused(1, second), float64(10*time.Millisecond))
		require.InDelta(t, 10*time.Second, paused(1, 1000*second), float64(10*time.Millisecond), "one that is larger than the burst is taken all the same")

		require.InDelta(t, 11, testutil.ToFloat64(m.heldBack), 0.1)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.False(t, w.pause(ctx, time.Now(), 1, 1000*second))
	})
}
