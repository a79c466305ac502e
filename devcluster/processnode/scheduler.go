package processnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

// RunScheduler binds pods of the default scheduler to ready, uncordoned process
// nodes until ctx ends: the node with the fewest pods first, by name among
// equals. Of the rules a pod may set it knows nodeSelector; a pod that requires
// affinity, and one that fits no node, stays Pending and says why. Taints,
// resources and priorities are not looked at. log may be nil.
func RunScheduler(ctx context.Context, client kubernetes.Interface, log *zap.Logger) error {
	if log == nil {
		log = zap.NewNop()
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	s := &scheduler{
		client: client,
		pods:   factory.Core().V1().Pods().Lister(),
		nodes:  factory.Core().V1().Nodes().Lister(),
		bound:  map[types.UID]string{},
	}
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[cache.ObjectName](50*time.Millisecond, 10*time.Second))
	add := func(o any) {
		if pod, ok := o.(*corev1.Pod); ok && wanted(pod) {
			queue.Add(cache.MetaObjectToName(pod))
		}
	}
	retry := func() { // something changed that may give a waiting pod its place
		pods, _ := s.pods.List(labels.Everything()) // a lister's cache never fails
		for _, pod := range pods {
			add(pod)
		}
	}
	_, podErr := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: add, UpdateFunc: func(_, o any) { add(o) }, DeleteFunc: func(any) { retry() },
	})
	_, nodeErr := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { retry() },
		UpdateFunc: func(before, after any) {
			if old, node := before.(*corev1.Node), after.(*corev1.Node); fits(old, nil) != fits(node, nil) || !labels.Equals(old.Labels, node.Labels) {
				retry()
			}
		},
	})
	if err := errors.Join(podErr, nodeErr); err != nil {
		return fmt.Errorf("scheduler: watch: %w", err)
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	for kind, ok := range factory.WaitForCacheSync(ctx.Done()) {
		if !ok && ctx.Err() == nil {
			return fmt.Errorf("scheduler: %v could not be listed", kind)
		}
	}
	var worker sync.WaitGroup
	worker.Go(func() {
		for {
			key, stop := queue.Get()
			if stop {
				return
			}
			if err := s.schedule(ctx, key); err != nil && ctx.Err() == nil {
				log.Info("pod will be scheduled again", zap.Stringer("pod", key), zap.Error(err))
				queue.AddRateLimited(key)
			} else {
				queue.Forget(key)
			}
			queue.Done(key)
		}
	})
	<-ctx.Done()
	queue.ShutDown()
	worker.Wait()
	return nil
}

type scheduler struct {
	client kubernetes.Interface
	pods   corelisters.PodLister
	nodes  corelisters.NodeLister
	bound  map[types.UID]string // to which node, until the cache shows it; one goroutine's
}

// wanted says whether a pod waits for this scheduler.
func wanted(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.Spec.SchedulerName == corev1.DefaultSchedulerName &&
		pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && !terminal(pod.Status.Phase)
}

// fits says whether a node takes new pods, and this one if it is not nil.
func fits(node *corev1.Node, pod *corev1.Pod) bool {
	if node.Spec.Unschedulable || node.DeletionTimestamp != nil || node.Labels[corev1.LabelInstanceTypeStable] != InstanceType {
		return false
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return pod == nil || labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(node.Labels))
		}
	}
	return false
}

// unknownRule names a placement rule that must hold and cannot be judged here.
func unknownRule(spec *corev1.PodSpec) string {
	a := spec.Affinity
	switch {
	case a == nil:
		return ""
	case a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil:
		return "spec.affinity.nodeAffinity"
	case a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0:
		return "spec.affinity.podAffinity"
	case a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0:
		return "spec.affinity.podAntiAffinity"
	}
	return ""
}

func (s *scheduler) schedule(ctx context.Context, key cache.ObjectName) error {
	pod, err := s.pods.Pods(key.Namespace).Get(key.Name)
	if err != nil || !wanted(pod) || s.bound[pod.UID] != "" {
		return nil // gone, or not ours any more
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	node, why := s.choose(pod)
	if node == "" {
		return s.unschedulable(ctx, pod, why)
	}
	err = s.client.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("bind to %s: %w", node, err)
	}
	s.bound[pod.UID] = node
	return nil
}

// choose returns the node, or none and the reason.
func (s *scheduler) choose(pod *corev1.Pod) (node, why string) {
	if rule := unknownRule(&pod.Spec); rule != "" {
		return "", rule + " is not known to the scheduler of process nodes"
	}
	nodes, _ := s.nodes.List(labels.Everything()) // a lister's cache never fails
	count := s.count()
	for _, n := range nodes {
		if !fits(n, pod) || count[n.Name] >= maxPods {
			continue
		}
		if node == "" || count[n.Name] < count[node] || (count[n.Name] == count[node] && n.Name < node) {
			node = n.Name
		}
	}
	return node, fmt.Sprintf("0/%d nodes are available: none is a ready, uncordoned process node that matches the pod's nodeSelector and has room", len(nodes))
}

func (s *scheduler) count() map[string]int {
	pods, _ := s.pods.List(labels.Everything())
	count, pending := map[string]int{}, map[types.UID]bool{}
	for _, p := range pods {
		node := p.Spec.NodeName
		if node == "" {
			node = s.bound[p.UID]
			pending[p.UID] = true
		}
		if node != "" && !terminal(p.Status.Phase) {
			count[node]++
		}
	}
	for uid := range s.bound {
		if !pending[uid] {
			delete(s.bound, uid)
		}
	}
	return count
}

func (s *scheduler) unschedulable(ctx context.Context, pod *corev1.Pod, why string) error {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Message == why {
			return nil
		}
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{"conditions": []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: why,
			LastTransitionTime: metav1.Now(), ObservedGeneration: pod.Generation,
		}}},
	})
	if err != nil {
		return fmt.Errorf("marshal condition: %w", err)
	}
	if _, err := s.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write condition: %w", err)
	}
	return nil
}
