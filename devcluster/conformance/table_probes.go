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
		{name: "ready only after the success threshold", pod: podSpec{readiness: thrice}, judge: func(s *subject) {
			s.until("ready", ready)
			require.GreaterOrEqual(s.t, s.readyAfter(), time.Second, "three probes a second apart")
		}},
		{name: "ready only after the initial delay", pod: podSpec{readiness: late}, judge: func(s *subject) {
			s.until("ready", ready)
			require.GreaterOrEqual(s.t, s.readyAfter(), 2*time.Second, "3 s by whole seconds")
		}},
		{name: "not ready after the failure threshold and back", dials: true, pod: podSpec{readiness: get("/readyz", 2)},
			judge: func(s *subject) {
				ip := s.until("ready", ready).Status.PodIP
				require.NoError(s.t, s.do(http.MethodPost, ip, mainPort, "/ready?value=false", nil))
				pod := s.until("not ready", notReady)
				require.Equal(s.t, "ContainersNotReady", condition(pod, corev1.PodReady).Reason)
				require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
				require.NoError(s.t, s.do(http.MethodPost, ip, mainPort, "/ready?value=true", nil))
				pod = s.until("ready again", ready)
				require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount, "readiness never restarts")
			}},
		{name: "one container of two not ready", pod: podSpec{readiness: get("/readyz", 1),
			args: []string{"--ready-after", "1h"}, beside: []string{}}, judge: func(s *subject) {
			pod := s.until("one ready", func(o observation) bool { return besideOf(o).Ready && running(o) })
			require.False(s.t, mainOf(observation{pod: pod}).Ready)
			require.Equal(s.t, corev1.ConditionFalse, condition(pod, corev1.PodReady).Status)
			require.Equal(s.t, besideName, pod.Status.ContainerStatuses[0].Name,
				"statuses are sorted by name, whatever the spec's order")
			s.delete(nil)
			s.until("gone", gone)
			s.never("ready", ready)
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
// the moment at which the pod became ready. A version that shows the container
// running and not ready need not exist: a kubelet writes the status once a second,
// and on a busy machine its first status shows the container ready.
func (s *subject) readyAfter() time.Duration {
	s.t.Helper()
	pod := s.first(ready)
	started := mainOf(observation{pod: pod}).State.Running.StartedAt
	return condition(pod, corev1.PodReady).LastTransitionTime.Sub(started.Time)
}
