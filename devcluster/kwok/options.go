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

// Options says which nodes there are.
type Options struct {
	// Nodes are the names of the Node objects, see Names. Required.
	Nodes []string
	// PodCIDR is the range pod addresses come from: IPv4 inside 127.0.0.0/8 and
	// without 127.0.0.1. Default Cluster.FakePodCIDR, which is no other cluster's
	// and is where the routers of package stack let requests go. KWOK counts on
	// from its third address.
	PodCIDR netip.Prefix
	// Port is the one that the server answers on. Default one that is free.
	Port uint16
	// Handler answers for the pods: http.LocalAddrContextKey says for which. A connection
	// that it hijacks is its own to close. Default: one that answers with the address.
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

// withDefaults reports all that is wrong at once.
func (o Options) withDefaults(c *devcluster.Cluster) (Options, error) {
	var errs []error
	if len(c.Nodes()) > 0 {
		errs = append(errs, errors.New("the cluster has process nodes: two schedulers would want the same pods; start one with Options.Nodes 0"))
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
	if loopback := netip.MustParsePrefix("127.0.0.0/8"); !loopback.Overlaps(o.PodCIDR) || o.PodCIDR.Bits() < loopback.Bits() ||
		o.PodCIDR.Contains(netip.MustParseAddr(hostIP)) || room(o.PodCIDR) < len(o.Nodes) {
		errs = append(errs, fmt.Errorf("Options.PodCIDR is %v: a range inside 127.0.0.0/8 is required, without %s and with a pod address for each node", o.PodCIDR, hostIP))
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

// room is how many pod addresses a range has: KWOK uses neither its first
// address nor the second, which would be a gateway's.
func room(cidr netip.Prefix) int { return 1<<(32-cidr.Bits()) - 2 }
