package nodes

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
)

// Watcher watches the cluster's nodes.
type Watcher struct {
	o        kube.Options
	resource kube.Resource
}

// NewWatcher returns a Watcher, or an error that names the missing options.
func NewWatcher(o kube.Options) (*Watcher, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	return &Watcher{o, kube.Resource{Client: o.Clients.Kubernetes.CoreV1().RESTClient(), Name: "nodes"}}, nil
}

// List returns the names of the usable nodes, read from the API server's store. It retries until
// ctx ends.
func (w *Watcher) List(ctx context.Context) ([]string, error) {
	names, _, err := kube.List(ctx, w.resource, w.o.Log, func(page *corev1.NodeList) (names []string) {
		for i := range page.Items {
			if usable(&page.Items[i]) {
				names = append(names, page.Items[i].Name)
			}
		}
		return names
	})
	return names, err
}

// Run submits every change until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	return kube.Watch(ctx, w.resource, &corev1.Node{}, slim, func(was, is *corev1.Node) {
		// The kubelet renews a node's status every few seconds.
		if was == nil || usable(was) != usable(is) {
			w.o.Submit(core.NodeSeen{Name: is.Name, Usable: usable(is)})
		}
	}, func(n *corev1.Node) { w.o.Submit(core.NodeGone{Name: n.Name}) })
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
func slim(n *corev1.Node) *corev1.Node {
	slim := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, DeletionTimestamp: n.DeletionTimestamp},
		Spec:       corev1.NodeSpec{Unschedulable: n.Spec.Unschedulable},
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			slim.Status.Conditions = append(slim.Status.Conditions, corev1.NodeCondition{Type: c.Type, Status: c.Status})
		}
	}
	return slim
}
