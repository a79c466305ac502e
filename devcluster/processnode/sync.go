package processnode

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/internal/wait"
)

// minimumGrace is the least time between SIGTERM and SIGKILL, also when the
// preStop sleep has used up the grace period (kuberuntime,
// minimumGracePeriodInSeconds).
const minimumGrace = 2 * time.Second

// ending reports whether the pod's end has been decided. The container is not started
// after that.
func (w *worker) ending() bool {
	return w.pod.DeletionTimestamp != nil || w.gone || w.rejected != "" || w.completed
}

// sync is one pass of the kubelet's pod worker. A pass that stops the container goes
// on until it has ended. Until then a kubelet does not react to changes of the pod,
// and reports changes of readiness only.
func (w *worker) sync() {
	w.wake = time.Time{}
	if r := w.current; r != nil && r.stopping && (!r.stopped || r.exit == nil) {
		return
	}
	if w.current != nil && w.current.exit != nil {
		w.earlier, w.exited, w.current, w.waiting = w.exited, w.current.exit, nil, nil
		if w.restarting {
			w.removeAll()
		}
	}
	w.mu.Lock()
	w.pod, w.gone = w.latest, w.latestGone
	w.mu.Unlock()
	if w.finished {
		return
	}
	if !w.ending() && w.recycled() {
		if w.restartAll(); w.current != nil {
			return
		}
	}
	if !w.ending() && w.current == nil {
		if w.restartable() {
			w.launch()
		}
		w.completed = !w.restartable()
	}
	if w.ending() {
		w.terminate()
	}
}

// restartable reports whether a container that does not run should be started.
func (w *worker) restartable() bool {
	return w.exited == nil || w.pod.Spec.RestartPolicy == corev1.RestartPolicyAlways
}

// launch starts the container, or sets an alarm if that must wait. It writes the present
// status first. A kubelet does not wait for that write, but its runtime takes longer to
// start a container than the write takes the API server. So a watch shows the status
// between.
func (w *worker) launch() {
	const id = "" // one container
	if w.exited != nil {
		ended := w.exited.FinishedAt.Time
		if w.backOff.IsInBackOffSince(id, ended) {
			w.waiting = &corev1.ContainerStateWaiting{
				Reason: "CrashLoopBackOff",
				Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)",
					w.backOff.Get(id), w.spec.Name, w.pod.Name, w.pod.Namespace, w.pod.UID),
			}
			w.wakeAfter(time.Until(ended.Add(w.backOff.Get(id))))
			return
		}
	}
	w.publish()
	if !w.holds {
		if w.address, w.holds = w.node.addresses.Take(); !w.holds {
			w.log.Warn("no pod address is free")
			w.wakeAfter(time.Second)
			return
		}
	}
	w.startInits()
	if w.exited != nil {
		w.backOff.Next(id, w.exited.FinishedAt.Time)
		w.restarts++
	}
	r, err := w.start()
	if err != nil {
		w.earlier, w.exited = w.exited, failedStart(err)
		w.wakeAfter(0)
		return
	}
	w.current, w.waiting = r, nil
	if w.spec.ReadinessProbe != nil {
		w.children.Go(func() { w.probe(r) })
	}
	w.children.Go(func() {
		select {
		case <-r.proc.Done():
		case <-w.ctx.Done():
			return
		}
		at := time.Now()
		groupGone(r.proc.Pid())
		w.post(func() { r.exit = r.ended(at) })
	})
}

// terminate stops the container and, when it has ended, the pod.
func (w *worker) terminate() {
	r := w.current
	if r == nil {
		w.waiting, w.finished = nil, true
		if w.holds {
			w.node.addresses.Release(w.address)
			w.holds = false
		}
		return
	}
	w.publish()
	r.stopping = true
	grace := gracePeriod(w.pod)
	w.children.Go(func() {
		w.kill(r, grace)
		w.post(func() { r.stopped = true })
	})
}

// gracePeriod is the deletion's, else the pod's own, and at least a second
// (pod_workers.go, calculateEffectiveGracePeriod).
func gracePeriod(pod *corev1.Pod) time.Duration {
	var grace int64
	switch own := pod.Spec.TerminationGracePeriodSeconds; {
	case pod.DeletionGracePeriodSeconds != nil:
		grace = *pod.DeletionGracePeriodSeconds
	case own != nil:
		grace = *own
	}
	return time.Duration(max(grace, 1)) * time.Second
}

// kill follows kuberuntime_container.go, killContainer. The preStop sleep counts
// against the grace period. It is not cut short when the container ends by itself. The
// grace period is fixed at the start: a kubelet does not pass a shorter one on to a stop
// that is under way.
func (w *worker) kill(r *run, grace time.Duration) {
	deadline := time.Now().Add(grace)
	if l := w.spec.Lifecycle; l != nil && l.PreStop != nil {
		wait.Sleep(w.ctx, min(time.Duration(l.PreStop.Sleep.Seconds)*time.Second, grace))
	}
	// A runtime signals the first process of the container only. The other
	// processes are killed when that process ends.
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // fails when it has ended already
	timer := time.NewTimer(max(time.Until(deadline), minimumGrace))
	defer timer.Stop()
	select {
	case <-r.proc.Done():
		return
	case <-w.ctx.Done():
		return // abandon stops the process
	case <-timer.C:
	}
	if err := r.proc.Signal(syscall.SIGKILL); err != nil {
		w.log.Error("container cannot be killed", zap.Error(err))
	}
	<-r.proc.Done()
}

// abandon ends the container at the end of the node.
func (w *worker) abandon() {
	if w.current == nil {
		return
	}
	if err := w.current.proc.Stop(context.WithoutCancel(w.ctx), time.Second); err != nil {
		w.log.Error("container cannot be stopped", zap.Error(err))
	}
}
