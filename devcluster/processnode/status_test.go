package processnode

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

func ended(code int32) corev1.ContainerState {
	return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}
}

func TestPhaseFollowsContainersAndPolicy(t *testing.T) {
	running := corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	waiting := corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}
	over := func(code int32) corev1.ContainerStatus { return corev1.ContainerStatus{State: ended(code)} }
	looping := func(code int32) corev1.ContainerStatus {
		return corev1.ContainerStatus{State: waiting.State, LastTerminationState: ended(code)}
	}
	const always, onFailure, never = corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever
	for _, c := range []struct {
		name   string
		policy corev1.RestartPolicy
		inits  int
		all    []corev1.ContainerStatus
		final  bool
		want   corev1.PodPhase
	}{
		{"not started", always, 0, []corev1.ContainerStatus{waiting}, false, corev1.PodPending},
		{"one of two started", always, 0, []corev1.ContainerStatus{running, waiting}, false, corev1.PodPending},
		{"running", never, 0, []corev1.ContainerStatus{running, over(1)}, false, corev1.PodRunning},
		{"crash loop", always, 0, []corev1.ContainerStatus{looping(1)}, false, corev1.PodRunning},
		{"ended, will be restarted", always, 0, []corev1.ContainerStatus{over(0)}, false, corev1.PodRunning},
		{"ended well", onFailure, 0, []corev1.ContainerStatus{over(0), over(0)}, false, corev1.PodSucceeded},
		{"ended badly, will be restarted", onFailure, 0, []corev1.ContainerStatus{over(0), over(1)}, false, corev1.PodRunning},
		{"ended badly", never, 0, []corev1.ContainerStatus{over(0), over(1)}, false, corev1.PodFailed},
		{"deleted, ended well", always, 0, []corev1.ContainerStatus{over(0)}, true, corev1.PodSucceeded},
		{"deleted, ended badly", always, 0, []corev1.ContainerStatus{over(137)}, true, corev1.PodFailed},
		{"init running", always, 1, []corev1.ContainerStatus{running, waiting}, false, corev1.PodPending},
		{"init failed for good", never, 1, []corev1.ContainerStatus{over(1), waiting}, false, corev1.PodFailed},
		{"init failed, will be restarted", always, 1, []corev1.ContainerStatus{looping(1), waiting}, false, corev1.PodPending},
		{"init done", always, 1, []corev1.ContainerStatus{over(0), running}, false, corev1.PodRunning},
		{"init runs again after a node restart", always, 1, []corev1.ContainerStatus{looping(0), looping(255)}, false, corev1.PodRunning},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, phase(&corev1.PodSpec{RestartPolicy: c.policy, InitContainers: make([]corev1.Container, c.inits)}, c.all, c.final))
		})
	}
}

func TestWhatNeverRanEndsOnlyInAnInitializedPod(t *testing.T) {
	waiting := corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}
	over := func(code int32) corev1.ContainerStatus { return corev1.ContainerStatus{State: ended(code)} }
	for _, c := range []struct {
		name        string
		inits       int
		initialized bool
		all         []corev1.ContainerStatus
		ends        []bool
	}{
		{"no init containers", 0, true, []corev1.ContainerStatus{waiting, over(0)}, []bool{true, true}},
		{"init killed", 1, false, []corev1.ContainerStatus{over(137), waiting}, []bool{true, false}},
		{"init done", 1, true, []corev1.ContainerStatus{over(0), waiting}, []bool{true, true}},
		{"second init's turn had not come", 2, false, []corev1.ContainerStatus{over(1), waiting, waiting}, []bool{true, false, false}},
		{"none had begun", 2, false, []corev1.ContainerStatus{waiting, waiting, waiting}, []bool{true, false, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			lost(c.all, c.inits, c.initialized)
			for i, s := range c.all {
				require.Equal(t, c.ends[i], s.State.Terminated != nil, "container %d", i)
			}
		})
	}
}

func TestMergeKeepsWhatOthersSayAndWhenItBegan(t *testing.T) {
	live := corev1.PodStatus{QOSClass: corev1.PodQOSBurstable, Conditions: []corev1.PodCondition{
		{Type: "example.com/gate", Status: corev1.ConditionTrue},
		{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		{Type: corev1.ContainersReady, Status: corev1.ConditionTrue},
	}}
	out := merge(live, corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		{Type: corev1.ContainersReady, Status: corev1.ConditionFalse},
	}})
	require.Equal(t, corev1.PodQOSBurstable, out.QOSClass)
	require.Equal(t, live.Conditions[:2], out.Conditions[:2])
	require.Equal(t, corev1.ConditionFalse, out.Conditions[2].Status)
	require.False(t, out.Conditions[2].LastTransitionTime.IsZero())
}

func TestWhatCannotBeImitatedIsNamed(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	require.Empty(t, unsupported(&corev1.PodSpec{
		Volumes: []corev1.Volume{
			{VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}}}},
		},
		Containers: []corev1.Container{{SecurityContext: &corev1.SecurityContext{}}},
	}))
	fields := unsupported(&corev1.PodSpec{
		HostNetwork:    true,
		Volumes:        []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}}},
		InitContainers: []corev1.Container{{RestartPolicy: &always}},
		Containers: []corev1.Container{{
			Ports:         []corev1.ContainerPort{{HostPort: 80}},
			Env:           []corev1.EnvVar{{ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{}}}},
			Lifecycle:     &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{}},
			LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{}}},
		}},
	})
	message := rejection(fields)
	for _, field := range []string{"spec.hostNetwork", "spec.volumes[0] (data", "spec.initContainers[0].restartPolicy", "spec.containers[0].ports[0].hostPort",
		"spec.containers[0].env[0].valueFrom", "spec.containers[0].lifecycle.postStart", "spec.containers[0].livenessProbe.grpc"} {
		require.Contains(t, message, field)
	}
	require.Len(t, fields, 7)
}

func TestOptionsReportAllThatIsWrong(t *testing.T) {
	_, err := New(Options{})
	for _, field := range []string{"RestConfig", "Name", "Supervisor", "Dir", "Addresses"} {
		require.ErrorContains(t, err, field)
	}
}
