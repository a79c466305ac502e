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

// makeStatus says what holds, as the kubelet's generateAPIPodStatus does.
func (w *worker) makeStatus() corev1.PodStatus {
	if w.past { // its sandbox is gone, and with it what a kubelet knows of its address
		s := *w.pod.Status.DeepCopy()
		s.PodIP, s.PodIPs = "", nil
		return s
	}
	if w.sandboxIs != sandboxUp { // nothing else is told until containers run in a new one
		s := *w.status.DeepCopy()
		for i := range s.Conditions {
			if s.Conditions[i].Type == corev1.PodReadyToStartContainers {
				s.Conditions[i].Status = corev1.ConditionFalse
				if w.sandboxIs == sandboxAgain {
					s.Conditions[i].Status = corev1.ConditionTrue
				}
			}
		}
		return s
	}
	s := corev1.PodStatus{
		ObservedGeneration: w.pod.Generation,
		StartTime:          &w.startTime,
		HostIP:             hostIP,
		HostIPs:            []corev1.HostIP{{IP: hostIP}},
	}
	if w.known { // an ended pod keeps naming an address that may be another's by now
		s.PodIP = w.address.String()
		s.PodIPs = []corev1.PodIP{{IP: s.PodIP}}
	}
	all := w.containerStatuses()
	s.Phase = phase(&w.pod.Spec, all, w.finished)
	if w.verdict != nil {
		s.Phase, s.Reason, s.Message = corev1.PodFailed, w.verdict.reason, w.verdict.message
	}
	s.Conditions = conditions(&w.pod.Spec, all, s.Phase, w.holds, w.pod.Status.Conditions)
	switch {
	case w.finished:
		lost(all, len(w.pod.Spec.InitContainers), w.initialized)
		if !terminal(s.Phase) { // status_manager.go, TerminatePod: after the conditions, so they do not say so
			s.Phase = corev1.PodFailed
		}
	case terminal(s.Phase):
		// status_manager.go, mergePodStatus: not ready at once, but terminal only
		// when nothing can be running any more.
		s.Phase, s.Reason, s.Message = w.status.Phase, w.status.Reason, w.status.Message
	}
	if w.verdict == nil || !w.verdict.rejected {
		inits := len(w.pod.Spec.InitContainers)
		s.InitContainerStatuses, s.ContainerStatuses = all[:inits:inits], all[inits:]
		slices.SortFunc(s.ContainerStatuses, func(a, b corev1.ContainerStatus) int { return strings.Compare(a.Name, b.Name) })
	}
	if w.verdict != nil && w.verdict.disruption && w.finished {
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason: corev1.PodReasonTerminationByKubelet, Message: w.verdict.message})
	}
	for i := range s.Conditions {
		s.Conditions[i].ObservedGeneration = w.pod.Generation
	}
	return s
}

// containerStatuses lists the init containers' first.
func (w *worker) containerStatuses() []corev1.ContainerStatus {
	out := make([]corev1.ContainerStatus, 0, len(w.containers))
	for _, c := range w.containers {
		out = append(out, w.containerStatus(c))
	}
	return out
}

func (w *worker) containerStatus(c *container) corev1.ContainerStatus {
	started := c.started()
	s := corev1.ContainerStatus{
		Name: c.spec.Name, Image: c.spec.Image, RestartCount: c.restarts,
		Started: &started, Ready: c.ready() && !c.init,
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
		s.Ready = c.init && c.exited.ExitCode == 0
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
		if len(w.pod.Spec.InitContainers) > 0 {
			s.State.Waiting.Reason = "PodInitializing"
		}
		s.LastTerminationState.Terminated = c.exited
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

// inSeconds cuts times as the API server does, so that what was written compares
// equal to what is read.
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

// lost gives what never ran an end, as TerminatePod does: all containers of a pod
// that was initialized, and of its init containers, which come first in all,
// only those whose turn had come.
func lost(all []corev1.ContainerStatus, inits int, initialized bool) {
	turns := min(inits, 1)
	for i, s := range all[:inits] {
		if s.State.Waiting == nil || s.LastTerminationState.Terminated != nil {
			turns = i + 1
		}
	}
	for i := range all {
		if all[i].State.Terminated != nil || (i < inits && i >= turns) || (i >= inits && !initialized) {
			continue
		}
		all[i].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137,
			Reason: "ContainerStatusUnknown", Message: "The container could not be located when the pod was terminated"}}
	}
}

// initialized is status_manager.go, hasPodInitialized. Like it, it goes by what the
// API server showed last: whether an init container's end in the pod's last
// moments counts is a matter of luck.
func initialized(pod *corev1.Pod) bool {
	if len(pod.Spec.InitContainers) == 0 {
		return true
	}
	for _, s := range pod.Status.ContainerStatuses {
		if s.LastTerminationState.Terminated != nil || s.State.Waiting == nil {
			return true
		}
	}
	endedWell := func(s corev1.ContainerState) bool { return s.Terminated != nil && s.Terminated.ExitCode == 0 }
	inits := pod.Status.InitContainerStatuses
	return len(inits) > 0 && (endedWell(inits[len(inits)-1].State) || endedWell(inits[len(inits)-1].LastTerminationState))
}

func terminal(p corev1.PodPhase) bool {
	return p == corev1.PodSucceeded || p == corev1.PodFailed
}

// phase is kubelet_pods.go, getPhase, without what a process node refuses
// (sidecars, restart rules). over: the pod will start nothing any more.
func phase(spec *corev1.PodSpec, all []corev1.ContainerStatus, over bool) corev1.PodPhase {
	restartable := func(code int32) bool {
		return spec.RestartPolicy == corev1.RestartPolicyAlways || (spec.RestartPolicy == corev1.RestartPolicyOnFailure && code != 0)
	}
	inits := len(spec.InitContainers)
	pending := false
	for _, s := range all[:inits] {
		end := s.State.Terminated
		if s.State.Waiting != nil {
			end = s.LastTerminationState.Terminated
		}
		switch {
		case end == nil:
			pending = true
		case end.ExitCode != 0 && !restartable(end.ExitCode):
			return corev1.PodFailed
		}
	}
	var running, waiting, stopped, final, succeeded int
	for _, s := range all[inits:] {
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
	case pending, waiting > 0:
		return corev1.PodPending
	case running > 0, stopped != final && !over:
		return corev1.PodRunning
	case stopped == succeeded:
		return corev1.PodSucceeded
	default:
		return corev1.PodFailed
	}
}

// conditions are those a kubelet owns (pkg/kubelet/status/generate.go), without
// times: those depend on what the API server has.
func conditions(spec *corev1.PodSpec, all []corev1.ContainerStatus, p corev1.PodPhase, sandbox bool, present []corev1.PodCondition) []corev1.PodCondition {
	condition := func(t corev1.PodConditionType, holds bool, reason, message string) corev1.PodCondition {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message}
		if holds {
			c.Status = corev1.ConditionTrue
		}
		return c
	}
	inits := len(spec.InitContainers)
	var incomplete, unready []string
	begun := false
	for _, s := range all[:inits] {
		if !s.Ready {
			incomplete = append(incomplete, s.Name)
		}
	}
	for _, s := range all[inits:] {
		begun = begun || s.ContainerID != ""
		if !s.Ready {
			unready = append(unready, s.Name)
		}
	}
	initialized := condition(corev1.PodInitialized, true, "", "")
	if p == corev1.PodSucceeded {
		initialized.Reason = "PodCompleted"
	} else if len(incomplete) > 0 && !begun {
		initialized = condition(corev1.PodInitialized, false, "ContainersNotInitialized", fmt.Sprintf("containers with incomplete status: %s", incomplete))
	}
	ready := condition(corev1.ContainersReady, true, "", "")
	switch {
	case p == corev1.PodSucceeded:
		ready = condition(corev1.ContainersReady, false, "PodCompleted", "")
	case p == corev1.PodFailed:
		ready = condition(corev1.ContainersReady, false, "PodFailed", "")
	case len(unready) > 0:
		ready = condition(corev1.ContainersReady, false, "ContainersNotReady", fmt.Sprintf("containers with unready status: %s", unready))
	}
	podReady := ready
	podReady.Type = corev1.PodReady
	if ready.Status == corev1.ConditionTrue {
		for _, gate := range spec.ReadinessGates {
			if !holds(present, gate.ConditionType) {
				podReady = condition(corev1.PodReady, false, "ReadinessGatesNotReady", fmt.Sprintf("the status of pod readiness gate %q is not \"True\"", gate.ConditionType))
			}
		}
	}
	return []corev1.PodCondition{
		condition(corev1.PodReadyToStartContainers, sandbox, "", ""),
		initialized, podReady, ready,
		condition(corev1.PodScheduled, true, "", ""),
	}
}

func holds(present []corev1.PodCondition, t corev1.PodConditionType) bool {
	for _, c := range present {
		if c.Type == t {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
