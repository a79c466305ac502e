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
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/processnode"
)

// downLimit bounds the stop of a cluster in Start's cleanup or after an Up that
// failed. Processes that have not ended by then are killed.
const downLimit = time.Minute

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
	// RestartBackOff is that of the process nodes.
	RestartBackOff processnode.RestartBackOff
	// CRDs are YAML files of CustomResourceDefinitions. They are served when Up
	// returns.
	CRDs [][]byte
}

// Cluster is a running cluster. All methods may be called concurrently.
type Cluster struct {
	o     Options
	block *block
	sup   *proc.Supervisor
	plane *controlPlane

	log     *zap.Logger // of the process nodes
	logFile *os.File
	nodes   []*processnode.Node
	cancel  context.CancelFunc // ends the nodes and the scheduler
	runs    sync.WaitGroup     // the process nodes and the scheduler

	down    sync.Once
	downErr error

	mu      sync.Mutex
	runErrs []error
}

// Start starts a cluster for a test and stops it after the test. With -short it
// skips the test, because -short needs no real parts.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a real kube-apiserver and etcd: run without -short")
	}
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
	dir, err := c.makeDir()
	if err != nil {
		return nil, err
	}
	c.plane = &controlPlane{sup: c.sup, dir: dir, etcdBin: etcd, apiBin: apiServer}
	if err := c.plane.prepare(c.block); err != nil {
		return nil, err
	}
	if err := c.plane.startEtcd(ctx); err != nil {
		return nil, err
	}
	if err := c.plane.startAPIServer(ctx); err != nil {
		return nil, err
	}
	if len(o.CRDs) > 0 {
		client, err := dynamic.NewForConfig(c.RestConfig())
		if err != nil {
			return nil, fmt.Errorf("client for CRDs: %w", err)
		}
		if err := installCRDs(ctx, client, o.CRDs); err != nil {
			return nil, err
		}
	}
	if o.Nodes > 0 {
		if err := c.startNodes(ctx); err != nil {
			return nil, err
		}
	}
	return c, nil
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

// startNodes starts the process nodes and the scheduler and waits until the
// nodes are ready.
func (c *Cluster) startNodes(ctx context.Context) error {
	var err error
	if c.logFile, err = os.Create(filepath.Join(c.Dir(), "nodes.log")); err != nil {
		return fmt.Errorf("log of the process nodes: %w", err)
	}
	c.log = zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig()),
		zapcore.Lock(c.logFile), zap.DebugLevel))
	client, err := kubernetes.NewForConfig(c.RestConfig())
	if err != nil {
		return fmt.Errorf("client for the process nodes: %w", err)
	}
	for i := range c.o.Nodes {
		n, err := processnode.New(c.NodeOptions(i))
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
		c.runs.Go(func() { c.keep(n.Run(run)) })
	}
	c.runs.Go(func() { c.keep(processnode.RunScheduler(run, client, c.log.Named("scheduler"))) })

	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("it took longer than %v", startLimit))
	defer cancel()
	for i := range c.o.Nodes {
		if err := c.awaitNode(ctx, client, nodeName(i)); err != nil {
			return fmt.Errorf("%s is not ready: %w; the end of the nodes' log:\n%s", nodeName(i), err, tailOf(c.logFile.Name()))
		}
	}
	return nil
}

func (c *Cluster) awaitNode(ctx context.Context, client kubernetes.Interface, name string) error {
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			for _, condition := range node.Status.Conditions {
				if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
					return nil
				}
			}
		}
		if err := c.runErr(); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w (last answer: %w)", context.Cause(ctx), err)
		}
	}
}

func (c *Cluster) keep(err error) {
	if err == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runErrs = append(c.runErrs, err)
}

func (c *Cluster) runErr() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.runErrs...)
}

// Down stops the cluster: pods, then the API server, then etcd. When ctx ends, the
// rest is killed. The error includes those of the process nodes since Up. Later calls
// return the error of the first one.
func (c *Cluster) Down(ctx context.Context) error {
	c.down.Do(func() {
		var errs []error
		if c.plane != nil {
			_ = c.plane.signalAPIServer(syscall.SIGCONT) // a paused one would delay the nodes
		}
		c.cancel()
		c.runs.Wait()
		errs = append(errs, c.runErr())
		if c.plane != nil {
			errs = append(errs, c.plane.stop(ctx))
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
func (c *Cluster) RestConfig() *rest.Config { return c.plane.restConfig() }

// Kubeconfig returns the path of a kubeconfig of the same user.
func (c *Cluster) Kubeconfig() string { return c.plane.kubeconfig() }

// Dir returns the directory with data, logs (kube-apiserver.log, etcd.log,
// nodes.log, nodes/...) and keys.
func (c *Cluster) Dir() string { return c.plane.dir }

// Supervisor starts processes that end with the cluster, and are killed when
// this process dies.
func (c *Cluster) Supervisor() *proc.Supervisor { return c.sup }

// EtcdMetrics is the URL of etcd's metrics in Prometheus' format.
func (c *Cluster) EtcdMetrics() string { return "http://" + c.plane.etcdAddr.String() + "/metrics" }

// EnvoyBin returns the path of Envoy 1.40, see EnvoyBinary.
func (c *Cluster) EnvoyBin(ctx context.Context) (string, error) {
	return EnvoyBinary(ctx, c.o.Progress)
}

// KWOKBinary returns the paths of KWOK and its stages, see function KWOKBinary.
func (c *Cluster) KWOKBinary(ctx context.Context) (kwok string, stages []string, err error) {
	return KWOKBinary(ctx, c.o.Progress)
}

// Nodes returns the process nodes.
func (c *Cluster) Nodes() []*processnode.Node { return c.nodes }

func nodeName(i int) string { return fmt.Sprintf("node-%d", i) }

// NodeOptions returns the options of process node i, 0 <= i < MaxNodes. The cluster
// does not start the nodes from Options.Nodes on. A test may start such a node, and
// must end it before Down.
func (c *Cluster) NodeOptions(i int) processnode.Options {
	return processnode.Options{
		RestConfig:     c.RestConfig(),
		Name:           nodeName(i),
		Supervisor:     c.sup,
		Addresses:      c.block.node(i),
		Path:           c.o.NodePath,
		Dir:            filepath.Join(c.Dir(), "nodes", nodeName(i)),
		Log:            c.log.Named(nodeName(i)),
		RestartBackOff: c.o.RestartBackOff,
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
// KWOK nodes, and pods whose status a test writes.
func (c *Cluster) FakePodCIDR() netip.Prefix { return c.block.fake() }

// FreeAddr returns an address with a free port, never the same twice. Its IP belongs
// to this cluster alone. A caller that listens on exactly this address finds the
// port free.
func (c *Cluster) FreeAddr() (netip.AddrPort, error) { return c.block.freeAddr(0) }

// KillAPIServer ends the API server by SIGKILL. etcd keeps running.
func (c *Cluster) KillAPIServer(ctx context.Context) error { return c.plane.killAPIServer(ctx) }

// StartAPIServer starts an API server that was killed or has ended, on the same
// address and data, and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error { return c.plane.startAPIServer(ctx) }

// StartEtcd starts an etcd that has ended on the same addresses and data, and
// waits until it is ready. It may not be called while etcd runs.
func (c *Cluster) StartEtcd(ctx context.Context) error { return c.plane.startEtcd(ctx) }

// APIServer returns the latest process of the API server. It is nil after
// KillAPIServer.
func (c *Cluster) APIServer() *proc.Process { return c.plane.process(&c.plane.api) }

// Etcd returns the latest process of etcd.
func (c *Cluster) Etcd() *proc.Process { return c.plane.process(&c.plane.etcd) }

// PauseAPIServer stops the API server from answering while its connections stay
// open, as if its machine hung or the network was partitioned.
func (c *Cluster) PauseAPIServer() error { return c.plane.signalAPIServer(syscall.SIGSTOP) }

// ResumeAPIServer undoes PauseAPIServer.
func (c *Cluster) ResumeAPIServer() error { return c.plane.signalAPIServer(syscall.SIGCONT) }
