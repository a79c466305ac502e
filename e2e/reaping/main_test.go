package reaping

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
	durationFlag = flag.Duration("reaping.duration", time.Minute,
		"how long sandboxes are used and processes disturbed, at least; it goes on until enough has happened")
	reapsFlag = flag.Int("reaping.reaps", 100,
		"how many sandboxes must be released; ten times as many requests must be near a deadline, a tenth at a release")
	seedFlag    = flag.Uint64("reaping.seed", 0, "seed of what is done; 0: another one each time")
	usersFlag   = flag.Int("reaping.users", 600, "how many sandboxes are used at a time")
	historyFlag = flag.String("reaping.history", "",
		"file to write the history to; empty: it is kept only if the test fails")
)

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	os.Exit(harness.Main(m, &binDir, func(ctx context.Context, dir string) error {
		return stack.Build(ctx, dir, harness.Race, "allocator", "extproc")
	}))
}
