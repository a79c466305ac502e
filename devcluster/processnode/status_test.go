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
		all    []corev1.ContainerStatus
		final  bool
		want   corev1.PodPhase
	}{
		{"not started", always, []corev1.ContainerStatus{waiting}, false, corev1.PodPending},
		{"one of two started", always, []corev1.ContainerStatus{running, waiting}, false, corev1.PodPending},
		{"running", never, []corev1.ContainerStatus{running, over(1)}, false, corev1.PodRunning},
		{"crash loop", always, []corev1.ContainerStatus{looping(1)}, false, corev1.PodRunning},
		{"ended, will be restarted", always, []corev1.ContainerStatus{over(0)}, false, corev1.PodRunning},
		{"ended well", onFailure, []corev1.ContainerStatus{over(0), over(0)}, false, corev1.PodSucceeded},
		{"ended badly, will be restarted", onFailure, []corev1.ContainerStatus{over(0), over(1)}, false, corev1.PodRunning},
		{"ended badly", never, []corev1.ContainerStatus{over(0), over(1)}, false, corev1.PodFailed},
		{"deleted, ended well", always, []corev1.ContainerStatus{over(0)}, true, corev1.PodSucceeded},
		{"deleted, ended badly", always, []corev1.ContainerStatus{over(137)}, true, corev1.PodFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, phase(&corev1.PodSpec{RestartPolicy: c.policy}, c.all, c.final))
		})
	}
}

func TestContainersWithoutAnEndGetOne(t *testing.T) {
	all := []corev1.ContainerStatus{
		{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}},
		{State: ended(0)},
	}
	lost(all)
	require.Equal(t, "ContainerStatusUnknown", all[0].State.Terminated.Reason)
	require.Nil(t, all[0].State.Waiting)
	require.Equal(t, ended(0), all[1].State)
}

func TestMergeKeepsConditionsOfOthersAndTransitionTimes(t *testing.T) {
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

func TestSupportedPodIsNotRefused(t *testing.T) {
	token := []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}
	require.Empty(t, unsupported(&corev1.PodSpec{
		Volumes: []corev1.Volume{
			{VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: token}}},
		},
		Containers: []corev1.Container{{
			SecurityContext: &corev1.SecurityContext{},
			ReadinessProbe:  &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{}}},
			Lifecycle:       &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{}}},
		}},
	}))
}

func TestRefusalNamesEveryUnsupportedField(t *testing.T) {
	exec := corev1.ProbeHandler{Exec: &corev1.ExecAction{}}
	of := func(c corev1.Container) *corev1.PodSpec { return &corev1.PodSpec{Containers: []corev1.Container{c}} }
	hooks := func(l corev1.Lifecycle) *corev1.PodSpec { return of(corev1.Container{Lifecycle: &l}) }
	probe, hostPath := &corev1.Probe{ProbeHandler: exec}, corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}
	for field, spec := range map[string]*corev1.PodSpec{
		"spec.initContainers":        {InitContainers: []corev1.Container{{}}},
		"spec.readinessGates":        {ReadinessGates: []corev1.PodReadinessGate{{}}},
		"spec.activeDeadlineSeconds": {ActiveDeadlineSeconds: new(int64)},
		"spec.hostNetwork":           {HostNetwork: true},
		"spec.volumes[0] (data: only emptyDir and the projected service account token)": {
			Volumes: []corev1.Volume{{Name: "data", VolumeSource: hostPath}}},
		"spec.containers[0].ports[0].hostPort": of(corev1.Container{Ports: []corev1.ContainerPort{{HostPort: 80}}}),
		"spec.containers[0].env[0].valueFrom (only fieldRef)": of(corev1.Container{
			Env: []corev1.EnvVar{{ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{}}}}}),
		"spec.containers[0].lifecycle.postStart":            hooks(corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{}}),
		"spec.containers[0].lifecycle.preStop (only sleep)": hooks(corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{}}),
		"spec.containers[0].readinessProbe (only httpGet)":  of(corev1.Container{ReadinessProbe: probe}),
		"spec.containers[0].livenessProbe":                  of(corev1.Container{LivenessProbe: probe}),
		"spec.containers[0].startupProbe":                   of(corev1.Container{StartupProbe: probe}),
	} {
		require.Equal(t, []string{field}, unsupported(spec))
	}
	all := unsupported(&corev1.PodSpec{HostNetwork: true, HostPID: true})
	require.Equal(t, "Pod was rejected: a process node does not support spec.hostNetwork, spec.hostPID", rejection(all))
}

func TestOptionsReportEveryMissingField(t *testing.T) {
	_, err := New(Options{})
	for _, field := range []string{"RestConfig", "Name", "Supervisor", "Dir", "Addresses"} {
		require.ErrorContains(t, err, field)
	}
}
