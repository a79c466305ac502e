package pods

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
)

// deleteGrace is the grace period of the allocator's own deletions: the shortest that leaves the
// end of the pod to its kubelet. At that point no request can reach the pod, so it need not serve
// on. The kubelet cuts the preStop sleep at the end of the grace period, sends SIGTERM, and sends
// SIGKILL 2 s later (kuberuntime, minimumGracePeriodInSeconds).
const deleteGrace = time.Second

// Writer carries out the core's effects on pods. Every write is conditional. Each method makes one
// attempt; the methods may be called concurrently.
type Writer struct{ o WriterOptions }

// WriterOptions configure a Writer. All but Gateway are required.
type WriterOptions struct {
	kube.Options
	// Settings are passed on to Build.
	Settings Settings
	// Gateway returns the addresses of the egress gateway, host:port and comma-separated; empty: they are not known. Without
	// it pods that are to reach nothing else only try what they must not reach.
	Gateway func() string
}

// NewWriter returns a Writer, or an error that names the missing options.
func NewWriter(o WriterOptions) (*Writer, error) {
	return &Writer{o}, errors.Join(o.Check(), options.Require(o, "Settings"))
}

// Delete deletes a pod. The caller repeats it until it returns nil, which means that the deletion
// is under way or the pod is gone. The core asks for it only when no request can reach the pod.
func (w *Writer) Delete(ctx context.Context, e core.DeletePod) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	grace := int64(deleteGrace / time.Second)
	uid := types.UID(e.Pod.UID)
	must := metav1.Preconditions{UID: &uid}
	if e.Pod.Life != 0 { // another life of the pod may have a sandbox by now
		p, gone, err := w.read(ctx, e.Pod)
		switch {
		case err != nil:
			return err
		case !gone && KeyOf(p) != e.Pod: // the watch shows it
			return nil
		case !gone:
			must.ResourceVersion = &p.ResourceVersion
		}
	}
	err := w.o.Clients.Kubernetes.CoreV1().Pods(e.Pod.Namespace).Delete(ctx, e.Pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &grace, Preconditions: &must,
	})
	if err == nil {
		return nil
	}
	p, gone, readErr := w.read(ctx, e.Pod)
	switch {
	case readErr != nil:
		return errors.Join(err, readErr)
	case gone:
		w.o.Submit(core.PodGone{Key: e.Pod.Whole()})
		return nil
	case p.DeletionTimestamp != nil:
		return nil
	}
	return fmt.Errorf("delete pod %s: %w", e.Pod.Name, err)
}

// Create makes a pod from the pool's template and submits the outcome to the core. The returned
// error is for the pool's condition. If a pod has the name, an earlier attempt may have created it, and no
// watch has shown it yet: so the API server is asked whose pod it is.
func (w *Writer) Create(ctx context.Context, pool *v1alpha1.SandboxPool, e core.CreatePod) error {
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	p := Build(pool, e.Name, w.o.Settings)
	if w.o.Gateway != nil && pool.Spec.EgressEnabled() != nil {
		nameGateway(p, w.o.Gateway())
	}
	p, err := w.o.Clients.Kubernetes.CoreV1().Pods(pool.Namespace).Create(call, p, metav1.CreateOptions{})
	failed := core.CreateFailed{Pool: e.Pool, Name: e.Name}
	switch {
	case err == nil:
		err = w.refuseChanged(call, pool, p)
	case apierrors.IsAlreadyExists(err):
		if p, err = w.o.Clients.Kubernetes.CoreV1().Pods(pool.Namespace).Get(call, e.Name, metav1.GetOptions{}); err == nil && !metav1.IsControlledBy(p, pool) {
			failed.Taken, err = true, errors.New("another pod has the name")
		}
	}
	if err != nil {
		// If the pod was created despite the error, the watch or the next attempt shows it.
		w.o.Submit(failed)
		return fmt.Errorf("create pod %s: %w", e.Name, err)
	}
	w.o.Submit(core.PodSeen{Pod: observe(p, w.o.Log)})
	return nil
}

// refuseChanged deletes a new pod that admission has changed so that no leader would find it in its pool, or would
// hand it out. It returns an error for such a pod.
func (w *Writer) refuseChanged(ctx context.Context, pool *v1alpha1.SandboxPool, p *corev1.Pod) error {
	var changed string
	made, labelled := egressOf(p)
	switch {
	case !metav1.IsControlledBy(p, pool):
		changed = "its owner reference"
	case p.Labels[v1alpha1.LabelPhase] == "":
		changed = "the label " + v1alpha1.LabelPhase
	case made != (pool.Spec.EgressEnabled() != nil):
		changed = "the variable " + egressEnv
	case made && !labelled:
		changed = "the label " + v1alpha1.LabelEgress
	case canRecycle(p) && p.Annotations[v1alpha1.AnnotationLife] == "":
		changed = "the annotation " + v1alpha1.AnnotationLife
	default:
		return nil
	}
	err := fmt.Errorf("an admission webhook or policy has removed %s; exempt the pods of the namespace from it", changed)
	uid := p.UID
	if failed := w.o.Clients.Kubernetes.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &uid},
	}); failed != nil && !apierrors.IsNotFound(failed) {
		return errors.Join(err, fmt.Errorf("the pod stays: %w", failed))
	}
	return err
}

// read reads a pod from the API server's store, in any life. gone is true when no pod with that UID exists.
func (w *Writer) read(ctx context.Context, key core.PodKey) (p *corev1.Pod, gone bool, err error) {
	p, err = w.o.Clients.Kubernetes.CoreV1().Pods(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, true, nil
	case err != nil:
		return nil, false, fmt.Errorf("read pod %s: %w", key.Name, err)
	}
	return p, string(p.UID) != key.UID, nil
}
