package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
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
	start func(context.Context) error
}

// parts are the processes of the environment except those of pods.
func (e *environment) parts() []part {
	servers := []*proc.Server{e.cluster.Etcd(), e.cluster.APIServer()}
	for _, a := range e.stack.Allocators {
		servers = append(servers, a.Server)
	}
	for _, g := range e.stack.Gateways {
		servers = append(servers, g.Envoy, g.Router)
	}
	var parts []part
	for _, s := range servers {
		parts = append(parts, part{s.Name, func() process { return s.Last() }, s.Start})
	}
	return parts
}

// restarter restarts parts and publishes their processes.
type restarter struct {
	log     *zap.Logger
	publish func([]devcluster.Part) error

	mu    sync.Mutex
	parts []devcluster.Part
}

// keep publishes the parts and restarts those that end, until ctx ends.
func keep(ctx context.Context, parts []part, publish func([]devcluster.Part) error, log *zap.Logger) error {
	k := &restarter{log: log, publish: publish}
	var processes []process
	for _, p := range parts {
		processes = append(processes, p.last())
		k.parts = append(k.parts, devcluster.Part{Name: p.name, PID: p.last().Pid()})
	}
	if err := publish(slices.Clone(k.parts)); err != nil {
		return err
	}
	var running sync.WaitGroup
	defer running.Wait()
	for i, p := range parts {
		running.Go(func() { k.keep(ctx, i, p, processes[i]) })
	}
	return nil
}

// keep restarts one part until ctx ends. A start that fails counts as a run that
// ended at once.
func (k *restarter) keep(ctx context.Context, i int, p part, current process) {
	log := k.log.With(zap.String("part", p.name))
	pause := firstPause
	for {
		began := time.Now()
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
		err := p.start(ctx)
		if err != nil && ctx.Err() == nil {
			log.Error("part not started again", zap.Error(err))
		}
		if now := p.last(); now != current {
			current = now
			restarts, err := k.restarted(i, now.Pid())
			log.Info("part started again", zap.Int("pid", now.Pid()), zap.Int("restarts", restarts))
			if err != nil {
				log.Error("state not published", zap.Error(err))
			}
		}
	}
}

// restarted publishes the new process of a part.
func (k *restarter) restarted(i, pid int) (restarts int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.parts[i].PID = pid
	k.parts[i].Restarts++
	return k.parts[i].Restarts, k.publish(slices.Clone(k.parts))
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
