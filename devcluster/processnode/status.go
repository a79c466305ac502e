package processnode

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/berth-sandbox/berth/devcluster/nodes"
)

// makeStatus returns the pod's present status, as the kubelet's generateAPIPodStatus
// does.
func (w *worker) makeStatus() corev1.PodStatus {
	s := corev1.PodStatus{
		ObservedGeneration: w.pod.Generation,
		StartTime:          &w.startTime,
		HostIP:             nodes.HostIP,
		HostIPs:            []corev1.HostIP{{IP: nodes.HostIP}},
	}
	if w.address.IsValid() { // also after the pod has ended, when another pod may have the address
		s.PodIP = w.address.String()
		s.PodIPs = []corev1.PodIP{{IP: s.PodIP}}
	}
	container := w.containerStatus()
	s.Phase = phase(w.pod.Spec.RestartPolicy, container, w.finished)
	if w.rejected != "" {
		s.Phase, s.Reason, s.Message = corev1.PodFailed, reasonUnsupported, w.rejected
	} else {
		s.ContainerStatuses = []corev1.ContainerStatus{container}
		s.InitContainerStatuses = w.initStatuses()
	}
	s.Conditions = append(conditions(container, s.Phase, w.holds), w.restartingCondition()...)
	for i := range s.Conditions {
		s.Conditions[i].ObservedGeneration = w.pod.Generation
	}
	return s
}

func (w *worker) containerStatus() corev1.ContainerStatus {
	started := w.current != nil
	s := corev1.ContainerStatus{
		Name: w.spec.Name, Image: w.spec.Image, RestartCount: w.restarts,
		Started: &started, Ready: started && w.current.passed && !w.restarting,
	}
	switch {
	case w.current != nil:
		s.ContainerID = w.current.id
		// A resize changes the latest spec only. It is allocated and in effect at once.
		s.Resources = w.pod.Spec.Containers[0].Resources.DeepCopy()
		s.AllocatedResources = s.Resources.Requests
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(w.current.startedAt)}
		s.LastTerminationState.Terminated = w.exited
	case w.waiting != nil && !w.ending():
		s.State.Waiting = w.waiting
		s.LastTerminationState.Terminated = w.exited
	case w.exited != nil:
		s.State.Terminated = w.exited
		s.LastTerminationState.Terminated = w.earlier
	case w.finished: // status_manager.go, TerminatePod
		s.State.Terminated = &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "ContainerStatusUnknown",
			Message: "The container could not be located when the pod was terminated"}
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
	}
	if s.ContainerID == "" && w.exited != nil {
		s.ContainerID = w.exited.ContainerID
	}
	if s.ContainerID != "" {
		s.ImageID = "process-node/" + w.spec.Image
	}
	return s
}

// phase is kubelet_pods.go, getPhase, for one container. over: the container will not be
// started any more.
func phase(policy corev1.RestartPolicy, s corev1.ContainerStatus, over bool) corev1.PodPhase {
	last := s.State.Terminated
	if last == nil {
		last = s.LastTerminationState.Terminated
	}
	switch {
	case s.State.Running != nil:
		return corev1.PodRunning
	case last == nil:
		return corev1.PodPending
	case policy == corev1.RestartPolicyAlways && !over:
		return corev1.PodRunning
	case last.ExitCode == 0:
		return corev1.PodSucceeded
	default:
		return corev1.PodFailed
	}
}

// conditions are those that a kubelet owns (pkg/kubelet/status/generate.go), without
// times. merge adds these. sandbox: the pod has an address.
func conditions(container corev1.ContainerStatus, p corev1.PodPhase, sandbox bool) []corev1.PodCondition {
	condition := func(t corev1.PodConditionType, holds bool, reason, message string) corev1.PodCondition {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message}
		if holds {
			c.Status = corev1.ConditionTrue
		}
		return c
	}
	initialized := condition(corev1.PodInitialized, true, "", "")
	ready := condition(corev1.ContainersReady, true, "", "")
	switch {
	case p == corev1.PodSucceeded:
		initialized.Reason = "PodCompleted"
		ready = condition(corev1.ContainersReady, false, "PodCompleted", "")
	case p == corev1.PodFailed:
		ready = condition(corev1.ContainersReady, false, "PodFailed", "")
	case !container.Ready:
		ready = condition(corev1.ContainersReady, false, "ContainersNotReady",
			fmt.Sprintf("containers with unready status: [%s]", container.Name))
	}
	podReady := ready
	podReady.Type = corev1.PodReady
	return []corev1.PodCondition{
		condition(corev1.PodReadyToStartContainers, sandbox, "", ""),
		initialized, podReady, ready,
		condition(corev1.PodScheduled, true, "", ""),
	}
}

// write writes a status to the API server. It does nothing if the pod is gone or was
// replaced by another of its name.
func (w *worker) write(status corev1.PodStatus) error {
	ctx, cancel := context.WithTimeout(w.ctx, callTimeout)
	defer cancel()
	pods := w.node.o.Client.CoreV1().Pods(w.pod.Namespace)
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error { // others change the metadata
		live, err := pods.Get(ctx, w.pod.Name, metav1.GetOptions{})
		if err != nil || live.UID != w.pod.UID {
			return err
		}
		live.Status = merge(live.Status, status)
		_, err = pods.UpdateStatus(ctx, live, metav1.UpdateOptions{})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the pod's status: %w", err)
	}
	return nil
}

// merge keeps the fields that the node does not own: the conditions of others, the
// QoS class, and the transition times of conditions whose status is unchanged.
func merge(live, want corev1.PodStatus) corev1.PodStatus {
	out := *want.DeepCopy()
	out.QOSClass = live.QOSClass
	own := map[corev1.PodConditionType]*corev1.PodCondition{}
	for i := range out.Conditions {
		c := &out.Conditions[i]
		c.LastTransitionTime = metav1.Now()
		own[c.Type] = c
	}
	var others []corev1.PodCondition
	for _, old := range live.Conditions {
		if c := own[old.Type]; c == nil {
			others = append(others, old)
		} else if c.Status == old.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
	}
	out.Conditions = append(out.Conditions, others...)
	return out
}

// deleteObject ends a deletion, as status_manager.go does when the pod has ended.
func (w *worker) deleteObject() error {
	ctx, cancel := context.WithTimeout(w.ctx, callTimeout)
	defer cancel()
	err := w.node.o.Client.CoreV1().Pods(w.pod.Namespace).Delete(ctx, w.pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: metav1.NewUIDPreconditions(string(w.pod.UID))})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the ended pod: %w", err)
	}
	return nil
}
