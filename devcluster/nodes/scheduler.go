package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

const (
	// bindersAtOnce is the number of pods that are bound at once. An API server on
	// two cores is not faster with more.
	bindersAtOnce = 8
	// retryAfter is the pause after a pass in which a request failed.
	retryAfter = 100 * time.Millisecond
	// callTimeout bounds each request to the API server.
	callTimeout = 10 * time.Second
	// byNode is an index of pods that have not ended, by the name of their node. Pods
	// that wait for this scheduler are at the empty name.
	byNode = "node"
)

// Scheduler binds the pods of the default scheduler. All fields are required.
type Scheduler struct {
	// Client may bind pods and write their status.
	Client kubernetes.Interface
	// Kind is that of the nodes. Other nodes get no pods.
	Kind string
	Log  *zap.Logger

	pods  cache.Indexer
	nodes corelisters.NodeLister
	// poke has one element if the watches show a change after which a pod may be
	// bound.
	poke chan struct{}
	// assumed has the node of each pod whose binding was sent, and that the watch does
	// not show on a node yet.
	assumed map[types.UID]assumption
}

type assumption struct {
	pod  *corev1.Pod
	node string
}

// Run binds pods until ctx ends. It may be called once. It returns an error only if
// waiting cannot repair the cause.
func (s *Scheduler) Run(ctx context.Context) error {
	s.poke, s.assumed = make(chan struct{}, 1), map[types.UID]assumption{}
	factory := informers.NewSharedInformerFactory(s.Client, 0)
	s.nodes = factory.Core().V1().Nodes().Lister()
	pods := factory.Core().V1().Pods().Informer()
	s.pods = pods.GetIndexer()
	_, podErr := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { s.seen(o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { s.seen(o.(*corev1.Pod)) },
	})
	_, nodeErr := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { s.wake() },
		UpdateFunc: func(any, any) { s.wake() },
	})
	if err := errors.Join(podErr, nodeErr, pods.AddIndexers(cache.Indexers{byNode: indexByNode})); err != nil {
		return fmt.Errorf("scheduler: watch: %w", err)
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	factory.WaitForCacheSync(ctx.Done())
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.poke:
		}
		if err := s.pass(ctx); err != nil && ctx.Err() == nil {
			s.Log.Info("pods will be scheduled again", zap.Error(err))
			time.AfterFunc(retryAfter, s.wake)
		}
	}
}

func (s *Scheduler) wake() {
	select {
	case s.poke <- struct{}{}:
	default:
	}
}

func (s *Scheduler) seen(pod *corev1.Pod) {
	if waits(pod) {
		s.wake()
	}
}

func indexByNode(o any) ([]string, error) {
	if pod := o.(*corev1.Pod); !ended(pod) && (pod.Spec.NodeName != "" || waits(pod)) {
		return []string{pod.Spec.NodeName}, nil
	}
	return nil, nil
}

// waits reports whether a pod waits for this scheduler.
func waits(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.Spec.SchedulerName == corev1.DefaultSchedulerName &&
		pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && !ended(pod)
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// pass gives each pod that waits a node, in the order in which they were made, and
// returns when the API server has answered all bindings.
func (s *Scheduler) pass(ctx context.Context) error {
	// The watch goes on meanwhile. The assumptions are read first, so that a pod whose
	// binding it shows now is in the index, and is neither bound again nor left out.
	placed := map[string]string{}
	for uid, a := range s.assumed {
		now, found, _ := s.pods.Get(a.pod)
		if pod, _ := now.(*corev1.Pod); !found || pod.UID != uid || !waits(pod) {
			delete(s.assumed, uid) // the watch shows its node or its end
		} else {
			placed[cache.MetaObjectToName(a.pod).String()] = a.node
		}
	}
	waiting, _ := s.pods.ByIndex(byNode, "") // an index never fails
	if len(waiting) == 0 {
		return nil
	}
	slices.SortFunc(waiting, func(a, b any) int {
		return a.(*corev1.Pod).CreationTimestamp.Compare(b.(*corev1.Pod).CreationTimestamp.Time)
	})
	all, _ := s.nodes.List(labels.Everything()) // a lister's cache never fails
	for _, node := range all {
		bound, _ := s.pods.IndexKeys(byNode, node.Name)
		for _, pod := range bound {
			placed[pod] = node.Name
		}
	}
	count := map[string]int{}
	for _, node := range placed {
		count[node]++
	}
	var sends errgroup.Group
	sends.SetLimit(bindersAtOnce)
	unbound := make(chan types.UID, len(waiting))
	for _, o := range waiting {
		pod := o.(*corev1.Pod)
		if _, sent := s.assumed[pod.UID]; sent {
			continue
		}
		node := choose(all, pod, s.Kind, count)
		if node == "" {
			why := "spec.affinity is not known to the scheduler of " + s.Kind + " nodes"
			if pod.Spec.Affinity == nil {
				why = fmt.Sprintf("0/%d nodes are available: none is an uncordoned %s node that matches the pod's "+
					"nodeSelector", len(all), s.Kind)
			}
			sends.Go(func() error { return s.unschedulable(ctx, pod, why) })
			continue
		}
		s.assumed[pod.UID] = assumption{pod, node}
		count[node]++
		sends.Go(func() error {
			err := s.bind(ctx, pod, node)
			if err != nil {
				unbound <- pod.UID
			}
			return err
		})
	}
	err := sends.Wait()
	for range len(unbound) {
		delete(s.assumed, <-unbound)
	}
	return err
}

// choose returns the name of the node for a pod, or none.
func choose(all []*corev1.Node, pod *corev1.Pod, kind string, count map[string]int) (node string) {
	if pod.Spec.Affinity != nil {
		return ""
	}
	for _, n := range all {
		fits := !n.Spec.Unschedulable && n.DeletionTimestamp == nil &&
			n.Labels[corev1.LabelInstanceTypeStable] == kind &&
			labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(n.Labels))
		if fits && (node == "" || count[n.Name] < count[node] || (count[n.Name] == count[node] && n.Name < node)) {
			node = n.Name
		}
	}
	return node
}

// bind sends a binding. If the request fails, bind reads whether the binding succeeded,
// again and again until the API server answers. The pod keeps its place on the node
// until then.
func (s *Scheduler) bind(ctx context.Context, pod *corev1.Pod, node string) error {
	pods := s.Client.CoreV1().Pods(pod.Namespace)
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	failed := pods.Bind(call, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if failed == nil {
		return nil
	}
	bound := false
	err := wait.PollUntilContextCancel(ctx, retryAfter, true, func(ctx context.Context) (bool, error) {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		now, err := pods.Get(call, pod.Name, metav1.GetOptions{})
		bound = err == nil && now.UID == pod.UID && now.Spec.NodeName != ""
		return err == nil || apierrors.IsNotFound(err), nil
	})
	if err == nil && bound {
		return nil
	}
	return fmt.Errorf("bind to %s: %w", node, failed)
}

func (s *Scheduler) unschedulable(ctx context.Context, pod *corev1.Pod, why string) error {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Message == why {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
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
	if _, err := s.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status"); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write condition: %w", err)
	}
	return nil
}
