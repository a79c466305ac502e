package pods

import (
	"context"
	"fmt"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
)

// WatcherOptions configure a Watcher. All are required.
type WatcherOptions struct {
	Client    kubernetes.Interface
	Namespace string
	// Submit takes the events. It may block.
	Submit func(core.Event)
	Log    *zap.Logger
}

// Watcher watches all pods of the namespace, whether a pool owns them or not. A watch
// filtered by label would report a pod as deleted when its label is removed, and would
// then never report it again. A foreign pod costs one small object in the cache; the core
// ignores it.
type Watcher struct {
	o       WatcherOptions
	factory informers.SharedInformerFactory
}

// NewWatcher returns a Watcher, or an error that names the missing options.
func NewWatcher(o WatcherOptions) (*Watcher, error) {
	if err := options.Require(o, "Client", "Namespace", "Submit", "Log"); err != nil {
		return nil, err
	}
	w := &Watcher{o: o}
	w.factory = informers.NewSharedInformerFactoryWithOptions(o.Client, 0,
		informers.WithNamespace(o.Namespace), informers.WithTransform(slim))
	w.factory.Core().V1().Pods().Informer() // registers what the factory starts
	return w, nil
}

// List returns all pods of the namespace and the resource version of that list, read from the API
// server's store. It retries until ctx ends.
func (w *Watcher) List(ctx context.Context) (all []core.Pod, version string, err error) {
	all, err = kube.List(ctx, func(ctx context.Context, next string) (pods []core.Pod, following string, err error) {
		page, err := w.o.Client.CoreV1().Pods(w.o.Namespace).List(ctx, metav1.ListOptions{Limit: kube.PageSize, Continue: next})
		if err != nil {
			return nil, "", fmt.Errorf("list pods: %w", err)
		}
		for i := range page.Items {
			seen, err := observe(&page.Items[i])
			if err != nil {
				w.o.Log.Warn("pod cannot be read, it will not be handed out", zap.Error(err))
			}
			pods = append(pods, seen)
		}
		version = page.ResourceVersion // the same on every page
		return pods, page.Continue, nil
	}, func(err error) { w.o.Log.Warn("list failed, retrying", zap.Error(err)) })
	return all, version, err
}

// Run watches until ctx ends. It must be called once.
func (w *Watcher) Run(ctx context.Context) error {
	// Registered before the start, so that no event is missed.
	_, err := w.factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { w.seen(o.(*corev1.Pod)) },
		UpdateFunc: func(old, o any) {
			before, now := old.(*corev1.Pod), o.(*corev1.Pod)
			if before.UID != now.UID { // deleted and created again between two events
				w.o.Submit(core.PodGone{Key: keyOf(before)})
			}
			w.seen(now)
		},
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj // the key is enough; the last state was missed
			}
			if p, ok := o.(*corev1.Pod); ok {
				w.o.Submit(core.PodGone{Key: keyOf(p)})
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	w.factory.Start(ctx.Done())
	<-ctx.Done()
	w.factory.Shutdown()
	return nil
}

func (w *Watcher) seen(p *corev1.Pod) {
	seen, err := observe(p)
	if err != nil {
		w.o.Log.Warn("pod cannot be read, it will not be handed out", zap.Error(err))
	}
	w.o.Submit(core.PodSeen{Pod: seen})
}

// slim keeps only the fields that this package reads, so that the cache stays small.
func slim(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	slim := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Name, Namespace: p.Namespace, UID: p.UID, ResourceVersion: p.ResourceVersion,
			CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp,
			Labels: map[string]string{},
		},
		Spec:   corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork},
		Status: corev1.PodStatus{Phase: p.Status.Phase, PodIP: p.Status.PodIP, Message: why(p)},
	}
	for _, name := range []string{v1alpha1.LabelPool, v1alpha1.LabelTemplate, v1alpha1.LabelPhase} {
		if value, ok := p.Labels[name]; ok {
			slim.Labels[name] = value
		}
	}
	if owner := metav1.GetControllerOf(p); owner != nil {
		slim.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	for _, c := range p.Status.ContainerStatuses {
		if c.RestartCount > 0 {
			slim.Status.ContainerStatuses = append(slim.Status.ContainerStatuses, corev1.ContainerStatus{Name: c.Name, RestartCount: c.RestartCount})
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			slim.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return slim, nil
}
