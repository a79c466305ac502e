package processnode

import (
	"context"
	"fmt"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// Run registers the node and runs the pods bound to it until ctx ends. It then
// stops every container and does not report that to the API server, as if the
// machine had lost power. The next node of this name starts the containers again.
// Run may be called once. It returns an error only if waiting cannot repair the
// cause.
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
	factory.Shutdown() // no worker is added after this
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
