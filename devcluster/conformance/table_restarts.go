package conformance

import (
	"strings"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func restartTable() []behaviour {
	ends := func(code string) []string { return []string{"--exit-after", "1s", "--exit-code", code} }
	judgeEnd := func(phase corev1.PodPhase, code int32, reason string) func(*subject) {
		return func(s *subject) {
			pod := s.until("phase "+string(phase), inPhase(phase))
			end := mainOf(observation{pod: pod}).State.Terminated
			require.NotNil(s.t, end)
			require.Equal(s.t, code, end.ExitCode)
			require.Equal(s.t, reason, end.Reason)
			require.False(s.t, end.FinishedAt.Before(&end.StartedAt))
			require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount)
			require.Equal(s.t, "Pod"+map[corev1.PodPhase]string{corev1.PodSucceeded: "Completed", corev1.PodFailed: "Failed"}[phase],
				condition(pod, corev1.PodReady).Reason)
			s.delete(nil)
			s.until("gone", gone)
			s.never("restarted", restarted)
		}
	}
	return []behaviour{
		{name: "exit 0 with policy Always restarts", pod: podSpec{args: ends("0")}, judge: func(s *subject) {
			first := s.until("running", running)
			pod := s.until("restarted", restarted)
			now := mainOf(observation{pod: pod})
			require.EqualValues(s.t, 1, now.RestartCount)
			require.Zero(s.t, now.LastTerminationState.Terminated.ExitCode)
			require.Equal(s.t, "Completed", now.LastTerminationState.Terminated.Reason)
			require.NotEqual(s.t, mainOf(observation{pod: first}).ContainerID, now.ContainerID)
			require.Equal(s.t, mainOf(observation{pod: first}).ContainerID, now.LastTerminationState.Terminated.ContainerID)
		}},
		{name: "CrashLoopBackOff after the second crash", pod: podSpec{args: ends("3")}, judge: func(s *subject) {
			s.until("restarted", restarted)
			pod := s.until("CrashLoopBackOff", backingOff())
			now := mainOf(observation{pod: pod})
			require.EqualValues(s.t, 1, now.RestartCount)
			require.EqualValues(s.t, 3, now.LastTerminationState.Terminated.ExitCode)
			require.Equal(s.t, "Error", now.LastTerminationState.Terminated.Reason)
			require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
			require.Contains(s.t, now.State.Waiting.Message, "back-off 10s restarting failed container="+mainName)
			s.until("restarted after the back-off", both(running, func(o observation) bool { return mainOf(o).RestartCount == 2 }))
			s.never("CrashLoopBackOff before any restart", both(backingOff(), func(o observation) bool { return mainOf(o).RestartCount == 0 }))
		}},
		{name: "OnFailure restarts a failure", pod: podSpec{restart: corev1.RestartPolicyOnFailure, args: ends("4")}, judge: func(s *subject) {
			pod := s.until("restarted", restarted)
			require.EqualValues(s.t, 4, mainOf(observation{pod: pod}).LastTerminationState.Terminated.ExitCode)
			require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
		}},
		{name: "OnFailure and exit 0 succeed", pod: podSpec{restart: corev1.RestartPolicyOnFailure, args: ends("0")},
			judge: judgeEnd(corev1.PodSucceeded, 0, "Completed")},
		{name: "Never and exit 0 succeed", pod: podSpec{restart: corev1.RestartPolicyNever, args: ends("0")},
			judge: judgeEnd(corev1.PodSucceeded, 0, "Completed")},
		{name: "Never and exit 5 fail", pod: podSpec{restart: corev1.RestartPolicyNever, args: ends("5")},
			judge: judgeEnd(corev1.PodFailed, 5, "Error")},
	}
}

func startTable() []behaviour {
	startError := func(t *corev1.ContainerStateTerminated) bool {
		return t != nil && t.ExitCode == 128 && t.Reason == "StartError" &&
			(strings.Contains(t.Message, "not found") || strings.Contains(t.Message, "no such file"))
	}
	missing := []string{"no-such-command-anywhere"}
	return []behaviour{
		{name: "missing command", pod: podSpec{command: missing}, judge: func(s *subject) {
			pod := s.until("CrashLoopBackOff", backingOff())
			require.True(s.t, startError(mainOf(observation{pod: pod}).LastTerminationState.Terminated))
			s.never("running", running)
			s.never("ready", ready)
			s.delete(nil)
			s.until("gone", gone)
		}},
		{name: "missing command with policy Never", pod: podSpec{command: missing, restart: corev1.RestartPolicyNever}, judge: func(s *subject) {
			pod := s.until("failed", inPhase(corev1.PodFailed))
			require.True(s.t, startError(mainOf(observation{pod: pod}).State.Terminated))
		}},
		{name: "init container before the others", pod: podSpec{init: []string{"--exit-after", "2s"}}, judge: func(s *subject) {
			pod := s.until("init runs", func(o observation) bool {
				return len(o.pod.Status.InitContainerStatuses) == 1 && o.pod.Status.InitContainerStatuses[0].State.Running != nil
			})
			require.Equal(s.t, corev1.PodPending, pod.Status.Phase)
			require.Equal(s.t, "PodInitializing", mainOf(observation{pod: pod}).State.Waiting.Reason)
			require.Equal(s.t, corev1.ConditionFalse, condition(pod, corev1.PodInitialized).Status)
			pod = s.until("ready", ready)
			end := pod.Status.InitContainerStatuses[0].State.Terminated
			require.Zero(s.t, end.ExitCode)
			require.False(s.t, mainOf(observation{pod: pod}).State.Running.StartedAt.Before(&end.FinishedAt))
			require.Equal(s.t, corev1.ConditionTrue, condition(pod, corev1.PodInitialized).Status)
		}},
		{name: "init failure with policy Never fails the pod", pod: podSpec{restart: corev1.RestartPolicyNever, init: []string{"--exit-now", "--exit-code", "6"}}, judge: func(s *subject) {
			pod := s.until("failed", inPhase(corev1.PodFailed))
			require.EqualValues(s.t, 6, pod.Status.InitContainerStatuses[0].State.Terminated.ExitCode)
			s.never("main container running", running)
		}},
		{name: "init failure with policy Always is tried again", pod: podSpec{init: []string{"--exit-now", "--exit-code", "6"}}, judge: func(s *subject) {
			pod := s.until("init in CrashLoopBackOff", func(o observation) bool {
				i := o.pod.Status.InitContainerStatuses
				return len(i) == 1 && i[0].State.Waiting != nil && i[0].State.Waiting.Reason == "CrashLoopBackOff"
			})
			require.EqualValues(s.t, 1, pod.Status.InitContainerStatuses[0].RestartCount)
			require.Equal(s.t, corev1.PodPending, pod.Status.Phase)
			s.never("main container running", running)
		}},
	}
}
