package chaos

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/devcluster/stack"
)

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 1
	}
	if !testing.Short() {
		dir, err := os.MkdirTemp("", "berth-chaos-bin-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = stack.Build(context.Background(), dir, raceEnabled, "allocator", "extproc")
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
