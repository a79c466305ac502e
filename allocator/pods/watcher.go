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

// Watcher watches the pods of all pools.
type Watcher struct {
	client    kubernetes.Interface
	namespace string
	submit    func(core.Event)
	log       *zap.Logger

	factory informers.SharedInformerFactory
	lister  listersv1.PodLister
	synced  cache.InformerSynced
}

// NewWatcher returns a Watcher that tells submit what it sees. submit may block.
func NewWatcher(client kubernetes.Interface, namespace string, submit func(core.Event), log *zap.Logger) *Watcher {
	w := &Watcher{client: client, namespace: namespace, submit: submit, log: log}
	w.factory = informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithNamespace(namespace), informers.WithTweakListOptions(selector), informers.WithTransform(slim))
	w.lister = w.factory.Core().V1().Pods().Lister()
	w.synced = w.factory.Core().V1().Pods().Informer().HasSynced
	return w
}

func selector(o *metav1.ListOptions) { o.LabelSelector = v1alpha1.LabelPool }

// List reads the pods from the API server's store, not from a cache of it, and
// returns the resource version at which they were so. It tries again until ctx ends.
func (w *Watcher) List(ctx context.Context) (all []core.Pod, version string, err error) {
	all, err = kube.List(ctx, func(ctx context.Context, next string) (pods []core.Pod, following string, err error) {
		o := metav1.ListOptions{Limit: kube.PageSize, Continue: next}
		selector(&o)
		page, err := w.client.CoreV1().Pods(w.namespace).List(ctx, o)
		if err != nil {
			return nil, "", fmt.Errorf("list pods: %w", err)
		}
		for i := range page.Items {
			seen, err := observe(&page.Items[i])
			if err != nil {
				w.log.Warn("pod not understood, it will not be handed out", zap.Error(err))
			}
			pods = append(pods, seen)
		}
		version = page.ResourceVersion // the same on every page
		return pods, page.Continue, nil
	}, func(err error) { w.log.Warn("will read again", zap.Error(err)) })
	return all, version, err
}

// Run watches until ctx ends. It is called once.
func (w *Watcher) Run(ctx context.Context) error {
	// Registered before the start: nothing is missed in between.
	_, err := w.factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { w.seen(o.(*corev1.Pod)) },
		UpdateFunc: func(old, o any) {
			before, now := old.(*corev1.Pod), o.(*corev1.Pod)
			if before.UID != now.UID { // deleted and made again between two events
				w.submit(core.PodGone{Key: keyOf(before)})
			}
			w.seen(now)
		},
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj // its last state was missed; its identity is what counts
			}
			if p, ok := o.(*corev1.Pod); ok {
				w.submit(core.PodGone{Key: keyOf(p)})
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

// Audit finds, now and then until ctx ends, pods that the core knows and the
// watch does not: those that went between a list and the start of the watch. The
// API server is asked about each, because a watch may also lag behind. known
// lists the pods the core knows.
func (w *Watcher) Audit(ctx context.Context, known func() []core.PodKey) {
	if !cache.WaitForCacheSync(ctx.Done(), w.synced) {
		return // ctx has ended
	}
	ticker := time.NewTicker(auditEvery)
	defer ticker.Stop()
	for {
		w.audit(ctx, known())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (w *Watcher) seen(p *corev1.Pod) {
	seen, err := observe(p)
	if err != nil {
		w.log.Warn("pod not understood, it will not be handed out", zap.Error(err))
	}
	w.submit(core.PodSeen{Pod: seen})
}

func (w *Watcher) audit(ctx context.Context, known []core.PodKey) {
	for _, key := range known {
		if p, err := w.lister.Pods(key.Namespace).Get(key.Name); err == nil && string(p.UID) == key.UID {
			continue
		}
		call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
		p, err := w.client.CoreV1().Pods(key.Namespace).Get(call, key.Name, metav1.GetOptions{})
		cancel()
		switch {
		case apierrors.IsNotFound(err) || err == nil && string(p.UID) != key.UID:
			w.log.Warn("repaired: a pod was gone without the watch having said so", zap.String("pod", key.Name))
			w.submit(core.PodGone{Key: key})
		case err != nil:
			if ctx.Err() == nil {
				w.log.Warn("pod not found in the watch, and the API server cannot be asked", zap.String("pod", key.Name), zap.Error(err))
			}
		}
	}
}

// slim keeps what is read, to keep the cache small.
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
		Status: corev1.PodStatus{Phase: p.Status.Phase, PodIP: p.Status.PodIP},
	}
	for _, name := range []string{v1alpha1.LabelPool, v1alpha1.LabelTemplate, v1alpha1.LabelPhase} {
		slim.Labels[name] = p.Labels[name]
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			slim.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return slim, nil
}
