package processnode

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// hostIP is the address of every process node: they share one machine.
const hostIP = "127.0.0.1"

// makeStatus returns the pod's present status, as the kubelet's generateAPIPodStatus
// does.
func (w *worker) makeStatus() corev1.PodStatus {
	if w.past { // a restarted kubelet does not know the address of a pod that has ended
		s := *w.pod.Status.DeepCopy()
		s.PodIP, s.PodIPs = "", nil
		return s
	}
	s := corev1.PodStatus{
		ObservedGeneration: w.pod.Generation,
		StartTime:          &w.startTime,
		HostIP:             hostIP,
		HostIPs:            []corev1.HostIP{{IP: hostIP}},
	}
	if w.known { // also after the pod has ended, when another pod may have the address
		s.PodIP = w.address.String()
		s.PodIPs = []corev1.PodIP{{IP: s.PodIP}}
	}
	all := w.containerStatuses()
	s.Phase = phase(&w.pod.Spec, all, w.finished)
	if w.rejected != "" {
		s.Phase, s.Reason, s.Message = corev1.PodFailed, reasonUnsupported, w.rejected
	}
	s.Conditions = conditions(all, s.Phase, w.holds)
	switch {
	case w.finished:
		lost(all)
		if !terminal(s.Phase) { // status_manager.go, TerminatePod: after the conditions, which do not show it
			s.Phase = corev1.PodFailed
		}
	case terminal(s.Phase):
		// status_manager.go, mergePodStatus: the pod is not ready at once. It is
		// terminal only when nothing of it can be running any more.
		s.Phase, s.Reason, s.Message = w.status.Phase, w.status.Reason, w.status.Message
	}
	if w.rejected == "" {
		s.ContainerStatuses = all
		slices.SortFunc(s.ContainerStatuses, func(a, b corev1.ContainerStatus) int { return strings.Compare(a.Name, b.Name) })
	}
	for i := range s.Conditions {
		s.Conditions[i].ObservedGeneration = w.pod.Generation
	}
	return s
}

func (w *worker) containerStatuses() []corev1.ContainerStatus {
	out := make([]corev1.ContainerStatus, 0, len(w.containers))
	for _, c := range w.containers {
		out = append(out, w.containerStatus(c))
	}
	return out
}

func (w *worker) containerStatus(c *container) corev1.ContainerStatus {
	started := c.run != nil
	s := corev1.ContainerStatus{
		Name: c.spec.Name, Image: c.spec.Image, RestartCount: c.restarts,
		Started: &started, Ready: c.ready(),
	}
	switch {
	case c.run != nil:
		s.ContainerID = c.run.id
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(c.run.startedAt)}
		s.LastTerminationState.Terminated = c.exited
	case c.waiting != nil && !w.ending() && w.restarts(c):
		s.State.Waiting = c.waiting
		s.LastTerminationState.Terminated = c.exited
	case c.exited != nil:
		s.State.Terminated = c.exited
		s.LastTerminationState.Terminated = c.earlier
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
	}
	if s.ContainerID == "" && c.exited != nil {
		s.ContainerID = c.exited.ContainerID
	}
	if s.ContainerID != "" {
		s.ImageID = "process-node/" + c.spec.Image
	}
	s.State, s.LastTerminationState = inSeconds(s.State), inSeconds(s.LastTerminationState)
	return s
}

// inSeconds cuts times to seconds as the API server does, so that a status that is
// read compares equal to the one that was written.
func inSeconds(in corev1.ContainerState) corev1.ContainerState {
	out := *in.DeepCopy()
	if out.Running != nil {
		out.Running.StartedAt = out.Running.StartedAt.Rfc3339Copy()
	}
	if t := out.Terminated; t != nil {
		t.StartedAt, t.FinishedAt = t.StartedAt.Rfc3339Copy(), t.FinishedAt.Rfc3339Copy()
	}
	return out
}

// lost gives an end to the containers that have none, as TerminatePod does.
func lost(all []corev1.ContainerStatus) {
	for i := range all {
		if all[i].State.Terminated == nil {
			all[i].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137,
				Reason: "ContainerStatusUnknown", Message: "The container could not be located when the pod was terminated"}}
		}
	}
}

func terminal(p corev1.PodPhase) bool {
	return p == corev1.PodSucceeded || p == corev1.PodFailed
}

// phase is kubelet_pods.go, getPhase, without the cases of pods that a process node
// refuses. over: no container of the pod will be started any more.
func phase(spec *corev1.PodSpec, all []corev1.ContainerStatus, over bool) corev1.PodPhase {
	restartable := func(code int32) bool {
		return spec.RestartPolicy == corev1.RestartPolicyAlways ||
			(spec.RestartPolicy == corev1.RestartPolicyOnFailure && code != 0)
	}
	var running, waiting, stopped, final, succeeded int
	for _, s := range all {
		switch last := s.LastTerminationState.Terminated; {
		case s.State.Running != nil:
			running++
		case s.State.Terminated != nil:
			stopped++
			if s.State.Terminated.ExitCode == 0 {
				succeeded++
			}
			if !restartable(s.State.Terminated.ExitCode) {
				final++
			}
		case last != nil:
			stopped++
			if !restartable(last.ExitCode) {
				final++
			}
		default:
			waiting++
		}
	}
	switch {
	case waiting > 0:
		return corev1.PodPending
	case running > 0, stopped != final && !over:
		return corev1.PodRunning
	case stopped == succeeded:
		return corev1.PodSucceeded
	default:
		return corev1.PodFailed
	}
}

// conditions are those that a kubelet owns (pkg/kubelet/status/generate.go), without
// times. merge adds these. sandbox: the pod has an address.
func conditions(all []corev1.ContainerStatus, p corev1.PodPhase, sandbox bool) []corev1.PodCondition {
	condition := func(t corev1.PodConditionType, holds bool, reason, message string) corev1.PodCondition {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message}
		if holds {
			c.Status = corev1.ConditionTrue
		}
		return c
	}
	var unready []string
	for _, s := range all {
		if !s.Ready {
			unready = append(unready, s.Name)
		}
	}
	initialized := condition(corev1.PodInitialized, true, "", "")
	if p == corev1.PodSucceeded {
		initialized.Reason = "PodCompleted"
	}
	ready := condition(corev1.ContainersReady, true, "", "")
	switch {
	case p == corev1.PodSucceeded:
		ready = condition(corev1.ContainersReady, false, "PodCompleted", "")
	case p == corev1.PodFailed:
		ready = condition(corev1.ContainersReady, false, "PodFailed", "")
	case len(unready) > 0:
		ready = condition(corev1.ContainersReady, false, "ContainersNotReady",
			fmt.Sprintf("containers with unready status: %s", unready))
	}
	podReady := ready
	podReady.Type = corev1.PodReady
	return []corev1.PodCondition{
		condition(corev1.PodReadyToStartContainers, sandbox, "", ""),
		initialized, podReady, ready,
		condition(corev1.PodScheduled, true, "", ""),
	}
}
