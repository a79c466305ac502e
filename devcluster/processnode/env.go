package processnode

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// environment resolves a container's variables in the order they are declared;
// a later one may refer to an earlier one.
func environment(pod *corev1.Pod, c *corev1.Container, podIP, hostIP string) (map[string]string, error) {
	env := map[string]string{}
	for _, v := range c.Env {
		switch {
		case v.ValueFrom == nil:
			env[v.Name] = expand(v.Value, env)
		case v.ValueFrom.FieldRef != nil:
			value, err := field(pod, v.ValueFrom.FieldRef.FieldPath, podIP, hostIP)
			if err != nil {
				return nil, fmt.Errorf("env %s: %w", v.Name, err)
			}
			env[v.Name] = value
		default:
			return nil, fmt.Errorf("env %s: only value and valueFrom.fieldRef can be resolved on a process node", v.Name)
		}
	}
	return env, nil
}

// field is the downward API: the same paths that a kubelet resolves.
func field(pod *corev1.Pod, path, podIP, hostIP string) (string, error) {
	if open := strings.IndexByte(path, '['); open > 0 && strings.HasSuffix(path, "']") {
		key := strings.Trim(path[open:], "[']")
		switch path[:open] {
		case "metadata.annotations":
			return pod.Annotations[key], nil
		case "metadata.labels":
			return pod.Labels[key], nil
		}
	}
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return formatMap(pod.Labels), nil
	case "metadata.annotations":
		return formatMap(pod.Annotations), nil
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return podIP, nil
	case "status.hostIP", "status.hostIPs":
		return hostIP, nil
	}
	return "", fmt.Errorf("fieldPath %q is not supported", path)
}

// formatMap is the downward API's form of a map: sorted key="value" lines.
func formatMap(m map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s=%s\n", k, strconv.Quote(m[k]))
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// expand replaces $(NAME) by the variable's value. A name that is not defined
// stays as it is written, and $$ is a plain $ (Kubernetes API, Container.command).
func expand(s string, env map[string]string) string {
	var b strings.Builder
	for {
		dollar := strings.IndexByte(s, '$')
		if dollar < 0 || dollar+1 == len(s) {
			b.WriteString(s)
			return b.String()
		}
		b.WriteString(s[:dollar])
		rest := s[dollar+1:]
		end := strings.IndexByte(rest, ')')
		switch {
		case rest[0] == '$':
			b.WriteByte('$')
			s = rest[1:]
		case rest[0] == '(' && end > 0:
			name := rest[1:end]
			if value, ok := env[name]; ok {
				b.WriteString(value)
			} else {
				b.WriteString("$(" + name + ")")
			}
			s = rest[end+1:]
		default:
			b.WriteByte('$')
			s = rest
		}
	}
}

func expandAll(in []string, env map[string]string) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = expand(s, env)
	}
	return out
}
