package processnode

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// reasonUnsupported is the status reason of a pod that is refused.
const reasonUnsupported = "ProcessNodeUnsupported"

// rejection says why a pod is refused. It is empty for a pod that is supported.
func rejection(spec *corev1.PodSpec) string {
	if fields := unsupported(spec); len(fields) > 0 {
		return "Pod was rejected: a process node does not support " + strings.Join(fields, ", ")
	}
	return ""
}

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
	refuse(spec.RestartPolicy == corev1.RestartPolicyOnFailure, "spec.restartPolicy (only Always and Never)")
	for i := range spec.InitContainers {
		refuseInit(i, &spec.InitContainers[i], refuse)
	}
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
		mounts := spec.Containers[0].VolumeMounts
		mounted := slices.ContainsFunc(mounts, func(m corev1.VolumeMount) bool { return m.Name == v.Name })
		refuse(v.EmptyDir == nil && !isTokenVolume(v) && (v.DownwardAPI == nil || mounted),
			"spec.volumes[%d] (%s: only emptyDir, the service account token and that of Berth)", i, v.Name)
	}
	refuse(len(spec.Containers) > 1, "spec.containers[1] (only one container)")
	refuseContainer(&spec.Containers[0], refuse)
	return fields
}

func refuseContainer(c *corev1.Container, refuse func(is bool, format string, args ...any)) {
	const at = "spec.containers[0]"
	refuse(len(c.Command) == 0, at+".command (a process node runs no image, so it is required)")
	refuse(c.WorkingDir != "", at+".workingDir")
	refuse(c.RestartPolicy != nil, at+".restartPolicy")
	refuse(len(c.RestartPolicyRules) > 0, at+".restartPolicyRules")
	refuse(len(c.EnvFrom) > 0, at+".envFrom")
	refuse(len(c.VolumeDevices) > 0, at+".volumeDevices")
	refuse(c.Stdin, at+".stdin")
	refuse(c.TTY, at+".tty")
	expands := func(s string) bool { return strings.Contains(s, "$(") || strings.Contains(s, "$$") }
	refuse(slices.ContainsFunc(slices.Concat(c.Command, c.Args), expands), at+".command and args ($(VAR))")
	for i, e := range c.Env {
		refuse(expands(e.Value), at+".env[%d].value ($(VAR))", i)
		known := e.ValueFrom == nil || e.ValueFrom.FieldRef != nil && fieldRefs[e.ValueFrom.FieldRef.FieldPath] != nil
		refuse(!known, at+".env[%d].valueFrom (only fieldRef of metadata.name, namespace and uid, spec.nodeName, "+
			"status.podIP and hostIP)", i)
	}
	for i, p := range c.Ports {
		refuse(p.HostPort != 0, at+".ports[%d].hostPort", i)
	}
	if l := c.Lifecycle; l != nil {
		refuse(l.PostStart != nil, at+".lifecycle.postStart")
		refuse(l.StopSignal != nil, at+".lifecycle.stopSignal")
		refuse(l.PreStop != nil && l.PreStop.Sleep == nil, at+".lifecycle.preStop (only sleep)")
	}
	if p := c.ReadinessProbe; p != nil {
		plain := p.HTTPGet != nil && p.HTTPGet.Port.Type == intstr.Int && p.HTTPGet.Host == "" &&
			p.HTTPGet.Scheme != corev1.URISchemeHTTPS && len(p.HTTPGet.HTTPHeaders) == 0
		refuse(!plain, at+".readinessProbe (only httpGet with path and number of the port)")
	}
	refuse(c.LivenessProbe != nil, at+".livenessProbe")
	refuse(c.StartupProbe != nil, at+".startupProbe")
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
