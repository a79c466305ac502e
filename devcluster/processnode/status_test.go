package processnode

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func ended(code int32) corev1.ContainerState {
	return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}
}

func TestPhaseFollowsContainerAndPolicy(t *testing.T) {
	running := corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	waiting := corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}
	over := func(code int32) corev1.ContainerStatus { return corev1.ContainerStatus{State: ended(code)} }
	looping := corev1.ContainerStatus{State: waiting.State, LastTerminationState: ended(1)}
	const always, never = corev1.RestartPolicyAlways, corev1.RestartPolicyNever
	for _, c := range []struct {
		name      string
		policy    corev1.RestartPolicy
		container corev1.ContainerStatus
		over      bool
		want      corev1.PodPhase
	}{
		{"not started", always, waiting, false, corev1.PodPending},
		{"running", never, running, false, corev1.PodRunning},
		{"crash loop", always, looping, false, corev1.PodRunning},
		{"ended, will be restarted", always, over(0), false, corev1.PodRunning},
		{"ended well", never, over(0), false, corev1.PodSucceeded},
		{"ended badly", never, over(1), false, corev1.PodFailed},
		{"deleted, ended well", always, over(0), true, corev1.PodSucceeded},
		{"deleted, ended badly", always, over(137), true, corev1.PodFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, phase(c.policy, c.container, c.over))
		})
	}
}

func TestMergeKeepsConditionsOfOthersAndTransitionTimes(t *testing.T) {
	began := metav1.NewTime(time.Now().Add(-time.Hour))
	live := corev1.PodStatus{QOSClass: corev1.PodQOSBurstable, Conditions: []corev1.PodCondition{
		{Type: "example.com/gate", Status: corev1.ConditionTrue},
		{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: began},
		{Type: corev1.ContainersReady, Status: corev1.ConditionTrue, LastTransitionTime: began},
	}}
	out := merge(live, corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		{Type: corev1.ContainersReady, Status: corev1.ConditionFalse},
	}})
	require.Equal(t, corev1.PodQOSBurstable, out.QOSClass)
	require.Equal(t, live.Conditions[1], out.Conditions[0], "the time of its transition stays")
	require.Equal(t, corev1.ConditionFalse, out.Conditions[1].Status)
	require.True(t, out.Conditions[1].LastTransitionTime.After(began.Time))
	require.Equal(t, live.Conditions[0], out.Conditions[2])
}

// supported returns a pod with one container, after change.
func supported(change func(*corev1.Container)) *corev1.PodSpec {
	field := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}
	token := []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}
	spec := &corev1.PodSpec{
		Volumes: []corev1.Volume{
			{VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: token}}},
		},
		Containers: []corev1.Container{{
			Command: []string{"run"}, Env: []corev1.EnvVar{{Name: "A", Value: "a"}, {Name: "IP", ValueFrom: field}},
			SecurityContext: &corev1.SecurityContext{},
			ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
				Path: "/", Port: intstr.FromInt32(80), Scheme: corev1.URISchemeHTTP}}},
			Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{}}},
		}},
	}
	change(&spec.Containers[0])
	return spec
}

func TestSupportedPodIsNotRefused(t *testing.T) {
	require.Empty(t, rejection(supported(func(*corev1.Container) {})))
}

func TestAgentListensOnTheAddressOfItsPod(t *testing.T) {
	c := corev1.Container{Command: []string{"/berth/berth-agent", "run", "--listen=:49983", "--", "server"},
		Args: []string{"--listen=:80"}}
	want := []string{"agent", "run", "--listen=127.1.2.3:49983", "--", "server", "--listen=:80"}
	require.Equal(t, want, commandOf(&c, netip.MustParseAddr("127.1.2.3")))
	c.Command = []string{"server"}
	require.Equal(t, []string{"server", "--listen=:80"}, commandOf(&c, netip.MustParseAddr("127.1.2.3")))
}

func TestRefusalNamesEveryUnsupportedField(t *testing.T) {
	for field, change := range map[string]func(*corev1.PodSpec){
		"spec.initContainers[1] (only those of Berth)": func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{
				{Command: []string{"agent", "install", "/berth"}}, {Command: []string{"true"}}}
		},
		"spec.readinessGates":        func(s *corev1.PodSpec) { s.ReadinessGates = []corev1.PodReadinessGate{{}} },
		"spec.activeDeadlineSeconds": func(s *corev1.PodSpec) { s.ActiveDeadlineSeconds = new(int64) },
		"spec.hostNetwork":           func(s *corev1.PodSpec) { s.HostNetwork = true },
		"spec.restartPolicy (only Always and Never)": func(s *corev1.PodSpec) {
			s.RestartPolicy = corev1.RestartPolicyOnFailure
		},
		"spec.containers[1] (only one container)": func(s *corev1.PodSpec) {
			s.Containers = append(s.Containers, corev1.Container{})
		},
		"spec.volumes[0] (data: only emptyDir, the service account token and that of Berth)": func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{}}}}
		},
	} {
		spec := supported(func(*corev1.Container) {})
		change(spec)
		require.Equal(t, []string{field}, unsupported(spec))
	}
	exec := corev1.ProbeHandler{Exec: &corev1.ExecAction{}}
	for field, change := range map[string]func(*corev1.Container){
		"command":           func(c *corev1.Container) { c.Command = nil },
		"ports[0].hostPort": func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{HostPort: 80}} },
		"env[0].valueFrom": func(c *corev1.Container) {
			c.Env[0].ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{}}
		},
		"env[0].value ($(VAR))":     func(c *corev1.Container) { c.Env[0].Value = "http://$(IP):80" },
		"command and args ($(VAR))": func(c *corev1.Container) { c.Args = []string{"--ip", "$(IP)"} },
		"env[1].valueFrom":          func(c *corev1.Container) { c.Env[1].ValueFrom.FieldRef.FieldPath = "status.phase" },
		"lifecycle.postStart":       func(c *corev1.Container) { c.Lifecycle.PostStart = &corev1.LifecycleHandler{} },
		"lifecycle.preStop":         func(c *corev1.Container) { c.Lifecycle.PreStop = &corev1.LifecycleHandler{} },
		"readinessProbe":            func(c *corev1.Container) { c.ReadinessProbe.ProbeHandler = exec },
		"readinessProbe (only httpGet with path and number of the port)": func(c *corev1.Container) {
			c.ReadinessProbe.HTTPGet.Port = intstr.FromString("http")
		},
		"livenessProbe": func(c *corev1.Container) { c.LivenessProbe = &corev1.Probe{ProbeHandler: exec} },
		"startupProbe":  func(c *corev1.Container) { c.StartupProbe = &corev1.Probe{ProbeHandler: exec} },
	} {
		fields := unsupported(supported(change))
		require.Len(t, fields, 1, field)
		require.Contains(t, fields[0], "spec.containers[0]."+field)
	}
	all := supported(func(c *corev1.Container) { c.TTY = true })
	all.HostPID = true
	require.Equal(t, "Pod was rejected: a process node does not support spec.hostPID, spec.containers[0].tty",
		rejection(all))
}

func TestOptionsReportEveryMissingField(t *testing.T) {
	_, err := New(t.Context(), Options{})
	for _, field := range []string{"Client", "Name", "Supervisor", "Dir", "Addresses", "Log"} {
		require.ErrorContains(t, err, field)
	}
}

func TestThresholdsDecideReadiness(t *testing.T) {
	p := &corev1.Probe{SuccessThreshold: 2, FailureThreshold: 3}
	var v verdict
	for i, c := range []struct{ succeeded, ready bool }{
		{true, false}, {false, false}, {true, false}, {true, true}, {false, true}, {false, true}, {true, true},
		{false, true}, {false, true}, {false, false}, {false, false}, {true, false}, {true, true},
	} {
		require.Equal(t, c.ready, v.record(p, c.succeeded), "result %d", i)
	}
}

func TestDeletionGraceCountsBeforeThePodsOwn(t *testing.T) {
	of := func(deletion, own *int64) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionGracePeriodSeconds: deletion},
			Spec: corev1.PodSpec{TerminationGracePeriodSeconds: own}}
	}
	seconds := func(n int64) *int64 { return &n }
	require.Equal(t, time.Second, gracePeriod(of(seconds(0), seconds(30))), "forced")
	require.Equal(t, 5*time.Second, gracePeriod(of(seconds(5), seconds(30))))
	require.Equal(t, 30*time.Second, gracePeriod(of(nil, seconds(30))))
	require.Equal(t, time.Second, gracePeriod(of(nil, nil)))
}
