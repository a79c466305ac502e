package processnode

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
)

// minimumGrace is what a container gets between SIGTERM and SIGKILL whatever
// the preStop hook has left (kuberuntime, minimumGracePeriodInSeconds).
const minimumGrace = 2 * time.Second

// killer ends one run: preStop hook, SIGTERM, SIGKILL.
type killer struct {
	deadline time.Time      // owned, as is least, by the killing goroutine once it is started
	least    time.Time      // no wish brings the deadline before this
	shorten  chan time.Time // capacity 1, earliest wish wins; written by the worker
	done     bool           // owned by the worker: the run is over and the hook too
}

func newKiller(grace time.Duration) *killer {
	return &killer{deadline: time.Now().Add(grace), shorten: make(chan time.Time, 1)}
}

// within asks for an earlier end. A grace period only ever gets shorter.
func (k *killer) within(grace time.Duration) {
	at := time.Now().Add(grace)
	select {
	case before := <-k.shorten:
		if before.Before(at) {
			at = before
		}
	default:
	}
	k.shorten <- at // only the worker sends, and it has just made room
}

// wait returns true when done is closed, false when the time is over.
func (k *killer) wait(ctx context.Context, done <-chan struct{}) bool {
	timer := time.NewTimer(time.Until(k.deadline))
	defer timer.Stop()
	for {
		select {
		case <-done:
			return true
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		case at := <-k.shorten:
			if at.Before(k.least) {
				at = k.least
			}
			if at.Before(k.deadline) {
				k.deadline = at
				timer.Reset(time.Until(at))
			}
		}
	}
}

// kill follows kuberuntime_container.go, killContainer: the hook runs inside the
// grace period, and is not cut short when the container ends by itself.
func (w *worker) kill(c *container, r *run, k *killer) {
	if l := c.spec.Lifecycle; l != nil && l.PreStop != nil && time.Until(k.deadline) > 0 {
		ctx, cancel := context.WithCancel(w.ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := w.hook(ctx, c, r, l.PreStop); err != nil {
				w.log.Warn("preStop hook failed", zap.String("container", c.spec.Name), zap.Error(err))
			}
		}()
		k.wait(w.ctx, done)
		cancel()
		<-done
	}
	k.least = time.Now().Add(minimumGrace)
	if k.deadline.Before(k.least) {
		k.deadline = k.least
	}
	// A runtime stops a container by a signal to its first process only; what
	// else is in there learns of it when that process ends.
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // fails when it has ended already
	if k.wait(w.ctx, r.proc.Done()) || w.ctx.Err() != nil {
		return // the worker itself ends what runs when its context is over
	}
	if err := r.proc.Signal(syscall.SIGKILL); err != nil {
		w.log.Error("container cannot be killed", zap.String("container", c.spec.Name), zap.Error(err))
	}
	<-r.proc.Done()
}

func (w *worker) hook(ctx context.Context, c *container, r *run, h *corev1.LifecycleHandler) error {
	switch {
	case h.Sleep != nil:
		timer := time.NewTimer(time.Duration(h.Sleep.Seconds) * time.Second)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		return nil
	case h.Exec != nil:
		return w.execute(ctx, r, h.Exec.Command)
	case h.HTTPGet != nil:
		return w.httpGet(ctx, c.spec, h.HTTPGet, "kube-lifecycle")
	}
	return fmt.Errorf("hook has no action: %w", os.ErrInvalid)
}
