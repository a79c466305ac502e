package harness

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// every is the pause between two checks of a condition.
const every = 25 * time.Millisecond

// Wait calls check until it returns nil. When ctx ends it returns the last error of check.
func Wait(ctx context.Context, check func(context.Context) error) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// Eventually waits until check returns nil, and ends the test if it does not within limit.
// limit is a guard and not what is tested.
func Eventually(t testing.TB, limit time.Duration, check func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := Wait(ctx, check); err != nil {
		t.Fatalf("after %v: %v", limit, err)
	}
}
