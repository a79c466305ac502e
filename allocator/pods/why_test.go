package pods

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	for name, c := range map[string]struct {
		status corev1.PodStatus
		want   string
	}{
		"is starting":        {corev1.PodStatus{ContainerStatuses: of(waits("ContainerCreating"), waits("PodInitializing"))}, ""},
		"runs":               {corev1.PodStatus{ContainerStatuses: of(corev1.ContainerState{Running: &corev1.ContainerStateRunning{}})}, ""},
		"no image":           {corev1.PodStatus{ContainerStatuses: of(waits("ContainerCreating"), waits("ImagePullBackOff"))}, "container b: ImagePullBackOff"},
		"crashes":            {corev1.PodStatus{ContainerStatuses: crashes}, "container a: CrashLoopBackOff, exit code 137 OOMKilled"},
		"has failed":         {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: of(ended(0, "Completed"), ended(1, "Error"))}, "container b: exit code 1 Error"},
		"has succeeded":      {corev1.PodStatus{Phase: corev1.PodSucceeded, ContainerStatuses: of(ended(0, "Completed"))}, "container a: exit code 0 Completed"},
		"an init container":  {corev1.PodStatus{InitContainerStatuses: of(ended(0, "Completed"), ended(2, "Error")), ContainerStatuses: of(waits("PodInitializing"))}, "container b: exit code 2 Error"},
		"was evicted":        {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "The node was low on memory."}, "Evicted: The node was low on memory."},
		"fits on no node":    {corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/1 nodes are available"}}}, "Unschedulable: 0/1 nodes are available"},
		"has a lot to say":   {corev1.PodStatus{Message: strings.Repeat("x", 1000)}, strings.Repeat("x", 256) + "..."},
		"is ready, and full": {corev1.PodStatus{Message: "x", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u", ResourceVersion: "5"}, Status: c.status}
			require.Equal(t, c.want, observe(p, zap.NewNop()).Why)
			require.Equal(t, c.want, observe(slim(p), zap.NewNop()).Why, "the watch keeps less of a pod")
		})
	}
}
