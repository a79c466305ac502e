package pods

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// synced returns the labels and annotations that idle pods get from the template whenever these change. They leave
// out the keys below berth.sh/ and Kubernetes' own annotations.
func synced(pool *v1alpha1.SandboxPool) (labels, annotations map[string]string) {
	annotations = foreignOnly(pool.Spec.Template.Metadata.Annotations)
	maps.DeleteFunc(annotations, func(key, _ string) bool { return ofKubernetes(key) })
	return foreignOnly(pool.Spec.Template.Metadata.Labels), annotations
}

// fixed returns the annotations of the template that a pod gets when it is created. They may decide how it starts,
// and the API server lets some of them not change.
func fixed(pool *v1alpha1.SandboxPool) map[string]string {
	kept := foreignOnly(pool.Spec.Template.Metadata.Annotations)
	maps.DeleteFunc(kept, func(key, _ string) bool { return !ofKubernetes(key) })
	return kept
}

// ofKubernetes reports whether a key is in one of the domains that Kubernetes reserves for itself.
func ofKubernetes(key string) bool {
	domain, _, _ := strings.Cut(key, "/")
	for _, own := range []string{"kubernetes.io", "k8s.io"} {
		if domain == own || strings.HasSuffix(domain, "."+own) {
			return true
		}
	}
	return false
}

// Metadata identifies the labels and annotations that idle pods get from the template. It is the value of
// v1alpha1.AnnotationMetadata: a hash, and the keys, so that those which the template drops can be removed. It is
// empty if there are none.
func Metadata(pool *v1alpha1.SandboxPool) string {
	labels, annotations := synced(pool)
	if len(labels)+len(annotations) == 0 {
		return ""
	}
	raw, err := json.Marshal([]any{labels, annotations})
	if err != nil {
		panic(fmt.Sprintf("encode strings: %v", err))
	}
	sum := sha256.Sum256(raw)
	return strings.Join([]string{hex.EncodeToString(sum[:6]), keysOf(labels), keysOf(annotations)}, ";")
}

func keysOf(all map[string]string) string { return strings.Join(slices.Sorted(maps.Keys(all)), ",") }

// maxSyncs is how often Sync tries a pod that changes meanwhile.
const maxSyncs = 5

// Sync gives an idle pod the labels and annotations of the template as it is now. What the template has dropped is
// removed, and what others have set stays. A pod that is not marked as warm keeps what it has. Sync makes the write
// on condition that the pod is as it was read.
func (w *Writer) Sync(ctx context.Context, pool *v1alpha1.SandboxPool, e core.SyncPod) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		err := w.sync(ctx, pool, e.Pod)
		if !apierrors.IsConflict(err) || attempt == maxSyncs {
			return err
		}
	}
}

func (w *Writer) sync(ctx context.Context, pool *v1alpha1.SandboxPool, key core.PodKey) error {
	p, gone, err := w.read(ctx, key)
	if err != nil || gone || p.DeletionTimestamp != nil || p.Labels[v1alpha1.LabelPhase] != v1alpha1.PhaseWarm {
		return err
	}
	had, want := p.Annotations[v1alpha1.AnnotationMetadata], Metadata(pool)
	if had == want {
		return nil
	}
	labels, annotations := synced(pool)
	_, keys, _ := strings.Cut(had, ";")
	hadLabels, hadAnnotations, _ := strings.Cut(keys, ";")
	annotationChanges := changes(hadAnnotations, annotations)
	annotationChanges[v1alpha1.AnnotationMetadata] = want
	patch := map[string]any{
		"uid": p.UID, "resourceVersion": p.ResourceVersion,
		"labels": changes(hadLabels, labels), "annotations": annotationChanges,
	}
	raw, err := json.Marshal(map[string]any{"metadata": patch})
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	_, err = w.o.Clients.Kubernetes.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.MergePatchType, raw, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("sync the labels and annotations of pod %s: %w", p.Name, err)
	}
	return nil
}

// changes is the merge patch from the keys that a pod had of the template to what it gets.
func changes(had string, want map[string]string) map[string]any {
	patch := map[string]any{}
	if had != "" {
		for key := range strings.SplitSeq(had, ",") {
			patch[key] = nil
		}
	}
	for key, value := range want {
		patch[key] = value
	}
	return patch
}
