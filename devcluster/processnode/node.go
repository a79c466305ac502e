package processnode

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/devcluster/nodes"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/internal/options"
)

// Kind is the value of the label node.kubernetes.io/instance-type on every process
// node.
const Kind = "process"

// Options configures a node. All fields but Path are required.
type Options struct {
	// Client reaches the API server as a user that may do what a kubelet does.
	Client kubernetes.Interface
	// Name of the Node object.
	Name string
	// Supervisor starts the containers. It must outlive Run.
	Supervisor *proc.Supervisor
	// Addresses is the range of pod addresses: IPv4 inside 127.0.0.0/8.
	Addresses netip.Prefix
	// Path lists the directories in which a command without a slash is looked up
	// before this process's own PATH.
	Path []string
	// Dir holds, per pod, its logs and its working directories.
	Dir string
	Log *zap.Logger
}

// Node is one process node. Make it with New and let it work with Run.
type Node struct {
	o         Options
	addresses *nodes.Addresses

	mu      sync.Mutex
	workers map[types.UID]*worker
	running sync.WaitGroup
}

// New registers a node. The error names every missing option.
func New(ctx context.Context, o Options) (*Node, error) {
	if err := options.Require(o, "Client", "Name", "Supervisor", "Addresses", "Dir", "Log"); err != nil {
		return nil, fmt.Errorf("process node: %w", err)
	}
	n := &Node{o: o, addresses: nodes.NewAddresses(o.Addresses), workers: map[types.UID]*worker{}}
	return n, nodes.Register(ctx, o.Client, o.Name, Kind)
}

// Run runs the pods bound to the node until ctx ends. It then stops every container and
// reports nothing to the API server. It may be called once. It returns an error only if
// waiting cannot repair the cause.
func (n *Node) Run(ctx context.Context) error {
	factory, err := nodes.WatchPods(n.o.Client, fields.OneTermEqualSelector("spec.nodeName", n.o.Name),
		func(pod *corev1.Pod) { n.seen(ctx, pod) }, n.gone)
	if err != nil {
		return fmt.Errorf("node %s: %w", n.o.Name, err)
	}
	factory.StartWithContext(ctx)
	<-ctx.Done()
	factory.Shutdown() // no worker is added after this
	n.running.Wait()
	return nil
}

func (n *Node) seen(ctx context.Context, pod *corev1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w, ok := n.workers[pod.UID]; ok {
		w.notify(pod, false)
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

func (n *Node) gone(pod *corev1.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w, ok := n.workers[pod.UID]; ok {
		w.notify(pod, true)
	}
}
