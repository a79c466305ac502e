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

// killer is the end of one run that was asked for: preStop hook, SIGTERM, SIGKILL.
// What it was given at the start holds to the end: a kubelet passes no later wish
// on to a stop that is under way (kubelet.go, SyncTerminatingPod and SyncPod, both
// cut themselves off from the context that a shorter grace period cancels).
type killer struct {
	probe bool // a probe failed; else the pod ends
	done  bool // owned by the worker: the run is over and the hook too
}

// kill follows kuberuntime_container.go, killContainer: the hook runs inside the
// grace period, and is not cut short when the container ends by itself.
func (w *worker) kill(c *container, r *run, grace time.Duration) {
	deadline := time.Now().Add(grace)
	if l := c.spec.Lifecycle; l != nil && l.PreStop != nil && grace > 0 {
		ctx, cancel := context.WithDeadline(w.ctx, deadline)
		if err := w.hook(ctx, c, r, l.PreStop); err != nil {
			w.log.Warn("preStop hook failed", zap.String("container", c.spec.Name), zap.Error(err))
		}
		cancel()
	}
	// A runtime stops a container by a signal to its first process only; what
	// else is in there learns of it when that process ends.
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // fails when it has ended already
	timer := time.NewTimer(max(time.Until(deadline), minimumGrace))
	defer timer.Stop()
	select {
	case <-r.proc.Done():
		return
	case <-w.ctx.Done():
		return // the worker itself ends what runs when its context is over
	case <-timer.C:
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
