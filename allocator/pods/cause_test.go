package pods

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
)

func TestCauseIsTakenFromThePodsStatus(t *testing.T) {
	at := func(second int) metav1.Time { return metav1.NewTime(time.Unix(int64(second), 0)) }
	ended := func(code int32, reason string, second int) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason, FinishedAt: at(second)}}
	}
	now := func(all ...corev1.ContainerState) (statuses []corev1.ContainerStatus) {
		for i, s := range all {
			statuses = append(statuses, corev1.ContainerStatus{Name: string(rune('a' + i)), State: s})
		}
		return statuses
	}
	before := func(all ...corev1.ContainerState) (statuses []corev1.ContainerStatus) {
		for i, s := range all {
			statuses = append(statuses, corev1.ContainerStatus{
				Name: string(rune('a' + i)), RestartCount: 1, LastTerminationState: s,
				State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}},
			})
		}
		return statuses
	}
	disrupted := func(reason, message string) []corev1.PodCondition {
		return []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
			{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: reason, Message: message},
		}
	}
	evicted := core.Cause{Reason: fact.ReasonEvicted}
	with := func(c core.Cause, message string, code ...int32) core.Cause {
		if c.Message = message; len(code) > 0 {
			c.ExitCode = &code[0]
		}
		return c
	}
	failed, oom := core.Cause{Reason: fact.ReasonFailed}, core.Cause{Reason: fact.ReasonOOMKilled}
	stale := disrupted("EvictionByEvictionAPI", "Eviction API: evicting")
	stale[1].Status = corev1.ConditionFalse
	for name, c := range map[string]struct {
		status    corev1.PodStatus
		want      core.Cause
		noExecute bool
	}{
		"runs":                          {corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: now(corev1.ContainerState{Running: &corev1.ContainerStateRunning{}})}, core.Cause{}, false},
		"waits":                         {corev1.PodStatus{Phase: corev1.PodPending, Message: "x", ContainerStatuses: now(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}})}, core.Cause{}, false},
		"failed":                        {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: now(ended(3, "Error", 1))}, with(failed, "container a: exit code 3 Error", 3), false},
		"first failure counts":          {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: now(ended(0, "Completed", 1), ended(137, "Error", 9), ended(3, "Error", 5))}, with(failed, "container c: exit code 3 Error", 3), false},
		"completed":                     {corev1.PodStatus{Phase: corev1.PodSucceeded, ContainerStatuses: now(ended(0, "Completed", 1))}, with(core.Cause{Reason: fact.ReasonCompleted}, "container a: exit code 0 Completed", 0), false},
		"out of memory":                 {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: now(ended(137, "OOMKilled", 1))}, with(oom, "container a: exit code 137 OOMKilled", 137), false},
		"restarted as OOM":              {corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: before(ended(137, "OOMKilled", 1))}, with(oom, "container a: exit code 137 OOMKilled", 137), false},
		"a child was out of memory":     {corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: before(ended(0, "OOMKilled", 1))}, with(failed, "container a: exit code 0 OOMKilled", 0), false},
		"latest restart counts":         {corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: before(ended(137, "OOMKilled", 1), ended(2, "Error", 5))}, with(failed, "container b: exit code 2 Error", 2), false},
		"OOM in a second, and for good": {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: now(ended(2, "Error", 5), ended(137, "OOMKilled", 5), ended(2, "Error", 5))}, with(oom, "container b: exit code 137 OOMKilled", 137), false},
		"OOM in a second, restarted":    {corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: before(ended(2, "Error", 5), ended(137, "OOMKilled", 5), ended(2, "Error", 5))}, with(oom, "container b: exit code 137 OOMKilled", 137), false},
		"evicted by the kubelet":        {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "The node was low on resource: memory.", Conditions: disrupted("TerminationByKubelet", "x"), ContainerStatuses: now(ended(137, "Error", 1))}, with(evicted, "Evicted: The node was low on resource: memory."), false},
		"deadline":                      {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "DeadlineExceeded", Message: "Pod was active too long", ContainerStatuses: now(ended(137, "Error", 1))}, with(failed, "DeadlineExceeded: Pod was active too long; container a: exit code 137 Error", 137), false},
		"not UTF-8":                     {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: now(corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 128, Reason: "StartError", Message: "x\xffy"}})}, with(failed, "container a: exit code 128 StartError: xy", 128), false},
		"what the container said":       {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: now(corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error", Message: "secret"}})}, with(failed, "container a: exit code 3 Error", 3), false},
		"evicted by the API":            {corev1.PodStatus{Phase: corev1.PodRunning, Conditions: disrupted("EvictionByEvictionAPI", "Eviction API: evicting")}, with(evicted, "EvictionByEvictionAPI: Eviction API: evicting"), false},
		"eviction was called off":       {corev1.PodStatus{Phase: corev1.PodRunning, Conditions: stale}, core.Cause{}, false},
		"node shut down":                {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Terminated", Message: "Pod was terminated in response to imminent node shutdown.", Conditions: disrupted("TerminationByKubelet", "")}, with(evicted, "TerminationByKubelet: Pod was terminated in response to imminent node shutdown."), false},
		"taint":                         {corev1.PodStatus{Phase: corev1.PodRunning, Conditions: disrupted("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")}, with(evicted, "DeletionByTaintManager: Taint manager: deleting due to NoExecute taint"), true},
		"node is gone":                  {corev1.PodStatus{Phase: corev1.PodFailed, Conditions: disrupted("DeletionByPodGC", "PodGC: node no longer exists")}, core.Cause{Reason: fact.ReasonNodeLost, Message: "DeletionByPodGC: PodGC: node no longer exists"}, false},
		"words are bounded":             {corev1.PodStatus{Phase: corev1.PodRunning, Conditions: disrupted("X", strings.Repeat("x", 5000))}, with(evicted, "X: "+strings.Repeat("x", 509)+"..."), false},
	} {
		t.Run(name, func(t *testing.T) {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"}, Status: c.status}
			for _, p := range []*corev1.Pod{p, slim(p)} { // the watch keeps less of a pod
				seen := observe(p, zap.NewNop())
				require.Equal(t, c.want, seen.Cause)
				require.Equal(t, c.noExecute, seen.NoExecute)
			}
		})
	}
}

func TestWorkloadHasImagesAndSumsOfResources(t *testing.T) {
	list := func(cpu, memory string) corev1.ResourceList {
		all := corev1.ResourceList{}
		if cpu != "" {
			all[corev1.ResourceCPU] = resource.MustParse(cpu)
		}
		if memory != "" {
			all[corev1.ResourceMemory] = resource.MustParse(memory)
		}
		return all
	}
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Image: "python:3", Resources: corev1.ResourceRequirements{Requests: list("250m", "1Gi"), Limits: list("1", "2Gi")}},
		{Image: "proxy:1", Resources: corev1.ResourceRequirements{Requests: list("50m", ""), Limits: list("", "512Mi")}},
	}}}
	want := &core.Workload{
		Images:   []string{"python:3", "proxy:1"},
		Requests: core.Resources{CPU: "300m", Memory: "1Gi"}, Limits: core.Resources{Memory: "2560Mi"},
	}
	require.Equal(t, want, observe(p, zap.NewNop()).Workload)
	require.Equal(t, want, observe(slim(p), zap.NewNop()).Workload)
	p.Spec.Resources = &corev1.ResourceRequirements{Limits: list("4", "8Gi")}
	want.Limits = core.Resources{CPU: "4", Memory: "8Gi"}
	require.Equal(t, want, observe(slim(p), zap.NewNop()).Workload)
}
