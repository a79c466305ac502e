package devcluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	// startLimit bounds a component's start. On an idle machine it takes 3 s.
	startLimit = 2 * time.Minute
	readyPoll  = 50 * time.Millisecond
	checkLimit = 5 * time.Second
)

// component is a running server with its log in a file.
type component struct {
	name, log string
	*proc.Process
}

// startComponent starts bin in dir; its log is appended to.
func startComponent(sup *proc.Supervisor, name, log, dir, bin string, args ...string) (*component, error) {
	f, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", name, err)
	}
	defer f.Close()
	cmd := exec.Command(bin, args...)
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = f, f
	p, err := sup.Start(cmd)
	if err != nil {
		return nil, err
	}
	return &component{name, log, p}, nil
}

// awaitReady polls check until it succeeds. It gives up when the component
// dies, when ctx ends, or after startLimit.
func (c *component) awaitReady(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("it took longer than %v", startLimit))
	defer cancel()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		checkCtx, done := context.WithTimeout(ctx, checkLimit)
		err := check(checkCtx)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.Done():
			return fmt.Errorf("%s ended before it was ready (%s); the end of its log:\n%s", c.name, c.State(), tailOf(c.log))
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w (last check: %w); the end of its log:\n%s", c.name, context.Cause(ctx), err, tailOf(c.log))
		}
	}
}
