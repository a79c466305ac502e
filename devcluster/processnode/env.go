package processnode

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/devcluster/nodes"
)

// environment returns a container's variables in the form of exec.Cmd.
func environment(pod *corev1.Pod, c *corev1.Container, podIP string) []string {
	var env []string
	for _, v := range c.Env {
		value := v.Value
		if v.ValueFrom != nil {
			value = fieldRefs[v.ValueFrom.FieldRef.FieldPath](pod, podIP)
		}
		env = append(env, v.Name+"="+value)
	}
	return env
}

// fieldRefs has the supported paths of the downward API.
var fieldRefs = map[string]func(pod *corev1.Pod, podIP string) string{
	"metadata.name":      func(pod *corev1.Pod, _ string) string { return pod.Name },
	"metadata.namespace": func(pod *corev1.Pod, _ string) string { return pod.Namespace },
	"metadata.uid":       func(pod *corev1.Pod, _ string) string { return string(pod.UID) },
	"spec.nodeName":      func(pod *corev1.Pod, _ string) string { return pod.Spec.NodeName },
	"status.podIP":       func(_ *corev1.Pod, podIP string) string { return podIP },
	"status.hostIP":      func(*corev1.Pod, string) string { return nodes.HostIP },
}
