package nodes

import (
	"context"
	"fmt"
	"runtime"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Report writes a Node object that is ready or not. It makes the object if it is
// missing. kind is the value of its label node.kubernetes.io/instance-type.
//
// A kubelet repeats its report and renews a Lease, so that the node controller can
// recognise a silent node. A devcluster has no node controller, so one report is
// enough.
func Report(ctx context.Context, client kubernetes.Interface, name, kind string, ready bool) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		corev1.LabelHostname:           name,
		corev1.LabelOSStable:           runtime.GOOS,
		corev1.LabelArchStable:         runtime.GOARCH,
		corev1.LabelInstanceTypeStable: kind,
	}}}
	_, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make node %s: %w", name, err)
	}
	if node, err = client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{}); err != nil {
		return fmt.Errorf("read node %s: %w", name, err)
	}
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
		corev1.ResourceMemory: resource.MustParse("8Gi"),
	}
	condition := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: "KubeletNotReady",
		LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}
	if ready {
		condition.Status, condition.Reason = corev1.ConditionTrue, "KubeletReady"
	}
	node.Status = corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity, Conditions: []corev1.NodeCondition{condition},
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: HostIP}},
		NodeInfo: corev1.NodeSystemInfo{OperatingSystem: runtime.GOOS, Architecture: runtime.GOARCH,
			KubeletVersion: "v1.36.3-" + kind, ContainerRuntimeVersion: kind + "://1"},
	}
	if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("report node %s: %w", name, err)
	}
	return nil
}

// IsReady reports whether a node's status says that it takes pods. A cordoned node may
// be ready.
func IsReady(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
