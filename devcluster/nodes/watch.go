package nodes

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// WatchPods returns a factory of one informer, which watches the pods that selector
// selects. It calls seen for each version of a pod, and gone for the last version of a
// pod that was deleted. The caller starts the factory and shuts it down.
func WatchPods(client kubernetes.Interface, selector fields.Selector, seen, gone func(*corev1.Pod),
) (informers.SharedInformerFactory, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = selector.String() }))
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { seen(o.(*corev1.Pod)) },
		UpdateFunc: func(before, after any) {
			old, pod := before.(*corev1.Pod), after.(*corev1.Pod)
			if old.UID != pod.UID { // deleted and made again between two lists
				gone(old)
			}
			seen(pod)
		},
		DeleteFunc: func(o any) {
			if unseen, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unseen.Obj
			}
			gone(o.(*corev1.Pod))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch pods: %w", err)
	}
	return factory, nil
}
