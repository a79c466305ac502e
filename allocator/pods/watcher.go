package pods

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listersv1 "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// auditEvery is the pause between comparisons of the core's table with the
// watch cache.
const auditEvery = time.Minute

// Sink is told what is seen. Its methods block until it has taken the event or
// its owner has ended.
type Sink interface {
	// Submit hands an event to the core.
	Submit(core.Event)
	// PodKeys lists the pods the core knows.
	PodKeys() []core.PodKey
}

// Watcher watches the pods of all pools.
type Watcher struct {
	Client    kubernetes.Interface
	Namespace string
	Sink      Sink
	Log       *zap.Logger

	lister listersv1.PodLister
}

func selector(o *metav1.ListOptions) { o.LabelSelector = v1alpha1.LabelPool }

// List reads the pods from the API server's store, not from a cache of it.
func (w *Watcher) List(ctx context.Context) ([]core.Pod, error) {
	var all []core.Pod
	o := metav1.ListOptions{Limit: 1000}
	selector(&o)
	for {
		page, err := w.Client.CoreV1().Pods(w.Namespace).List(ctx, o)
		if err != nil {
			return nil, fmt.Errorf("list pods: %w", err)
		}
		for i := range page.Items {
			seen, err := observe(&page.Items[i])
			if err != nil {
				w.Log.Warn("pod not understood, it will not be handed out", zap.Error(err))
			}
			all = append(all, seen)
		}
		if o.Continue = page.Continue; o.Continue == "" {
			return all, nil
		}
	}
}

// Run watches until ctx ends. The core has been told the result of List before.
func (w *Watcher) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(w.Client, 0,
		informers.WithNamespace(w.Namespace), informers.WithTweakListOptions(selector), informers.WithTransform(slim))
	pods := factory.Core().V1().Pods()
	w.lister = pods.Lister()
	// Registered before the start: nothing is missed in between.
	registration, err := pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { w.seen(o.(*corev1.Pod)) },
		UpdateFunc: func(old, o any) {
			before, now := old.(*corev1.Pod), o.(*corev1.Pod)
			if before.UID != now.UID { // deleted and made again between two events
				w.Sink.Submit(core.PodGone{Key: keyOf(before)})
			}
			w.seen(now)
		},
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj // its last state was missed; its identity is what counts
			}
			if p, ok := o.(*corev1.Pod); ok {
				w.Sink.Submit(core.PodGone{Key: keyOf(p)})
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	if !cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return nil // ctx has ended
	}
	ticker := time.NewTicker(auditEvery)
	defer ticker.Stop()
	for {
		w.audit(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (w *Watcher) seen(p *corev1.Pod) {
	seen, err := observe(p)
	if err != nil {
		w.Log.Warn("pod not understood, it will not be handed out", zap.Error(err))
	}
	w.Sink.Submit(core.PodSeen{Pod: seen})
}

// audit finds pods that the core knows and the watch does not: those that went
// between the list and the start of the watch. The API server is asked about
// each, because a watch may also lag behind.
func (w *Watcher) audit(ctx context.Context) {
	for _, key := range w.Sink.PodKeys() {
		if p, err := w.lister.Pods(key.Namespace).Get(key.Name); err == nil && string(p.UID) == key.UID {
			continue
		}
		call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
		p, err := w.Client.CoreV1().Pods(key.Namespace).Get(call, key.Name, metav1.GetOptions{})
		cancel()
		switch {
		case apierrors.IsNotFound(err) || err == nil && string(p.UID) != key.UID:
			w.Log.Warn("repaired: a pod was gone without the watch having said so", zap.String("pod", key.Name))
			w.Sink.Submit(core.PodGone{Key: key})
		case err != nil:
			if ctx.Err() == nil {
				w.Log.Warn("pod not found in the watch, and the API server cannot be asked", zap.String("pod", key.Name), zap.Error(err))
			}
		}
	}
}

// slim drops what is never read, to keep the cache small.
func slim(o any) (any, error) {
	if p, ok := o.(*corev1.Pod); ok {
		p.ManagedFields = nil
		p.Spec = corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork}
		p.Status.ContainerStatuses, p.Status.InitContainerStatuses = nil, nil
	}
	return o, nil
}
