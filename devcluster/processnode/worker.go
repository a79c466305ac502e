package processnode

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/flowcontrol"
)

const (
	// callTimeout bounds each request to the API server.
	callTimeout = 10 * time.Second
	// writeAgain is the pause after a status that could not be written.
	writeAgain = 200 * time.Millisecond
	// The kubelet's default bounds of the wait before a container is started again.
	firstBackOff, lastBackOff = 10 * time.Second, 5 * time.Minute
)

// worker runs one pod, from its first sight on the node until its object is gone
// and its container has ended. A pod of the same name with another UID has a worker
// of its own.
type worker struct {
	node *Node
	log  *zap.Logger

	ctx      context.Context    // of all goroutines of this pod
	cancel   context.CancelFunc // called by run as it ends
	events   chan func()        // to be called on the worker's goroutine; never closed
	poke     chan struct{}      // capacity 1: latest or latestGone have changed
	children sync.WaitGroup

	mu         sync.Mutex
	latest     *corev1.Pod // as the watch showed it last
	latestGone bool

	// The fields below belong to the goroutine of run.
	pod       *corev1.Pod
	spec      *corev1.Container
	gone      bool   // the object is deleted
	rejected  string // why the pod is refused; empty: it is not
	completed bool   // its container has ended for good
	finished  bool   // the container does not run and will never run
	deleted   bool   // the deletion of the object was requested after the end

	inits        []initRun // nil: the init containers have not run yet
	life         string    // the annotation of this name, as the sidecar has read it at its start
	initRestarts int32
	restarting   bool // all containers are being killed, to be started again
	hasRestarted bool // that has happened

	current  *run                             // nil while the container does not run
	exited   *corev1.ContainerStateTerminated // how the latest run ended
	earlier  *corev1.ContainerStateTerminated // how the run before it ended
	waiting  *corev1.ContainerStateWaiting    // why it is not started now; nil: no reason
	restarts int32
	backOff  *flowcontrol.Backoff

	address   netip.Addr // valid from the first start on
	holds     bool       // the address is taken from the node's pool
	startTime metav1.Time
	status    corev1.PodStatus // as written last
	wake      time.Time        // zero: no alarm
}

func newWorker(ctx context.Context, n *Node, pod *corev1.Pod) *worker {
	w := &worker{
		node: n, pod: pod, latest: pod, spec: &pod.Spec.Containers[0], status: pod.Status, rejected: rejection(&pod.Spec),
		log:    n.o.Log.With(zap.String("pod", pod.Namespace+"/"+pod.Name), zap.String("uid", string(pod.UID))),
		events: make(chan func()), poke: make(chan struct{}, 1),
		backOff:   flowcontrol.NewBackOff(firstBackOff, lastBackOff),
		startTime: metav1.Now().Rfc3339Copy(),
	}
	w.ctx, w.cancel = context.WithCancel(ctx)
	return w
}

// run is the worker's goroutine. Each round acts on the news, reports and waits.
func (w *worker) run() {
	defer w.children.Wait()
	defer w.cancel()
	for {
		w.sync()
		w.publish()
		if w.finished && w.gone {
			return
		}
		if !w.wait() {
			w.abandon()
			return
		}
	}
}

// wait returns true when there may be news, false when the node ends.
func (w *worker) wait() bool {
	var alarm <-chan time.Time
	if !w.wake.IsZero() {
		timer := time.NewTimer(time.Until(w.wake))
		defer timer.Stop()
		alarm = timer.C
	}
	select {
	case <-w.poke:
	case <-alarm:
	case f := <-w.events:
		f()
	case <-w.ctx.Done():
		return false
	}
	return true
}

// post has f called on the worker's goroutine, unless the worker is ending.
func (w *worker) post(f func()) {
	select {
	case w.events <- f:
	case <-w.ctx.Done():
	}
}

// notify tells the worker what the watch shows. It never blocks.
func (w *worker) notify(pod *corev1.Pod, gone bool) {
	w.mu.Lock()
	w.latest, w.latestGone = pod, w.latestGone || gone
	w.mu.Unlock()
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

func (w *worker) wakeAfter(d time.Duration) {
	if at := time.Now().Add(d); w.wake.IsZero() || at.Before(w.wake) {
		w.wake = at
	}
}

// publish writes the present status to the API server if it has changed. After the end
// of a pod whose deletion was requested it deletes the object too.
func (w *worker) publish() {
	if w.gone {
		return
	}
	status := w.makeStatus()
	if !apiequality.Semantic.DeepEqual(status, w.status) {
		if err := w.write(status); err != nil {
			w.log.Info("pod status will be written again", zap.Error(err))
			w.wakeAfter(writeAgain)
			return
		}
		w.status = status
	}
	if w.finished && w.pod.DeletionTimestamp != nil && !w.deleted {
		if err := w.deleteObject(); err != nil {
			w.log.Info("pod will be deleted again", zap.Error(err))
			w.wakeAfter(writeAgain)
			return
		}
		w.deleted = true
	}
}
