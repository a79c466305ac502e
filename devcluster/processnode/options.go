package processnode

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// Options configures a node.
type Options struct {
	// RestConfig reaches the API server as a user that may do what a kubelet
	// does. Required. A config without a rate limit is used without one.
	RestConfig *rest.Config
	// Name of the Node object. Required.
	Name string
	// Supervisor starts the containers. Required; it must outlive Run.
	Supervisor *proc.Supervisor
	// Addresses is the range of pod addresses: IPv4 inside 127.0.0.0/8. Required.
	// Addresses that end in .0 or .255 and 127.0.0.1, the node's own, are not used.
	Addresses netip.Prefix
	// Path lists the directories in which a command without a slash is looked
	// up before this process's own PATH.
	Path []string
	// Dir holds, per container, its logs and its working directories. Required.
	Dir string
	// Log defaults to no log.
	Log *zap.Logger
	// RestartBackOff is the wait before a crashed container is started again.
	RestartBackOff RestartBackOff
}

// RestartBackOff bounds the wait between restarts of a container that keeps
// ending. Zero fields take the kubelet's defaults: 10 s, doubling up to 5 min.
type RestartBackOff struct {
	Initial, Max time.Duration
}

// Node is one process node. Make it with New and let it work with Run.
type Node struct {
	o         Options
	client    kubernetes.Interface
	addresses *addressPool

	mu      sync.Mutex
	workers map[types.UID]*worker
	running sync.WaitGroup
}

// New checks the options and sets their defaults. The error names every wrong
// option.
func New(o Options) (*Node, error) {
	var errs []error
	if o.RestConfig == nil {
		errs = append(errs, errors.New("processnode: Options.RestConfig is required"))
	}
	if o.Name == "" {
		errs = append(errs, errors.New("processnode: Options.Name is required"))
	}
	if o.Supervisor == nil {
		errs = append(errs, errors.New("processnode: Options.Supervisor is required"))
	}
	if o.Dir == "" {
		errs = append(errs, errors.New("processnode: Options.Dir is required"))
	}
	if !netip.MustParsePrefix("127.0.0.0/8").Overlaps(o.Addresses) || o.Addresses.Bits() < 8 {
		errs = append(errs, fmt.Errorf("processnode: Options.Addresses is %v: a range inside 127.0.0.0/8 is required",
			o.Addresses))
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if o.RestartBackOff.Initial == 0 {
		o.RestartBackOff.Initial = 10 * time.Second
	}
	if o.RestartBackOff.Max == 0 {
		o.RestartBackOff.Max = 5 * time.Minute
	}
	if o.RestartBackOff.Initial < 0 || o.RestartBackOff.Max < o.RestartBackOff.Initial {
		errs = append(errs, fmt.Errorf("RestartBackOff is %v to %v: the first must be positive and not above the second",
			o.RestartBackOff.Initial, o.RestartBackOff.Max))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("process node options: %w", err)
	}
	config := rest.CopyConfig(o.RestConfig)
	if config.QPS == 0 {
		config.QPS = -1 // client-go would otherwise limit requests to 5 per second
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("process node client: %w", err)
	}
	return &Node{
		o:         o,
		client:    client,
		addresses: newAddressPool(o.Addresses),
		workers:   map[types.UID]*worker{},
	}, nil
}
