// Package programs makes what the tests of a package run: Berth's programs, built with
// the race detector if the tests are.
package programs

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main has the programs built into a directory of their own, unless -short is set, runs
// the tests and looks for goroutines that stay. It returns the exit code. dir is set
// before a test begins; build puts the programs there.
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
