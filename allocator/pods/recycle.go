package pods

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/agent/recycle"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// A pod that can be recycled has two containers of Berth, before all others. The init container cleanName
// removes what restarts keep. The sidecar awaitName reads the number of the pod's life from a file, and exits
// when it changes. The kubelet then kills and removes all containers, without a grace period, and starts all
// of them again, in their order. So a life that begins is one write: [Writer.Recycle].
//
// The kubelet's status proves the restart. The containers of sandboxes cannot write it. The init container ends
// with the number of the life in its termination message: so it has run in this life, and init containers run
// again only after all containers were removed. See restarted.
const (
	cleanName  = "berth-clean"
	awaitName  = "berth-recycle"
	cleanDir   = "/berth-clean"
	lifeDir    = "/berth-life"
	lifeFile   = "life"
	savedName  = "berth-clean" // of the volumes
	lifeVolume = "berth-life"
)

// ErrRecycle is wrapped by the errors of CheckRecycle.
var ErrRecycle = errors.New("pods cannot be recycled")

// CheckRecycle returns nil, or an error that wraps ErrRecycle and lists what keeps the pods of a pool from being
// recycled. Package pools refuses what can change the node or the pod's namespaces, such as more capabilities.
func CheckRecycle(pool *v1alpha1.SandboxPool, settings Settings) error {
	var refused []string
	refuse := func(is bool, format string, args ...any) {
		if is {
			refused = append(refused, fmt.Sprintf(format, args...))
		}
	}
	spec := &pool.Spec.Template.Spec
	for i, c := range spec.InitContainers { // in every pool: a pod with them is taken for one that can be recycled
		refuse(c.Name == cleanName || c.Name == awaitName,
			"spec.template.spec.initContainers[%d].name: %s is that of a container of Berth", i, c.Name)
	}
	if pool.Spec.Reuse == v1alpha1.ReuseRecycle {
		refuse(agentImage(pool, settings) == "", "the allocators have no --agent-image, whose program cleans pods")
		refuse(spec.OS != nil && spec.OS.Name != corev1.Linux, "spec.template.spec.os: only Linux")
		refuse(spec.RestartPolicy != "" && spec.RestartPolicy != corev1.RestartPolicyAlways,
			"spec.template.spec.restartPolicy: must be Always")
		refuse(spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace, "spec.template.spec.shareProcessNamespace")
		refuse(spec.RuntimeClassName != nil,
			"spec.template.spec.runtimeClassName: what another runtime keeps is not known")
		refuse(len(spec.ResourceClaims) > 0, "spec.template.spec.resourceClaims: devices are not cleaned")
		refuse(spec.AutomountServiceAccountToken != nil && *spec.AutomountServiceAccountToken,
			"spec.template.spec.automountServiceAccountToken: a token outlives the sandbox that has read it")
		checkRecycledVolumes(pool, refuse)
		checkRecycledContainers(pool, refuse)
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("spec.reuse: %w: %s", ErrRecycle, strings.Join(refused, "; "))
}

// perPod reports whether no other pod can mount a volume. Through a volume that two pods mount, a sandbox can pass
// an open socket to a program in another pod, and that program gets requests for the next sandbox.
func perPod(v corev1.Volume) bool { return readOnly(v) || v.EmptyDir != nil || v.Ephemeral != nil }

func checkRecycledVolumes(pool *v1alpha1.SandboxPool, refuse func(bool, string, ...any)) {
	for i, v := range pool.Spec.Template.Spec.Volumes {
		at := fmt.Sprintf("spec.template.spec.volumes[%d]", i)
		refuse(v.Name == savedName || v.Name == lifeVolume, at+".name: %s is that of a volume of Berth", v.Name)
		refuse(!perPod(v) && v.Name != savedName && v.Name != lifeVolume,
			at+": other pods may mount the volume %s, and a sandbox could pass sockets through it; use emptyDir or ephemeral", v.Name)
		refuse(!readOnly(v) && perPod(v) && !pool.Spec.AcceptVolumes,
			at+": the volume %s keeps what a sandbox writes; remove it, or set spec.acceptVolumes", v.Name)
		refuse(v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.ServiceAccountToken != nil || s.PodCertificate != nil
		}), at+".projected: the credential of a pod outlives the sandbox that has read it")
	}
}

func checkRecycledContainers(pool *v1alpha1.SandboxPool, refuse func(bool, string, ...any)) {
	check := func(at string, c *corev1.Container) {
		refuse(len(c.RestartPolicyRules) > 0, at+".restartPolicyRules")
		if s := c.SecurityContext; s != nil {
			refuse(unmasked(s), at+".securityContext.procMount: must be Default, for the settings of the network are not restored")
			refuse(ownSeccomp(s.SeccompProfile), at+".securityContext.seccompProfile: must be RuntimeDefault, which refuses kernel keyrings")
		}
		for _, m := range c.VolumeMounts {
			refuse(m.Name == savedName || m.Name == lifeVolume || m.Name == agentName, at+".volumeMounts: %s is a volume of Berth", m.Name)
		}
		refuse(len(c.VolumeDevices) > 0 && !pool.Spec.AcceptVolumes,
			at+".volumeDevices: devices are not cleaned; remove them, or set spec.acceptVolumes")
		for _, list := range []corev1.ResourceList{c.Resources.Requests, c.Resources.Limits} {
			for name := range list {
				refuse(strings.Contains(string(name), "/"), at+".resources: devices are not cleaned: %s", name)
			}
		}
	}
	if s := pool.Spec.Template.Spec.SecurityContext; s != nil {
		refuse(ownSeccomp(s.SeccompProfile), "spec.template.spec.securityContext.seccompProfile: must be RuntimeDefault, which refuses kernel keyrings")
	}
	for i := range pool.Spec.Template.Spec.InitContainers {
		check(fmt.Sprintf("spec.template.spec.initContainers[%d]", i), &pool.Spec.Template.Spec.InitContainers[i])
	}
	for i := range pool.Spec.Template.Spec.Containers {
		c := &pool.Spec.Template.Spec.Containers[i]
		check(fmt.Sprintf("spec.template.spec.containers[%d]", i), c)
		refuse(c.RestartPolicy != nil, "spec.template.spec.containers[%d].restartPolicy", i)
	}
}

func unmasked(s *corev1.SecurityContext) bool {
	return s.ProcMount != nil && *s.ProcMount != corev1.DefaultProcMount
}

func ownSeccomp(s *corev1.SeccompProfile) bool {
	return s != nil && s.Type != corev1.SeccompProfileTypeRuntimeDefault
}

// readOnly reports whether containers cannot write to a volume. The kubelet mounts these so.
func readOnly(v corev1.Volume) bool {
	return v.ConfigMap != nil || v.Secret != nil || v.DownwardAPI != nil || v.Projected != nil || v.Image != nil
}

// addRecycling adds the two containers. No container gets the capability NET_RAW: with it, packets could be
// forged that change what the pod's network stack has learned of routes and neighbours, which restarts keep.
func addRecycling(p *corev1.Pod, image string) {
	spec := &p.Spec
	if len(spec.Containers) == 0 {
		return // the API server refuses such a pod
	}
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[v1alpha1.AnnotationLife] = "0"
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			dropRaw(&containers[i])
		}
	}
	spec.Volumes = append(spec.Volumes,
		corev1.Volume{Name: savedName, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		corev1.Volume{Name: lifeVolume, VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{
			Items: []corev1.DownwardAPIVolumeFile{{Path: lifeFile, FieldRef: &corev1.ObjectFieldSelector{
				APIVersion: "v1", FieldPath: "metadata.annotations['" + v1alpha1.AnnotationLife + "']",
			}}},
		}}})
	// The limit of the CPU is far above the request: with less, the start of the two programs takes seconds.
	resources := corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi")},
		Limits:   corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
	}
	always := corev1.ContainerRestartPolicyAlways
	spec.InitContainers = append([]corev1.Container{{
		Name: cleanName, Image: image, Command: []string{agentInImage, "clean", cleanDir, lifeDir + "/" + lifeFile},
		Resources: resources,
		VolumeMounts: []corev1.VolumeMount{
			{Name: savedName, MountPath: cleanDir}, {Name: lifeVolume, MountPath: lifeDir, ReadOnly: true},
		},
		SecurityContext:          cleaner(spec),
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError, // it says what is left
	}, {
		Name: awaitName, Image: image, Command: []string{agentInImage, "await", lifeDir + "/" + lifeFile},
		Resources:     *resources.DeepCopy(),
		VolumeMounts:  []corev1.VolumeMount{{Name: lifeVolume, MountPath: lifeDir, ReadOnly: true}},
		RestartPolicy: &always, SecurityContext: limited(awaitUser),
		RestartPolicyRules: []corev1.ContainerRestartRule{{
			Action: corev1.ContainerRestartRuleActionRestartAllContainers,
			ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{
				Operator: corev1.ContainerRestartRuleOnExitCodesOpIn, Values: []int32{recycle.ExitCode},
			},
		}},
	}}, spec.InitContainers...)
}

const netRaw corev1.Capability = "NET_RAW"

func dropRaw(c *corev1.Container) {
	if c.SecurityContext == nil {
		c.SecurityContext = &corev1.SecurityContext{}
	}
	if c.SecurityContext.Capabilities == nil {
		c.SecurityContext.Capabilities = &corev1.Capabilities{}
	}
	dropped := &c.SecurityContext.Capabilities.Drop
	if !slices.Contains(*dropped, netRaw) && !slices.Contains(*dropped, "ALL") {
		*dropped = append(*dropped, netRaw)
	}
}

// awaitUser is a user that owns nothing.
const awaitUser = 65532

// limited is the security context of a container that needs no capability. Every Pod Security Standard allows it.
func limited(user int64) *corev1.SecurityContext {
	yes, no := true, false
	return &corev1.SecurityContext{
		RunAsUser: &user, RunAsGroup: &user, RunAsNonRoot: &yes, AllowPrivilegeEscalation: &no,
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// cleaner is the security context of the init container that cleans. The runtime makes the files of the pod
// read-only in containers whose root file system is. If all containers have the same user other than root, that
// user can remove what they leave. What it cannot remove, because a program has become root, keeps the pod from
// becoming ready. Otherwise the container needs root, and these capabilities of the Pod Security Standard baseline.
func cleaner(spec *corev1.PodSpec) *corev1.SecurityContext {
	if user := onlyUser(spec); user > 0 {
		return limited(user)
	}
	root, no := int64(0), false
	return &corev1.SecurityContext{
		RunAsUser: &root, RunAsGroup: &root, RunAsNonRoot: &no, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &no,
		Capabilities: &corev1.Capabilities{
			Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID"},
		},
	}
}

// onlyUser returns the user that a pod sets for all containers, 0: they have several, root, or one that the pod
// does not set.
func onlyUser(spec *corev1.PodSpec) (user int64) {
	for i, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		var its *int64
		if spec.SecurityContext != nil {
			its = spec.SecurityContext.RunAsUser
		}
		if c.SecurityContext != nil && c.SecurityContext.RunAsUser != nil {
			its = c.SecurityContext.RunAsUser
		}
		if its == nil || i > 0 && *its != user {
			return 0
		}
		user = *its
	}
	return user
}

// canRecycle reports whether a pod was made to be recycled. Containers cannot be added to a pod or renamed. An API
// server that does not know the rule of the sidecar has dropped it.
func canRecycle(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.InitContainers, func(c corev1.Container) bool {
		return c.Name == awaitName && len(c.RestartPolicyRules) > 0
	})
}

// lifeOf returns the number of a pod's life, false if it cannot be read.
func lifeOf(p *corev1.Pod) (int, bool) {
	text := p.Annotations[v1alpha1.AnnotationLife]
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0 && text == strconv.Itoa(n)
}

// LifeBegan returns when the containers of a pod began the present life of the pod, zero in its first one. Before
// that is known, it is the end of time.
func LifeBegan(p *corev1.Pod) time.Time {
	if life, known := lifeOf(p); !canRecycle(p) || known && life == 0 {
		return time.Time{}
	}
	if restarted(p) {
		for _, s := range p.Status.InitContainerStatuses {
			if s.Name == cleanName {
				return s.State.Terminated.StartedAt.Time
			}
		}
	}
	return time.Unix(math.MaxInt32, 0)
}

// whyUnclean says why the init container that cleans has failed, empty: it has not.
func whyUnclean(p *corev1.Pod) (reason, words string) {
	for _, s := range p.Status.InitContainerStatuses {
		t := cmp.Or(s.State.Terminated, s.LastTerminationState.Terminated)
		if s.Name == cleanName && t != nil && t.ExitCode != 0 && t.Reason != restarting {
			return core.PodCrashLoop, kube.Bounded(fmt.Sprintf("container %s: exit code %d: %s", s.Name, t.ExitCode, t.Message), maxWhy)
		}
	}
	return "", ""
}

// restarting is the kubelet's reason of the ends of containers that it restarts all.
const restarting = "RestartingAllContainers"

// restarted reports whether the kubelet's status proves that every container of a pod was restarted after the
// life before: the init container that cleans has run in this life, no container has the ID of one of the life
// before, and none of those that run has started before it was cleaned.
func restarted(p *corev1.Pod) bool {
	ended := strings.Split(p.Annotations[v1alpha1.AnnotationEnded], ",")
	inits, others := p.Status.InitContainerStatuses, p.Status.ContainerStatuses
	if len(ended) != len(inits)+len(others) || len(others) == 0 || len(p.Spec.EphemeralContainers) > 0 {
		return false
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.AllContainersRestarting && c.Status != corev1.ConditionFalse {
			return false
		}
	}
	var cleaned metav1.Time
	for _, s := range slices.Concat(inits, others) {
		if s.ContainerID == "" || slices.Contains(ended, s.ContainerID) {
			return false
		}
		if s.Name == cleanName {
			t := s.State.Terminated
			if t == nil || t.ExitCode != 0 || t.Message != p.Annotations[v1alpha1.AnnotationLife] {
				return false
			}
			cleaned = t.FinishedAt
		}
	}
	return !cleaned.IsZero() && !slices.ContainsFunc(slices.Concat(inits, others), func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil && s.State.Running.StartedAt.Before(&cleaned)
	})
}

// asBuilt reports whether a pod is what CheckRecycle and the policy of package pools have judged: admission may have
// added containers, volumes and rights.
func asBuilt(is, built *corev1.Pod) bool {
	type rights struct {
		name       string
		privileged bool
		unmasked   bool
		caps       string
		volumes    string
	}
	all := func(p *corev1.Pod) (all []rights) {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			r := rights{name: c.Name}
			if s := c.SecurityContext; s != nil {
				r.privileged, r.unmasked = s.Privileged != nil && *s.Privileged, unmasked(s)
				if s.Capabilities != nil {
					r.caps = fmt.Sprint(s.Capabilities.Add, slices.Contains(s.Capabilities.Drop, netRaw) || slices.Contains(s.Capabilities.Drop, "ALL"))
				}
			}
			for _, m := range c.VolumeMounts {
				r.volumes += m.Name + " "
			}
			all = append(all, r)
		}
		for _, v := range p.Spec.Volumes {
			all = append(all, rights{volumes: v.Name})
		}
		return all
	}
	on := func(b *bool) bool { return b != nil && *b }
	return is.Labels[v1alpha1.LabelTemplate] == built.Labels[v1alpha1.LabelTemplate] && slices.Equal(all(is), all(built)) &&
		!is.Spec.HostNetwork && !is.Spec.HostPID && !is.Spec.HostIPC && !on(is.Spec.ShareProcessNamespace) && is.Spec.RuntimeClassName == nil
}

// Recycle begins the next life of a pod, in one write that fails if anything about the pod has changed since it
// was read. It deletes the pod if that cannot be recycled, or if pool is nil. The caller repeats it until it returns
// nil. The core asks for it only when no request can reach the pod.
func (w *Writer) Recycle(ctx context.Context, pool *v1alpha1.SandboxPool, e core.RecyclePod) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	p, gone, err := w.read(ctx, e.Pod)
	switch {
	case err != nil:
		return err
	case gone:
		w.o.Submit(core.PodGone{Key: e.Pod.Whole()})
		return nil
	case KeyOf(p) != e.Pod, // an earlier attempt; the watch shows the next life
		p.DeletionTimestamp != nil:
		return nil
	}
	life, known := lifeOf(p)
	var ended []string
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		ended = append(ended, s.ContainerID)
	}
	if !known || !observe(p, w.o.Log).Recyclable || pool == nil ||
		len(ended) != len(p.Spec.InitContainers)+len(p.Spec.Containers) || slices.Contains(ended, "") {
		return w.Delete(ctx, core.DeletePod{Pod: e.Pod})
	}
	built := Build(pool, p.Name, w.o.Settings)
	if !asBuilt(p, built) {
		return w.Delete(ctx, core.DeletePod{Pod: e.Pod})
	}
	of := func(name string) any { // the template's value replaces that for the sandbox
		if value, ok := built.Annotations[name]; ok {
			return value
		}
		return nil
	}
	raw, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": p.UID, "resourceVersion": p.ResourceVersion,
		"labels": map[string]any{v1alpha1.LabelPhase: v1alpha1.PhaseWarm, v1alpha1.LabelSandbox: nil},
		"annotations": map[string]any{
			v1alpha1.AnnotationLife: strconv.Itoa(life + 1), v1alpha1.AnnotationEnded: strings.Join(ended, ","),
			annotationSafeToEvict: of(annotationSafeToEvict), annotationDoNotDisrupt: of(annotationDoNotDisrupt),
		},
	}})
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	_, err = w.o.Clients.Kubernetes.CoreV1().Pods(e.Pod.Namespace).Patch(ctx, e.Pod.Name, types.MergePatchType, raw, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("recycle pod %s: %w", e.Pod.Name, err)
	}
	return nil
}
