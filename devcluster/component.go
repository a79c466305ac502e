package devcluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	// startLimit bounds a component's start. On an idle machine it takes 3 s.
	startLimit = 2 * time.Minute
	readyPoll  = 50 * time.Millisecond
	checkLimit = 5 * time.Second
)

// Component is a running server with its log in a file.
type Component struct {
	name, log string
	*proc.Process
}

// StartComponent starts a server beside the control plane. Its output is appended
// to <name>.log in Dir, which is also its working directory. It ends by Stop, with
// the cluster, or with this process. The caller may set the path, the arguments and
// the environment of cmd, and no other field.
func (c *Cluster) StartComponent(name string, cmd *exec.Cmd) (*Component, error) {
	return startComponent(c.sup, name, filepath.Join(c.Dir(), name+".log"), c.Dir(), cmd)
}

// startComponent starts cmd in dir and appends its output to log.
func startComponent(sup *proc.Supervisor, name, log, dir string, cmd *exec.Cmd) (*Component, error) {
	f, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", name, err)
	}
	defer f.Close()
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = f, f
	p, err := sup.Start(cmd)
	if err != nil {
		return nil, err
	}
	return &Component{name, log, p}, nil
}

// LogTail is the end of the log.
func (c *Component) LogTail() string { return tailOf(c.log) }

// AwaitReady polls check until it succeeds. It gives up when the component
// dies, when ctx ends, or after startLimit.
func (c *Component) AwaitReady(ctx context.Context, check func(context.Context) error) error {
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
			return fmt.Errorf("%s ended before it was ready (%s); the end of its log:\n%s", c.name, c.State(), c.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w (last check: %w); the end of its log:\n%s", c.name, context.Cause(ctx),
				err, c.LogTail())
		}
	}
}
