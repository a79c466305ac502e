package pods

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/agent/canary"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// egressEnv is the variable of the first container that says what v1alpha1.LabelEgress says. The label is what network
// policies go by, and other clients can change it. The variable cannot be changed.
const egressEnv = "BERTH_EGRESS"

// The variables that tell the attempts of the init container what the pod must not reach, beside what each pod knows.
const (
	nodeEnv   = "BERTH_NODE_IPS"
	publicEnv = "BERTH_EGRESS_PUBLIC"
)

// addEgress marks a pod that is to reach the egress gateway only, and has it try that before anything else starts.
func addEgress(p *corev1.Pod, settings Settings) {
	p.Labels[v1alpha1.LabelEgress] = v1alpha1.EgressByGateway
	mark := corev1.EnvVar{Name: egressEnv, Value: v1alpha1.EgressByGateway}
	if len(p.Spec.Containers) > 0 { // else the API server refuses it
		c := &p.Spec.Containers[0]
		c.Env = append(c.Env, mark)
	}
	install := slices.IndexFunc(p.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == agentName })
	if install >= 0 && !settings.EgressUnchecked {
		c := &p.Spec.InitContainers[install]
		c.Env = append(c.Env, mark, corev1.EnvVar{Name: nodeEnv, ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.hostIPs"},
		}}, corev1.EnvVar{Name: publicEnv, Value: settings.EgressPublic})
	}
}

// EgressUnproven reports whether this is why a pod is not ready: it reaches more than the egress gateway, or not even
// that.
func EgressUnproven(why string) bool { return strings.HasPrefix(why, canary.Failed) }

// gatewayEnv names the gateway for the attempts of the init container. It is no part of the template's hash, because the
// address of a Service changes only with the Service.
const gatewayEnv = "BERTH_EGRESS_GATEWAY"

// nameGateway tells a pod that tries its network the addresses of the egress gateway.
func nameGateway(p *corev1.Pod, addresses string) {
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		if c.Name == agentName && slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == egressEnv }) {
			c.Env = append(c.Env, corev1.EnvVar{Name: gatewayEnv, Value: addresses})
		}
	}
}

// egressOf reports whether a pod was made to reach the egress gateway only, and whether it has the label for that.
func egressOf(p *corev1.Pod) (made, labelled bool) {
	if agentPort(p) != 0 {
		for _, e := range p.Spec.Containers[0].Env {
			made = made || e.Name == egressEnv
		}
	}
	return made, p.Labels[v1alpha1.LabelEgress] == v1alpha1.EgressByGateway
}
