package conformance

import (
	"net/http"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func readinessTable() []behaviour {
	thrice := get("/readyz", 1)
	thrice.SuccessThreshold = 3
	late := get("/healthz", 1)
	late.InitialDelaySeconds = 3
	socket := get("", 2)
	socket.HTTPGet, socket.TCPSocket = nil, &corev1.TCPSocketAction{Port: socket.HTTPGet.Port}
	command := get("", 2)
	command.HTTPGet, command.Exec = nil, &corev1.ExecAction{Command: []string{"demo-sandbox", "--exit-now"}}
	refusing := get("", 2)
	refusing.HTTPGet, refusing.Exec = nil, &corev1.ExecAction{Command: []string{"demo-sandbox", "--exit-now", "--exit-code", "1"}}
	becomesReady := func(s *subject) {
		pod := s.until("ready", ready)
		require.Equal(s.t, corev1.ConditionTrue, condition(pod, corev1.ContainersReady).Status)
		require.Equal(s.t, corev1.ConditionTrue, condition(pod, corev1.PodInitialized).Status)
		require.Equal(s.t, corev1.ConditionTrue, condition(pod, corev1.PodReadyToStartContainers).Status)
		require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
		require.NotEmpty(s.t, pod.Status.PodIP)
		require.Equal(s.t, pod.Status.PodIP, pod.Status.PodIPs[0].IP)
		require.NotEmpty(s.t, pod.Status.HostIP)
		require.NotNil(s.t, pod.Status.StartTime)
		require.Equal(s.t, pod.Generation, pod.Status.ObservedGeneration)
	}
	return []behaviour{
		{name: "without a probe ready when running", judge: becomesReady},
		{name: "tcp probe", pod: podSpec{readiness: socket, args: []string{"--listen-after", "3s"}}, judge: func(s *subject) {
			becomesReady(s)
			require.GreaterOrEqual(s.t, s.readyAfter(), 2*time.Second)
		}},
		{name: "exec probe", pod: podSpec{readiness: command}, judge: becomesReady},
		{name: "exec probe that fails", pod: podSpec{readiness: refusing}, judge: func(s *subject) {
			s.until("running and not ready", both(running, notReady))
			s.delete(nil)
			s.until("gone", gone)
			s.never("ready", ready)
		}},
		{name: "ready only after the success threshold", pod: podSpec{readiness: thrice}, judge: func(s *subject) {
			s.until("ready", ready)
			require.GreaterOrEqual(s.t, s.readyAfter(), time.Second, "three probes a second apart")
		}},
		{name: "ready only after the initial delay", pod: podSpec{readiness: late}, judge: func(s *subject) {
			s.until("ready", ready)
			require.GreaterOrEqual(s.t, s.readyAfter(), 2*time.Second, "3 s by whole seconds")
		}},
		{name: "not ready after the failure threshold and back", dials: true, pod: podSpec{readiness: get("/readyz", 2)}, judge: func(s *subject) {
			ip := s.until("ready", ready).Status.PodIP
			require.NoError(s.t, s.do(http.MethodPost, ip, mainPort, "/ready?value=false", nil))
			pod := s.until("not ready", notReady)
			require.Equal(s.t, "ContainersNotReady", condition(pod, corev1.PodReady).Reason)
			require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
			require.NoError(s.t, s.do(http.MethodPost, ip, mainPort, "/ready?value=true", nil))
			pod = s.until("ready again", ready)
			require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount, "readiness never restarts")
		}},
		{name: "one container of two not ready", pod: podSpec{readiness: get("/readyz", 1), args: []string{"--ready-after", "1h"}, beside: []string{}}, judge: func(s *subject) {
			pod := s.until("one ready", func(o observation) bool { return besideOf(o).Ready && running(o) })
			require.False(s.t, mainOf(observation{pod: pod}).Ready)
			require.Equal(s.t, corev1.ConditionFalse, condition(pod, corev1.PodReady).Status)
			require.Equal(s.t, besideName, pod.Status.ContainerStatuses[0].Name, "statuses are sorted by name, whatever the spec's order")
			s.delete(nil)
			s.until("gone", gone)
			s.never("ready", ready)
		}},
		{name: "ready only with its readiness gate", pod: podSpec{gate: "conformance.berth.sh/gate"}, judge: func(s *subject) {
			pod := s.until("containers ready", func(o observation) bool {
				return condition(o.pod, corev1.ContainersReady).Status == corev1.ConditionTrue
			})
			require.Equal(s.t, "ReadinessGatesNotReady", condition(pod, corev1.PodReady).Reason)
			s.patch(`{"status":{"conditions":[{"type":"conformance.berth.sh/gate","status":"True"}]}}`, "status")
			s.until("ready", ready)
			s.delete(nil)
			require.Equal(s.t, corev1.ConditionTrue, condition(s.until("gone", gone), "conformance.berth.sh/gate").Status, "others' conditions stay")
		}},
		{name: "readiness is still probed while terminating", pod: podSpec{readiness: get("/readyz", 1),
			args: []string{"--unready-on-term", "--term-delay", "6s"}}, judge: func(s *subject) {
			s.until("ready", ready)
			s.delete(nil)
			s.until("deleting and ready", both(deleting, ready))
			s.until("deleting, running and not ready", both(both(deleting, running), notReady))
			s.until("gone", gone)
		}},
	}
}

// readyAfter is the time, in whole seconds, from the main container's start to
// the moment at which the pod became ready. Whether a version shows it running
// and not ready yet is not promised: a kubelet looks once a second, and on a busy
// machine its first look finds the container ready.
func (s *subject) readyAfter() time.Duration {
	s.t.Helper()
	pod := s.first(ready)
	return condition(pod, corev1.PodReady).LastTransitionTime.Sub(mainOf(observation{pod: pod}).State.Running.StartedAt.Time)
}

func livenessTable() []behaviour {
	impatient := get("/healthz", 2)
	impatient.TerminationGracePeriodSeconds = new(int64)
	*impatient.TerminationGracePeriodSeconds = 1
	hanging := get("/sleep?ms=3600000", 2)
	hanging.TimeoutSeconds = 1
	return []behaviour{
		{name: "liveness failure restarts", pod: podSpec{liveness: get("/healthz", 2), args: []string{"--healthy-for", "2s"}}, judge: func(s *subject) {
			first := s.until("running", running)
			pod := s.until("restarted", restarted)
			last := mainOf(observation{pod: pod}).LastTerminationState.Terminated
			require.NotNil(s.t, last)
			require.Zero(s.t, last.ExitCode, "SIGTERM was honoured")
			require.Equal(s.t, "Completed", last.Reason)
			require.Equal(s.t, mainOf(observation{pod: first}).ContainerID, last.ContainerID)
			require.Equal(s.t, first.Status.PodIP, pod.Status.PodIP, "a container restart keeps the address")
		}},
		{name: "liveness failure kills by the probe's own grace", pod: podSpec{liveness: impatient, grace: 3600,
			args: []string{"--healthy-for", "2s", "--ignore-sigterm"}}, judge: func(s *subject) {
			last := mainOf(observation{pod: s.until("restarted", restarted)}).LastTerminationState.Terminated
			require.NotNil(s.t, last)
			require.EqualValues(s.t, 137, last.ExitCode)
			require.Equal(s.t, "Error", last.Reason)
		}},
		{name: "liveness failure with policy Never fails the pod", pod: podSpec{liveness: get("/healthz", 3), restart: corev1.RestartPolicyNever,
			args: []string{"--healthy-for", "2s", "--ignore-sigterm"}, grace: 1}, judge: func(s *subject) {
			pod := s.until("failed", inPhase(corev1.PodFailed))
			require.EqualValues(s.t, 137, mainOf(observation{pod: pod}).State.Terminated.ExitCode)
			s.never("restarted", restarted)
		}},
		{name: "a liveness probe that hangs restarts", pod: podSpec{liveness: hanging}, judge: func(s *subject) {
			s.until("restarted", restarted)
		}},
		{name: "preStop delays a liveness kill, too", pod: podSpec{liveness: get("/healthz", 1), args: []string{"--healthy-for", "2s"}, preStop: sleepHook(5)}, judge: func(s *subject) {
			last := mainOf(observation{pod: s.until("restarted", restarted)}).LastTerminationState.Terminated
			require.Zero(s.t, last.ExitCode)
			require.GreaterOrEqual(s.t, last.FinishedAt.Sub(last.StartedAt.Time), 6*time.Second)
		}},
		{name: "startup probe holds readiness back", pod: podSpec{startup: get("/readyz", 60), readiness: get("/healthz", 1),
			args: []string{"--ready-after", "4s"}}, judge: func(s *subject) {
			s.until("ready", ready)
			require.GreaterOrEqual(s.t, s.readyAfter(), 3*time.Second)
			s.never("ready and not started", func(o observation) bool {
				return ready(o) && (mainOf(o).Started == nil || !*mainOf(o).Started)
			})
		}},
		{name: "startup probe holds liveness back", pod: podSpec{startup: get("/readyz", 60), liveness: get("/readyz", 1),
			args: []string{"--ready-after", "5s"}}, judge: func(s *subject) {
			pod := s.until("ready", ready)
			require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount, "liveness waits for startup")
		}},
		{name: "startup failure restarts", pod: podSpec{startup: get("/readyz", 2), args: []string{"--ready-after", "1h"}}, judge: func(s *subject) {
			s.until("restarted", restarted)
			s.never("ready", ready)
		}},
	}
}
