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

// List returns the names of the usable nodes and of the cordoned ones, read from the API server's store. It
// retries until ctx ends.
func (w *Watcher) List(ctx context.Context) (usable, cordoned []string, err error) {
	all, _, err := kube.List(ctx, w.resource, w.o.Log, func(page *corev1.NodeList) (all []core.NodeSeen) {
		for i := range page.Items {
			all = append(all, observe(&page.Items[i]))
		}
		return all
	})
	for _, n := range all {
		switch {
		case n.Usable:
			usable = append(usable, n.Name)
		case n.Cordoned:
			cordoned = append(cordoned, n.Name)
		}
	}
	return usable, cordoned, err
}

// Run submits every change until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	return kube.Watch(ctx, w.resource, &corev1.Node{}, slim, func(was, is *corev1.Node) {
		// The kubelet renews a node's status every few seconds.
		if was == nil || observe(was) != observe(is) {
			w.o.Submit(observe(is))
		}
	}, func(n *corev1.Node) { w.o.Submit(core.NodeGone{Name: n.Name}) })
}

func observe(n *corev1.Node) core.NodeSeen {
	cordoned := n.Spec.Unschedulable || n.DeletionTimestamp != nil
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return core.NodeSeen{Name: n.Name, Usable: !cordoned, Cordoned: cordoned}
		}
	}
	return core.NodeSeen{Name: n.Name}
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
