package v1alpha1_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Invariant: P28
func TestPoolNamesEachFieldThatForbidsSleep(t *testing.T) {
	const port = 49983
	always := corev1.ContainerRestartPolicyAlways
	get := func(port intstr.IntOrString, host string) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: port, Host: host}}}
	}
	dial := func(port int32) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(port)}}}
	}
	call := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: port}}}
	exec := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	const at = "spec.template.spec."
	for name, c := range map[string]struct {
		change func(*v1alpha1.SandboxPoolSpec, *corev1.PodSpec)
		fields []string
	}{
		"nothing": {func(*v1alpha1.SandboxPoolSpec, *corev1.PodSpec) {}, nil},
		"an init container": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.InitContainers = []corev1.Container{{Name: "setup"}}
		}, nil},
		"readiness probes": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) { p.Containers[0].ReadinessProbe = dial(80) }, nil},
		"the agent answers": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers[0].LivenessProbe, p.Containers[0].StartupProbe = get(intstr.FromInt32(port), ""), dial(port)
		}, nil},
		"the agent answers at a port with a name": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers[0].Ports = []corev1.ContainerPort{{Name: "web", ContainerPort: 80}, {Name: "agent", ContainerPort: port}}
			p.Containers[0].LivenessProbe = get(intstr.FromString("agent"), "")
		}, nil},
		"no agent":             {func(s *v1alpha1.SandboxPoolSpec, _ *corev1.PodSpec) { s.Agent = nil }, []string{"spec.agent"}},
		"an agent that is off": {func(s *v1alpha1.SandboxPoolSpec, _ *corev1.PodSpec) { s.Agent.Enabled = false }, []string{"spec.agent"}},
		"a second container": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers = append(p.Containers, corev1.Container{Name: "proxy"}, corev1.Container{Name: "logs"})
		}, []string{at + "containers[1]: "}},
		"a sidecar": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.InitContainers = []corev1.Container{{Name: "setup"}, {Name: "proxy", RestartPolicy: &always}}
		}, []string{at + "initContainers[1]: "}},
		"the program answers liveness": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers[0].LivenessProbe = get(intstr.FromInt32(80), "")
		}, []string{at + "containers[0].livenessProbe: "}},
		"the program accepts": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) { p.Containers[0].LivenessProbe = dial(80) },
			[]string{at + "containers[0].livenessProbe: "}},
		"the program answers a start": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers[0].StartupProbe = get(intstr.FromString("web"), "")
		}, []string{at + "containers[0].startupProbe: "}},
		"another host answers": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers[0].LivenessProbe = get(intstr.FromInt32(port), "10.0.0.1")
		}, []string{at + "containers[0].livenessProbe: "}},
		"gRPC": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) { p.Containers[0].LivenessProbe = call },
			[]string{at + "containers[0].livenessProbe: "}},
		"exec in both": {func(_ *v1alpha1.SandboxPoolSpec, p *corev1.PodSpec) {
			p.Containers[0].LivenessProbe, p.Containers[0].StartupProbe = exec, exec
		}, []string{at + "containers[0].livenessProbe: it runs a process", at + "containers[0].startupProbe: it runs a process"}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := &v1alpha1.SandboxPoolSpec{Agent: &v1alpha1.PoolAgent{Enabled: true, Port: port}}
			spec.Template.Spec.Containers = []corev1.Container{{Name: "sandbox"}}
			c.change(spec, &spec.Template.Spec)
			why := spec.CannotSleep()
			if len(c.fields) == 0 {
				require.Empty(t, why)
			}
			for _, field := range c.fields {
				require.Contains(t, why, field)
			}
		})
	}
}
