package processnode

import (
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ending reports whether the pod's end has been decided. No container is started
// after that.
func (w *worker) ending() bool {
	return w.pod.DeletionTimestamp != nil || w.gone || w.rejected != "" || w.completed
}

// sync is one pass of the kubelet's pod worker. A pass that stops containers goes on
// until all of them have ended. Until then a kubelet does not react to changes of
// the pod, and reports changes of readiness only.
func (w *worker) sync() {
	w.wake = time.Time{}
	if w.stopping() {
		return
	}
	w.reported = false
	w.fold()
	w.take()
	if w.finished {
		return
	}
	if !w.ending() {
		w.advance()
		w.completed = terminal(phase(&w.pod.Spec, w.containerStatuses(), false))
	}
	if w.ending() {
		w.terminate()
	}
}

func (w *worker) stopping() bool {
	for _, c := range w.containers {
		if r := c.run; r != nil && r.killer != nil && (!r.killer.done || r.exit == nil) {
			return true
		}
	}
	return false
}

// fold turns runs that are over into past ones.
func (w *worker) fold() {
	for _, c := range w.containers {
		if c.run != nil && c.run.exit != nil {
			c.earlier, c.exited, c.run, c.waiting = c.exited, c.run.exit, nil, nil
		}
	}
}

func (w *worker) wakeAt(at time.Time) {
	if w.wake.IsZero() || at.Before(w.wake) {
		w.wake = at
	}
}

// advance starts the containers that should run and do not: the kubelet's
// computePodActions.
func (w *worker) advance() {
	defer func() { w.known = w.holds }()
	for _, c := range w.containers {
		if c.run == nil && w.restarts(c) {
			w.report()
			if !w.ensureSandbox() {
				return
			}
			w.launch(c)
		}
	}
}

// restarts reports whether a container that does not run should be started.
func (w *worker) restarts(c *container) bool {
	switch {
	case c.exited == nil, w.pod.Spec.RestartPolicy == corev1.RestartPolicyAlways:
		return true
	default:
		return w.pod.Spec.RestartPolicy != corev1.RestartPolicyNever && c.exited.ExitCode != 0
	}
}

// report writes the present status before the next step changes it. A kubelet does
// not wait for that write. But its next step takes a runtime longer than the write
// takes the API server, so a watch shows the status between. The wait is bounded,
// so a slow API server may skip it here too.
func (w *worker) report() {
	const limit = time.Second
	if w.reported || w.gone {
		return
	}
	w.reported = true
	w.publish()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-w.written:
	case <-timer.C:
	case <-w.ctx.Done():
	}
}

// ensureSandbox makes sure that the pod has an address. The status shows that there
// is one before it shows which (kubelet.go, OnPodSandboxReady).
func (w *worker) ensureSandbox() bool {
	if w.holds {
		return true
	}
	if w.address, w.holds = w.node.addresses.take(); !w.holds {
		w.log.Warn("no pod address is free")
		w.wakeAt(time.Now().Add(time.Second))
		return false
	}
	w.startProbes()
	w.reported = false
	w.report()
	return true
}

func (w *worker) launch(c *container) {
	if c.exited != nil {
		wait, ok := w.backOff.restart(c.spec.Name, c.exited.FinishedAt.Time)
		if !ok {
			c.waiting = w.backOff.waiting(w.pod, c.spec.Name)
			w.wakeAt(time.Now().Add(wait))
			return
		}
	}
	before := c.restarts
	if c.exited != nil {
		c.restarts++
	}
	r, err := w.start(c)
	switch {
	case errors.Is(err, errConfig):
		c.restarts = before
		c.waiting = &corev1.ContainerStateWaiting{Reason: "CreateContainerConfigError", Message: err.Error()}
	case err != nil:
		c.earlier, c.exited = c.exited, failedStart(err)
		c.waiting = &corev1.ContainerStateWaiting{Reason: "RunContainerError", Message: c.exited.Message}
		w.wakeAt(time.Now())
	default:
		c.run, c.waiting, c.passed, c.fresh = r, nil, false, true
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
}

func (w *worker) startProbes() {
	for _, c := range w.containers {
		if c.spec.ReadinessProbe != nil {
			w.children.Go(func() { w.probe(c) })
		}
	}
}

// probed notes a probe's news, unless it is about an earlier run.
func (w *worker) probed(c *container, id string, o outcome) {
	if c.run != nil && c.run.id == id {
		c.passed = o == success
	}
}

func (w *worker) startKill(c *container, grace time.Duration) {
	r, k := c.run, &killer{}
	r.killer = k
	w.children.Go(func() {
		w.kill(c, r, grace)
		w.post(func() { k.done = true })
	})
}

// terminate stops all containers and, when they have ended, the pod.
func (w *worker) terminate() {
	if !w.terminating {
		w.terminating, w.reported = true, false
		w.report()
	}
	grace, left := w.gracePeriod(), false
	for _, c := range w.containers {
		if c.run != nil {
			left = true
			w.startKill(c, grace)
		}
	}
	if left {
		return
	}
	for _, c := range w.containers {
		c.waiting = nil
	}
	if w.holds {
		w.node.addresses.release(w.address)
		w.holds = false
	}
	w.finished = true
}

// gracePeriod is the deletion's, else the pod's own, and at least a second
// (pod_workers.go, calculateEffectiveGracePeriod).
func (w *worker) gracePeriod() time.Duration {
	var grace int64
	switch own := w.pod.Spec.TerminationGracePeriodSeconds; {
	case w.pod.DeletionGracePeriodSeconds != nil:
		grace = *w.pod.DeletionGracePeriodSeconds
	case own != nil:
		grace = *own
	}
	return time.Duration(max(grace, 1)) * time.Second
}
