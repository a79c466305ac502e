package processnode

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// worker runs one pod, from its first sight on the node until its object is gone
// and none of its containers runs. A pod of the same name with another UID has a
// worker of its own.
type worker struct {
	node *Node
	log  *zap.Logger

	ctx      context.Context    // of all goroutines of this pod
	cancel   context.CancelFunc // called by run as it ends
	events   chan func()        // to be called on the worker's goroutine; never closed
	poke     chan struct{}      // capacity 1: the inbox has news
	children sync.WaitGroup
	writer   *statusWriter

	mu    sync.Mutex
	inbox inbox

	// The fields below belong to the goroutine of run.
	pod         *corev1.Pod
	gone        bool   // the object is deleted
	rejected    string // why the pod is refused; empty: it is not
	completed   bool   // all its containers have ended for good
	finished    bool   // no container runs or will ever run
	past        bool   // the pod was terminal when first seen: its status stays
	containers  []*container
	address     netip.Addr // valid from the first start on
	holds       bool       // the address is taken from the node's pool
	known       bool       // the status shows the address
	backOff     crashBackOff
	startTime   metav1.Time
	status      corev1.PodStatus // as offered last
	written     <-chan struct{}  // closed when that status, or a later one, was written
	reported    bool             // in this pass
	terminating bool             // the pod's end has begun
	wake        time.Time        // zero: no alarm
}

// inbox holds the latest news for a worker.
type inbox struct {
	pod  *corev1.Pod
	gone bool
}

// newWorker reads the status that an earlier run of the node has left: restart
// counts go on, and containers that it shows as running have died with that node.
func newWorker(ctx context.Context, n *Node, pod *corev1.Pod) *worker {
	log := n.o.Log.With(zap.String("pod", pod.Namespace+"/"+pod.Name), zap.String("uid", string(pod.UID)))
	w := &worker{
		node: n, log: log, pod: pod,
		events: make(chan func()), poke: make(chan struct{}, 1),
		writer:    newStatusWriter(n.client, log, pod),
		backOff:   newCrashBackOff(n.o.RestartBackOff),
		startTime: metav1.Now().Rfc3339Copy(),
		status:    pod.Status,
	}
	w.ctx, w.cancel = context.WithCancel(ctx)
	if pod.Status.StartTime != nil {
		w.startTime = *pod.Status.StartTime
	}
	if terminal(pod.Status.Phase) {
		w.past, w.finished = true, true
	} else if fields := unsupported(&pod.Spec); len(fields) > 0 {
		w.rejected = rejection(fields)
	}
	for i := range pod.Spec.Containers {
		w.adopt(&container{spec: &pod.Spec.Containers[i], trigger: make(chan struct{}, 1)})
	}
	return w
}

func (w *worker) adopt(c *container) {
	w.containers = append(w.containers, c)
	for _, s := range w.pod.Status.ContainerStatuses {
		if s.Name != c.spec.Name {
			continue
		}
		c.restarts, c.exited, c.earlier = s.RestartCount, s.LastTerminationState.Terminated, nil
		switch {
		case s.State.Running != nil: // containerd reports this for containers that a reboot has ended
			c.earlier = c.exited
			c.exited = &corev1.ContainerStateTerminated{ExitCode: 255, Reason: "Unknown", ContainerID: s.ContainerID,
				StartedAt: s.State.Running.StartedAt, FinishedAt: metav1.Now()}
		case s.State.Terminated != nil:
			c.earlier, c.exited = c.exited, s.State.Terminated
		}
	}
}

// run is the worker's goroutine. Each round acts on the news, reports and waits.
func (w *worker) run() {
	defer w.children.Wait()
	defer w.cancel()
	w.children.Go(func() { w.writer.run(w.ctx) })
	for {
		w.sync()
		w.publish()
		if w.finished && w.gone {
			break
		}
		if !w.wait() {
			w.abandon()
			return
		}
	}
	if err := w.removeHomes(); err != nil {
		w.log.Warn("working directories stay behind", zap.Error(err))
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

// abandon ends the containers without a report to the API server, as a machine that
// loses power does. The next run of the node finds them dead.
func (w *worker) abandon() {
	const grace = time.Second
	var stops sync.WaitGroup
	for _, c := range w.containers {
		if c.run != nil {
			r := c.run
			stops.Go(func() {
				if err := r.proc.Stop(context.WithoutCancel(w.ctx), grace); err != nil {
					w.log.Error("container cannot be stopped", zap.Error(err))
				}
				groupGone(r.proc.Pid())
			})
		}
	}
	stops.Wait()
	if w.holds {
		w.node.addresses.release(w.address)
	}
}

// post has f called on the worker's goroutine, unless the worker is ending.
func (w *worker) post(f func()) {
	select {
	case w.events <- f:
	case <-w.ctx.Done():
	}
}

// tell changes the inbox and wakes the worker. It never blocks.
func (w *worker) tell(change func(*inbox)) {
	w.mu.Lock()
	change(&w.inbox)
	w.mu.Unlock()
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

func (w *worker) take() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inbox.pod != nil {
		w.pod = w.inbox.pod
	}
	w.gone = w.gone || w.inbox.gone
	w.inbox = inbox{}
}

// publish passes the present state to the probes and to the API server.
func (w *worker) publish() {
	for _, c := range w.containers {
		c.see(w.targetOf(c))
		if c.fresh && c.run != nil && c.spec.ReadinessProbe != nil {
			c.fresh = false
			select { // prober_manager.go, UpdatePodStatus: probe now, not at the next period
			case c.trigger <- struct{}{}:
			default:
			}
		}
	}
	if w.gone {
		return
	}
	s := w.makeStatus()
	d := desired{status: s, delete: w.finished && w.pod.DeletionTimestamp != nil}
	if !apiequality.Semantic.DeepEqual(s, w.status) || d.delete {
		w.status = s
		w.written = w.writer.offer(d)
	}
}

func (w *worker) targetOf(c *container) target {
	t := target{terminal: w.finished}
	switch {
	case c.run != nil:
		t.id, t.running, t.startedAt = c.run.id, true, c.run.startedAt
	case c.exited != nil:
		t.id = c.exited.ContainerID
		t.terminal = t.terminal || !w.restarts(c)
	}
	return t
}

func (c *container) see(t target) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.target = t
}

func (c *container) seen() target {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.target
}

func (c *container) ready() bool {
	return c.run != nil && (c.spec.ReadinessProbe == nil || c.passed)
}

func (w *worker) dir() string {
	return filepath.Join(w.node.o.Dir, fmt.Sprintf("%s_%s_%s", w.pod.Namespace, w.pod.Name, w.pod.UID))
}
