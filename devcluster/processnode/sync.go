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

func (w *worker) sync() {
	w.take()
	w.wake = time.Time{}
	if w.finished {
		return
	}
	if !w.ending() {
		w.checkDeadline()
	}
	if !w.ending() {
		w.advance()
		w.completed = terminal(phase(&w.pod.Spec, w.containerStatuses(), false))
	}
	if w.ending() {
		w.terminate()
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

// advance starts what should run and ends what failed a probe: the kubelet's
// computePodActions. Init containers come first, one after the other.
func (w *worker) advance() {
	for _, c := range w.containers {
		switch {
		case c.run != nil && c.init:
			return
		case c.run != nil:
			w.checkProbes(c)
		case c.init && c.exited != nil && c.exited.ExitCode == 0 && !c.again:
		case w.restarts(c):
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

func (w *worker) launch(c *container) {
	if !w.holds {
		if w.address, w.holds = w.node.addresses.take(); !w.holds {
			w.log.Warn("no pod address is free")
			w.wakeAt(time.Now().Add(time.Second))
			return
		}
		w.startProbes()
	}
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
		c.run, c.waiting, c.again = r, nil, false
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
			w.post(func() { r.exit = r.ended(at); w.fold(c, r) })
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
	if c.run.killer != nil {
		return
	}
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
		w.startKill(c, time.Duration(grace)*time.Second)
		return
	}
}

func (w *worker) startKill(c *container, grace time.Duration) {
	r := c.run
	k := newKiller(grace)
	r.killer = k
	w.children.Go(func() {
		w.kill(c, r, k)
		w.post(func() { k.done = true; w.fold(c, r) })
	})
}

// fold turns a run that is over into a past one. A run whose end was asked for
// is over when its hook is, too. While the pod ends, runs stay as they are until
// all of them are over: a kubelet is busy stopping then and reports nothing but
// readiness.
func (w *worker) fold(c *container, r *run) {
	if c.run != r || r.exit == nil || (r.killer != nil && (!r.killer.done || w.ending())) {
		return
	}
	c.since = &r.exit.FinishedAt.Time
	if r.killer != nil {
		// A kubelet starts the next run in the pass that killed this one, and in
		// that pass knows only of ends before it.
		c.since = nil
		if c.exited != nil {
			c.since = &c.exited.FinishedAt.Time
		}
	}
	w.bury(c)
}

func (w *worker) bury(c *container) {
	c.run.end()
	c.earlier, c.exited, c.run, c.waiting = c.exited, c.run.exit, nil, nil
}

// terminate ends all runs and, when they are over, the pod.
func (w *worker) terminate() {
	grace := w.gracePeriod()
	left := false
	for _, c := range w.containers {
		switch {
		case c.run == nil:
			continue
		case c.run.killer == nil:
			w.startKill(c, grace)
		default:
			c.run.killer.within(grace)
		}
		left = left || !c.run.killer.done || c.run.exit == nil
	}
	if left {
		return
	}
	for _, c := range w.containers {
		c.waiting = nil
		if c.run != nil {
			w.bury(c)
		}
	}
	if w.holds {
		w.node.addresses.release(w.address)
		w.holds = false
	}
	w.finished = true
	close(w.over)
}

// gracePeriod follows pod_workers.go, calculateEffectiveGracePeriod: it may only
// decrease and is at least a second.
func (w *worker) gracePeriod() time.Duration {
	asked := false
	lower := func(seconds *int64) {
		if seconds != nil && (w.grace == 0 || *seconds < w.grace) {
			w.grace, asked = *seconds, true
		}
	}
	lower(w.pod.DeletionGracePeriodSeconds)
	if w.verdict != nil {
		lower(w.verdict.grace)
	}
	if own := w.pod.Spec.TerminationGracePeriodSeconds; !asked && w.grace == 0 && own != nil {
		w.grace = *own
	}
	w.grace = max(w.grace, 1)
	return time.Duration(w.grace) * time.Second
}
