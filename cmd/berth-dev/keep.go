package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	// firstPause and maxPause bound the time between a part's end and its next
	// start. It doubles with each start.
	firstPause, maxPause = 500 * time.Millisecond, 10 * time.Second
	// settled is the length of a run after which the part's pause is firstPause again.
	settled = 30 * time.Second
)

// process is a *proc.Process.
type process interface {
	Pid() int
	Done() <-chan struct{}
	State() *os.ProcessState
}

// part is a process of a cluster that is restarted after its end.
type part struct {
	name string
	// last returns the latest process. It may have ended.
	last func() process
	// start starts a part that has ended, and waits until it is ready.
	start    func(context.Context) error
	restarts atomic.Int32
}

// parts are the processes of the environment except those of pods.
func (e *environment) parts() []*part {
	servers := []*proc.Server{e.cluster.Etcd(), e.cluster.APIServer()}
	for _, a := range e.stack.Allocators {
		servers = append(servers, a.Server)
	}
	for _, g := range e.stack.Gateways {
		servers = append(servers, g.Envoy, g.Router)
	}
	var parts []*part
	for _, s := range servers {
		parts = append(parts, &part{name: s.Name, last: func() process { return s.Last() }, start: s.Start})
	}
	return parts
}

// state describes the part as it is now.
func (p *part) state() devcluster.Part {
	last := p.last()
	return devcluster.Part{
		Name: p.name, PID: last.Pid(), Running: last.State() == nil, Restarts: int(p.restarts.Load()),
	}
}

func states(parts []*part) (all []devcluster.Part) {
	for _, p := range parts {
		all = append(all, p.state())
	}
	return all
}

// keep restarts parts that end, until ctx ends.
func keep(ctx context.Context, parts []*part, log *zap.Logger) {
	var running sync.WaitGroup
	for _, p := range parts {
		running.Go(func() { p.keep(ctx, log.With(zap.String("part", p.name))) })
	}
	running.Wait()
}

// keep restarts one part until ctx ends. A start that fails counts as a run that
// ended at once.
func (p *part) keep(ctx context.Context, log *zap.Logger) {
	pause := firstPause
	for {
		began, current := time.Now(), p.last()
		select {
		case <-current.Done():
		case <-ctx.Done():
			return
		}
		if time.Since(began) >= settled {
			pause = firstPause
		}
		log.Warn("part ended", zap.Int("pid", current.Pid()), zap.Stringer("state", current.State()),
			zap.Duration("nextStart", pause))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		pause = min(2*pause, maxPause)
		if err := p.start(ctx); err != nil && ctx.Err() == nil {
			log.Error("part not started again", zap.Error(err))
		}
		if now := p.last(); now != current {
			log.Info("part started again", zap.Int("pid", now.Pid()), zap.Int32("restarts", p.restarts.Add(1)))
		}
	}
}

// partState describes a part's state in a few words.
func partState(p devcluster.Part) string {
	state := "down"
	if p.Running {
		state = fmt.Sprintf("running, process %d", p.PID)
	}
	if p.Restarts == 0 {
		return state
	}
	return fmt.Sprintf("%s, restarts %d", state, p.Restarts)
}
