package processnode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func TestThresholdsDecideWhatHolds(t *testing.T) {
	const s, f = success, failure
	for _, c := range []struct {
		name               string
		kind               probeKind
		successes, failing int32
		results            []outcome
		want               []outcome // unchanged shortened to 3
	}{
		{"ready at the third success", readiness, 3, 1, []outcome{s, s, s, s}, []outcome{3, 3, s, 3}},
		{"a failure between starts the count again", readiness, 2, 2, []outcome{s, f, s, s}, []outcome{3, 3, 3, s}},
		{"failures below the threshold change nothing", readiness, 1, 3, []outcome{s, f, f, s, f, f, f}, []outcome{s, 3, 3, 3, 3, 3, f}},
		{"not ready from the start is not news", readiness, 1, 1, []outcome{f, f, s}, []outcome{3, 3, s}},
		{"a probe that could not be made does not count", readiness, 1, 2, []outcome{s, f, unknown, f}, []outcome{s, 3, 3, f}},
		{"liveness is assumed", liveness, 1, 2, []outcome{s, f, f}, []outcome{3, 3, f}},
		{"startup is news", startup, 1, 2, []outcome{f, s}, []outcome{3, s}},
		{"startup failure", startup, 1, 2, []outcome{f, f}, []outcome{3, f}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := prober{kind: c.kind, spec: &corev1.Probe{SuccessThreshold: c.successes, FailureThreshold: c.failing}}
			p.next(target{id: "1", running: true, started: c.kind != startup, startedAt: time.Now()}, time.Now())
			for i, r := range c.results {
				require.Equal(t, c.want[i], p.record(r), "result %d", i)
			}
		})
	}
}

func TestWhenToProbe(t *testing.T) {
	now := time.Now()
	running := target{id: "1", running: true, started: true, startedAt: now.Add(-10 * time.Second)}
	with := func(change func(*target)) target {
		t := running
		change(&t)
		return t
	}
	for _, c := range []struct {
		name  string
		kind  probeKind
		delay int32
		t     target
		want  tick
	}{
		{"running", readiness, 0, running, tickProbe},
		{"never started", readiness, 0, target{}, tickWait},
		{"not running", readiness, 0, with(func(t *target) { t.running = false }), tickWait},
		{"initial delay", readiness, 11, running, tickWait},
		{"after the initial delay", readiness, 10, running, tickProbe},
		{"readiness waits for startup", readiness, 0, with(func(t *target) { t.started = false }), tickWait},
		{"liveness waits for startup", liveness, 0, with(func(t *target) { t.started = false }), tickWait},
		{"startup while not started", startup, 0, with(func(t *target) { t.started = false }), tickProbe},
		{"startup is over when started", startup, 0, running, tickWait},
		{"readiness while terminating", readiness, 0, with(func(t *target) { t.terminating = true }), tickProbe},
		{"no liveness while terminating", liveness, 0, with(func(t *target) { t.terminating = true }), tickQuit},
		{"no startup while terminating", startup, 0, with(func(t *target) { t.terminating = true }), tickQuit},
		{"terminal", readiness, 0, with(func(t *target) { t.terminal = true }), tickQuit},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := prober{kind: c.kind, spec: &corev1.Probe{InitialDelaySeconds: c.delay}}
			require.Equal(t, c.want, p.next(c.t, now))
		})
	}
}

func TestAFailedLivenessProbeRestsUntilTheNextRun(t *testing.T) {
	p := prober{kind: liveness, spec: &corev1.Probe{SuccessThreshold: 1, FailureThreshold: 1}}
	one := target{id: "1", running: true, started: true, startedAt: time.Now()}
	require.Equal(t, tickProbe, p.next(one, time.Now()))
	require.Equal(t, failure, p.record(failure))
	require.Equal(t, tickWait, p.next(one, time.Now()))
	two := one
	two.id = "2"
	require.Equal(t, tickProbe, p.next(two, time.Now()))
	require.Equal(t, failure, p.record(failure), "the new run's failure is news")
}
