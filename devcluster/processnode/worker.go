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

// worker runs one pod, from the moment it is seen on the node until its object
// is gone and nothing of it runs. A pod of the same name with another UID has a
// worker of its own.
type worker struct {
	node *Node
	log  *zap.Logger

	ctx      context.Context    // of all that runs for this pod
	cancel   context.CancelFunc // called by run as it ends
	events   chan func()        // to be done on the worker's goroutine; never closed
	poke     chan struct{}      // capacity 1: the inbox has something new
	over     chan struct{}      // closed by the worker when no container runs or ever will
	children sync.WaitGroup
	writer   *statusWriter

	mu    sync.Mutex
	inbox inbox

	// All below belongs to the goroutine of run.
	pod         *corev1.Pod
	gone        bool     // the object is
	verdict     *verdict // why the pod must fail
	completed   bool     // all its containers ended and stay so
	finished    bool     // nothing runs or ever will; over is closed
	initialized bool     // its init containers had ended when it finished
	past        bool     // the pod was terminal when first seen: its status is not ours to write
	containers  []*container
	address     netip.Addr // valid from the first start on
	holds       bool       // the address is ours
	lost        bool       // the sandbox that has the address is to be replaced
	sandboxIs   sandbox    // what is told of it
	known       bool       // and is told
	backOff     crashBackOff
	startTime   metav1.Time
	status      corev1.PodStatus // as offered last
	written     <-chan struct{}  // closed when that, or what overtook it, was written
	reported    bool             // in this pass
	terminating bool             // the end has begun
	wake        time.Time        // zero: nothing to wait for
}

// inbox holds the latest that others want a worker to know.
type inbox struct {
	pod   *corev1.Pod
	gone  bool
	evict *verdict
	lost  bool
}

// sandbox is what is told of the pod's sandbox while it is replaced.
type sandbox int

const (
	sandboxUp sandbox = iota
	sandboxDown
	sandboxAgain
)

// verdict ends a pod against its will.
type verdict struct {
	reason, message string
	grace           *int64 // seconds; nil: the pod's own
	rejected        bool   // nothing of it was ever started
	disruption      bool   // say so in the DisruptionTarget condition
}

// newWorker takes over what an earlier run of the node left in the status:
// counts go on, and what it says is running has died with that node.
func newWorker(ctx context.Context, n *Node, pod *corev1.Pod) *worker {
	log := n.o.Log.With(zap.String("pod", pod.Namespace+"/"+pod.Name), zap.String("uid", string(pod.UID)))
	w := &worker{
		node: n, log: log, pod: pod,
		events: make(chan func()), poke: make(chan struct{}, 1), over: make(chan struct{}),
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
		close(w.over)
	} else if fields := unsupported(&pod.Spec); len(fields) > 0 {
		w.verdict = &verdict{reason: "ProcessNodeUnsupported", message: rejection(fields), rejected: true}
	}
	for i := range pod.Spec.InitContainers {
		w.adopt(&container{spec: &pod.Spec.InitContainers[i], init: true}, pod.Status.InitContainerStatuses)
	}
	for i := range pod.Spec.Containers {
		w.adopt(&container{spec: &pod.Spec.Containers[i]}, pod.Status.ContainerStatuses)
	}
	return w
}

func (w *worker) adopt(c *container, statuses []corev1.ContainerStatus) {
	for k := range c.triggers {
		c.triggers[k] = make(chan struct{}, 1)
	}
	w.containers = append(w.containers, c)
	for _, s := range statuses {
		if s.Name != c.spec.Name {
			continue
		}
		c.restarts, c.exited, c.earlier = s.RestartCount, s.LastTerminationState.Terminated, nil
		switch {
		case s.State.Running != nil: // containerd says this of containers that a reboot ended
			c.earlier = c.exited
			c.exited = &corev1.ContainerStateTerminated{ExitCode: 255, Reason: "Unknown", ContainerID: s.ContainerID,
				StartedAt: s.State.Running.StartedAt, FinishedAt: metav1.Now()}
		case s.State.Terminated != nil:
			c.earlier, c.exited = c.exited, s.State.Terminated
		}
		// A new sandbox starts over with the init containers (computePodActions).
		c.again = c.init && c.exited != nil && w.pod.Spec.RestartPolicy != corev1.RestartPolicyNever
	}
}

// run is the worker's goroutine: look, act, report, wait.
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

// wait returns when there may be something to do, false when the node ends.
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

// abandon ends what runs and says nothing to the API server: as when a machine
// goes down, and found so by the node's next run.
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

// post has f done on the worker's goroutine, unless the worker is ending.
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
	if w.verdict == nil && !w.finished {
		w.verdict = w.inbox.evict
	}
	w.lost = w.lost || (w.inbox.lost && w.holds)
	w.inbox = inbox{}
}

// publish tells the probes and the API server what now holds.
func (w *worker) publish() {
	for _, c := range w.containers {
		c.see(w.targetOf(c), c.run)
		if c.fresh && c.started() && c.spec.ReadinessProbe != nil {
			c.fresh = false
			select { // prober_manager.go, UpdatePodStatus: ask now rather than at the next period
			case c.triggers[readiness] <- struct{}{}:
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
	t := target{terminating: w.ending(), terminal: w.finished, started: c.started()}
	switch {
	case c.run != nil:
		t.id, t.running, t.startedAt = c.run.id, true, c.run.startedAt
	case c.exited != nil:
		t.id = c.exited.ContainerID
		t.terminal = t.terminal || !w.restarts(c)
	}
	return t
}

func (c *container) see(t target, r *run) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.target, c.visible = t, r
}

func (c *container) seen() target {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.target
}

func (c *container) current() *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.visible
}

func (c *container) started() bool {
	return c.run != nil && (c.spec.StartupProbe == nil || c.results[startup] == success)
}

func (c *container) ready() bool {
	return c.started() && (c.spec.ReadinessProbe == nil || c.results[readiness] == success)
}

func (w *worker) dir() string {
	return filepath.Join(w.node.o.Dir, fmt.Sprintf("%s_%s_%s", w.pod.Namespace, w.pod.Name, w.pod.UID))
}
