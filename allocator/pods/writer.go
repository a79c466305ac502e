package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// deleteGrace is what a pod gets between SIGTERM and SIGKILL when the allocator
// deletes it: by then nobody uses it any more.
const deleteGrace = 2 * time.Second

// Annotations that keep the cluster autoscaler and Karpenter from removing a
// node under a claimed pod. They stay until the pod goes: also a released one
// keeps its address from being used until no router routes to it.
const (
	annotationSafeToEvict  = "cluster-autoscaler.kubernetes.io/safe-to-evict"
	annotationDoNotDisrupt = "karpenter.sh/do-not-disrupt"
)

// Writer carries out the core's effects on pods. Every write has a condition.
// Methods return when the outcome is known or ctx has ended; they may be called
// concurrently.
type Writer struct {
	Client kubernetes.Interface
	Submit func(core.Event)
	Log    *zap.Logger
}

type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func pointer(fields ...string) string {
	var b strings.Builder
	for _, f := range fields {
		b.WriteByte('/')
		b.WriteString(strings.NewReplacer("~", "~0", "/", "~1").Replace(f)) // RFC 6901
	}
	return b.String()
}

func label(name string) string      { return pointer("metadata", "labels", name) }
func annotation(name string) string { return pointer("metadata", "annotations", name) }

func (w *Writer) patch(ctx context.Context, key core.PodKey, ops ...patchOp) (*corev1.Pod, error) {
	raw, err := json.Marshal(append([]patchOp{{"test", "/metadata/uid", key.UID}}, ops...))
	if err != nil {
		return nil, fmt.Errorf("encode patch: %w", err)
	}
	p, err := w.Client.CoreV1().Pods(key.Namespace).Patch(ctx, key.Name, types.JSONPatchType, raw, metav1.PatchOptions{})
	return p, err
}

// errTryAgain is for an outcome that was read and is still open.
var errTryAgain = errors.New("the write did not take place")

// Bind writes a claim to a warm pod and reports the outcome. As long as the
// outcome is unknown it asks again: a claim is neither answered nor given up
// before.
func (w *Writer) Bind(ctx context.Context, e core.BindPod) {
	b := binding{ID: e.Binding.ID, ClaimedAt: e.Binding.ClaimedAt, Metadata: e.Binding.Metadata}
	if !e.Binding.EndAt.IsZero() {
		b.EndAt = &e.Binding.EndAt
	}
	text, err := json.Marshal(b)
	if err != nil {
		w.Log.Error("encode binding", zap.Error(err)) // strings and times always encode
		return
	}
	bound := false
	err = kube.Retry(ctx, func(ctx context.Context) error {
		p, err := w.patch(ctx, e.Pod,
			patchOp{"test", label(v1alpha1.LabelPhase), v1alpha1.PhaseWarm},
			patchOp{"replace", label(v1alpha1.LabelPhase), v1alpha1.PhaseClaimed},
			patchOp{"add", label(v1alpha1.LabelSandbox), e.Binding.ID},
			patchOp{"add", annotation(v1alpha1.AnnotationBinding), string(text)},
			// Somebody uses it now: those who tidy up nodes must not.
			patchOp{"add", annotation(annotationSafeToEvict), "false"},
			patchOp{"add", annotation(annotationDoNotDisrupt), "true"},
		)
		if err == nil {
			bound = true
			w.observed(p) // its address may be newer than the one the core knows
			return nil
		}
		p, gone, readErr := w.read(ctx, e.Pod)
		switch {
		case readErr != nil:
			return errors.Join(err, readErr)
		case gone:
			w.Submit(core.PodGone{Key: e.Pod})
			return nil
		}
		seen, _ := observe(p) // what cannot be understood is not free either
		if seen.Binding != nil && seen.Binding.ID == e.Binding.ID {
			bound = true // the answer was lost, not the write
			w.Submit(core.PodSeen{Pod: seen})
			return nil
		}
		if seen.Free && seen.Binding == nil && !kube.Refused(err) {
			return errors.Join(errTryAgain, err)
		}
		seen.Free = false // whatever the refusal was about, it is not to be tried again as it is
		w.Submit(core.PodSeen{Pod: seen})
		return nil
	}, w.failed("bind pod", e.Pod))
	if err == nil {
		w.Submit(core.BindDone{Pod: e.Pod, ID: e.Binding.ID, Bound: bound})
	}
}

// MarkReleased writes the release to the pod and repeats until it is known to
// be written, or the pod to be gone.
func (w *Writer) MarkReleased(ctx context.Context, e core.MarkReleased) {
	text, err := json.Marshal(release{Reason: e.Reason, At: time.Now().UTC()})
	if err != nil {
		w.Log.Error("encode release", zap.Error(err)) // strings and times always encode
		return
	}
	err = kube.Retry(ctx, func(ctx context.Context) error {
		_, err := w.patch(ctx, e.Pod,
			patchOp{"add", label(v1alpha1.LabelPhase), v1alpha1.PhaseReleased},
			patchOp{"add", annotation(v1alpha1.AnnotationRelease), string(text)},
		)
		if err == nil {
			return nil
		}
		if _, gone, readErr := w.read(ctx, e.Pod); readErr == nil && gone {
			w.Submit(core.PodGone{Key: e.Pod})
			return nil
		}
		return err
	}, w.failed("mark pod released", e.Pod))
	if err == nil {
		w.Submit(core.ReleaseDone{ID: e.ID})
	}
}

// Delete deletes a pod.
func (w *Writer) Delete(ctx context.Context, e core.DeletePod) {
	grace := int64(deleteGrace / time.Second)
	uid := types.UID(e.Pod.UID)
	o := metav1.DeleteOptions{GracePeriodSeconds: &grace, Preconditions: &metav1.Preconditions{UID: &uid}}
	if e.IfVersion != "" {
		o.Preconditions.ResourceVersion = &e.IfVersion
	}
	_ = kube.Retry(ctx, func(ctx context.Context) error { // it only fails when ctx has ended
		err := w.Client.CoreV1().Pods(e.Pod.Namespace).Delete(ctx, e.Pod.Name, o)
		if err == nil {
			return nil
		}
		p, gone, readErr := w.read(ctx, e.Pod)
		switch {
		case readErr != nil:
			return errors.Join(err, readErr)
		case gone:
			w.Submit(core.PodGone{Key: e.Pod})
			return nil
		case p.DeletionTimestamp != nil:
			return nil
		case apierrors.IsConflict(err) && e.IfVersion != "":
			w.observed(p)
			w.Submit(core.DeleteFailed{Key: e.Pod})
			return nil
		}
		return err
	}, w.failed("delete pod", e.Pod))
}

// Create makes a pod from the pool's template. The error, if any, is for the
// pool's condition; the core has been told.
func (w *Writer) Create(ctx context.Context, pool *v1alpha1.SandboxPool, e core.CreatePod) error {
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	p, err := w.Client.CoreV1().Pods(pool.Namespace).Create(call, Build(pool, e.Name), metav1.CreateOptions{})
	if err != nil {
		// If it was made all the same, the watch will tell.
		w.Submit(core.CreateFailed(e))
		return fmt.Errorf("create pod %s: %w", e.Name, err)
	}
	w.observed(p)
	return nil
}

// observed tells the core what a read or a write has shown.
func (w *Writer) observed(p *corev1.Pod) {
	seen, err := observe(p)
	if err != nil {
		w.Log.Warn("pod not understood, it will not be handed out", zap.Error(err))
	}
	w.Submit(core.PodSeen{Pod: seen})
}

// read reads a pod from the API server's store. gone is true when that pod,
// by its UID, does not exist any more.
func (w *Writer) read(ctx context.Context, key core.PodKey) (p *corev1.Pod, gone bool, err error) {
	p, err = w.Client.CoreV1().Pods(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, true, nil
	case err != nil:
		return nil, false, fmt.Errorf("read pod %s: %w", key.Name, err)
	}
	return p, string(p.UID) != key.UID, nil
}

func (w *Writer) failed(what string, key core.PodKey) func(error) {
	return func(err error) {
		w.Log.Warn("will try again: "+what, zap.String("pod", key.Name), zap.Error(err))
	}
}
