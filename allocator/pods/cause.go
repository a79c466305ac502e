package pods

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/kube"
)

// Reasons of the condition DisruptionTarget, which have no constants in k8s.io/api. The others, such as
// EvictionByEvictionAPI, are evictions.
const (
	byPodGC        = "DeletionByPodGC" // its node does not exist any more, or is out of service
	byTaintManager = "DeletionByTaintManager"
)

// statusEvicted is the reason in the status of a pod that its kubelet has evicted.
const statusEvicted = "Evicted"

// maxImages bounds the images in a Workload, and maxImage each of them, in bytes.
const (
	maxImages = 16
	maxImage  = 256
)

// disruptionOf returns the condition that says that Kubernetes is about to end a pod, or nil.
func disruptionOf(p *corev1.Pod) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

// causeOf returns what the status of a pod says of its end, or else of the latest end of one of its
// containers. noExecute: it is deleted for a taint of its node.
func causeOf(p *corev1.Pod) (cause core.Cause, noExecute bool) {
	said := func(reason, why, message string) core.Cause {
		return core.Cause{Reason: reason, Message: kube.Bounded(joined(why, message), maxWhy)}
	}
	if p.Status.Reason == statusEvicted {
		return said(fact.ReasonEvicted, p.Status.Reason, p.Status.Message), false
	}
	if c := disruptionOf(p); c != nil {
		if c.Reason == byPodGC {
			return said(fact.ReasonNodeLost, c.Reason, c.Message), false
		}
		return said(fact.ReasonEvicted, c.Reason, cmp.Or(c.Message, p.Status.Message)), c.Reason == byTaintManager
	}
	end := endOf(p)
	if end == nil {
		return core.Cause{}, false
	}
	reason := fact.ReasonFailed
	switch {
	case end.outOfMemory():
		reason = fact.ReasonOOMKilled
	case p.Status.Phase == corev1.PodSucceeded:
		reason = fact.ReasonCompleted
	}
	code := end.ExitCode
	words := fmt.Sprintf("container %s: exit code %d %s", end.container, code, end.Reason)
	if p.Status.Phase == corev1.PodFailed && p.Status.Reason != "" { // the kubelet gave the pod up, such as DeadlineExceeded
		words = joined(p.Status.Reason, p.Status.Message) + "; " + words
	}
	message := "" // a container that ran may have written it, also with secrets of its claim
	if end.Reason == startError || end.Reason == cannotRun {
		message = end.Message
	}
	cause = said(reason, words, message)
	cause.ExitCode = &code
	return cause, false
}

// Reasons of ended containers.
const (
	oomKilled = "OOMKilled" // by the kernel, for its use of memory
	// The container runtime could not start it.
	startError = "StartError"
	cannotRun  = "ContainerCannotRun"
)

// ended is the end of a container.
type ended struct {
	container string
	*corev1.ContainerStateTerminated
}

// endOf returns the end of a container that explains the state of a pod: of a pod that has ended, the first
// failure, because the ends of other containers may follow from it; of another pod the latest end. Times are
// whole seconds, and of two ends in one second the one for lack of memory counts. nil: no container has ended.
func endOf(p *corev1.Pod) *ended {
	finished := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	var found *ended
	for i := range p.Status.ContainerStatuses {
		c := &p.Status.ContainerStatuses[i]
		end := ended{c.Name, cmp.Or(c.State.Terminated, c.LastTerminationState.Terminated)}
		if end.ContainerStateTerminated == nil {
			continue
		}
		if found == nil {
			found = &end
			continue
		}
		order := found.FinishedAt.Compare(end.FinishedAt.Time)
		if failed := end.ExitCode != 0; finished && failed != (found.ExitCode != 0) {
			order = -1
			if failed {
				order = 1
			}
		} else if !finished {
			order = -order
		}
		if order > 0 || order == 0 && end.outOfMemory() {
			found = &end
		}
	}
	return found
}

// outOfMemory reports whether the kernel has killed the container's first process. With the exit code 0 it has
// killed a child of that.
func (e *ended) outOfMemory() bool { return e.Reason == oomKilled && e.ExitCode != 0 }

// joined joins a reason and a message of Kubernetes, of which each may be missing.
func joined(reason, message string) string {
	reason, message = strings.TrimSpace(reason), strings.TrimSpace(message)
	if reason == "" || message == "" {
		return reason + message
	}
	return reason + ": " + message
}

// workloadOf returns what runs in a pod.
func workloadOf(p *corev1.Pod) *core.Workload {
	w := &core.Workload{
		Requests: core.Resources{CPU: sum(p, corev1.ResourceCPU, false), Memory: sum(p, corev1.ResourceMemory, false)},
		Limits:   core.Resources{CPU: sum(p, corev1.ResourceCPU, true), Memory: sum(p, corev1.ResourceMemory, true)},
	}
	for i := range p.Spec.Containers {
		if i == maxImages {
			break
		}
		w.Images = append(w.Images, kube.Bounded(p.Spec.Containers[i].Image, maxImage))
	}
	return w
}

// sum adds the requests, or the limits, of all containers for a resource. A limit that one of them does not
// have does not bound the pod, so there is none. What the pod itself asks for comes first.
func sum(p *corev1.Pod, name corev1.ResourceName, limits bool) string {
	of := func(r corev1.ResourceRequirements) corev1.ResourceList {
		if limits {
			return r.Limits
		}
		return r.Requests
	}
	if p.Spec.Resources != nil {
		if q, ok := of(*p.Spec.Resources)[name]; ok {
			return q.String()
		}
	}
	var all resource.Quantity
	found := 0
	for i := range p.Spec.Containers {
		q, ok := of(p.Spec.Containers[i].Resources)[name]
		if full, lowered, _ := cpuRequest(p); i == 0 && lowered && name == corev1.ResourceCPU && !limits {
			q = resource.MustParse(full)
		}
		if ok {
			all.Add(q)
			found++
		}
	}
	if found == 0 || limits && found < len(p.Spec.Containers) {
		return ""
	}
	return all.String()
}
