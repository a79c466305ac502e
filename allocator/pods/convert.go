package pods

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// KeyOf returns the core's key of a pod: of its present life, if it can be recycled.
func KeyOf(p *corev1.Pod) core.PodKey {
	key := core.PodKey{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}
	if life, known := lifeOf(p); canRecycle(p) {
		if key.Life = life + 1; !known {
			key.Life = -1
		}
	}
	return key
}

// poolOf returns the name of the pool that owns a pod, or "". The owner reference decides and not a
// label: people and other controllers change labels, while the garbage collector uses owner
// references too.
func poolOf(p *corev1.Pod) string {
	owner := metav1.GetControllerOf(p)
	if owner == nil || owner.Kind != poolKind {
		return ""
	}
	if gv, err := schema.ParseGroupVersion(owner.APIVersion); err != nil || gv.Group != v1alpha1.Group {
		return ""
	}
	return owner.Name
}

const poolKind = "SandboxPool"

// observe turns a pod into an observation. The core does not hand out a pod whose address is missing
// or cannot be read.
func observe(p *corev1.Pod, log *zap.Logger) core.Pod {
	seen := core.Pod{
		Key:       KeyOf(p),
		Pool:      poolOf(p),
		Node:      p.Spec.NodeName,
		Template:  p.Labels[v1alpha1.LabelTemplate],
		Metadata:  p.Annotations[v1alpha1.AnnotationMetadata],
		AgentPort: agentPort(p),
		CreatedAt: p.CreationTimestamp.Time,
		Version:   p.ResourceVersion,
		Deleting:  p.DeletionTimestamp != nil,
		Finished:  p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
		Used:      p.Labels[v1alpha1.LabelPhase] != v1alpha1.PhaseWarm || p.Spec.HostNetwork,
	}
	made, labelled := egressOf(p)
	seen.Egress = made
	// Without the label it may reach what pods of other pools may.
	seen.Used = seen.Used || made && !labelled
	seen.Mislabelled = seen.Pool != "" && (p.Labels[v1alpha1.LabelPool] != seen.Pool || made && !labelled)
	for _, c := range p.Status.ContainerStatuses {
		seen.Restarts += int(c.RestartCount)
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			seen.Ready = c.Status == corev1.ConditionTrue
		}
	}
	if canRecycle(p) {
		life, known := lifeOf(p)
		seen.Recyclable = known && p.Generation == 1
		seen.Recycling = known && life > 0 && !restarted(p)
		seen.Ready = seen.Ready && !seen.Recycling
		// A number that went back to 0 is no first life.
		seen.Used = seen.Used || !known || life == 0 && p.Annotations[v1alpha1.AnnotationEnded] != ""
	}
	switch {
	case seen.Recycling: // while containers are restarted, their ends mean nothing
		seen.Reason, seen.Why = whyUnclean(p)
	case !seen.Ready || seen.Deleting:
		seen.Reason, seen.Why = why(p)
	}
	seen.Cause, seen.NoExecute = causeOf(p)
	seen.CPURequest, seen.Lowered, seen.Deferred = cpuRequest(p)
	seen.Workload = workloadOf(p)
	if p.Status.PodIP != "" && !p.Spec.HostNetwork {
		ip, err := netip.ParseAddr(p.Status.PodIP)
		if err != nil {
			log.Warn("pod cannot be read, it will not be handed out", zap.String("pod", p.Name), zap.Error(err))
		}
		seen.IP = ip.Unmap()
	}
	return seen
}

// buildVersion changes whenever Build makes a different pod from the same template, so that idle
// pods made before are replaced.
const buildVersion = "5\n"

// Settings are what Build needs beside the pool.
type Settings struct {
	// ServeOn is how long a pod that another client deletes serves on: see the function of this name.
	ServeOn time.Duration
	// AgentImage has the agent's program, for pools that name no image. AgentKey is the text of the
	// allocator's public key. Empty: there is none.
	AgentImage, AgentKey string
	// AsleepCPU is what a pod requests while its sandbox is asleep; 0: as before.
	AsleepCPU resource.Quantity
	// EgressUnchecked: pods that are to reach the egress gateway only do not try whether they reach more.
	EgressUnchecked bool
	// EgressPublic has the addresses outside the cluster that such a pod tries: ip:port, comma-separated. Pods that were
	// made with others are kept.
	EgressPublic string
}

// TemplateHash identifies what a pod is created from: the pool's pod template without what idle pods get later on
// (see Metadata), and what Build makes of it with these settings.
func TemplateHash(pool *v1alpha1.SandboxPool, settings Settings) string {
	raw, err := json.Marshal(v1alpha1.PodTemplate{
		Metadata: v1alpha1.PodTemplateMetadata{Annotations: fixed(pool)}, Spec: pool.Spec.Template.Spec,
	})
	if err != nil {
		panic(fmt.Sprintf("encode pod template: %v", err)) // it was decoded from JSON
	}
	made := fmt.Appendf(nil, "%s%d\n", buildVersion, preStopSeconds(settings.ServeOn))
	if a := pool.Spec.AgentEnabled(); a != nil {
		made = fmt.Appendf(made, "agent %d %q %q %q %s\n", a.Port, a.Image, settings.AgentImage, settings.AgentKey, &settings.AsleepCPU)
		if a.NewFiles == v1alpha1.NewFilesAnywhere {
			made = append(made, "new files anywhere\n"...)
		}
	}
	if pool.Spec.EgressEnabled() != nil {
		made = fmt.Appendf(made, "egress gateway %t\n", settings.EgressUnchecked)
	}
	if pool.Spec.Reuse == v1alpha1.ReuseRecycle {
		made = fmt.Appendf(made, "recycle %q\n", agentImage(pool, settings))
	}
	sum := sha256.Sum256(append(made, raw...))
	return hex.EncodeToString(sum[:6])
}

// Build makes a pod from the pool's template. It fills in what the template leaves open with
// defaults for untrusted code: no service account token, the runtime's default seccomp profile, and
// no environment variables that list the namespace's services.
//
// Another client may delete or evict the pod with a grace period of its own choice. All containers
// then serve on for settings.ServeOn. By the end of that time the leader has released the
// sandbox, even if one failover happened meanwhile, and no request can be on its way to the pod.
func Build(pool *v1alpha1.SandboxPool, name string, settings Settings) *corev1.Pod {
	labels := foreignOnly(pool.Spec.Template.Metadata.Labels)
	labels[v1alpha1.LabelPool] = pool.Name
	labels[v1alpha1.LabelPhase] = v1alpha1.PhaseWarm
	labels[v1alpha1.LabelTemplate] = TemplateHash(pool, settings)
	annotations := foreignOnly(pool.Spec.Template.Metadata.Annotations)
	if m := Metadata(pool); m != "" {
		annotations[v1alpha1.AnnotationMetadata] = m
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: pool.Namespace, Labels: labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pool, v1alpha1.GroupVersion().WithKind(poolKind))},
		},
		Spec: *pool.Spec.Template.Spec.DeepCopy(),
	}
	no := false
	if p.Spec.AutomountServiceAccountToken == nil {
		p.Spec.AutomountServiceAccountToken = &no
	}
	if p.Spec.EnableServiceLinks == nil {
		p.Spec.EnableServiceLinks = &no
	}
	if windows := p.Spec.OS != nil && p.Spec.OS.Name == corev1.Windows; !windows { // Windows has no seccomp
		if p.Spec.SecurityContext == nil {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{}
		}
		if p.Spec.SecurityContext.SeccompProfile == nil {
			p.Spec.SecurityContext.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
		}
	}
	if a := pool.Spec.AgentEnabled(); a != nil {
		addAgent(&p.Spec, a, agentImage(pool, settings), settings)
		allowResize(p, settings.AsleepCPU)
	}
	if pool.Spec.EgressEnabled() != nil {
		addEgress(p, settings)
	}
	addStopDelay(&p.Spec, preStopSeconds(settings.ServeOn))
	if pool.Spec.Reuse == v1alpha1.ReuseRecycle {
		addRecycling(p, agentImage(pool, settings))
	}
	return p
}

// foreignOnly copies the template's labels or annotations without those in the allocator's own
// group.
func foreignOnly(all map[string]string) map[string]string {
	kept := map[string]string{}
	for k, v := range all {
		if !strings.HasPrefix(k, v1alpha1.Group+"/") {
			kept[k] = v
		}
	}
	return kept
}
