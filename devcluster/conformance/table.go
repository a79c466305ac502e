package conformance

import (
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func readinessTable() []behaviour {
	return []behaviour{
		{"without a probe ready when running", podSpec{}, func(s *subject) {
			v := s.until("ready", ready)
			for _, t := range []corev1.PodConditionType{corev1.ContainersReady, corev1.PodInitialized,
				corev1.PodReadyToStartContainers} {
				require.Equal(s.t, corev1.ConditionTrue, v.condition(t).Status, t)
			}
			require.Equal(s.t, corev1.PodRunning, v.Status.Phase)
			require.NotEmpty(s.t, v.Status.PodIP)
			require.Equal(s.t, v.Status.PodIP, v.Status.PodIPs[0].IP)
			require.NotEmpty(s.t, v.Status.HostIP)
			require.NotNil(s.t, v.Status.StartTime)
			require.Equal(s.t, v.Generation, v.Status.ObservedGeneration)
		}},
		{"ready only after the success threshold", podSpec{probe: "/readyz", successes: 3}, func(s *subject) {
			require.GreaterOrEqual(s.t, readyAfter(s), time.Second, "three probes a second apart")
		}},
		{"ready only after the initial delay", podSpec{probe: "/readyz", delay: 3}, func(s *subject) {
			require.GreaterOrEqual(s.t, readyAfter(s), 2*time.Second, "3 s by whole seconds")
		}},
		{"not ready after the failure threshold and back", podSpec{probe: "/readyz", failures: 2}, func(s *subject) {
			v := s.until("ready", ready)
			s.setReady(v, false)
			v = s.until("not ready", notReady)
			require.Equal(s.t, "ContainersNotReady", v.condition(corev1.PodReady).Reason)
			require.Equal(s.t, corev1.PodRunning, v.Status.Phase)
			s.setReady(v, true)
			require.Zero(s.t, s.until("ready again", ready).main().RestartCount, "readiness never restarts")
		}},
		{"readiness is probed while terminating", podSpec{probe: "/readyz", failures: 1, args: "--term-delay 20s"},
			func(s *subject) {
				s.until("ready", ready)
				s.delete()
				v := s.until("deleting and ready", deleting, ready)
				s.setReady(v, false)
				s.until("deleting, running and not ready", deleting, running, notReady)
				s.setReady(v, true)
				s.until("deleting and ready again", deleting, ready)
				s.until("gone", gone)
			}},
	}
}

// readyAfter is the time, in whole seconds, from the container's start to the moment at
// which the pod became ready. A version that shows the container running and not ready
// need not exist: a kubelet writes the status once a second, and on a busy machine its
// first status shows the container ready.
func readyAfter(s *subject) time.Duration {
	s.t.Helper()
	v := s.until("ready", ready)
	return v.condition(corev1.PodReady).LastTransitionTime.Sub(v.main().State.Running.StartedAt.Time)
}

func restartTable() []behaviour {
	// A run of one second may end before any status shows it. One of five seconds is
	// visible.
	never := func(code int32, phase corev1.PodPhase, reason, podReason string) behaviour {
		return behaviour{fmt.Sprintf("exit %d with policy Never ends the pod", code),
			podSpec{never: true, args: fmt.Sprintf("--exit-after 1s --exit-code %d", code)}, func(s *subject) {
				v := s.until("phase "+string(phase), inPhase(phase))
				end := v.main().State.Terminated
				require.NotNil(s.t, end)
				require.Equal(s.t, code, end.ExitCode)
				require.Equal(s.t, reason, end.Reason)
				require.False(s.t, end.FinishedAt.Before(&end.StartedAt))
				require.Zero(s.t, v.main().RestartCount)
				require.Equal(s.t, podReason, v.condition(corev1.PodReady).Reason)
				s.delete()
				s.until("gone", gone)
				s.never("restarted", restarted)
			}}
	}
	return []behaviour{
		never(0, corev1.PodSucceeded, "Completed", "PodCompleted"),
		never(5, corev1.PodFailed, "Error", "PodFailed"),
		{"exit 0 with policy Always restarts", podSpec{args: "--exit-after 5s"}, func(s *subject) {
			first := s.until("running", running).main()
			now := s.until("restarted", restarted).main()
			require.EqualValues(s.t, 1, now.RestartCount)
			require.Zero(s.t, now.LastTerminationState.Terminated.ExitCode)
			require.Equal(s.t, "Completed", now.LastTerminationState.Terminated.Reason)
			require.NotEqual(s.t, first.ContainerID, now.ContainerID)
			require.Equal(s.t, first.ContainerID, now.LastTerminationState.Terminated.ContainerID)
		}},
		{"CrashLoopBackOff after the second crash", podSpec{args: "--exit-after 1s --exit-code 3"}, func(s *subject) {
			v := s.until("CrashLoopBackOff", backingOff)
			now := v.main()
			require.Positive(s.t, now.RestartCount)
			last := now.LastTerminationState.Terminated
			require.EqualValues(s.t, 3, last.ExitCode)
			require.Equal(s.t, "Error", last.Reason)
			require.Equal(s.t, corev1.PodRunning, v.Status.Phase)
			wait := 10 * time.Second << (now.RestartCount - 1) // the first wait may end before any status shows it
			require.Contains(s.t, now.State.Waiting.Message,
				fmt.Sprintf("back-off %v restarting failed container=%s", wait, mainName))
			again := s.until("restarted after the back-off", func(v version) bool {
				return v.main().RestartCount > now.RestartCount && v.main().State.Waiting == nil
			}).main().State
			var began time.Time
			if again.Running != nil {
				began = again.Running.StartedAt.Time
			} else {
				began = again.Terminated.StartedAt.Time
			}
			require.GreaterOrEqual(s.t, began.Sub(last.FinishedAt.Time), wait-time.Second)
			s.never("CrashLoopBackOff before any restart", backingOff,
				func(v version) bool { return v.main().RestartCount == 0 })
		}},
		{"an end is reported before the restart", podSpec{args: "--exit-after 5s --exit-code 3"}, func(s *subject) {
			s.until("ready", ready)
			v := s.until("ended", terminated)
			require.Zero(s.t, v.main().RestartCount)
			require.Equal(s.t, corev1.PodRunning, v.Status.Phase)
			require.Equal(s.t, "ContainersNotReady", v.condition(corev1.PodReady).Reason)
			s.until("restarted", restarted)
		}},
		{"missing command", podSpec{command: "no-such-command-anywhere"}, func(s *subject) {
			end := s.until("CrashLoopBackOff", backingOff).main().LastTerminationState.Terminated
			require.NotNil(s.t, end)
			require.EqualValues(s.t, 128, end.ExitCode)
			require.Equal(s.t, "StartError", end.Reason)
			require.True(s.t, strings.Contains(end.Message, "not found") || strings.Contains(end.Message, "no such file"))
			s.never("running", running)
			s.never("ready", ready)
			s.delete()
			s.until("gone", gone)
		}},
		{"a status is written before the start", podSpec{}, func(s *subject) {
			v := s.until("accepted", func(v version) bool { return v.Status.StartTime != nil })
			require.Equal(s.t, corev1.PodPending, v.Status.Phase)
			require.Equal(s.t, "ContainerCreating", v.main().State.Waiting.Reason)
			require.Empty(s.t, v.Status.PodIP)
			require.Equal(s.t, corev1.ConditionFalse, v.condition(corev1.PodReadyToStartContainers).Status)
			s.until("ready", ready)
			s.never("running without an address", running, func(v version) bool { return v.Status.PodIP == "" })
		}},
	}
}

func endTable() []behaviour {
	const probe, ignore = "/healthz", "--ignore-sigterm"
	return []behaviour{
		{"SIGTERM honoured", podSpec{probe: probe}, func(s *subject) {
			end, _, last := s.ends()
			require.Zero(s.t, end.ExitCode)
			require.Equal(s.t, "Completed", end.Reason)
			require.Equal(s.t, corev1.PodSucceeded, last.Status.Phase)
		}},
		{"SIGTERM ignored", podSpec{probe: probe, args: ignore, grace: 4}, func(s *subject) {
			end, after, last := s.ends()
			require.EqualValues(s.t, 137, end.ExitCode)
			require.Equal(s.t, "Error", end.Reason)
			require.Equal(s.t, corev1.PodFailed, last.Status.Phase)
			require.GreaterOrEqual(s.t, after, 3*time.Second, "the whole grace period, by whole seconds")
		}},
		{"ready stays until the end", podSpec{args: "--term-delay 3s"}, func(s *subject) {
			s.until("ready", ready)
			s.delete()
			require.EqualValues(s.t, 30, *s.until("deleting and ready", deleting, ready).DeletionGracePeriodSeconds)
			s.until("gone", gone)
			s.never("terminated and ready", terminated, ready)
		}},
		{"preStop sleep delays SIGTERM", podSpec{probe: probe, preStop: 4}, func(s *subject) {
			end, after, _ := s.ends()
			require.Zero(s.t, end.ExitCode)
			require.GreaterOrEqual(s.t, after, 3*time.Second)
		}},
		{"a pod in its preStop sleep is ready and serves", podSpec{probe: probe, preStop: 12}, func(s *subject) {
			s.until("ready", ready)
			s.delete()
			v := s.until("stopping and ready", stopping, ready)
			s.serves(v, mainPort, 100*time.Millisecond, v.asked().Add(6*time.Second))
			end, _, _ := s.ended()
			require.Zero(s.t, end.ExitCode)
			s.never("terminated and ready", terminated, ready)
		}},
		{"the deletion's grace cuts a preStop sleep", podSpec{probe: probe, preStop: 3600, grace: 3600}, func(s *subject) {
			end, _, _ := s.ends(1)
			require.Zero(s.t, end.ExitCode)
		}},
		{"grace counts preStop", podSpec{probe: probe, preStop: 12, args: ignore, grace: 16}, func(s *subject) {
			end, after, _ := s.ends()
			require.EqualValues(s.t, 137, end.ExitCode)
			require.GreaterOrEqual(s.t, after, 15*time.Second)
			require.Less(s.t, after, 27*time.Second, "12 s of preStop and 16 s of grace, one after the other, would be 28 s")
		}},
		{"the deletion's grace counts, not the pod's", podSpec{probe: probe, args: ignore, grace: 3600}, func(s *subject) {
			end, after, _ := s.ends(2)
			require.EqualValues(s.t, 137, end.ExitCode)
			require.GreaterOrEqual(s.t, after, time.Second)
		}},
		{"a shortened grace does not cut the stop under way", podSpec{probe: probe, args: ignore, grace: 8},
			func(s *subject) {
				s.until("ready", ready)
				s.delete()
				s.until("stopping", stopping)
				s.delete(1)
				end, after, _ := s.ended()
				require.EqualValues(s.t, 137, end.ExitCode)
				require.GreaterOrEqual(s.t, after, 7*time.Second)
			}},
		{"a finalizer keeps the ended pod", podSpec{probe: probe, finalizer: "conformance.berth.sh/stay"},
			func(s *subject) {
				s.until("ready", ready)
				s.delete()
				v := s.until("ended", inPhase(corev1.PodSucceeded))
				require.NotNil(s.t, v.main().State.Terminated)
				require.Equal(s.t, corev1.ConditionFalse, v.condition(corev1.PodReady).Status)
				require.NotEmpty(s.t, v.Status.PodIP)
				v = s.until("to be removed", deleting, func(v version) bool { return *v.DeletionGracePeriodSeconds == 0 })
				require.Equal(s.t, corev1.PodSucceeded, v.Status.Phase)
				ctx, cancel := s.limit()
				defer cancel()
				_, err := s.client.CoreV1().Pods(s.o.Namespace).Patch(ctx, s.name, types.MergePatchType,
					[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
				require.NoError(s.t, err)
				s.until("gone", gone)
			}},
		{"deletion before any status is written", podSpec{}, func(s *subject) {
			s.until("bound", func(v version) bool { return v.Spec.NodeName != "" })
			s.delete()
			_, _, last := s.ended() // it may have run, and been ready, after its deletion was asked for
			require.Contains(s.t, []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed}, last.Status.Phase)
		}},
		{"deletion in CrashLoopBackOff", podSpec{args: "--exit-after 1ms --exit-code 1"}, func(s *subject) {
			s.until("CrashLoopBackOff", backingOff)
			s.delete()
			s.until("gone", gone)
		}},
		{"forced deletion", podSpec{}, func(s *subject) {
			s.until("ready", ready)
			s.delete(0)
			s.until("gone", gone)
		}},
		{"forced deletion does not cut the stop under way", podSpec{probe: probe, grace: 15,
			args: fmt.Sprintf("%s --ports %d,%d", ignore, mainPort, ownPort)}, func(s *subject) {
			v := s.until("ready", ready)
			s.delete()
			s.until("stopping", stopping)
			s.delete(0)
			s.until("gone", gone)
			s.serves(v, ownPort, 500*time.Millisecond, s.first(deleting).asked().Add(8*time.Second))
			s.reachable(v.Status.PodIP, ownPort, false)
		}},
		{"eviction through the API", podSpec{probe: probe}, func(s *subject) {
			s.until("ready", ready)
			ctx, cancel := s.limit()
			defer cancel()
			require.NoError(s.t, s.client.PolicyV1().Evictions(s.o.Namespace).Evict(ctx, &policyv1.Eviction{
				ObjectMeta: metav1.ObjectMeta{Namespace: s.o.Namespace, Name: s.name}}))
			s.until("deleting", deleting)
			end, _, last := s.ended()
			require.Zero(s.t, end.ExitCode)
			require.Equal(s.t, corev1.ConditionTrue, last.condition(corev1.DisruptionTarget).Status)
		}},
		{"same name again is another pod", podSpec{}, func(s *subject) {
			s.until("ready", ready)
			s.delete(0)
			s.until("gone", gone)
			v := s.createNamed(s.name, s.spec).until("ready", ready)
			require.NotEqual(s.t, s.made.UID, v.UID)
			require.Zero(s.t, v.main().RestartCount)
		}},
	}
}

func addressTable() []behaviour {
	const probe = "/healthz"
	return []behaviour{
		{"every pod has its own address", podSpec{probe: probe}, func(s *subject) {
			owner := map[string]string{}
			for _, o := range []*subject{s, s.create(s.spec), s.create(s.spec), s.create(s.spec)} {
				v := o.until("ready", ready)
				require.Empty(s.t, owner[v.Status.PodIP], "address %s has two pods", v.Status.PodIP)
				owner[v.Status.PodIP] = v.Name
			}
		}},
		{"an address is reused only after the old container", podSpec{probe: probe, args: "--term-delay 4s"},
			func(s *subject) {
				old := s.until("ready", ready)
				s.delete()
				s.until("deleting", deleting)
				quick := podSpec{probe: probe}
				var later []version
				for range 3 { // some while the old pod still runs
					later = append(later, s.create(quick).until("ready", ready))
				}
				end, _, _ := s.ended()
				later = append(later, s.create(quick).until("ready", ready)) // and one after it
				for _, v := range later {
					began := v.main().State.Running.StartedAt
					require.False(s.t, v.Status.PodIP == old.Status.PodIP && began.Before(&end.FinishedAt),
						"%s had the address %s from %v on, and its last pod ran until %v", v.Name, old.Status.PodIP, began,
						end.FinishedAt)
				}
			}},
		{"the process knows its pod", podSpec{probe: probe}, func(s *subject) {
			v := s.until("ready", ready)
			var who struct {
				Pod, PodUID, IP, Path string
				Port                  int
			}
			require.NoError(s.t, s.do("GET", v.Status.PodIP, mainPort, "/some/path?q=1", &who))
			require.Equal(s.t, s.name, who.Pod)
			require.Equal(s.t, string(v.UID), who.PodUID)
			require.Equal(s.t, v.Status.PodIP, who.IP)
			require.Equal(s.t, mainPort, who.Port)
			require.Equal(s.t, "/some/path?q=1", who.Path)
		}},
		{"a child process ends with its pod", podSpec{probe: probe, grace: 5,
			args: fmt.Sprintf("--spawn-child %d", childPort)}, func(s *subject) {
			v := s.until("ready", ready)
			s.reachable(v.Status.PodIP, childPort, true)
			s.delete()
			s.until("gone", gone)
			s.reachable(v.Status.PodIP, childPort, false)
		}},
		{"forced deletion ends the processes", podSpec{probe: probe,
			args: fmt.Sprintf("--ignore-sigterm --spawn-child %d", forcedChildPort)}, func(s *subject) {
			v := s.until("ready", ready)
			s.reachable(v.Status.PodIP, forcedChildPort, true)
			s.delete(0)
			s.until("gone", gone)
			s.reachable(v.Status.PodIP, forcedChildPort, false)
		}},
	}
}
