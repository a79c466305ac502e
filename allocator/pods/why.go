package pods

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
)

// maxWhy bounds the explanation taken from a pod's status, in bytes.
const maxWhy = 512

// imageFailures are the kubelet's reasons of a container that waits for its image (pkg/kubelet/images).
var imageFailures = []string{
	"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable",
	"SignatureValidationFailed",
}

// disruptions are the reasons of the condition DisruptionTarget.
var disruptions = map[string]string{
	corev1.PodReasonPreemptionByScheduler: core.PodPreempted,
	"DeletionByTaintManager":              core.PodNodeLost,
	"DeletionByPodGC":                     core.PodNodeLost,
	"EvictionByEvictionAPI":               core.PodEvicted,
	corev1.PodReasonTerminationByKubelet:  core.PodEvicted,
}

// why explains why a pod is not ready, or how it ended: in one of the core's words, and in those of the
// kubelet, the scheduler or the API server. Both are "" for a pod that is only starting. The pod's own status
// comes first, then its first container that gives a reason.
func why(p *corev1.Pod) (reason, words string) {
	reason, words = ofPod(p)
	if reason == "" || reason == core.PodFailed {
		if r, w := ofContainers(p); r != "" {
			reason, words = r, w
		}
	}
	if reason == "" {
		words = p.Status.Message
	}
	return reason, kube.Bounded(words, maxWhy)
}

// ofPod reads the conditions and the reason of a pod.
func ofPod(p *corev1.Pod) (reason, words string) {
	for _, c := range p.Status.Conditions {
		switch {
		case c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue && disruptions[c.Reason] != "":
			words = c.Message
			if p.Status.Message != "" { // the kubelet says more than the condition does
				words = p.Status.Message
			}
			return disruptions[c.Reason], words
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason != corev1.PodReasonSchedulingGated:
			return core.PodUnschedulable, c.Message
		}
	}
	switch r := p.Status.Reason; {
	case r == "":
		return "", ""
	case r == core.PodNodeLost || r == "NodeShutdown" || r == "Terminated": // a node that shuts down
		return core.PodNodeLost, p.Status.Message
	case r == "Preempting":
		return core.PodPreempted, p.Status.Message
	case slices.Contains(core.PodReasons, r):
		return r, p.Status.Message
	default: // the kubelet refused the pod, for example OutOfcpu
		return core.PodFailed, strings.TrimSuffix(r+": "+p.Status.Message, ": ")
	}
}

// ofContainers reads the state of the first container that gives a reason.
func ofContainers(p *corev1.Pod) (reason, words string) {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		ended, waits := c.State.Terminated, c.State.Waiting
		before := c.LastTerminationState.Terminated
		if ended == nil && (waits != nil || before != nil && EgressUnproven(before.Message)) {
			ended = before // its previous run
		}
		if ended != nil && EgressUnproven(ended.Message) {
			return core.PodNotStarted, ended.Message
		}
		var parts []string
		if waits != nil && waits.Reason != "" && waits.Reason != "ContainerCreating" && waits.Reason != "PodInitializing" {
			parts, reason = append(parts, strings.TrimSuffix(waits.Reason+": "+waits.Message, ": ")), core.PodNotStarted
			switch {
			case slices.Contains(imageFailures, waits.Reason):
				reason = core.PodImagePull
			case waits.Reason == "CrashLoopBackOff":
				reason = core.PodCrashLoop
			}
		}
		if ended != nil && (ended.ExitCode != 0 || p.Status.Phase == corev1.PodSucceeded) {
			parts = append(parts, strings.TrimSpace(fmt.Sprintf("exit code %d %s", ended.ExitCode, ended.Reason)))
			switch {
			case ended.Reason == core.PodOOMKilled && reason != core.PodImagePull:
				reason = core.PodOOMKilled
			case reason == "":
				reason = core.PodFailed
			}
		}
		if len(parts) > 0 {
			return reason, fmt.Sprintf("container %s: %s", c.Name, strings.Join(parts, ", "))
		}
	}
	return "", ""
}
