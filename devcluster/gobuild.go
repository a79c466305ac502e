package devcluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// goBuild builds programs from a module that pins every dependency by version and
// hash.
type goBuild struct {
	what, took string // for messages: the programs, and how long the build takes
	mod, sum   []byte // the module's go.mod and go.sum
	ldflags    string
	packages   []string
}

func (b goBuild) args() []string {
	return []string{"build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-tags=grpcnotrace", "-ldflags=" + b.ldflags}
}

// env overrides Go settings of the caller's environment. GOFLAGS is not empty,
// because the go command would then use the one of "go env -w".
func (goBuild) env() []string {
	return []string{
		"GOFLAGS=-mod=readonly", "GOWORK=off", "CGO_ENABLED=0",
		"GOOS=" + runtime.GOOS, "GOARCH=" + runtime.GOARCH,
	}
}

// recipe is all input that decides the result, except the version of Go.
func (b goBuild) recipe() []string {
	recipe := append([]string{string(b.mod), string(b.sum)}, b.env()...)
	return append(append(recipe, b.args()...), b.packages...)
}

// run builds into out. It leaves the module in scratch, for command.
func (b goBuild) run(ctx context.Context, sup *proc.Supervisor, progress io.Writer, out, scratch string) error {
	for name, content := range map[string][]byte{"go.mod": b.mod, "go.sum": b.sum} {
		if err := os.WriteFile(filepath.Join(scratch, name), content, 0o644); err != nil {
			return err
		}
	}
	cmd, err := b.command(scratch, append(append(b.args(), "-o", out+"/"), b.packages...)...)
	if err != nil {
		return err
	}
	fmt.Fprintf(progress, "devcluster: building %s from source, first time only, %s\n", b.what, b.took)
	begin := time.Now()
	if err := run(ctx, sup, cmd, func(elapsed time.Duration) {
		fmt.Fprintf(progress, "devcluster: building %s, %v\n", b.what, elapsed)
	}); err != nil {
		return err
	}
	fmt.Fprintf(progress, "devcluster: built %s in %v\n", b.what, time.Since(begin).Round(time.Second))
	return nil
}

// command is a go command in the module that run has left in scratch.
func (b goBuild) command(scratch string, args ...string) (*exec.Cmd, error) {
	goBin, err := exec.LookPath("go")
	if err != nil {
		return nil, fmt.Errorf("the go command is needed: %w", err)
	}
	cmd := exec.Command(goBin, args...)
	cmd.Dir = scratch
	// An interrupted build leaves nothing outside scratch.
	cmd.Env = append(append(os.Environ(), b.env()...), "GOTMPDIR="+scratch, "PWD="+scratch)
	return cmd, nil
}
