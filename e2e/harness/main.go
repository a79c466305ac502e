package harness

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main runs the tests of a package and returns the exit code, for TestMain. Before that it
// has build put the programs under test into a new directory, unless -short is set, and
// sets dir to it. It fails if a goroutine is left when the tests are over.
func Main(m *testing.M, dir *string, build func(ctx context.Context, dir string) error) int {
	flag.Parse()
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if !testing.Short() {
		made, err := os.MkdirTemp("", "berth-programs-")
		if err == nil {
			defer os.RemoveAll(made)
			err = build(context.Background(), made)
		}
		if err != nil {
			return fail(fmt.Errorf("build the programs under test: %w", err))
		}
		*dir = made
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return fail(err)
		}
	}
	return code
}
