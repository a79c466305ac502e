// Package nodes tells the core which nodes get something new: those that are
// ready and not cordoned.
package nodes

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
)

// Watcher watches nodes.
type Watcher struct {
	Client kubernetes.Interface
	// Submit takes the events. It may block.
	Submit func(core.Event)
	Log    *zap.Logger
}

// List reads the names of the nodes that are usable from the API server's store. It
// tries again until ctx ends.
func (w *Watcher) List(ctx context.Context) ([]string, error) {
	return kube.List(ctx, func(ctx context.Context, next string) (names []string, following string, err error) {
		page, err := w.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: kube.PageSize, Continue: next})
		if err != nil {
			return nil, "", fmt.Errorf("list nodes: %w", err)
		}
		for i := range page.Items {
			if usable(&page.Items[i]) {
				names = append(names, page.Items[i].Name)
			}
		}
		return names, page.Continue, nil
	}, w.failed)
}

func (w *Watcher) failed(err error) { w.Log.Warn("will read again", zap.Error(err)) }

// Run tells of every change until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(w.Client, 0, informers.WithTransform(slim))
	if _, err := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { w.seen(o.(*corev1.Node)) },
		UpdateFunc: func(old, o any) {
			// A node is written every few seconds to say that it is alive.
			if before, now := old.(*corev1.Node), o.(*corev1.Node); usable(before) != usable(now) {
				w.seen(now)
			}
		},
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj
			}
			if n, ok := o.(*corev1.Node); ok {
				w.Submit(core.NodeGone{Name: n.Name})
			}
		},
	}); err != nil {
		return fmt.Errorf("watch nodes: %w", err)
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

func (w *Watcher) seen(n *corev1.Node) {
	w.Submit(core.NodeSeen{Name: n.Name, Usable: usable(n)})
}

func usable(n *corev1.Node) bool {
	if n.Spec.Unschedulable || n.DeletionTimestamp != nil {
		return false
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// slim drops what is never read, to keep the cache small.
func slim(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	slim := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, DeletionTimestamp: n.DeletionTimestamp},
		Spec:       corev1.NodeSpec{Unschedulable: n.Spec.Unschedulable},
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			slim.Status.Conditions = append(slim.Status.Conditions, corev1.NodeCondition{Type: c.Type, Status: c.Status})
		}
	}
	return slim, nil
}
