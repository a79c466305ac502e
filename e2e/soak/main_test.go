package soak

import (
	"context"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

var (
	durationFlag = flag.Duration("soak.duration", 45*time.Second,
		"how long faults are made, 20s or more; cluster and judgement take another half minute")
	seedFlag    = flag.Uint64("soak.seed", 0, "seed of what is done; 0: another one each time")
	rateFlag    = flag.Float64("soak.rate", 0, "requests a second at the most; 0: 150 with the race detector, else 500")
	historyFlag = flag.String("soak.history", "", "file to write the history to; empty: it is kept only if the test fails")
)

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	os.Exit(harness.Main(m, &binDir, func(ctx context.Context, dir string) error {
		if err := stack.Build(ctx, dir, harness.Race, "allocator", "extproc"); err != nil {
			return err
		}
		return stack.Build(ctx, dir, false, "demo-sandbox", "agent") // there are many of them
	}))
}
