package soak

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/devcluster/stack"
)

var (
	durationFlag = flag.Duration("soak.duration", 2*time.Minute, "how long the soak lasts, 20s or more; cluster and judgement take another half minute")
	seedFlag     = flag.Uint64("soak.seed", 0, "seed of what is done; 0: another one each time")
	rateFlag     = flag.Float64("soak.rate", 0, "requests a second at the most; 0: 150 with the race detector, else 500")
	historyFlag  = flag.String("soak.history", "", "file to write the history to; empty: it is kept only if the test fails")
)

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 1
	}
	if !testing.Short() {
		dir, err := os.MkdirTemp("", "berth-soak-bin-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = stack.Build(context.Background(), dir, raceEnabled, "allocator", "extproc")
		}
		if err == nil { // is not under test, and there are many of it
			err = stack.Build(context.Background(), dir, false, "demo-sandbox")
		}
		if err != nil {
			return fail(fmt.Errorf("build the programs under test: %w", err))
		}
		binDir = dir
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return fail(err)
		}
	}
	return code
}
