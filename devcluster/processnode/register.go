package processnode

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Kubelet defaults: nodeLeaseDurationSeconds, a quarter of it between renewals,
// nodeStatusReportFrequency.
const (
	leaseSeconds = 40
	renewEvery   = leaseSeconds * time.Second / 4
	reportEvery  = 5 * time.Minute
)

const leaseNamespace = "kube-node-lease"

// InstanceType is the value of the label node.kubernetes.io/instance-type on
// every process node; RunScheduler binds to no other nodes.
const InstanceType = "process"

// maxPods is the largest number of pods on one process node.
const maxPods = 250

// register makes the Node object, or takes over the one of an earlier run. It waits
// for the API server.
func (n *Node) register(ctx context.Context) error {
	var last error
	err := wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		last = n.report(ctx, true)
		if last == nil {
			last = n.renew(ctx)
		}
		if last != nil {
			n.o.Log.Info("node is not registered yet", zap.Error(last))
		}
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%w, last: %w", err, last)
	}
	return nil
}

// heartbeat keeps the lease and the status fresh. At the end it reports the node as
// not ready, so that no more pods are bound to it.
func (n *Node) heartbeat(ctx context.Context) {
	renew, report := time.NewTicker(renewEvery), time.NewTicker(reportEvery)
	defer renew.Stop()
	defer report.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			if err := n.report(context.WithoutCancel(ctx), false); err != nil {
				n.o.Log.Info("node could not say that it ends", zap.Error(err))
			}
			return
		case <-renew.C:
			err = n.renew(ctx)
		case <-report.C:
			err = n.report(ctx, true)
		}
		if err != nil && ctx.Err() == nil {
			n.o.Log.Warn("heartbeat failed", zap.Error(err))
		}
	}
}

func (n *Node) report(ctx context.Context, ready bool) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	nodes := n.client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, n.o.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && ready {
		node, err = nodes.Create(ctx, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: n.o.Name, Labels: map[string]string{
				corev1.LabelHostname:           n.o.Name,
				corev1.LabelOSStable:           runtime.GOOS,
				corev1.LabelArchStable:         runtime.GOARCH,
				corev1.LabelInstanceTypeStable: InstanceType,
			}},
			Spec: corev1.NodeSpec{PodCIDR: n.o.Addresses.Masked().String()},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("node object: %w", err)
	}
	n.fill(&node.Status, ready)
	if _, err := nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("node status: %w", err)
	}
	return nil
}

func (n *Node) fill(s *corev1.NodeStatus, ready bool) {
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
		corev1.ResourceMemory: resource.MustParse("8Gi"),
		corev1.ResourcePods:   *resource.NewQuantity(maxPods, resource.DecimalSI),
	}
	s.Capacity, s.Allocatable = capacity, capacity
	s.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: hostIP},
		{Type: corev1.NodeHostName, Address: n.o.Name}}
	s.NodeInfo.OperatingSystem, s.NodeInfo.Architecture = runtime.GOOS, runtime.GOARCH
	s.NodeInfo.KubeletVersion, s.NodeInfo.ContainerRuntimeVersion = "v1.36.3-process", "process://1"
	set := func(t corev1.NodeConditionType, holds bool, reason, message string) {
		now := metav1.Now()
		c := corev1.NodeCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message,
			LastHeartbeatTime: now, LastTransitionTime: now}
		if holds {
			c.Status = corev1.ConditionTrue
		}
		for i, old := range s.Conditions {
			if old.Type == t {
				if old.Status == c.Status {
					c.LastTransitionTime = old.LastTransitionTime
				}
				s.Conditions[i] = c
				return
			}
		}
		s.Conditions = append(s.Conditions, c)
	}
	set(corev1.NodeMemoryPressure, false, "KubeletHasSufficientMemory", "process node does not watch memory")
	set(corev1.NodeDiskPressure, false, "KubeletHasNoDiskPressure", "process node does not watch disks")
	set(corev1.NodePIDPressure, false, "KubeletHasSufficientPID", "process node does not watch process IDs")
	if ready {
		set(corev1.NodeReady, true, "KubeletReady", "process node is running pods")
	} else {
		set(corev1.NodeReady, false, "KubeletNotReady", "process node is stopping")
	}
}

func (n *Node) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	leases := n.client.CoordinationV1().Leases(leaseNamespace)
	now, seconds := metav1.NowMicro(), int32(leaseSeconds)
	spec := coordinationv1.LeaseSpec{HolderIdentity: &n.o.Name, LeaseDurationSeconds: &seconds, RenewTime: &now}
	lease, err := leases.Get(ctx, n.o.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: n.o.Name}, Spec: spec},
			metav1.CreateOptions{})
	case err == nil:
		lease.Spec = spec
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("node lease: %w", err)
	}
	return nil
}
