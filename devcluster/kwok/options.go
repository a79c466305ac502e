package kwok

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/devcluster"
)

// InstanceType is the value of the label node.kubernetes.io/instance-type on
// every KWOK node.
const InstanceType = "kwok"

// Options configures the nodes.
type Options struct {
	// Nodes are the names of the Node objects, see Names. Required.
	Nodes []string
	// PodCIDR is the range of pod addresses: IPv4 inside 127.0.0.0/8, without
	// 127.0.0.1. KWOK assigns addresses from the third one upwards. Default
	// Cluster.FakePodCIDR, which no other cluster has and to which the routers of
	// package stack may send requests.
	PodCIDR netip.Prefix
	// Port is the server's port. Default: a free one.
	Port uint16
	// Handler answers for the pods. http.LocalAddrContextKey holds the pod's address.
	// Handler must close a connection that it hijacks. Default: a handler that answers
	// with the address.
	Handler http.Handler
	// Log is the scheduler's. Default no log.
	Log *zap.Logger
}

// Names returns n names: prefix-0, prefix-1 and so on.
func Names(prefix string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%d", prefix, i)
	}
	return names
}

// withDefaults sets the defaults. The error names every wrong option.
func (o Options) withDefaults(c *devcluster.Cluster) (Options, error) {
	var errs []error
	if len(c.Nodes()) > 0 {
		errs = append(errs, errors.New("the cluster has process nodes and so a scheduler; start one with Options.Nodes 0"))
	}
	if len(o.Nodes) == 0 {
		errs = append(errs, errors.New("Options.Nodes is required"))
	}
	if sorted := slices.Sorted(slices.Values(o.Nodes)); len(slices.Compact(sorted)) < len(o.Nodes) {
		errs = append(errs, errors.New("Options.Nodes holds a name twice"))
	}
	if !o.PodCIDR.IsValid() {
		o.PodCIDR = c.FakePodCIDR()
	}
	o.PodCIDR = o.PodCIDR.Masked()
	if loopback := netip.MustParsePrefix("127.0.0.0/8"); !loopback.Overlaps(o.PodCIDR) ||
		o.PodCIDR.Bits() < loopback.Bits() ||
		o.PodCIDR.Contains(netip.MustParseAddr(hostIP)) || room(o.PodCIDR) < len(o.Nodes) {
		errs = append(errs, fmt.Errorf("Options.PodCIDR is %v: it must be in 127.0.0.0/8, without %s, with a pod address for each node",
			o.PodCIDR, hostIP))
	}
	if o.Handler == nil {
		o.Handler = http.HandlerFunc(answer)
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if err := errors.Join(errs...); err != nil {
		return o, fmt.Errorf("kwok options: %w", err)
	}
	return o, nil
}

// room is the number of pod addresses in a range. KWOK leaves out the first address
// and the second, which would be a gateway's.
func room(cidr netip.Prefix) int { return 1<<(32-cidr.Bits()) - 2 }
