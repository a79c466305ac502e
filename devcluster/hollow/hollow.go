package hollow

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/nodes"
)

// Kind is the value of the label node.kubernetes.io/instance-type on every hollow
// node.
const Kind = "hollow"

const (
	// writersAtOnce is the number of pods whose status is written at once. An API
	// server on two cores is not faster with more.
	writersAtOnce = 8
	callTimeout   = 10 * time.Second
)

// Options configures the nodes.
type Options struct {
	// Nodes is the number of nodes, called node-0, node-1 and so on. Required.
	Nodes int
	// Handler answers for the pods. http.LocalAddrContextKey holds the pod's address.
	// Handler must close a connection that it hijacks. Default: a handler that answers
	// with the address.
	Handler http.Handler
	// StartTime returns how long a pod takes from its binding until it is ready. It may be called concurrently.
	// Default: none.
	StartTime func() time.Duration
}

// Nodes are running hollow nodes with their scheduler and server. Methods may be called
// concurrently.
type Nodes struct {
	client    kubernetes.Interface
	cidr      netip.Prefix
	addresses *nodes.Addresses
	pods      corelisters.PodLister
	queue     workqueue.TypedRateLimitingInterface[cache.ObjectName]
	echo      *echo

	cancel  context.CancelFunc
	runs    sync.WaitGroup // the scheduler, the watch and the writers
	runErr  error          // of the scheduler; read after runs
	stopped sync.Once
	stopErr error

	mu    sync.Mutex
	given map[types.UID]netip.Addr
}

// Start starts hollow nodes on a cluster without process nodes. The caller must call
// Close before Cluster.Down. If Start fails, it has stopped all that it started.
func Start(ctx context.Context, c *devcluster.Cluster, o Options) (*Nodes, error) {
	if o.Nodes < 1 {
		return nil, errors.New("hollow nodes: Options.Nodes is required")
	}
	if len(c.Nodes()) > 0 {
		return nil, errors.New("hollow nodes: the cluster has process nodes and so a scheduler")
	}
	if o.Handler == nil {
		o.Handler = http.HandlerFunc(answer)
	}
	client, err := kubernetes.NewForConfig(c.RestConfig())
	if err != nil {
		return nil, fmt.Errorf("hollow nodes: client: %w", err)
	}
	n := &Nodes{
		client: client, cidr: c.FakePodCIDR(), addresses: nodes.NewAddresses(c.FakePodCIDR()),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[cache.ObjectName](
			50*time.Millisecond, 5*time.Second)),
		given: map[types.UID]netip.Addr{},
	}
	for i := range o.Nodes {
		if err := nodes.Register(ctx, client, fmt.Sprintf("node-%d", i), Kind); err != nil {
			return nil, fmt.Errorf("hollow nodes: %w", err)
		}
	}
	factory, err := nodes.WatchPods(client, fields.OneTermNotEqualSelector("spec.nodeName", ""),
		func(pod *corev1.Pod) {
			if o.StartTime != nil && pod.DeletionTimestamp == nil && pod.Status.PodIP == "" {
				n.queue.AddAfter(cache.MetaObjectToName(pod), o.StartTime())
				return
			}
			n.queue.Add(cache.MetaObjectToName(pod))
		}, n.gone)
	if err != nil {
		return nil, fmt.Errorf("hollow nodes: %w", err)
	}
	n.pods = factory.Core().V1().Pods().Lister()
	if n.echo, err = startEcho(n.cidr, o.Handler); err != nil {
		return nil, fmt.Errorf("hollow nodes: %w", err)
	}
	var run context.Context
	run, n.cancel = context.WithCancel(context.WithoutCancel(ctx)) // ends by Close alone
	factory.StartWithContext(run)
	scheduler := nodes.Scheduler{Client: client, Kind: Kind, Log: zap.NewNop()}
	n.runs.Go(func() { n.runErr = scheduler.Run(run) })
	n.runs.Go(func() { <-run.Done(); n.queue.ShutDown(); factory.Shutdown() })
	for range writersAtOnce {
		n.runs.Go(func() { n.work(run) })
	}
	return n, nil
}

// PodCIDR is the range of pod addresses.
func (n *Nodes) PodCIDR() netip.Prefix { return n.cidr }

// Port is the server's port, at every address of PodCIDR.
func (n *Nodes) Port() uint16 { return n.echo.port }

// Close ends the scheduler and the server and waits for them. Node and Pod objects stay.
// The error includes those of the scheduler and the server since Start. Later calls
// return the error of the first one.
func (n *Nodes) Close() error {
	n.stopped.Do(func() {
		n.cancel()
		n.runs.Wait()
		n.stopErr = errors.Join(n.runErr, n.echo.close())
	})
	return n.stopErr
}

func (n *Nodes) gone(pod *corev1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a, ok := n.given[pod.UID]; ok {
		delete(n.given, pod.UID)
		n.addresses.Release(a)
	}
}

func (n *Nodes) work(ctx context.Context) {
	for {
		key, stop := n.queue.Get()
		if stop {
			return
		}
		if err := n.sync(ctx, key); err != nil {
			n.queue.AddRateLimited(key)
		} else {
			n.queue.Forget(key)
		}
		n.queue.Done(key)
	}
}

// sync makes a new pod ready, and deletes one that is to be deleted.
func (n *Nodes) sync(ctx context.Context, key cache.ObjectName) error {
	pod, err := n.pods.Pods(key.Namespace).Get(key.Name)
	if err != nil {
		return nil //nolint:nilerr // gone
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pods := n.client.CoreV1().Pods(pod.Namespace)
	switch {
	case pod.DeletionTimestamp != nil && *pod.DeletionGracePeriodSeconds > 0:
		err = pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64),
			Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
	case pod.DeletionTimestamp == nil && (pod.Status.PodIP == "" || recycled(pod)):
		var patch []byte
		if patch, err = n.ready(pod); err == nil {
			_, err = pods.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		}
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // gone, or another pod has the name
		return nil
	}
	return err
}

// lifeAnnotation is changed to have all containers of a pod restarted, if Berth made it so that it can be.
const lifeAnnotation = "berth.sh/life"

// recycled reports whether the containers of a pod are those of an earlier life.
func recycled(pod *corev1.Pod) bool {
	s := pod.Status.ContainerStatuses
	return len(pod.Spec.InitContainers) > 0 && len(s) > 0 && s[0].ContainerID != containerID(pod, s[0].Name)
}

// containerID names a container in the present life of its pod.
func containerID(pod *corev1.Pod, name string) string {
	return fmt.Sprintf("hollow://%s/%s/%s", pod.UID, name, pod.Annotations[lifeAnnotation])
}

// ready is the patch that makes a pod ready, on an address that it keeps until its
// object is gone.
func (n *Nodes) ready(pod *corev1.Pod) ([]byte, error) {
	n.mu.Lock()
	address, ok := n.given[pod.UID]
	if !ok {
		if address, ok = n.addresses.Take(); ok {
			n.given[pod.UID] = address
		}
	}
	n.mu.Unlock()
	if !ok {
		return nil, errors.New("no pod address is free")
	}
	now := metav1.Now()
	s := corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now, HostIP: nodes.HostIP, HostIPs: []corev1.HostIP{{IP: nodes.HostIP}},
		PodIP: address.String(), PodIPs: []corev1.PodIP{{IP: address.String()}},
	}
	for _, t := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized,
		corev1.ContainersReady, corev1.PodReady} {
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue,
			LastTransitionTime: now})
	}
	restarts, _ := strconv.Atoi(pod.Annotations[lifeAnnotation])
	status := func(c *corev1.Container, runs bool) corev1.ContainerStatus {
		its := corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, ContainerID: containerID(pod, c.Name),
			Ready: true, Started: &runs, RestartCount: int32(restarts),
			AllocatedResources: c.Resources.Requests, Resources: c.Resources.DeepCopy(),
		}
		if runs {
			its.State.Running = &corev1.ContainerStateRunning{StartedAt: now}
		} else {
			its.State.Terminated = &corev1.ContainerStateTerminated{
				Reason: "Completed", StartedAt: now, FinishedAt: now,
				Message: pod.Annotations[lifeAnnotation], // that of berth-clean
			}
		}
		return its
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		s.InitContainerStatuses = append(s.InitContainerStatuses, status(c, c.RestartPolicy != nil))
	}
	for i := range pod.Spec.Containers {
		s.ContainerStatuses = append(s.ContainerStatuses, status(&pod.Spec.Containers[i], true))
	}
	return json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": s})
}
