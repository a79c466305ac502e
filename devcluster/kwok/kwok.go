package kwok

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/scheduler"
)

const (
	// hostIP is the address of every node.
	hostIP = "127.0.0.1"
	// leaseSeconds is the kubelet's default, nodeLeaseDurationSeconds.
	leaseSeconds = 40
	// workers is the number of pods that are bound at once. An API server on two
	// cores is not faster with more.
	workers = 8
	// stopGrace is the time from SIGTERM to SIGKILL. KWOK ends in milliseconds.
	stopGrace = 5 * time.Second
	// closeLimit bounds the clean-up of a Start that failed.
	closeLimit = 30 * time.Second
)

// Nodes are running KWOK nodes with their scheduler and server. Methods may be
// called concurrently.
type Nodes struct {
	o       Options
	client  kubernetes.Interface
	kwok    *devcluster.Component
	echo    *echo
	cancel  context.CancelFunc // ends the scheduler
	runs    sync.WaitGroup     // the scheduler
	runErr  error              // the scheduler's; read after runs
	stopped sync.Once
	stopErr error
}

// Start starts KWOK nodes on a cluster without process nodes and waits until they
// are ready and give pods addresses. KWOK is built if it is not in the cache. The
// caller must call Close before Cluster.Down. If Start fails, it has stopped all that
// it started.
func Start(ctx context.Context, c *devcluster.Cluster, o Options) (_ *Nodes, err error) {
	if o, err = o.withDefaults(c); err != nil {
		return nil, err
	}
	bin, stages, err := c.KWOKBinary(ctx)
	if err != nil {
		return nil, err
	}
	n := &Nodes{o: o, cancel: func() {}}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
			defer cancel()
			err = errors.Join(fmt.Errorf("start KWOK nodes: %w", err), n.stop(ctx))
		}
	}()
	if n.client, err = kubernetes.NewForConfig(c.RestConfig()); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	// First the port, which may be taken, then the steps that take time.
	if n.echo, err = startEcho(o.PodCIDR, o.Port, o.Handler); err != nil {
		return nil, err
	}
	if err := n.createNodes(ctx); err != nil {
		return nil, err
	}
	if n.kwok, err = c.StartComponent("kwok", command(c, o, bin, stages)); err != nil {
		return nil, err
	}
	if err := n.kwok.AwaitReady(ctx, n.nodesReady); err != nil {
		return nil, err
	}
	if err := n.firstAddress(ctx); err != nil {
		return nil, err
	}
	var run context.Context
	run, n.cancel = context.WithCancel(context.WithoutCancel(ctx)) // ends by Close alone
	n.runs.Go(func() {
		n.runErr = scheduler.Run(run, scheduler.Options{
			Client: n.client, InstanceType: InstanceType, MaxPods: room(o.PodCIDR) / len(o.Nodes), Workers: workers, Log: o.Log,
		})
	})
	return n, nil
}

func command(c *devcluster.Cluster, o Options, bin string, stages []string) *exec.Cmd {
	args := []string{
		"--kubeconfig=" + c.Kubeconfig(),
		// Not all nodes: KWOK must leave nodes of other kinds alone.
		"--manage-nodes-with-label-selector=" + corev1.LabelInstanceTypeStable + "=" + InstanceType,
		// KWOK assigns addresses upwards from this one.
		"--cidr=" + netip.PrefixFrom(o.PodCIDR.Addr().Next(), o.PodCIDR.Bits()).String(),
		"--node-ip=" + hostIP,
		fmt.Sprintf("--node-lease-duration-seconds=%d", leaseSeconds),
	}
	for _, stage := range stages {
		args = append(args, "--config="+stage)
	}
	cmd := exec.Command(bin, args...)
	// Settings of the caller's environment for another KWOK must not reach this one.
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "KWOK_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "KWOK_WORKDIR="+c.Dir())
	return cmd
}

// PodCIDR is the range of pod addresses.
func (n *Nodes) PodCIDR() netip.Prefix { return n.o.PodCIDR }

// Port is the server's port, at every address of PodCIDR.
func (n *Nodes) Port() uint16 { return n.echo.port }

// Close ends the scheduler, the server and KWOK and waits for them. Node and Pod
// objects stay. When ctx ends, the rest is killed. The error includes those of the
// scheduler and the server since Start. Later calls return the error of the first
// one.
func (n *Nodes) Close(ctx context.Context) error {
	var died error
	select {
	case <-n.kwok.Done():
		died = fmt.Errorf("kwok ended by itself (%s); the end of its log:\n%s", n.kwok.State(), n.kwok.LogTail())
	default:
	}
	return n.stop(ctx, died)
}

func (n *Nodes) stop(ctx context.Context, found ...error) error {
	n.stopped.Do(func() {
		errs := found
		n.cancel()
		n.runs.Wait()
		errs = append(errs, n.runErr)
		if n.echo != nil {
			errs = append(errs, n.echo.close())
		}
		if n.kwok != nil {
			errs = append(errs, n.kwok.Stop(ctx, stopGrace))
		}
		n.stopErr = errors.Join(errs...)
	})
	return n.stopErr
}

func (n *Nodes) createNodes(ctx context.Context) error {
	nodes := n.client.CoreV1().Nodes()
	old, err := nodes.List(ctx, metav1.ListOptions{LabelSelector: corev1.LabelInstanceTypeStable + "=" + InstanceType})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	if len(old.Items) > 0 {
		return fmt.Errorf("there is a KWOK node %s: KWOK can be started once on a cluster, with all its nodes",
			old.Items[0].Name)
	}
	for _, name := range n.o.Nodes {
		if _, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				corev1.LabelHostname:           name,
				corev1.LabelInstanceTypeStable: InstanceType,
			},
		}}, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create a node: %w", err)
		}
	}
	return nil
}

func (n *Nodes) nodesReady(ctx context.Context) error {
	nodes, err := n.client.CoreV1().Nodes().List(ctx,
		metav1.ListOptions{LabelSelector: corev1.LabelInstanceTypeStable + "=" + InstanceType})
	if err != nil {
		return err
	}
	ready := 0
	for _, node := range nodes.Items {
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				ready++
			}
		}
	}
	if ready < len(n.o.Nodes) {
		return fmt.Errorf("%d of %d nodes are ready", ready, len(n.o.Nodes))
	}
	return nil
}

// firstAddress has KWOK run one pod and deletes it again. If the first pods of a KWOK
// come together, they may get the same address, because each of them makes the pool
// of addresses.
func (n *Nodes) firstAddress(ctx context.Context) error {
	pods := n.client.CoreV1().Pods(metav1.NamespaceSystem)
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "kwok-first-address-"},
		Spec:       corev1.PodSpec{NodeName: n.o.Nodes[0], Containers: []corev1.Container{{Name: "none", Image: "none"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create a first pod: %w", err)
	}
	name, uid := pod.Name, pod.UID
	if err := n.kwok.AwaitReady(ctx, func(ctx context.Context) error {
		pod, err := pods.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ip, err := netip.ParseAddr(pod.Status.PodIP); err != nil || !n.o.PodCIDR.Contains(ip) {
			return fmt.Errorf("the address of a first pod is %q, expected one in %v", pod.Status.PodIP, n.o.PodCIDR)
		}
		return nil
	}); err != nil {
		return err
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64),
		Preconditions: &metav1.Preconditions{UID: &uid}}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the first pod: %w", err)
	}
	return nil
}
