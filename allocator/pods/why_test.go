package pods

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
)

func TestUnreadyPodIsReportedWithItsReason(t *testing.T) {
	waits := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}
	}
	ended := func(code int32, reason string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}}
	}
	of := func(states ...corev1.ContainerState) []corev1.ContainerStatus {
		var all []corev1.ContainerStatus
		for i, s := range states {
			all = append(all, corev1.ContainerStatus{Name: string(rune('a' + i)), State: s})
		}
		return all
	}
	crashes := of(waits("CrashLoopBackOff"))
	crashes[0].LastTerminationState = ended(137, "OOMKilled")
	open := of(corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}) // it tries again
	open[0].LastTerminationState = ended(1, "Error")
	open[0].LastTerminationState.Terminated.Message = "egress check failed: the pod reaches a name server"
	pull := waits("ImagePullBackOff")
	pull.Waiting.Message = "Back-off pulling image"
	condition := func(kind corev1.PodConditionType, status corev1.ConditionStatus, reason, message string) []corev1.PodCondition {
		return []corev1.PodCondition{{Type: kind, Status: status, Reason: reason, Message: message}}
	}
	for name, c := range map[string]struct {
		status corev1.PodStatus
		reason string
		want   string
	}{
		"is starting": {corev1.PodStatus{ContainerStatuses: of(waits("ContainerCreating"), waits("PodInitializing"))}, "", ""},
		"runs":        {corev1.PodStatus{ContainerStatuses: of(corev1.ContainerState{Running: &corev1.ContainerStateRunning{}})}, "", ""},
		"no image": {corev1.PodStatus{ContainerStatuses: of(waits("ContainerCreating"), pull)}, core.PodImagePull,
			"container b: ImagePullBackOff: Back-off pulling image"},
		"no such secret": {corev1.PodStatus{ContainerStatuses: of(waits("CreateContainerConfigError"))}, core.PodNotStarted,
			"container a: CreateContainerConfigError"},
		"crashes for lack of memory": {corev1.PodStatus{ContainerStatuses: crashes}, core.PodOOMKilled,
			"container a: CrashLoopBackOff, exit code 137 OOMKilled"},
		"crashes": {corev1.PodStatus{ContainerStatuses: of(waits("CrashLoopBackOff"))}, core.PodCrashLoop, "container a: CrashLoopBackOff"},
		"has failed": {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: of(ended(0, "Completed"), ended(1, "Error"))},
			core.PodFailed, "container b: exit code 1 Error"},
		"has succeeded": {corev1.PodStatus{Phase: corev1.PodSucceeded, ContainerStatuses: of(ended(0, "Completed"))},
			core.PodFailed, "container a: exit code 0 Completed"},
		"an init container": {corev1.PodStatus{InitContainerStatuses: of(ended(0, "Completed"), ended(2, "Error")),
			ContainerStatuses: of(waits("PodInitializing"))}, core.PodFailed, "container b: exit code 2 Error"},
		"reaches more than the egress gateway": {corev1.PodStatus{InitContainerStatuses: open}, core.PodNotStarted,
			"egress check failed: the pod reaches a name server"},
		"was evicted": {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "The node was low on memory.",
			ContainerStatuses: of(ended(137, "Error"))}, core.PodEvicted, "The node was low on memory."},
		"is being evicted": {corev1.PodStatus{Conditions: condition(corev1.DisruptionTarget, corev1.ConditionTrue, "EvictionByEvictionAPI",
			"Eviction API: evicting")}, core.PodEvicted, "Eviction API: evicting"},
		"is preempted": {corev1.PodStatus{Conditions: condition(corev1.DisruptionTarget, corev1.ConditionTrue, "PreemptionByScheduler",
			"scheduler: preempting")}, core.PodPreempted, "scheduler: preempting"},
		"its node is lost": {corev1.PodStatus{Conditions: condition(corev1.DisruptionTarget, corev1.ConditionTrue, "DeletionByTaintManager",
			"Taint manager: deleting")}, core.PodNodeLost, "Taint manager: deleting"},
		"its node shuts down": {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Terminated", Message: "Pod was terminated"},
			core.PodNodeLost, "Pod was terminated"},
		"its node refused it": {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfcpu", Message: "Node didn't have enough resource"},
			core.PodFailed, "OutOfcpu: Node didn't have enough resource"},
		"fits on no node": {corev1.PodStatus{Conditions: condition(corev1.PodScheduled, corev1.ConditionFalse, "Unschedulable",
			"0/1 nodes are available")}, core.PodUnschedulable, "0/1 nodes are available"},
		"has a lot to say":   {corev1.PodStatus{Message: strings.Repeat("x", 1000)}, "", strings.Repeat("x", 512) + "..."},
		"is ready, and full": {corev1.PodStatus{Message: "x", Conditions: condition(corev1.PodReady, corev1.ConditionTrue, "", "")}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u", ResourceVersion: "5"}, Status: c.status}
			for _, seen := range []core.Pod{observe(p, zap.NewNop()), observe(slim(p), zap.NewNop())} { // the watch keeps less of a pod
				require.Equal(t, [2]string{c.reason, c.want}, [2]string{seen.Reason, seen.Why})
			}
		})
	}
}
