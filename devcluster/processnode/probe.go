package processnode

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

type probeKind int

const (
	readiness probeKind = iota
	liveness
	startup
	probeKinds
)

func (k probeKind) spec(c *corev1.Container) *corev1.Probe {
	switch k {
	case readiness:
		return c.ReadinessProbe
	case liveness:
		return c.LivenessProbe
	default:
		return c.StartupProbe
	}
}

type outcome int

const (
	unknown outcome = iota
	success
	failure
	unchanged // nothing to report
)

// initial is what holds for a new run until its first probe has a result.
func (k probeKind) initial() outcome {
	switch k {
	case readiness:
		return failure
	case liveness:
		return success
	default:
		return unknown
	}
}

// target is what a probe must know of the run it probes.
type target struct {
	id          string // of the current or latest run; empty before the first
	running     bool
	started     bool // startup probe passed, or there is none
	startedAt   time.Time
	terminating bool // the pod is; only readiness is still probed
	terminal    bool // the pod is, or the container will never run again
}

type tick int

const (
	tickWait  tick = iota // nothing to probe now
	tickProbe             // probe, and tell record what came out
	tickQuit              // this probe is over
)

// prober is one probe of one container: the part of pkg/kubelet/prober/worker.go
// that decides, without its goroutine. It lives as long as the pod, not the run:
// a readiness probe's count of equal results survives a restart, as it does there.
type prober struct {
	kind probeKind
	spec *corev1.Probe

	id    string  // run that hold and holds are about
	hold  bool    // verdict given; nothing more until there is a new run
	holds outcome // what was last reported
	last  outcome
	same  int // how often last came in a row
}

// next is asked once per period.
func (p *prober) next(t target, now time.Time) tick {
	if t.terminal || (t.terminating && p.kind != readiness) {
		return tickQuit
	}
	if t.id == "" {
		return tickWait
	}
	if p.id != t.id {
		p.id, p.hold, p.holds = t.id, false, p.kind.initial()
	}
	switch {
	case p.hold, !t.running:
		return tickWait
	case int32(now.Sub(t.startedAt).Seconds()) < p.spec.InitialDelaySeconds:
		return tickWait
	case t.started == (p.kind == startup): // others wait for startup, startup ends when started
		return tickWait
	}
	return tickProbe
}

// record takes a probe's result and says what now holds; unchanged while below a
// threshold, or when it held before.
func (p *prober) record(o outcome) outcome {
	if o == unknown {
		return unchanged // the probe itself could not be made: thrown away
	}
	if p.last == o {
		p.same++
	} else {
		p.last, p.same = o, 1
	}
	if (o == failure && p.same < int(p.spec.FailureThreshold)) || (o == success && p.same < int(p.spec.SuccessThreshold)) {
		return unchanged
	}
	if (p.kind == liveness && o == failure) || p.kind == startup {
		p.hold, p.same = true, 0
	}
	if p.holds == o {
		return unchanged
	}
	p.holds = o
	return o
}
