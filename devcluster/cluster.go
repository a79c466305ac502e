package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/devcluster/nodes"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/processnode"
)

const (
	// downLimit bounds the stop of a cluster in Start's cleanup or after an Up that
	// failed. Processes that have not ended by then are killed.
	downLimit = time.Minute
	// readyLimit bounds the wait for a CRD, which takes some 0.2 s.
	readyLimit = time.Minute
	readyPoll  = 50 * time.Millisecond
)

// Options configures a cluster. The zero value is an API server without nodes.
type Options struct {
	// Dir holds data, logs, keys and the kubeconfig. It is made if it is missing,
	// must have no files, and is not removed. Default: a temporary directory that is
	// removed with the cluster, also when this process is killed.
	Dir string
	// Progress gets lines while programs are built or downloaded for the first
	// time. nil: no lines.
	Progress io.Writer
	// Nodes is the number of process nodes, 0 to MaxNodes, called node-0, node-1
	// and so on. With any, a scheduler binds pods to them.
	Nodes int
	// NodePath lists the directories in which process nodes look a container's
	// command up before PATH.
	NodePath []string
	// CRDs are YAML files of CustomResourceDefinitions. They are served when Up
	// returns.
	CRDs [][]byte
}

// Cluster is a running cluster. All methods may be called concurrently.
type Cluster struct {
	o               Options
	block           *block
	sup             *proc.Supervisor
	dir             string
	config          *rest.Config
	client          *kubernetes.Clientset
	etcdURL         string
	etcd, apiServer *proc.Server
	served          []schema.GroupVersionResource // custom resources

	log     *zap.Logger // of the process nodes
	logFile *os.File
	nodes   []*processnode.Node
	cancel  context.CancelFunc // ends the nodes and the scheduler
	runs    errgroup.Group     // the process nodes and the scheduler

	down    sync.Once
	downErr error
}

// Start starts a cluster for a test and stops it after the test. With -short it
// skips the test, because -short needs no real parts.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	skipShort(t)
	if o.Progress == nil {
		o.Progress = os.Stderr // a test's own log shows only after the wait
	}
	c, err := Up(t.Context(), o)
	if err != nil {
		t.Fatalf("start a cluster: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), downLimit)
		defer cancel()
		if err := c.Down(ctx); err != nil {
			t.Errorf("stop the cluster: %v", err)
		}
	})
	return c
}

func skipShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a real kube-apiserver and etcd: run without -short")
	}
}

// Up starts a cluster. The caller must call Down. If Up fails, it has stopped all
// that it started.
func Up(ctx context.Context, o Options) (_ *Cluster, err error) {
	if o.Nodes < 0 || o.Nodes > MaxNodes {
		return nil, fmt.Errorf("%d process nodes: 0 to %d are possible", o.Nodes, MaxNodes)
	}
	etcd, apiServer, err := ControlPlaneBinaries(ctx, o.Progress)
	if err != nil {
		return nil, err
	}
	c := &Cluster{o: o, log: zap.NewNop(), cancel: func() {}}
	if c.block, err = reserveBlock(); err != nil {
		return nil, err
	}
	if c.sup, err = proc.New(); err != nil {
		return nil, errors.Join(err, c.block.free())
	}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downLimit)
			defer cancel()
			err = errors.Join(err, c.Down(ctx))
		}
	}()
	if c.dir, err = c.makeDir(); err != nil {
		return nil, err
	}
	if err := c.prepare(etcd, apiServer); err != nil {
		return nil, err
	}
	if err := c.etcd.Start(ctx); err != nil {
		return nil, err
	}
	if err := c.apiServer.Start(ctx); err != nil {
		return nil, err
	}
	if err := c.installCRDs(ctx); err != nil {
		return nil, err
	}
	return c, c.startNodes(ctx)
}

func (c *Cluster) makeDir() (string, error) {
	if c.o.Dir == "" {
		return c.sup.TempDir("", "berth-cluster-")
	}
	dir, err := filepath.Abs(c.o.Dir)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the cluster's directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("the cluster's directory: %w", err)
	}
	if len(entries) > 0 {
		return "", fmt.Errorf("the cluster's directory %s is not empty (%s, ...): empty it or name another", dir,
			entries[0].Name())
	}
	return dir, nil
}

// startNodes starts the process nodes and the scheduler.
func (c *Cluster) startNodes(ctx context.Context) (err error) {
	if c.o.Nodes == 0 {
		return nil
	}
	if c.logFile, err = os.Create(filepath.Join(c.dir, "nodes.log")); err != nil {
		return fmt.Errorf("log of the process nodes: %w", err)
	}
	c.log = zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig()),
		zapcore.Lock(c.logFile), zap.DebugLevel))
	for i := range c.o.Nodes {
		n, err := processnode.New(ctx, c.NodeOptions(i))
		if err != nil {
			return err
		}
		c.nodes = append(c.nodes, n)
	}
	// The nodes do not use the caller's context. Only Down ends them, before the API
	// server to which they report.
	var run context.Context
	run, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	for _, n := range c.nodes {
		c.runs.Go(func() error { return n.Run(run) })
	}
	scheduler := nodes.Scheduler{Client: c.client, Kind: processnode.Kind, Log: c.log.Named("scheduler")}
	c.runs.Go(func() error { return scheduler.Run(run) })
	return nil
}

// Down stops the cluster: pods, then the API server, then etcd. When ctx ends, the
// rest is killed. The error includes that of a process node since Up. Later calls
// return the error of the first one.
func (c *Cluster) Down(ctx context.Context) error {
	c.down.Do(func() {
		if c.apiServer != nil && c.apiServer.Running() {
			_ = c.apiServer.Resume() // a paused one would delay the nodes, and does not act on SIGTERM
		}
		c.cancel()
		errs := []error{c.runs.Wait()}
		if c.apiServer != nil {
			errs = append(errs, c.apiServer.Stop(ctx, apiServerGrace), c.etcd.Stop(ctx, etcdGrace))
		}
		if c.logFile != nil {
			errs = append(errs, c.logFile.Close())
		}
		errs = append(errs, c.sup.Close(), c.block.free())
		c.downErr = errors.Join(errs...)
	})
	return c.downErr
}

// RestConfig returns a new config of a user with all permissions, without a limit on
// the rate of requests.
func (c *Cluster) RestConfig() *rest.Config { return rest.CopyConfig(c.config) }

// Kubeconfig returns the path of a kubeconfig of the same user.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// Dir returns the directory with data, logs (kube-apiserver.log, etcd.log,
// nodes.log, nodes/...) and keys.
func (c *Cluster) Dir() string { return c.dir }

// Supervisor starts processes that end with the cluster, and are killed when
// this process dies.
func (c *Cluster) Supervisor() *proc.Supervisor { return c.sup }

// APIServer is kube-apiserver. It keeps its address and its data when it is ended and
// started again.
func (c *Cluster) APIServer() *proc.Server { return c.apiServer }

// Etcd is etcd. It keeps its addresses and its data when it is ended and started again.
func (c *Cluster) Etcd() *proc.Server { return c.etcd }

// EtcdMetrics is the URL of etcd's metrics in Prometheus' format.
func (c *Cluster) EtcdMetrics() string { return c.etcdURL + "/metrics" }

// EnvoyBin returns the path of Envoy 1.40, see EnvoyBinary.
func (c *Cluster) EnvoyBin(ctx context.Context) (string, error) {
	return EnvoyBinary(ctx, c.o.Progress)
}

// Nodes returns the process nodes.
func (c *Cluster) Nodes() []*processnode.Node { return c.nodes }

func nodeName(i int) string { return fmt.Sprintf("node-%d", i) }

// NodeOptions returns the options of process node i, 0 <= i < MaxNodes. The cluster
// does not start the nodes from Options.Nodes on. A test may start such a node, and
// must end it before Down.
func (c *Cluster) NodeOptions(i int) processnode.Options {
	return processnode.Options{
		Client:     c.client,
		Name:       nodeName(i),
		Supervisor: c.sup,
		Addresses:  c.block.node(i),
		Path:       c.o.NodePath,
		Dir:        filepath.Join(c.dir, "nodes", nodeName(i)),
		Log:        c.log.Named(nodeName(i)),
	}
}

// PodCIDRs returns all ranges of this cluster's pod addresses: one per possible
// process node, and FakePodCIDR.
func (c *Cluster) PodCIDRs() []netip.Prefix {
	cidrs := []netip.Prefix{c.FakePodCIDR()}
	for i := range MaxNodes {
		cidrs = append(cidrs, c.block.node(i))
	}
	return cidrs
}

// FakePodCIDR is the range, of 32,766 addresses, for pods without processes: pods on
// hollow nodes, and pods whose status a test writes.
func (c *Cluster) FakePodCIDR() netip.Prefix { return c.block.fake() }

// FreeAddr returns an address with a free port, never the same twice. Its IP belongs
// to this cluster alone. A caller that listens on exactly this address finds the
// port free.
func (c *Cluster) FreeAddr() (netip.AddrPort, error) { return c.block.freeAddr(0) }
