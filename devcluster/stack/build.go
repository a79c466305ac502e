package stack

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// Build builds programs of this module, named by their folders in cmd, into dir. Tests
// and benchmarks then run the tree as it is. With race the programs have the race
// detector, which needs a C compiler.
func Build(ctx context.Context, dir string, race bool, programs ...string) error {
	// Debug information takes as long to link as the rest, and stacks do not need it.
	args := []string{"build", "-ldflags=-w", "-o", dir + "/"}
	env := os.Environ()
	if race {
		args = append(args, "-race")
	} else {
		args, env = append(args, "-trimpath"), append(env, "CGO_ENABLED=0")
	}
	for _, program := range programs {
		args = append(args, "github.com/berth-sandbox/berth/cmd/"+program)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = env
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
