package processnode

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// reasonUnsupported is the status reason of a pod that is refused.
const reasonUnsupported = "ProcessNodeUnsupported"

// unsupported returns every field of the spec that would have an effect on a
// kubelet and has none here. A pod with such a field is refused, because a test
// with a pod that runs without it would prove nothing.
func unsupported(spec *corev1.PodSpec) []string {
	var fields []string
	refuse := func(is bool, format string, args ...any) {
		if is {
			fields = append(fields, fmt.Sprintf(format, args...))
		}
	}
	refuse(len(spec.InitContainers) > 0, "spec.initContainers")
	refuse(len(spec.ReadinessGates) > 0, "spec.readinessGates")
	refuse(spec.ActiveDeadlineSeconds != nil, "spec.activeDeadlineSeconds")
	refuse(spec.HostNetwork, "spec.hostNetwork")
	refuse(spec.HostPID, "spec.hostPID")
	refuse(spec.HostIPC, "spec.hostIPC")
	refuse(spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace, "spec.shareProcessNamespace")
	refuse(len(spec.HostAliases) > 0, "spec.hostAliases")
	refuse(spec.DNSConfig != nil, "spec.dnsConfig")
	refuse(spec.RuntimeClassName != nil, "spec.runtimeClassName")
	refuse(spec.OS != nil && spec.OS.Name != corev1.Linux, "spec.os")
	refuse(len(spec.ResourceClaims) > 0, "spec.resourceClaims")
	refuse(len(spec.EphemeralContainers) > 0, "spec.ephemeralContainers")
	for i, v := range spec.Volumes {
		refuse(v.EmptyDir == nil && !isTokenVolume(v),
			"spec.volumes[%d] (%s: only emptyDir and the projected service account token)", i, v.Name)
	}
	for i := range spec.Containers {
		refuseContainer(&spec.Containers[i], fmt.Sprintf("spec.containers[%d]", i), refuse)
	}
	return fields
}

func refuseContainer(c *corev1.Container, at string, refuse func(is bool, format string, args ...any)) {
	refuse(c.RestartPolicy != nil, "%s.restartPolicy", at)
	refuse(len(c.RestartPolicyRules) > 0, "%s.restartPolicyRules", at)
	refuse(len(c.EnvFrom) > 0, "%s.envFrom", at)
	refuse(len(c.VolumeDevices) > 0, "%s.volumeDevices", at)
	refuse(c.Stdin, "%s.stdin", at)
	refuse(c.TTY, "%s.tty", at)
	for i, e := range c.Env {
		refuse(e.ValueFrom != nil && e.ValueFrom.FieldRef == nil, "%s.env[%d].valueFrom (only fieldRef)", at, i)
	}
	for i, p := range c.Ports {
		refuse(p.HostPort != 0, "%s.ports[%d].hostPort", at, i)
	}
	if l := c.Lifecycle; l != nil {
		refuse(l.PostStart != nil, "%s.lifecycle.postStart", at)
		refuse(l.StopSignal != nil, "%s.lifecycle.stopSignal", at)
		refuse(l.PreStop != nil && l.PreStop.Sleep == nil, "%s.lifecycle.preStop (only sleep)", at)
	}
	refuse(c.ReadinessProbe != nil && c.ReadinessProbe.HTTPGet == nil, "%s.readinessProbe (only httpGet)", at)
	refuse(c.LivenessProbe != nil, "%s.livenessProbe", at)
	refuse(c.StartupProbe != nil, "%s.startupProbe", at)
}

// isTokenVolume recognises the volume that the ServiceAccount admission plugin adds
// to every pod. A node that refused it would refuse every pod of a cluster with that
// plugin.
func isTokenVolume(v corev1.Volume) bool {
	if v.Projected == nil {
		return false
	}
	for _, s := range v.Projected.Sources {
		if s.ServiceAccountToken != nil {
			return true
		}
	}
	return false
}

func rejection(fields []string) string {
	return "Pod was rejected: a process node does not support " + strings.Join(fields, ", ")
}
