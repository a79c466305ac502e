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

// The policies have the names of the Pod Security Standards.
const (
	PolicyBaseline   = "baseline"
	PolicyPrivileged = "privileged"
)

// Policy limits what a pool's template may ask for. The zero Policy refuses every pool.
type Policy struct {
	level     api.Level
	evaluator policy.Evaluator
}

// NewPolicy returns the policy with the given name, or an error for any other name.
//
// "baseline" refuses what the Pod Security Standard of that name refuses
// (https://kubernetes.io/docs/concepts/security/pod-security-standards/): host namespaces, host
// ports, host paths, privileged containers and a few more. It also refuses:
//   - credentials of the pod: service account tokens and pod certificates;
//   - what bypasses the scheduler or evicts other pods: spec.nodeName, system priorities, and
//     tolerations of every taint or of control plane taints.
//
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

// errNoPolicy is returned by Policy.Check of the zero Policy.
var errNoPolicy = errors.New("pools: no policy is set")

// Check returns nil, or an error that lists everything the pool's template asks for and must not
// have. Under any policy it wraps pods.ErrPreStop if a container has a preStop action other than
// sleep.
func (p Policy) Check(pool *v1alpha1.SandboxPool) error {
	if p.evaluator == nil {
		return errNoPolicy
	}
	return errors.Join(pods.CheckPreStop(pool), p.checkSecurity(pool))
}

func (p Policy) checkSecurity(pool *v1alpha1.SandboxPool) error {
	recycles := pool.Spec.Reuse == v1alpha1.ReuseRecycle
	if p.level == api.LevelPrivileged && !recycles {
		return nil
	}
	pod := pods.Build(pool, "", pods.Settings{}) // they do not affect security
	var refused []string
	// A privileged container can change what restarts keep, such as the network of the pod.
	result := policy.AggregateCheckResults(p.evaluator.EvaluatePod(api.LevelVersion{Level: api.LevelBaseline, Version: api.LatestVersion()}, &pod.ObjectMeta, &pod.Spec))
	switch {
	case p.level == api.LevelPrivileged && result.Allowed:
		return nil
	case p.level == api.LevelPrivileged:
		return fmt.Errorf("spec.reuse: %w: spec.template: %s", pods.ErrRecycle, result.ForbiddenDetail())
	case !result.Allowed:
		refused = append(refused, result.ForbiddenDetail())
	}
	if *pod.Spec.AutomountServiceAccountToken {
		refused = append(refused, "service account token (automountServiceAccountToken must be false or absent)")
	}
	for _, v := range pod.Spec.Volumes {
		if credential := credentialIn(v); credential != "" {
			refused = append(refused, fmt.Sprintf("%s (volume %q must not project one)", credential, v.Name))
		}
	}
	refused = append(refused, privileges(&pod.Spec)...)
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("spec.template: not allowed for sandboxes: %s; change the template, or run the allocator with --pod-security=%s", strings.Join(refused, ", "), PolicyPrivileged)
}

// systemPriority is the prefix of the names of Kubernetes' own priority classes.
const systemPriority = "system-"

// controlPlaneTaints keep ordinary pods off control plane nodes.
var controlPlaneTaints = []string{"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"}

// privileges lists the fields with which a pod bypasses the scheduler or evicts other pods. Other
// schedulers, the cluster's own priority classes and tolerations of its own taints are the
// operator's choice and are allowed.
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

// credentialIn names the credential that a volume projects into the pod, or returns "".
func credentialIn(v corev1.Volume) string {
	if v.Projected == nil {
		return ""
	}
	for _, source := range v.Projected.Sources {
		switch {
		case source.ServiceAccountToken != nil:
			return "service account token"
		case source.PodCertificate != nil: // some of them authenticate to the API server
			return "pod certificate"
		}
	}
	return ""
}
