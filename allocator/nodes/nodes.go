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
	"github.com/berth-sandbox/berth/internal/options"
)

// WatcherOptions configure a Watcher. All are required.
type WatcherOptions struct {
	Client kubernetes.Interface
	// Submit takes the events. It may block.
	Submit func(core.Event)
	Log    *zap.Logger
}

// Watcher watches the cluster's nodes.
type Watcher struct{ o WatcherOptions }

// NewWatcher returns a Watcher, or an error that names the missing options.
func NewWatcher(o WatcherOptions) (*Watcher, error) {
	if err := options.Require(o, "Client", "Submit", "Log"); err != nil {
		return nil, err
	}
	return &Watcher{o}, nil
}

// List returns the names of the usable nodes, read from the API server's store. It retries until
// ctx ends.
func (w *Watcher) List(ctx context.Context) ([]string, error) {
	return kube.List(ctx, func(ctx context.Context, next string) (names []string, following string, err error) {
		page, err := w.o.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: kube.PageSize, Continue: next})
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

func (w *Watcher) failed(err error) { w.o.Log.Warn("list failed, retrying", zap.Error(err)) }

// Run submits every change until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(w.o.Client, 0, informers.WithTransform(slim))
	if _, err := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { w.seen(o.(*corev1.Node)) },
		UpdateFunc: func(old, o any) {
			// The kubelet renews a node's status every few seconds.
			if before, now := old.(*corev1.Node), o.(*corev1.Node); usable(before) != usable(now) {
				w.seen(now)
			}
		},
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj
			}
			if n, ok := o.(*corev1.Node); ok {
				w.o.Submit(core.NodeGone{Name: n.Name})
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
	w.o.Submit(core.NodeSeen{Name: n.Name, Usable: usable(n)})
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

// slim keeps only the fields that this package reads, so that the cache stays small.
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
