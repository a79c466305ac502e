package scheduler

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

// callTimeout bounds each request to the API server.
const callTimeout = 10 * time.Second

// Options configures a scheduler.
type Options struct {
	// Client may bind pods and write their status. Required.
	Client kubernetes.Interface
	// InstanceType is the value of the label node.kubernetes.io/instance-type on
	// the nodes. Other nodes get no pods. Required.
	InstanceType string
	// MaxPods is the largest number of pods on one node. 0: no limit.
	MaxPods int
	// Workers is how many pods are bound at once. Default 1.
	Workers int
	// Log defaults to no log.
	Log *zap.Logger
}

// Run binds pods of the default scheduler until ctx ends. It returns an error only if
// waiting cannot repair the cause.
func Run(ctx context.Context, o Options) error {
	if o.Client == nil || o.InstanceType == "" {
		return errors.New("scheduler: Options.Client and Options.InstanceType are required")
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	factory := informers.NewSharedInformerFactory(o.Client, 0)
	retries := workqueue.NewTypedItemExponentialFailureRateLimiter[cache.ObjectName](50*time.Millisecond, 10*time.Second)
	s := &scheduler{
		o:      o,
		pods:   factory.Core().V1().Pods().Lister(),
		nodes:  factory.Core().V1().Nodes().Lister(),
		ledger: newLedger(),
		queue:  workqueue.NewTypedRateLimitingQueue(retries),
	}
	_, podErr := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { s.podSeen(o.(*corev1.Pod)) },
		UpdateFunc: func(before, after any) {
			old, pod := before.(*corev1.Pod), after.(*corev1.Pod)
			if old.UID != pod.UID { // deleted and made again between two lists
				s.podGone(old)
			}
			s.podSeen(pod)
		},
		DeleteFunc: func(o any) {
			if unseen, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unseen.Obj
			}
			s.podGone(o.(*corev1.Pod))
		},
	})
	_, nodeErr := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { s.wake() },
		UpdateFunc: func(before, after any) {
			if old, node := before.(*corev1.Node), after.(*corev1.Node); s.fits(old, nil) != s.fits(node, nil) ||
				!labels.Equals(old.Labels, node.Labels) {
				s.wake()
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
	var workers sync.WaitGroup
	for range max(1, o.Workers) {
		workers.Go(func() { s.work(ctx) })
	}
	<-ctx.Done()
	s.queue.ShutDown()
	workers.Wait()
	return nil
}

type scheduler struct {
	o      Options
	pods   corelisters.PodLister
	nodes  corelisters.NodeLister
	ledger *ledger
	queue  workqueue.TypedRateLimitingInterface[cache.ObjectName]
}

func (s *scheduler) podSeen(pod *corev1.Pod) {
	if s.ledger.saw(pod) {
		s.wake()
	}
	if wanted(pod) {
		s.queue.Add(cache.MetaObjectToName(pod))
	}
}

func (s *scheduler) podGone(pod *corev1.Pod) {
	if s.ledger.forget(pod.UID) {
		s.wake()
	}
}

// wake queues the pods without a node again, after a change that may have made room.
func (s *scheduler) wake() {
	for _, key := range s.ledger.woken() {
		s.queue.Add(key)
	}
}

func (s *scheduler) work(ctx context.Context) {
	for {
		key, stop := s.queue.Get()
		if stop {
			return
		}
		if err := s.schedule(ctx, key); err != nil && ctx.Err() == nil {
			s.o.Log.Info("pod will be scheduled again", zap.Stringer("pod", key), zap.Error(err))
			s.queue.AddRateLimited(key)
		} else {
			s.queue.Forget(key)
		}
		s.queue.Done(key)
	}
}

// wanted reports whether a pod waits for this scheduler.
func wanted(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.Spec.SchedulerName == corev1.DefaultSchedulerName &&
		pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && !terminal(pod.Status.Phase)
}

func terminal(p corev1.PodPhase) bool { return p == corev1.PodSucceeded || p == corev1.PodFailed }

// fits reports whether a node takes new pods, and this pod if it is not nil.
func (s *scheduler) fits(node *corev1.Node, pod *corev1.Pod) bool {
	if node.Spec.Unschedulable || node.DeletionTimestamp != nil ||
		node.Labels[corev1.LabelInstanceTypeStable] != s.o.InstanceType {
		return false
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return pod == nil || labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(node.Labels))
		}
	}
	return false
}

// unknownRule names a required placement rule that this scheduler does not support.
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
	if err != nil || !wanted(pod) {
		return nil // gone, or not ours any more
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if rule := unknownRule(&pod.Spec); rule != "" {
		return s.unschedulable(ctx, pod, fmt.Sprintf("%s is not known to the scheduler of %s nodes", rule, s.o.InstanceType))
	}
	var seen int
	node, placed := s.ledger.place(key, pod.UID, func(count map[string]int) (node string) {
		node, seen = s.choose(pod, count)
		return node
	})
	if !placed {
		return s.resolve(ctx, pod)
	}
	if node == "" {
		return s.unschedulable(ctx, pod, fmt.Sprintf(
			"0/%d nodes are available: none is a ready, uncordoned %s node that matches the pod's nodeSelector and has room",
			seen, s.o.InstanceType))
	}
	err = s.o.Client.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err == nil {
		return nil
	}
	if unresolved := s.resolve(ctx, pod); unresolved != nil {
		return fmt.Errorf("bind to %s: %w; %w", node, err, unresolved)
	}
	return nil
}

// resolve reads whether a pod that has its place in the ledger is bound. A binding
// may have succeeded although its request failed. The place stays taken until that
// is known.
func (s *scheduler) resolve(ctx context.Context, pod *corev1.Pod) error {
	now, err := s.o.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("ask for the pod's node: %w", err)
	}
	if err == nil && now.UID == pod.UID && now.Spec.NodeName != "" {
		return nil
	}
	if s.ledger.forget(pod.UID) {
		s.wake()
	}
	if err == nil && now.UID == pod.UID {
		return errors.New("it is not bound")
	}
	return nil // gone
}

// choose returns the node for a pod, or none, and how many nodes there are.
func (s *scheduler) choose(pod *corev1.Pod, count map[string]int) (node string, nodes int) {
	all, _ := s.nodes.List(labels.Everything()) // a lister's cache never fails
	for _, n := range all {
		if !s.fits(n, pod) || (s.o.MaxPods > 0 && count[n.Name] >= s.o.MaxPods) {
			continue
		}
		if node == "" || count[n.Name] < count[node] || (count[n.Name] == count[node] && n.Name < node) {
			node = n.Name
		}
	}
	return node, len(all)
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
	if _, err := s.o.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status"); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write condition: %w", err)
	}
	return nil
}
