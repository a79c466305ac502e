package harness

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/internal/wait"
)

// Wait calls check until it returns nil. When ctx ends it returns the last error of check. The
// pauses between calls grow from 10 to 200 ms, because many tests wait at the same time.
func Wait(ctx context.Context, check func(context.Context) error) error {
	const least, most = 10 * time.Millisecond, 200 * time.Millisecond
	for pause := least; ; pause = min(2*pause, most) {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if !wait.Sleep(ctx, pause) {
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

// Eventually waits until check returns nil, and ends the test if it does not within limit, which
// Berth does not promise.
func Eventually(t testing.TB, limit time.Duration, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := Wait(ctx, check); err != nil {
		t.Fatalf("after %v: %v", limit, err)
	}
}
