package conformance

import (
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func restartTable() []behaviour {
	// A run of one second may end before any status shows it. One of five seconds is
	// visible.
	ends := func(code string) []string { return []string{"--exit-after", "1s", "--exit-code", code} }
	lasts := func(code string) []string { return []string{"--exit-after", "5s", "--exit-code", code} }
	judgeEnd := func(phase corev1.PodPhase, code int32, reason string) func(*subject) {
		return func(s *subject) {
			pod := s.until("phase "+string(phase), inPhase(phase))
			end := mainOf(observation{pod: pod}).State.Terminated
			require.NotNil(s.t, end)
			require.Equal(s.t, code, end.ExitCode)
			require.Equal(s.t, reason, end.Reason)
			require.False(s.t, end.FinishedAt.Before(&end.StartedAt))
			require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount)
			require.Equal(s.t, "Pod"+map[corev1.PodPhase]string{corev1.PodSucceeded: "Completed",
				corev1.PodFailed: "Failed"}[phase],
				condition(pod, corev1.PodReady).Reason)
			s.delete(nil)
			s.until("gone", gone)
			s.never("restarted", restarted)
		}
	}
	return []behaviour{
		{name: "exit 0 with policy Always restarts", pod: podSpec{args: lasts("0")}, judge: func(s *subject) {
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
			pod := s.until("CrashLoopBackOff", backingOff())
			now := mainOf(observation{pod: pod})
			require.Positive(s.t, now.RestartCount)
			require.EqualValues(s.t, 3, now.LastTerminationState.Terminated.ExitCode)
			require.Equal(s.t, "Error", now.LastTerminationState.Terminated.Reason)
			require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
			wait := 10 * time.Second << (now.RestartCount - 1) // the first wait may end before any status shows it
			require.Contains(s.t, now.State.Waiting.Message,
				fmt.Sprintf("back-off %v restarting failed container=%s", wait, mainName))
			again := s.until("restarted after the back-off", func(o observation) bool {
				return mainOf(o).RestartCount > now.RestartCount && mainOf(o).State.Waiting == nil
			})
			ended := now.LastTerminationState.Terminated.FinishedAt.Time
			require.GreaterOrEqual(s.t, startOf(mainOf(observation{pod: again})).Sub(ended), wait-time.Second)
			s.never("CrashLoopBackOff before any restart", both(backingOff(),
				func(o observation) bool { return mainOf(o).RestartCount == 0 }))
		}},
		{name: "an end is reported before the restart", pod: podSpec{args: lasts("3")}, judge: func(s *subject) {
			s.until("ready", ready)
			pod := s.until("ended", terminated)
			require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount)
			require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
			require.Equal(s.t, "ContainersNotReady", condition(pod, corev1.PodReady).Reason)
			s.until("restarted", restarted)
		}},
		{name: "a crash leaves the other container alone", pod: podSpec{beside: ends("3")}, judge: func(s *subject) {
			first := s.until("running", running)
			pod := s.until("the other in CrashLoopBackOff", func(o observation) bool {
				w := besideOf(o).State.Waiting
				return w != nil && w.Reason == "CrashLoopBackOff"
			})
			require.Equal(s.t, mainOf(observation{pod: first}).ContainerID, mainOf(observation{pod: pod}).ContainerID)
			require.True(s.t, mainOf(observation{pod: pod}).Ready)
			require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
			require.Equal(s.t, "ContainersNotReady", condition(pod, corev1.PodReady).Reason)
			s.never("restarted", restarted)
		}},
		{name: "one of two that ended for good", pod: podSpec{restart: corev1.RestartPolicyNever, beside: ends("0")},
			judge: func(s *subject) {
				pod := s.until("the other ended", func(o observation) bool { return besideOf(o).State.Terminated != nil })
				require.NotNil(s.t, mainOf(observation{pod: pod}).State.Running)
				require.Equal(s.t, corev1.PodRunning, pod.Status.Phase)
				require.Equal(s.t, "ContainersNotReady", condition(pod, corev1.PodReady).Reason)
				s.delete(nil)
				require.Equal(s.t, corev1.PodSucceeded, s.until("gone", gone).Status.Phase)
			}},
		{name: "OnFailure restarts a failure", pod: podSpec{restart: corev1.RestartPolicyOnFailure, args: lasts("4")},
			judge: func(s *subject) {
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
		{name: "missing command with policy Never", pod: podSpec{command: missing, restart: corev1.RestartPolicyNever},
			judge: func(s *subject) {
				pod := s.until("failed", inPhase(corev1.PodFailed))
				require.True(s.t, startError(mainOf(observation{pod: pod}).State.Terminated))
			}},
		{name: "a status is written before the start", judge: func(s *subject) {
			pod := s.until("accepted", func(o observation) bool { return o.pod.Status.StartTime != nil })
			require.Equal(s.t, corev1.PodPending, pod.Status.Phase)
			require.Equal(s.t, "ContainerCreating", mainOf(observation{pod: pod}).State.Waiting.Reason)
			require.Empty(s.t, pod.Status.PodIP)
			require.Equal(s.t, corev1.ConditionFalse, condition(pod, corev1.PodReadyToStartContainers).Status)
			s.until("ready", ready)
			s.never("running without an address", both(running, func(o observation) bool { return o.pod.Status.PodIP == "" }))
		}},
	}
}
