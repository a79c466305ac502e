package allocator

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/bootclock"
)

// after is how long something that comes so long after the first call has to
// wait.
func (h *headStart) after(began time.Duration, d time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(0, h.until-(began+d))
}

func TestHeadStartOfCallsIsBounded(t *testing.T) {
	var h headStart
	began := bootclock.Now()
	h.wait(t.Context()) // no call was made: no wait
	h.call()
	require.InDelta(t, headStartPerCall, h.after(began, 0), float64(headStartPerCall/2))

	// Calls that come all the time: the head start ends, and stays ended.
	h.began = bootclock.Now() - maxHeadStart
	h.until = h.began + maxHeadStart
	for range 100 {
		h.call()
	}
	require.LessOrEqual(t, h.until, h.began+maxHeadStart)
	h.wait(t.Context())

	h.began = bootclock.Now() - headStartInterval // a second later it is their turn again
	h.call()
	require.Greater(t, h.until, bootclock.Now())
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	h.wait(ctx)
	require.Error(t, ctx.Err(), "it did not wait")
}
