package processnode

import (
	"regexp"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/devcluster/nodes"
)

// environment resolves a container's variables in the order they are declared;
// a later one may refer to an earlier one.
func environment(pod *corev1.Pod, c *corev1.Container, podIP string) map[string]string {
	env := map[string]string{}
	for _, v := range c.Env {
		if v.ValueFrom == nil {
			env[v.Name] = expand(v.Value, env)
		} else {
			env[v.Name] = fieldRefs[v.ValueFrom.FieldRef.FieldPath](pod, podIP)
		}
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

var reference = regexp.MustCompile(`\$\$|\$\([^)]*\)`)

// expand replaces $(NAME) by the variable's value. A name that is not defined
// stays as it is written, and $$ is a plain $ (Kubernetes API, Container.command).
func expand(s string, env map[string]string) string {
	return reference.ReplaceAllStringFunc(s, func(found string) string {
		if found == "$$" {
			return "$"
		}
		if value, ok := env[found[2:len(found)-1]]; ok {
			return value
		}
		return found
	})
}

func expandAll(in []string, env map[string]string) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = expand(s, env)
	}
	return out
}
