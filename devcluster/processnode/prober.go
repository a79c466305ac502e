package processnode

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// outcome is the result of one probe, or the news that it makes.
type outcome int

const (
	unknown outcome = iota // the probe could not be made
	success
	failure
	unchanged // no news
)

// target is what the readiness probe must know about the container.
type target struct {
	id        string // of the current or latest run; empty before the first
	running   bool
	startedAt time.Time
	terminal  bool // the pod has ended, or the container will never run again
}

// tick says what a probe does in one period.
type tick int

const (
	tickWait  tick = iota // nothing
	tickProbe             // probe, and pass the result to record
	tickQuit              // end: there will be nothing to probe any more
)

// prober is the readiness probe of one container: the decisions of
// pkg/kubelet/prober/worker.go, without its goroutine. It lives as long as the pod.
// As in a kubelet, the count of equal results survives a restart of the container.
type prober struct {
	spec *corev1.Probe

	id    string  // run that holds is about
	holds outcome // the last news
	last  outcome // the last result
	same  int     // how often last came in a row
}

// next is called once per period.
func (p *prober) next(t target, now time.Time) tick {
	switch {
	case t.terminal:
		return tickQuit
	case t.id == "":
		return tickWait
	}
	if p.id != t.id {
		p.id, p.holds = t.id, failure // a new run is not ready until its probe succeeds
	}
	if !t.running || int32(now.Sub(t.startedAt).Seconds()) < p.spec.InitialDelaySeconds {
		return tickWait
	}
	return tickProbe
}

// record takes a result and returns the news: unchanged below a threshold, and when
// the result held before.
func (p *prober) record(o outcome) outcome {
	if o == unknown {
		return unchanged
	}
	if p.last == o {
		p.same++
	} else {
		p.last, p.same = o, 1
	}
	threshold := p.spec.SuccessThreshold
	if o == failure {
		threshold = p.spec.FailureThreshold
	}
	if p.same < int(threshold) || p.holds == o {
		return unchanged
	}
	p.holds = o
	return o
}
