package harness

import (
	"context"
	"fmt"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// CreatePool creates a pool of demo sandboxes, after change has changed it if that is set.
func (b *Berth) CreatePool(name string, warm int32, change func(*v1alpha1.SandboxPool)) {
	b.Helper()
	p := stack.DemoPool(Namespace, name, warm)
	if b.Nodes != nil {
		p.Spec.Template.Spec.Containers[0].Env = nil // no process reads it
	}
	if change != nil {
		change(p)
	}
	require.NoError(b,
		b.Clients.Berth.Post().Namespace(Namespace).Resource("sandboxpools").Body(p).Do(b.Context()).Error())
}

// ReadPool reads a pool.
func (b *Berth) ReadPool(ctx context.Context, name string) (p v1alpha1.SandboxPool, err error) {
	return p, b.Clients.Berth.Get().Namespace(Namespace).Resource("sandboxpools").Name(name).Do(ctx).Into(&p)
}

// Pods lists the pods of a pool that also match the labels in and, if there are any.
func (b *Berth) Pods(ctx context.Context, pool, and string) ([]corev1.Pod, error) {
	selector := v1alpha1.LabelPool + "=" + pool
	if and != "" {
		selector += "," + and
	}
	list, err := b.Clients.Kubernetes.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return list.Items, nil
}

// How a pod is deleted, in the history.
const (
	ByForce = "by force"
	Plainly = "plainly"
)

// DeletePod deletes a pod, by force or plainly, and records it. It returns nil if the pod
// was gone, and ok if it was there.
func (b *Berth) DeletePod(ctx context.Context, p *corev1.Pod, how string) (ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	o := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))}
	if how == ByForce {
		o.GracePeriodSeconds = new(int64)
	}
	e := history.Event{Kind: history.Delete, What: how, Pod: p.Name, PodUID: string(p.UID), Began: bootclock.Now()}
	err = b.Clients.Kubernetes.CoreV1().Pods(Namespace).Delete(ctx, p.Name, o)
	e.Ended = bootclock.Now()
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // it has ended by itself
		return false, nil
	}
	if err != nil {
		e.Error = err.Error()
	}
	b.History.Add(e)
	return err == nil, err
}

// Records are the Sandbox objects as events.
func (b *Berth) Records(ctx context.Context) (all []history.Event, err error) {
	var list v1alpha1.SandboxList
	if err := b.Clients.Berth.Get().Namespace(Namespace).Resource("sandboxes").Do(ctx).Into(&list); err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	for _, s := range list.Items {
		e := history.Event{
			Kind: history.Record, Sandbox: s.Name, Pod: s.Spec.PodName, PodUID: s.Spec.PodUID, Address: s.Spec.PodIP,
			IdleTimeout: time.Duration(s.Spec.IdleTimeoutSeconds) * time.Second,
			Phase:       string(s.Status.Phase), Reason: s.Status.Reason,
		}
		if s.Status.ReleasedAt != nil {
			e.Released = s.Status.ReleasedAt.Time
		}
		all = append(all, e)
	}
	return all, nil
}
