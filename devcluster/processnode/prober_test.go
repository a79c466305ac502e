package processnode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func TestThresholdsDecideReadiness(t *testing.T) {
	const s, f = success, failure
	for _, c := range []struct {
		name               string
		successes, failing int32
		results            []outcome
		want               []outcome // unchanged shortened to 3
	}{
		{"ready at the third success", 3, 1, []outcome{s, s, s, s}, []outcome{3, 3, s, 3}},
		{"a failure between starts the count again", 2, 2, []outcome{s, f, s, s}, []outcome{3, 3, 3, s}},
		{"failures below the threshold change nothing", 1, 3, []outcome{s, f, f, s, f, f, f}, []outcome{s, 3, 3, 3, 3, 3, f}},
		{"not ready from the start is not news", 1, 1, []outcome{f, f, s}, []outcome{3, 3, s}},
		{"a probe that could not be made does not count", 1, 2, []outcome{s, f, unknown, f}, []outcome{s, 3, 3, f}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := prober{spec: &corev1.Probe{SuccessThreshold: c.successes, FailureThreshold: c.failing}}
			p.next(target{id: "1", running: true, startedAt: time.Now()}, time.Now())
			for i, r := range c.results {
				require.Equal(t, c.want[i], p.record(r), "result %d", i)
			}
		})
	}
}

func TestProbeRunsOnlyWhileContainerRuns(t *testing.T) {
	now := time.Now()
	running := target{id: "1", running: true, startedAt: now.Add(-10 * time.Second)}
	with := func(change func(*target)) target {
		t := running
		change(&t)
		return t
	}
	for _, c := range []struct {
		name  string
		delay int32
		t     target
		want  tick
	}{
		{"running", 0, running, tickProbe},
		{"never started", 0, target{}, tickWait},
		{"not running", 0, with(func(t *target) { t.running = false }), tickWait},
		{"initial delay", 11, running, tickWait},
		{"after the initial delay", 10, running, tickProbe},
		{"terminal", 0, with(func(t *target) { t.terminal = true }), tickQuit},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := prober{spec: &corev1.Probe{InitialDelaySeconds: c.delay}}
			require.Equal(t, c.want, p.next(c.t, now))
		})
	}
}

func TestRestartedContainerIsNotReadyUntilItsProbeSucceeds(t *testing.T) {
	p := prober{spec: &corev1.Probe{SuccessThreshold: 1, FailureThreshold: 1}}
	run := target{id: "1", running: true, startedAt: time.Now()}
	require.Equal(t, tickProbe, p.next(run, time.Now()))
	require.Equal(t, success, p.record(success))
	run.id = "2"
	require.Equal(t, tickProbe, p.next(run, time.Now()))
	require.Equal(t, success, p.record(success), "the success of the new run is news")
}
