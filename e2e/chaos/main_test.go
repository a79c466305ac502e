package chaos

import (
	"context"
	"os"
	"testing"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/internal/programs"
)

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

func TestMain(m *testing.M) {
	os.Exit(programs.Main(m, &binDir, func(ctx context.Context, dir string) error {
		return stack.Build(ctx, dir, programs.Race, "allocator", "extproc")
	}))
}
