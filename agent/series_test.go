package agent

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

func TestSeriesBeginsWithTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); h.KeepSeries(ctx) }()
		time.Sleep(time.Hour) // as a warm pod
		synctest.Wait()
		require.Empty(t, h.series.points(), "of the time before the claim")
		status, _ := h.call(http.MethodGet, "/metrics/history", nil)
		require.Equal(t, http.StatusServiceUnavailable, status)

		h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
		synctest.Wait()
		began := time.Now()
		time.Sleep(3 * seriesStep)
		synctest.Wait()
		status, _ = h.call(http.MethodGet, "/metrics/history", nil)
		require.Equal(t, http.StatusUnauthorized, status)
		status, body := h.call(http.MethodGet, "/metrics/history", nil, TokenHeader, "t")
		require.Equal(t, http.StatusOK, status, body)
		var got struct {
			TS     int64        `json:"ts"`
			CPUs   int          `json:"cpu_count"`
			Points [][5]float64 `json:"points"`
		}
		require.NoError(t, json.Unmarshal([]byte(body), &got))
		require.Equal(t, time.Now().Unix(), got.TS)
		require.Positive(t, got.CPUs)
		require.Len(t, got.Points, 3)
		for i, p := range got.Points {
			require.InDelta(t, float64(began.Add(time.Duration(i+1)*seriesStep).Unix()), p[0], 0)
			require.Positive(t, p[2])
			require.Positive(t, p[4])
		}

		time.Sleep(2 * seriesSize * seriesStep)
		synctest.Wait()
		all := h.series.points()
		require.Len(t, all, seriesSize, "an hour at most")
		require.InDelta(t, float64(time.Now().Unix()), all[seriesSize-1][0], seriesStep.Seconds())
		raw, err := json.Marshal(History{&Metrics{}, all})
		require.NoError(t, err)
		require.Less(t, len(raw), 24<<10, "the allocator reads 64 KiB")
		stop()
		<-ended
	})
}
