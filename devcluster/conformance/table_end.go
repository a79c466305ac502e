package conformance

import (
	"fmt"
	"net/http"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// endsDeleted deletes the pod once it is ready and returns its last version,
// which names how the main container ended and, with it, how long it was given.
func endsDeleted(s *subject) (end *corev1.ContainerStateTerminated, after time.Duration, last *corev1.Pod) {
	s.t.Helper()
	s.until("ready", ready)
	s.delete(nil)
	last = s.until("gone", gone)
	end = mainOf(observation{pod: last}).State.Terminated
	require.NotNil(s.t, end, "the last version says how the container ended")
	return end, end.FinishedAt.Sub(asked(s.first(deleting))), last
}

// first returns the first version of all that has the property.
func (s *subject) first(holds func(observation) bool) *corev1.Pod {
	s.t.Helper()
	for _, o := range s.seen.all(s.name) {
		if o.pod.UID == s.made.UID && holds(o) {
			return o.pod
		}
	}
	require.Fail(s.t, "no such version")
	return nil
}

func endTable() []behaviour {
	probe := get("/healthz", 3)
	one, two, zero := int64(1), int64(2), int64(0)
	return []behaviour{
		{name: "SIGTERM honoured", pod: podSpec{readiness: probe}, judge: func(s *subject) {
			end, _, last := endsDeleted(s)
			require.Zero(s.t, end.ExitCode)
			require.Equal(s.t, "Completed", end.Reason)
			require.Equal(s.t, corev1.PodSucceeded, last.Status.Phase)
		}},
		{name: "SIGTERM ignored", pod: podSpec{readiness: probe, args: []string{"--ignore-sigterm"}, grace: 4},
			judge: func(s *subject) {
				end, after, last := endsDeleted(s)
				require.EqualValues(s.t, 137, end.ExitCode)
				require.Equal(s.t, "Error", end.Reason)
				require.Equal(s.t, corev1.PodFailed, last.Status.Phase)
				require.GreaterOrEqual(s.t, after, 3*time.Second, "the whole grace period, by whole seconds")
			}},
		{name: "ready stays until the end", pod: podSpec{args: []string{"--term-delay", "3s"}}, judge: func(s *subject) {
			s.until("ready", ready)
			s.delete(nil)
			pod := s.until("deleting and ready", both(deleting, ready))
			require.EqualValues(s.t, 30, *pod.DeletionGracePeriodSeconds)
			s.until("gone", gone)
			s.never("terminated and ready", both(terminated, ready))
		}},
		{name: "preStop sleep delays SIGTERM", pod: podSpec{readiness: probe, preStop: sleepHook(4)},
			judge: func(s *subject) {
				end, after, _ := endsDeleted(s)
				require.Zero(s.t, end.ExitCode)
				require.GreaterOrEqual(s.t, after, 3*time.Second)
			}},
		{name: "a pod in its preStop sleep is ready and serves", dials: true,
			pod: podSpec{readiness: probe, preStop: sleepHook(12)}, judge: func(s *subject) {
				s.until("ready", ready)
				s.delete(nil)
				pod := s.until("stopping and ready", both(stopping, ready))
				s.serves(pod, 100*time.Millisecond, asked(pod).Add(6*time.Second))
				end := mainOf(observation{pod: s.until("gone", gone)}).State.Terminated
				require.Zero(s.t, end.ExitCode)
				s.never("terminated and ready", both(terminated, ready))
			}},
		{name: "the deletion's grace cuts a preStop sleep",
			pod: podSpec{readiness: probe, preStop: sleepHook(3600), grace: 3600}, judge: func(s *subject) {
				s.until("ready", ready)
				s.delete(&one)
				end := mainOf(observation{pod: s.until("gone", gone)}).State.Terminated
				require.Zero(s.t, end.ExitCode)
			}},
		{name: "grace counts preStop", pod: podSpec{readiness: probe, preStop: sleepHook(12),
			args: []string{"--ignore-sigterm"}, grace: 16}, judge: func(s *subject) {
			end, after, _ := endsDeleted(s)
			require.EqualValues(s.t, 137, end.ExitCode)
			require.GreaterOrEqual(s.t, after, 15*time.Second)
			require.Less(s.t, after, 27*time.Second, "12 s of preStop and 16 s of grace, one after the other, would be 28 s")
		}},
		{name: "the deletion's grace counts, not the pod's",
			pod: podSpec{readiness: probe, args: []string{"--ignore-sigterm"}, grace: 3600}, judge: func(s *subject) {
				s.until("ready", ready)
				s.delete(&two)
				end := mainOf(observation{pod: s.until("gone", gone)}).State.Terminated
				require.EqualValues(s.t, 137, end.ExitCode)
				require.GreaterOrEqual(s.t, end.FinishedAt.Sub(asked(s.first(deleting))), time.Second)
			}},
		{name: "a shortened grace does not cut the stop under way",
			pod: podSpec{readiness: probe, args: []string{"--ignore-sigterm"}, grace: 8}, judge: func(s *subject) {
				s.until("ready", ready)
				s.delete(nil)
				s.until("stopping", stopping)
				s.delete(&one)
				end := mainOf(observation{pod: s.until("gone", gone)}).State.Terminated
				require.EqualValues(s.t, 137, end.ExitCode)
				require.GreaterOrEqual(s.t, end.FinishedAt.Sub(asked(s.first(deleting))), 7*time.Second)
			}},
		{name: "ends of a pod's containers are reported together",
			pod: podSpec{beside: []string{"--ignore-sigterm"}, grace: 8}, judge: func(s *subject) {
				end, _, last := endsDeleted(s)
				require.Zero(s.t, end.ExitCode)
				other := besideOf(observation{pod: last}).State.Terminated
				require.NotNil(s.t, other)
				require.EqualValues(s.t, 137, other.ExitCode)
				require.GreaterOrEqual(s.t, other.FinishedAt.Sub(end.FinishedAt.Time), 2*time.Second)
				require.Equal(s.t, corev1.PodFailed, last.Status.Phase, "one of the two failed")
				require.NotEmpty(s.t, last.Status.PodIP)
				s.never("one reported before the other", func(o observation) bool {
					return terminated(o) != (besideOf(o).State.Terminated != nil)
				})
			}},
		{name: "a finalizer keeps the ended pod", pod: podSpec{readiness: probe, finalizer: "conformance.berth.sh/stay"},
			judge: func(s *subject) {
				s.until("ready", ready)
				s.delete(nil)
				pod := s.until("ended", inPhase(corev1.PodSucceeded))
				require.NotNil(s.t, mainOf(observation{pod: pod}).State.Terminated)
				require.Equal(s.t, corev1.ConditionFalse, condition(pod, corev1.PodReady).Status)
				require.NotEmpty(s.t, pod.Status.PodIP)
				pod = s.until("to be removed", func(o observation) bool {
					return deleting(o) &&
						*o.pod.DeletionGracePeriodSeconds == 0
				})
				require.Equal(s.t, corev1.PodSucceeded, pod.Status.Phase)
				s.patch(`{"metadata":{"finalizers":null}}`)
				s.until("gone", gone)
			}},
		{name: "deletion before any status is written", judge: func(s *subject) {
			s.until("bound", func(o observation) bool { return o.pod.Spec.NodeName != "" })
			s.delete(nil)
			last := s.until("gone", gone) // it may have run, and been ready, after its deletion was asked for
			require.Contains(s.t, []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed}, last.Status.Phase)
			require.NotNil(s.t, mainOf(observation{pod: last}).State.Terminated)
		}},
		{name: "ready although deleting", pod: podSpec{readiness: get("/readyz", 1),
			args: []string{"--ready-after", "6s", "--term-delay", "15s"}}, judge: func(s *subject) {
			s.until("running", running)
			s.delete(nil)
			s.until("deleting and ready", both(deleting, ready))
			s.until("gone", gone)
		}},
		{name: "deletion in CrashLoopBackOff", pod: podSpec{args: []string{"--exit-now", "--exit-code", "1"}},
			judge: func(s *subject) {
				s.until("CrashLoopBackOff", backingOff())
				s.delete(nil)
				s.until("gone", gone)
			}},
		{name: "forced deletion", judge: func(s *subject) {
			s.until("ready", ready)
			s.delete(&zero)
			s.until("gone", gone)
		}},
		{name: "forced deletion does not cut the stop under way", dials: true, pod: podSpec{readiness: probe,
			args: []string{"--ignore-sigterm", "--ports", fmt.Sprintf("%d,%d", mainPort, ownPort)}, grace: 15},
			judge: func(s *subject) {
				pod := s.until("ready", ready)
				s.delete(nil)
				s.until("stopping", stopping)
				s.delete(&zero)
				s.until("gone", gone)
				ticker := time.NewTicker(500 * time.Millisecond)
				defer ticker.Stop()
				for now, end := time.Now(), asked(s.first(deleting)).Add(8*time.Second); ; now = <-ticker.C {
					require.NoError(s.t, s.do(http.MethodGet, pod.Status.PodIP, ownPort, "/", nil), "without an object, and at work")
					if now.After(end) {
						break
					}
				}
				s.reachable(pod.Status.PodIP, ownPort, false)
			}},
		{name: "eviction through the API", pod: podSpec{readiness: probe}, judge: func(s *subject) {
			s.until("ready", ready)
			ctx, cancel := s.limit()
			defer cancel()
			require.NoError(s.t, s.client.PolicyV1().Evictions(s.o.Namespace).Evict(ctx, &policyv1.Eviction{
				ObjectMeta: metav1.ObjectMeta{Namespace: s.o.Namespace, Name: s.name}}))
			s.until("deleting", deleting)
			last := s.until("gone", gone)
			require.Zero(s.t, mainOf(observation{pod: last}).State.Terminated.ExitCode)
			require.Equal(s.t, corev1.ConditionTrue, condition(last, corev1.DisruptionTarget).Status)
		}},
		{name: "same name again is another pod", judge: func(s *subject) {
			s.until("ready", ready)
			s.delete(&zero)
			s.until("gone", gone)
			again := s.createNamed(s.name, s.spec)
			pod := again.until("ready", ready)
			require.NotEqual(s.t, s.made.UID, pod.UID)
			require.Zero(s.t, mainOf(observation{pod: pod}).RestartCount)
		}},
	}
}
