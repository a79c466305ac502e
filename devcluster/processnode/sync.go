package processnode

import (
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ending holds from the moment on from which nothing is started any more.
func (w *worker) ending() bool {
	return w.pod.DeletionTimestamp != nil || w.gone || w.verdict != nil || w.completed
}

// sync is one pass of the kubelet's pod worker: look, report, act. While it stops
// containers the pass goes on: a kubelet is deaf to the pod until all of them
// are over, be it a failed probe or the pod's end that stops them, and of what
// changes meanwhile it reports readiness only.
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
		w.checkDeadline()
	}
	if w.ending() {
		w.lost = false
	}
	if w.lost && !w.replaceSandbox() {
		return
	}
	if !w.ending() {
		w.advance()
		w.completed = terminal(phase(&w.pod.Spec, w.containerStatuses(), false))
	}
	w.sandboxIs = sandboxUp
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

// fold turns runs that are over into past ones. What a failed probe ended is
// started again in the pass that ended it, whatever came in meanwhile: also when
// that was the pod's deletion.
func (w *worker) fold() {
	var again []*container
	for _, c := range w.containers {
		r := c.run
		if r == nil || r.exit == nil {
			continue
		}
		c.since = &r.exit.FinishedAt.Time
		if r.killer != nil && r.killer.probe {
			c.since = nil // that pass knew only of ends before this one
			if c.exited != nil {
				c.since = &c.exited.FinishedAt.Time
			}
			again = append(again, c)
		}
		c.run.end()
		c.earlier, c.exited, c.run, c.waiting = c.exited, r.exit, nil, nil
	}
	for _, c := range again {
		if w.restarts(c) {
			w.launch(c)
		}
	}
}

func (w *worker) checkDeadline() {
	seconds := w.pod.Spec.ActiveDeadlineSeconds
	if seconds == nil {
		return
	}
	at := w.startTime.Add(time.Duration(*seconds) * time.Second)
	if time.Now().Before(at) {
		w.wakeAt(at)
		return
	}
	w.verdict = &verdict{reason: "DeadlineExceeded", message: "Pod was active on the node longer than the specified deadline"}
}

func (w *worker) wakeAt(at time.Time) {
	if w.wake.IsZero() || at.Before(w.wake) {
		w.wake = at
	}
}

// advance ends what failed a probe and then starts what should run: the kubelet's
// computePodActions. Init containers come first, one after the other.
func (w *worker) advance() {
	for _, c := range w.containers {
		if c.run != nil {
			w.checkProbes(c)
		}
	}
	if w.stopping() {
		return
	}
	defer func() { w.known = w.holds }()
	for _, c := range w.containers {
		switch {
		case c.run != nil && c.init:
			return
		case c.run != nil:
		case c.init && c.exited != nil && c.exited.ExitCode == 0 && !c.again:
		case w.restarts(c):
			w.report()
			if !w.ensureSandbox() {
				return
			}
			w.launch(c)
			if c.init {
				return
			}
		case c.init:
			return // it failed for good, and the pod with it
		}
	}
}

// restarts says whether a container that does not run should.
func (w *worker) restarts(c *container) bool {
	switch {
	case c.exited == nil, c.again:
		return true
	case w.pod.Spec.RestartPolicy == corev1.RestartPolicyAlways && !c.init:
		return true
	default:
		return w.pod.Spec.RestartPolicy != corev1.RestartPolicyNever && c.exited.ExitCode != 0
	}
}

// report brings what holds to the API server before it is changed. A kubelet does
// not wait for that write; but what it does next takes a runtime longer than a
// write takes the API server, so watchers see it. Where the API server is slower
// than that, they may not.
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

// ensureSandbox makes sure that the pod has an address. Who watches learns that
// there is one before learning which (kubelet.go, OnPodSandboxReady).
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

// replaceSandbox gives the pod a new sandbox, and with it another address, after
// the end of all that ran in the old one; false: not yet, or nothing more runs.
// The new address is taken before the old one is given back, so that the pod
// surely moves.
func (w *worker) replaceSandbox() bool {
	if w.sandboxIs == sandboxUp {
		w.sandboxIs = sandboxDown
		w.report()
		for _, c := range w.containers {
			if c.run != nil {
				w.startKill(c, &killer{}, w.gracePeriod())
			}
		}
		if w.stopping() {
			return false
		}
	}
	if w.pod.Spec.RestartPolicy == corev1.RestartPolicyNever {
		w.lost = false
		return true // for the pass to find that all has ended
	}
	next, ok := w.node.addresses.take()
	if !ok {
		w.wakeAt(time.Now().Add(time.Second))
		return false
	}
	w.node.addresses.release(w.address)
	w.address, w.lost, w.sandboxIs = next, false, sandboxAgain
	for _, c := range w.containers {
		c.again = c.init
	}
	w.reported = false
	w.report()
	return true
}

func (w *worker) launch(c *container) {
	if c.exited != nil && c.since != nil {
		wait, ok := w.backOff.restart(c.spec.Name, *c.since)
		if !ok {
			c.waiting = w.backOff.waiting(w.pod, c.spec.Name)
			c.since = &c.exited.FinishedAt.Time
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
		c.earlier, c.exited, c.again = c.exited, failedStart(err), false
		c.since = &c.exited.FinishedAt.Time
		c.waiting = &corev1.ContainerStateWaiting{Reason: "RunContainerError", Message: c.exited.Message}
		w.wakeAt(time.Now())
	default:
		c.run, c.waiting, c.again, c.fresh = r, nil, false, true
		for k := range probeKinds {
			c.results[k] = k.initial()
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
}

func (w *worker) startProbes() {
	for _, c := range w.containers {
		for k := range probeKinds {
			if !c.init && k.spec(c.spec) != nil {
				w.children.Go(func() { w.probe(c, k) })
			}
		}
	}
}

// probed takes what a probe found. A result about an earlier run comes too late.
func (w *worker) probed(c *container, id string, k probeKind, o outcome) {
	if c.run != nil && c.run.id == id {
		c.results[k] = o
	}
}

// checkProbes ends a run that failed its liveness or startup probe.
func (w *worker) checkProbes(c *container) {
	for _, k := range []probeKind{liveness, startup} {
		if c.results[k] != failure {
			continue
		}
		grace := int64(minimumGrace / time.Second)
		if own := k.spec(c.spec).TerminationGracePeriodSeconds; own != nil {
			grace = *own
		} else if pods := w.pod.Spec.TerminationGracePeriodSeconds; pods != nil {
			grace = *pods
		}
		w.startKill(c, &killer{probe: true}, time.Duration(grace)*time.Second)
		return
	}
}

func (w *worker) startKill(c *container, k *killer, grace time.Duration) {
	r := c.run
	r.killer = k
	w.children.Go(func() {
		w.kill(c, r, grace)
		w.post(func() { k.done = true })
	})
}

// terminate ends all runs and, when they are over, the pod.
func (w *worker) terminate() {
	if !w.terminating {
		w.terminating, w.reported = true, false
		w.report()
	}
	grace, left := w.gracePeriod(), false
	for _, c := range w.containers {
		if c.run != nil {
			left = true
			w.startKill(c, &killer{}, grace)
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
	w.finished, w.initialized = true, initialized(w.pod)
	close(w.over)
}

// gracePeriod follows pod_workers.go, calculateEffectiveGracePeriod: the shortest
// that was asked for, and at least a second.
func (w *worker) gracePeriod() time.Duration {
	var grace int64
	asked := false
	lower := func(seconds *int64) {
		if seconds != nil && (grace == 0 || *seconds < grace) {
			grace, asked = *seconds, true
		}
	}
	lower(w.pod.DeletionGracePeriodSeconds)
	if w.verdict != nil {
		lower(w.verdict.grace)
	}
	if own := w.pod.Spec.TerminationGracePeriodSeconds; !asked && own != nil {
		grace = *own
	}
	return time.Duration(max(grace, 1)) * time.Second
}
