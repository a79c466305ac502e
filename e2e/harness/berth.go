package harness

import (
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"path/filepath"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness/network"
)

// Namespace holds pools, pods and sandboxes.
const Namespace = "default"

// Options say what to start.
type Options struct {
	// Cluster is the cluster. Start adds Berth's CRDs.
	Cluster devcluster.Options
	// Hollow has pods without processes if it is set.
	Hollow *hollow.Options
	// Stack is Berth itself.
	Stack stack.Options
	// Kubeconfig, if set, returns the allocators' way to the API server.
	Kubeconfig func(*devcluster.Cluster) string
	// Relays has the connections of routers to allocators pass relays, for CutRouter.
	Relays bool
	// KubeRelays has those of allocators to the API server pass relays too.
	KubeRelays bool
	// Connections is how many idle connections to each gateway are kept.
	Connections int
}

// Berth is a running Berth. Its fields do not change.
type Berth struct {
	*Run
	Cluster  *devcluster.Cluster
	Nodes    *hollow.Nodes // nil without Options.Hollow
	Clients  *kube.Clients
	Stack    *stack.Stack
	Gateways []*Gateway
	// Network holds the relays; nil without Options.Relays.
	Network *network.Network
	// HTTP opens a connection for each call: none that a killed process has left is used.
	HTTP *http.Client

	allocators sync.Mutex // held by a fault of one

	mu   sync.Mutex                // also of Gateways, while Start fills them
	held map[*stack.Allocator]bool // not started again
}

// Start starts a cluster and Berth on it. Both end with the test. Then the test fails if a
// program has reported a data race or has panicked, and keeps the logs and the history if
// it has failed.
func (r *Run) Start(o Options) *Berth {
	r.Helper()
	b := &Berth{
		Run: r, held: map[*stack.Allocator]bool{},
		HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	o.Cluster.CRDs = crd.All()
	b.Cluster = devcluster.Start(r, o.Cluster)
	var err error
	if o.Hollow != nil {
		b.Nodes, err = hollow.Start(r.Context(), b.Cluster, *o.Hollow)
		require.NoError(r, err)
		r.Cleanup(func() { b.stop(func(context.Context) error { return b.Nodes.Close() }) })
	}
	if o.Kubeconfig != nil {
		shared := o.Kubeconfig(b.Cluster)
		o.Stack.Kubeconfig = func(int) (string, error) { return shared, nil }
	}
	b.relays(&o)
	b.Stack, err = stack.Start(r.Context(), b.Cluster, o.Stack)
	require.NoError(r, err)
	r.Cleanup(b.end)
	for _, g := range b.Stack.Gateways {
		b.addGateway(g, o.Connections)
	}
	if b.Network != nil {
		b.Network.Reset("") // connections of routers from before their gateways were known
	}
	b.Clients, err = kube.NewClients(b.Cluster.RestConfig(), 0, 0)
	require.NoError(r, err)
	return b
}

// stopWait bounds how long a part of Berth may take to end.
const stopWait = 30 * time.Second

func (b *Berth) stop(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), stopWait)
	defer cancel()
	if err := f(ctx); err != nil {
		b.Errorf("stop: %v", err)
	}
}

// end stops Berth and looks at what it leaves.
func (b *Berth) end() {
	if b.Failed() {
		ShowLogs(b, b.Cluster.Dir()) // before they get the goroutines
		dumpGoroutines(b.Stack)
	}
	b.stop(b.Stack.Stop)
	if err := CheckLogs(b.Cluster.Dir()); err != nil {
		b.Error(err)
	}
	if !b.Failed() {
		return
	}
	if err := b.History.Flush(); err != nil {
		b.Error(err)
	}
	b.keep(Logs(b.Cluster.Dir()))
}

// relays leads connections through the network, as the options say.
func (b *Berth) relays(o *Options) {
	if !o.Relays && !o.KubeRelays {
		return
	}
	b.Network = network.New(b)
	if o.Relays {
		o.Stack.ControlOf = func(_ int, listens netip.AddrPort) (netip.AddrPort, error) {
			return b.Network.Relay(listens.String(), func(client, listener netip.AddrPort) string {
				return network.Owner(client, listener, b.routers)
			})
		}
	}
	if o.KubeRelays {
		o.Stack.Kubeconfig = b.kubeconfig
	}
}

// kubeconfig leads an allocator to the API server through a relay of its own. TLS passes
// the relay unchanged.
func (b *Berth) kubeconfig(i int) (string, error) {
	config, err := clientcmd.LoadFromFile(b.Cluster.Kubeconfig())
	if err != nil {
		return "", err
	}
	for _, c := range config.Clusters {
		server, err := url.Parse(c.Server)
		if err != nil {
			return "", err
		}
		at, err := b.Network.Relay(server.Host, func(_, _ netip.AddrPort) string { return allocatorName(i) })
		if err != nil {
			return "", err
		}
		c.TLSServerName = server.Hostname()
		server.Host = at.String()
		c.Server = server.String()
	}
	file := filepath.Join(b.TempDir(), "kubeconfig")
	return file, clientcmd.WriteToFile(*config, file)
}

// routers are the processes of the routers, by gateway.
func (b *Berth) routers() map[string][]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := map[string][]int{}
	for _, g := range b.Gateways {
		for _, p := range []*proc.Server{g.Router, g.Successor} {
			if pid := p.Pid(); pid != 0 {
				all[g.Name] = append(all[g.Name], pid)
			}
		}
	}
	return all
}
