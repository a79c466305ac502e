package pods

import (
	"context"
	"encoding/json"
	"fmt"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// A pod whose sandbox is asleep requests less CPU. A resize keeps the pod's QoS class, its limits and its memory. The
// request to which it returns is an annotation, because the spec shows only the present one, and the pool's template
// may have changed.

// allowResize annotates a new pod with an agent if its CPU request can be lowered to this one later. The API server
// refuses to resize a pod to or from the QoS class Guaranteed, and a container may ask to be restarted by a resize.
// A pod counts on its node with the largest request of its init containers, also when these have ended. So the one that
// installs the agent asks for no more than what is left then.
func allowResize(p *corev1.Pod, asleep resource.Quantity) {
	c := &p.Spec.Containers[0]
	request := c.Resources.Requests[corev1.ResourceCPU]
	if asleep.IsZero() || request.Cmp(asleep) <= 0 || p.Spec.Resources != nil || isGuaranteed(c.Resources) {
		return
	}
	for _, r := range c.ResizePolicy {
		if r.ResourceName == corev1.ResourceCPU && r.RestartPolicy != corev1.NotRequired {
			return
		}
	}
	p.Spec.InitContainers[0].Resources.Requests[corev1.ResourceCPU] = asleep
	metav1.SetMetaDataAnnotation(&p.ObjectMeta, v1alpha1.AnnotationCPURequest, request.String())
}

func isGuaranteed(r corev1.ResourceRequirements) bool {
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		limit, ok := r.Limits[name]
		if request, asked := r.Requests[name]; !ok || asked && request.Cmp(limit) != 0 {
			return false
		}
	}
	return true
}

// cpuRequest reads what a pod requests while its sandbox is awake, empty if that does not change, whether it requests
// less now, and whether its node has no room for what it requests.
func cpuRequest(p *corev1.Pod) (full string, lowered, deferred bool) {
	text := p.Annotations[v1alpha1.AnnotationCPURequest]
	want, err := resource.ParseQuantity(text)
	if err != nil || len(p.Spec.Containers) == 0 {
		return "", false, false
	}
	now := p.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU]
	for _, c := range p.Status.Conditions {
		deferred = deferred || c.Type == corev1.PodResizePending && c.Status == corev1.ConditionTrue
	}
	return text, now.Cmp(want) < 0, deferred
}

// Resize changes the CPU request of a pod, unless the pod has changed since it was observed. The next observation shows
// then whether there is something to do.
func (w *Writer) Resize(ctx context.Context, e core.ResizePod) error {
	to, err := resource.ParseQuantity(e.CPURequest)
	if err != nil {
		return fmt.Errorf("annotation %s of pod %s: %w", v1alpha1.AnnotationCPURequest, e.Pod.Name, err)
	}
	if asleep := w.o.Settings.AsleepCPU; e.Lower {
		if asleep.IsZero() || asleep.Cmp(to) >= 0 { // it was made under another setting
			return nil
		}
		to = asleep
	}
	raw, err := json.Marshal([]map[string]any{
		{"op": "replace", "path": "/metadata/resourceVersion", "value": e.Version},
		{"op": "replace", "path": "/spec/containers/0/resources/requests/cpu", "value": to.String()},
	})
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	_, err = w.o.Clients.Kubernetes.CoreV1().Pods(e.Pod.Namespace).Patch(ctx, e.Pod.Name, types.JSONPatchType, raw, metav1.PatchOptions{}, "resize")
	switch {
	case err == nil, apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil
	case e.Lower && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err)): // such as by a LimitRange
		w.o.Log.Warn("a pod whose sandbox is asleep keeps its CPU request", zap.String("pod", e.Pod.Name), zap.Error(err))
		return nil
	}
	return fmt.Errorf("resize pod %s: %w", e.Pod.Name, err)
}
