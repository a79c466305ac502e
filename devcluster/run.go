package devcluster

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	tailBytes     = 3000
	interruptWait = 3 * time.Second
	tickEvery     = 15 * time.Second
)

// run runs cmd to its end. It writes a line to progress at the beginning and about every
// 15 s. doing says what cmd does. The error holds the end of the output.
func run(ctx context.Context, sup *proc.Supervisor, cmd *exec.Cmd, progress io.Writer, doing string) error {
	var out tail
	cmd.Stdout, cmd.Stderr = &out, &out
	began := time.Now()
	p, err := sup.Start(cmd)
	if err != nil {
		return err
	}
	fmt.Fprintf(progress, "devcluster: %s, first time only\n", doing)
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-p.Done():
			if !p.State().Success() {
				return fmt.Errorf("%s: %s %s: %s; the end of its output:\n%s", doing, filepath.Base(cmd.Path), cmd.Args[1],
					p.State(), out)
			}
			return nil
		case <-ticker.C:
			fmt.Fprintf(progress, "devcluster: %s, %v\n", doing, time.Since(began).Round(time.Second))
		case <-ctx.Done():
			if err := p.Stop(ctx, interruptWait); err != nil {
				return err
			}
			return fmt.Errorf("%s: %w", doing, context.Cause(ctx))
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
