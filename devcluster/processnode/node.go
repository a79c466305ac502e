package processnode

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// ErrNoPod is returned by Evict when no pod of that name runs on the node.
var ErrNoPod = errors.New("no such pod runs on this node")

// Run registers the node and runs the pods bound to it until ctx ends. It then
// stops every container, without telling the API server, as a machine that goes
// down does; the next Run of a node of this name starts them again. Run may be
// called once. It returns an error only for what waiting cannot repair.
func (n *Node) Run(ctx context.Context) error {
	if err := n.register(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("register node %s: %w", n.o.Name, err)
	}
	n.running.Go(func() { n.heartbeat(ctx) })

	factory := informers.NewSharedInformerFactoryWithOptions(n.client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", n.o.Name).String()
		}))
	pods := factory.Core().V1().Pods().Informer()
	_, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { n.seen(ctx, o.(*corev1.Pod)) },
		UpdateFunc: func(before, after any) {
			old, pod := before.(*corev1.Pod), after.(*corev1.Pod)
			if old.UID != pod.UID { // deleted and made again between two lists
				n.vanished(old)
			}
			n.seen(ctx, pod)
		},
		DeleteFunc: func(o any) {
			if unseen, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unseen.Obj
			}
			n.vanished(o.(*corev1.Pod))
		},
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	factory.StartWithContext(ctx)
	n.o.Log.Info("process node runs", zap.String("node", n.o.Name))
	<-ctx.Done()
	factory.Shutdown() // from here on no worker is added
	n.running.Wait()
	return nil
}

func (n *Node) seen(ctx context.Context, pod *corev1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w, ok := n.workers[pod.UID]; ok {
		w.tell(func(in *inbox) { in.pod = pod })
		return
	}
	if ctx.Err() != nil {
		return
	}
	w := newWorker(ctx, n, pod)
	n.workers[pod.UID] = w
	n.running.Go(func() {
		w.run()
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.workers, pod.UID)
	})
}

func (n *Node) vanished(pod *corev1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w, ok := n.workers[pod.UID]; ok {
		w.tell(func(in *inbox) { in.pod, in.gone = pod, true })
	}
}

// Evict ends a pod as the kubelet does under pressure on a resource: grace of a
// second, phase Failed, reason Evicted; the object stays. It returns when no
// container of the pod runs any more, or when ctx ends.
func (n *Node) Evict(ctx context.Context, namespace, name, message string) error {
	w := n.worker(namespace, name)
	if w == nil {
		return fmt.Errorf("evict %s/%s: %w", namespace, name, ErrNoPod)
	}
	grace := int64(1) // eviction manager, immediateEvictionGracePeriodSeconds
	w.tell(func(in *inbox) {
		in.evict = &verdict{reason: "Evicted", message: message, grace: &grace, disruption: true}
	})
	select {
	case <-w.over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("evict %s/%s: %w", namespace, name, ctx.Err())
	}
}

// LoseSandbox has a pod's sandbox die, as when its pause process is killed: all
// its containers end and are started again at another address, and the old one
// is free for the next pod. As on a kubelet, the pod's status names the old
// address, and calls the pod ready, until containers run at the new one. It
// returns at once; a pod that ends, or has no address yet, loses nothing.
func (n *Node) LoseSandbox(namespace, name string) error {
	w := n.worker(namespace, name)
	if w == nil {
		return fmt.Errorf("lose the sandbox of %s/%s: %w", namespace, name, ErrNoPod)
	}
	w.tell(func(in *inbox) { in.lost = true })
	return nil
}

// worker finds the pod of that name that still runs.
func (n *Node) worker(namespace, name string) *worker {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, w := range n.workers {
		if w.writer.namespace != namespace || w.writer.name != name {
			continue
		}
		select {
		case <-w.over:
		default:
			return w
		}
	}
	return nil
}
