package devcluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	tailBytes     = 3000
	commandChars  = 60 // of a command line in an error
	interruptWait = 3 * time.Second
	tickEvery     = 15 * time.Second
)

// run runs cmd to its end and calls tick, which may be nil, about every 15 s. The
// error holds the end of the output, without the standard output if the caller has
// set cmd.Stdout.
func run(ctx context.Context, sup *proc.Supervisor, cmd *exec.Cmd, tick func(elapsed time.Duration)) error {
	what := strings.Join(append([]string{filepath.Base(cmd.Path)}, cmd.Args[1:]...), " ")
	if len(what) > commandChars {
		what = what[:commandChars] + "..."
	}
	var out tail
	cmd.Stderr = &out
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	begin := time.Now()
	p, err := sup.Start(cmd)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-p.Done():
			if !p.State().Success() {
				return fmt.Errorf("%s: %s; the end of its output:\n%s", what, p.State(), out)
			}
			return nil
		case <-ticker.C:
			if tick != nil {
				tick(time.Since(begin).Round(time.Second))
			}
		case <-ctx.Done():
			if err := p.Stop(ctx, interruptWait); err != nil {
				return err
			}
			return fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
	}
}

// tail keeps the last bytes that are written to it.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b...)
	if over := len(*t) - tailBytes; over > tailBytes {
		*t = append((*t)[:0], (*t)[over:]...)
	}
	return len(b), nil
}

func (t tail) String() string {
	if over := len(t) - tailBytes; over > 0 {
		t = t[over:]
	}
	return strings.TrimSpace(string(t))
}

// tailOf returns the end of a file, for an error message.
func tailOf(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return tail(b).String()
}
