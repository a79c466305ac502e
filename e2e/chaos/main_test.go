package chaos

import (
	"context"
	"flag"
	"os"
	"testing"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

var longFlag = flag.Bool("chaos.long", false, "as many kills, pauses and waves as make test-long has")

// times is how often a scenario does something: less often where everything is tested.
func times(short, long int) int {
	if *longFlag {
		return long
	}
	return short
}

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	os.Exit(harness.Main(m, &binDir, func(ctx context.Context, dir string) error {
		return stack.Build(ctx, dir, harness.Race, "allocator", "extproc")
	}))
}
