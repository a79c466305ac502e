package v1alpha1

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// CannotSleep says why sandboxes of the pool cannot sleep; empty: they can. It names the fields that keep them from it, and
// what to do about each.
//
// The agent stops the processes of the first container, and no others. A probe must not need one of them. The kubelet
// restarts a container whose liveness probe is not answered. It asks a startup probe again after its own restart, also of a
// container that has started long ago. A probe with exec starts a process, which runs although the sandbox sleeps. A
// readiness probe has no such effect: a pod that is not ready keeps its sandbox.
func (s *SandboxPoolSpec) CannotSleep() string {
	agent := s.AgentEnabled()
	if agent == nil {
		return "the pods of this pool have no agent, without which a sandbox cannot sleep; enable spec.agent of the pool"
	}
	var why []string
	say := func(format string, args ...any) { why = append(why, fmt.Sprintf(format, args...)) }
	pod := &s.Template.Spec
	if i := slices.IndexFunc(pod.InitContainers, isSidecar); i >= 0 {
		say("spec.template.spec.initContainers[%d]: the agent does not stop the processes of a sidecar; remove it", i)
	}
	if len(pod.Containers) > 1 {
		say("spec.template.spec.containers[1]: the agent does not stop the processes of a second container; remove it")
	}
	if len(pod.Containers) > 0 {
		c := &pod.Containers[0]
		for _, p := range []struct {
			field string
			probe *corev1.Probe
		}{{"livenessProbe", c.LivenessProbe}, {"startupProbe", c.StartupProbe}} {
			if p.probe == nil || answeredBy(agent, p.probe, c.Ports) {
				continue
			}
			because := "a sandbox that sleeps does not answer it, and the kubelet restarts the container"
			if p.probe.Exec != nil {
				because = "it runs a process in a sandbox that sleeps"
			}
			say("spec.template.spec.containers[0].%s: %s; remove it, or let the agent answer it: httpGet, port %d, path /health",
				p.field, because, agent.Port)
		}
	}
	return strings.Join(why, "; ")
}

func isSidecar(c corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// answeredBy reports whether the agent answers a probe of its container. It serves HTTP while the sandbox sleeps.
func answeredBy(agent *PoolAgent, p *corev1.Probe, ports []corev1.ContainerPort) bool {
	switch {
	case p.HTTPGet != nil:
		return p.HTTPGet.Host == "" && portOf(p.HTTPGet.Port, ports) == agent.Port
	case p.TCPSocket != nil:
		return p.TCPSocket.Host == "" && portOf(p.TCPSocket.Port, ports) == agent.Port
	}
	return false
}

// portOf is the number of a port of a container, which may have a name; 0: there is none of that name.
func portOf(port intstr.IntOrString, ports []corev1.ContainerPort) int32 {
	if port.Type == intstr.Int {
		return port.IntVal
	}
	for _, p := range ports {
		if p.Name == port.StrVal {
			return p.ContainerPort
		}
	}
	return 0
}
