package processnode

import (
	"syscall"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
)

// minimumGrace is the least time between SIGTERM and SIGKILL, also when the
// preStop sleep has used up the grace period (kuberuntime,
// minimumGracePeriodInSeconds).
const minimumGrace = 2 * time.Second

// killer is a stop of one run: preStop sleep, SIGTERM, SIGKILL. Its grace period is
// fixed at the start. A kubelet does not pass a shorter one on to a stop that is
// under way (kubelet.go, SyncTerminatingPod does not use the context that the
// shorter grace period cancels).
type killer struct {
	done bool // owned by the worker: the run and the sleep are over
}

// kill follows kuberuntime_container.go, killContainer. The sleep counts against the
// grace period. It is not cut short when the container ends by itself.
func (w *worker) kill(c *container, r *run, grace time.Duration) {
	deadline := time.Now().Add(grace)
	w.preStop(c.spec, deadline)
	// A runtime signals the first process of the container only. The other
	// processes are killed when that process ends.
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // fails when it has ended already
	timer := time.NewTimer(max(time.Until(deadline), minimumGrace))
	defer timer.Stop()
	select {
	case <-r.proc.Done():
		return
	case <-w.ctx.Done():
		return // the worker stops the process when its context ends
	case <-timer.C:
	}
	if err := r.proc.Signal(syscall.SIGKILL); err != nil {
		w.log.Error("container cannot be killed", zap.String("container", c.spec.Name), zap.Error(err))
	}
	<-r.proc.Done()
}

// preStop sleeps as the container asks for, until the deadline at most.
func (w *worker) preStop(c *corev1.Container, deadline time.Time) {
	if c.Lifecycle == nil || c.Lifecycle.PreStop == nil || c.Lifecycle.PreStop.Sleep == nil {
		return
	}
	sleep := time.Duration(c.Lifecycle.PreStop.Sleep.Seconds) * time.Second
	timer := time.NewTimer(min(sleep, time.Until(deadline)))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-w.ctx.Done():
	}
}
