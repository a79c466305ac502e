package pools

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"

	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// The policies, by the names that the Pod Security Standards have for them.
const (
	PolicyBaseline   = "baseline"
	PolicyPrivileged = "privileged"
)

// Policy says what a pool, and its pods, may ask for. The zero Policy refuses every
// pool.
type Policy struct {
	level     api.Level
	evaluator policy.Evaluator
}

// NewPolicy returns the policy of that name: "baseline" refuses what the Pod
// Security Standard of that name refuses (host namespaces, host ports, host
// paths, privileged containers and a few more,
// https://kubernetes.io/docs/concepts/security/pod-security-standards/), and
// credentials of the pod's own: service account tokens and pod certificates, and
// what puts a pod before others or where the scheduler would not: a node's name,
// priorities of the system, tolerations of every taint and of that of control plane nodes;
// "privileged" refuses nothing.
func NewPolicy(name string) (Policy, error) {
	if name != PolicyBaseline && name != PolicyPrivileged {
		return Policy{}, fmt.Errorf("pod security %q: must be %s or %s", name, PolicyBaseline, PolicyPrivileged)
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		return Policy{}, fmt.Errorf("pod security: %w", err)
	}
	return Policy{level: api.Level(name), evaluator: evaluator}, nil
}

// Check returns nil, or everything that the pool's template asks for and may
// not have. With pods.ErrPreStop that is, under any policy, a preStop action.
func (p Policy) Check(pool *v1alpha1.SandboxPool) error {
	if p.evaluator == nil {
		return errors.New("there is no policy")
	}
	return errors.Join(pods.CheckPreStop(pool), p.checkSecurity(pool))
}

func (p Policy) checkSecurity(pool *v1alpha1.SandboxPool) error {
	if p.level == api.LevelPrivileged {
		return nil
	}
	pod := pods.Build(pool, "", 0) // how long it sleeps is no matter of security
	var refused []string
	result := policy.AggregateCheckResults(p.evaluator.EvaluatePod(api.LevelVersion{Level: p.level, Version: api.LatestVersion()}, &pod.ObjectMeta, &pod.Spec))
	if !result.Allowed {
		refused = append(refused, result.ForbiddenDetail())
	}
	if *pod.Spec.AutomountServiceAccountToken {
		refused = append(refused, "service account token (automountServiceAccountToken must be false or absent)")
	}
	for _, v := range pod.Spec.Volumes {
		if credential := projects(v); credential != "" {
			refused = append(refused, fmt.Sprintf("%s (volume %q must not project one)", credential, v.Name))
		}
	}
	refused = append(refused, privileges(&pod.Spec)...)
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("spec.template: not allowed for sandboxes: %s; change the template, or run the allocator with --pod-security=%s", strings.Join(refused, ", "), PolicyPrivileged)
}

// systemPriority is how the names of Kubernetes' own priority classes begin.
const systemPriority = "system-"

// controlPlaneTaints keep pods from the nodes of the control plane.
var controlPlaneTaints = []string{"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"}

// privileges names the fields with which a pod gets round the scheduler or evicts
// what the cluster needs. Other schedulers, priority classes of the cluster's own and
// tolerations of its own taints are the operator's to offer.
func privileges(spec *corev1.PodSpec) (refused []string) {
	if spec.NodeName != "" {
		refused = append(refused, "node name (spec.nodeName must be absent: the scheduler chooses the node)")
	}
	if strings.HasPrefix(spec.PriorityClassName, systemPriority) {
		refused = append(refused, fmt.Sprintf("system priority (spec.priorityClassName must not be %q: such pods evict others)", spec.PriorityClassName))
	}
	if spec.Priority != nil {
		refused = append(refused, "priority (spec.priority must be absent: it follows from spec.priorityClassName)")
	}
	for i, t := range spec.Tolerations {
		switch {
		case t.Key == "":
			refused = append(refused, fmt.Sprintf("toleration of every taint (spec.tolerations[%d] must have a key)", i))
		case slices.Contains(controlPlaneTaints, t.Key):
			refused = append(refused, fmt.Sprintf("toleration of control plane nodes (spec.tolerations[%d].key must not be %q)", i, t.Key))
		}
	}
	return refused
}

// projects names the credential of the pod's own that a volume contains, "" if
// there is none.
func projects(v corev1.Volume) string {
	if v.Projected == nil {
		return ""
	}
	for _, source := range v.Projected.Sources {
		switch {
		case source.ServiceAccountToken != nil:
			return "service account token"
		case source.PodCertificate != nil: // the API server takes some of them for a login
			return "pod certificate"
		}
	}
	return ""
}
